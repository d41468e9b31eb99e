//! The tables that perftest prints.

use anyhow::{Context, bail};

use crate::running::Finished;

/// The TCP port on which its servers listen.
pub const PERFTEST_PORT: u16 = 18515;

/// The options with which its connections last for 17 s without an answer (2.1 s, seven retries), not half a second: a virtual
/// machine's processor may be taken away for longer, with the RNIC on it, and that is not what is tested.
pub const PATIENCE: &[&str] = &["-u", "19"];

/// A line of `ib_*_bw`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BandwidthRow {
    /// Message size.
    pub bytes: u64,
    /// Messages, of all queue pairs together.
    pub iterations: u64,
    /// MiB per second, by perftest's own clock.
    pub average_mib_s: f64,
}

/// A line of `ib_*_lat`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatencyRow {
    /// Message size.
    pub bytes: u64,
    /// Messages.
    pub iterations: u64,
    /// The median, in microseconds. Infinite if perftest could not find out how fast the processor's clock ticks, which
    /// happens to it on a busy machine.
    pub typical_us: f64,
}

/// The numbers of the lines between perftest's two last rulers that begin with a number. Those in the columns that are
/// `used` are finite; perftest's standard deviation may be the root of something below 0.
fn rows(finished: &Finished, columns: usize, used: &[usize]) -> anyhow::Result<Vec<Vec<f64>>> {
    let mut rows = Vec::new();
    let mut in_table = false;
    for line in finished.stdout.lines() {
        if line.trim_start().starts_with("#bytes") {
            in_table = true;
        } else if in_table
            && line
                .trim_start()
                .starts_with(|first: char| first.is_ascii_digit())
        {
            let numbers: Vec<f64> = line
                .split_ascii_whitespace()
                .map(str::parse)
                .collect::<Result<_, _>>()
                .with_context(|| format!("not a line of perftest's table: {line:?}"))?;
            if numbers.len() < columns || used.iter().any(|column| !numbers[*column].is_finite()) {
                bail!("perftest printed {line:?}");
            }
            rows.push(numbers);
        }
    }
    if rows.is_empty() {
        bail!("`{}` printed no result{}", finished.what, finished.output());
    }
    Ok(rows)
}

impl BandwidthRow {
    /// The table that a program has written.
    pub fn parse(finished: &Finished) -> anyhow::Result<Vec<Self>> {
        // #bytes #iterations BW-peak BW-average MsgRate
        let rows = rows(finished, 5, &[0, 1, 3])?;
        Ok(rows
            .iter()
            .map(|row| Self {
                bytes: row[0] as u64,
                iterations: row[1] as u64,
                average_mib_s: row[3],
            })
            .collect())
    }
}

impl LatencyRow {
    /// The table that a program has written.
    pub fn parse(finished: &Finished) -> anyhow::Result<Vec<Self>> {
        // #bytes #iterations t_min t_max t_typical t_avg t_stdev 99% 99.9%
        let rows = rows(finished, 9, &[0, 1])?;
        Ok(rows
            .iter()
            .map(|row| Self {
                bytes: row[0] as u64,
                iterations: row[1] as u64,
                typical_us: row[4],
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(stdout: &str) -> Finished {
        Finished {
            what: "ib_write_bw".to_owned(),
            code: 0,
            stdout: stdout.to_owned(),
            stderr: String::new(),
        }
    }

    #[test]
    fn the_table_is_found_among_the_rest() {
        let text = "\
 local address: LID 0000 QPN 0x0011 PSN 0xc4ba3f
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:77:00:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 2          5000             1.56               1.33   \t\t   0.697
 65536      5000             2211.30            2001.55\t\t   0.032025
---------------------------------------------------------------------------------------
";
        let rows = BandwidthRow::parse(&printed(text)).unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!(
            rows[1],
            BandwidthRow {
                bytes: 65536,
                iterations: 5000,
                average_mib_s: 2001.55
            }
        );
        assert!(BandwidthRow::parse(&printed(" #bytes\n")).is_err(), "no result");
        assert!(LatencyRow::parse(&printed(text)).is_err(), "too few columns");
    }

    #[test]
    fn what_perftest_could_not_measure_is_no_failure_and_what_it_did_not_do_is() {
        let text = "#bytes\n 1000 100 1996.36 221720.55 10019.45 14008.80 -nan 221720.55 221720.55";
        assert_eq!(LatencyRow::parse(&printed(text)).unwrap()[0].typical_us, 10019.45);
        let unclear = text.replace("10019.45", "inf");
        assert!(
            LatencyRow::parse(&printed(&unclear)).unwrap()[0]
                .typical_us
                .is_infinite()
        );
        let nothing = text.replace(" 100 ", " nan ");
        assert!(LatencyRow::parse(&printed(&nothing)).is_err());
    }
}
