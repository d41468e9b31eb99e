//! Runs of `db_bench`, RocksDB's own program for measuring it, as the distribution has it.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Serialize;

use crate::disk::ended;

/// Of a key and of a value, in bytes: as in the paper.
const KEY: u32 = 30;
const VALUE: u32 = 30_720;

/// Keys: 1.1 GiB with their values. The paper has 4.3 GiB, and a disk of 8.
pub const KEYS: u32 = 40_000;

/// What a run has measured. Times in µs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Run {
    /// How long it took.
    pub seconds: f64,
    pub reads: Reads,
    pub writes: Writes,
}

/// Of the thread that reads.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Reads {
    /// How many.
    pub count: u64,
    pub mean: f64,
    pub p50: f64,
    /// Not among those that it prints: by its buckets, as it computes the others.
    pub p90: f64,
    pub p99: f64,
    /// The longest.
    pub most: f64,
}

/// Of the thread that writes.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Writes {
    /// How many.
    pub count: u64,
    pub mean: f64,
    pub p95: f64,
    pub p99: f64,
}

impl Run {
    pub fn reads_a_second(&self) -> f64 {
        self.reads.count as f64 / self.seconds
    }

    pub fn writes_a_second(&self) -> f64 {
        self.writes.count as f64 / self.seconds
    }
}

/// With what both have: the paper's sizes, nothing compressed. Direct I/O, since this machine's page cache has room for all of it and the disk would
/// not be asked. Files of level 0 are few, so that what is not compacted yet finds room on the disk too.
fn command(folder: &Path, benchmark: &str) -> Command {
    let mut command = Command::new("db_bench");
    command
        .args([
            "--compression_type=none",
            "--use_direct_reads=true",
            "--use_direct_io_for_flush_and_compaction=true",
            "--level0_slowdown_writes_trigger=8",
            "--level0_stop_writes_trigger=12",
            "--progress_reports=false",
        ])
        .arg(format!("--benchmarks={benchmark}"))
        .arg(format!("--num={KEYS}"))
        .arg(format!("--key_size={KEY}"))
        .arg(format!("--value_size={VALUE}"))
        .arg(format!("--db={}", folder.join("db").display()));
    command
}

/// Makes the data: each key once.
pub fn fill(folder: &Path) -> anyhow::Result<()> {
    ended(&mut command(folder, "fillseq")).map(drop)
}

/// Waits until nothing is compacted any more.
pub fn settle(folder: &Path) -> anyhow::Result<()> {
    ended(command(folder, "waitforcompaction").arg("--use_existing_db=true")).map(drop)
}

/// One thread reads at random as fast as it can, another writes at random, so many bytes a second at most.
pub fn run(folder: &Path, seconds: u32, written: Option<u64>, seed: u32) -> anyhow::Result<Run> {
    let mut command = command(folder, "readwhilewriting");
    command
        .args(["--use_existing_db=true", "--histogram=1", "--statistics=1"])
        .arg(format!("--duration={seconds}"))
        // 0: without a limit.
        .arg(format!("--benchmark_write_rate_limit={}", written.unwrap_or(0)))
        .arg(format!("--seed={seed}"));
    parse(&ended(&mut command)?)
}

/// What it has written.
fn parse(text: &str) -> anyhow::Result<Run> {
    let run = || {
        let line = |begin: &str| text.lines().find_map(|line| line.trim().strip_prefix(begin));
        let reads = line("Count: ")?;
        let writes = line("rocksdb.db.write.micros ")?;
        let writes_count = after(writes, "COUNT :")?;
        let percentiles = line("Percentiles: ")?;
        Some(Run {
            seconds: before(line("readwhilewriting")?, "seconds")?,
            reads: Reads {
                count: reads.split_whitespace().next()?.parse().ok()?,
                mean: after(reads, "Average:")?,
                p50: after(percentiles, "P50:")?,
                p90: percentile(&buckets(text), 0.9)?,
                p99: after(percentiles, "P99:")?,
                most: after(line("Min: ")?, "Max:")?,
            },
            writes: Writes {
                count: writes_count as u64,
                mean: after(writes, "SUM :")? / writes_count,
                p95: after(writes, "P95 :")?,
                p99: after(writes, "P99 :")?,
            },
        })
    };
    let run = run().with_context(|| format!("db_bench says {text:?}"))?;
    ensure!(
        run.reads.count > 0 && run.writes.count > 0,
        "db_bench has not done both: {run:?}"
    );
    Ok(run)
}

/// The number that stands behind a name.
fn after(line: &str, name: &str) -> Option<f64> {
    let (_, rest) = line.split_once(name)?;
    rest.split_whitespace().next()?.parse().ok()
}

/// The number that stands before a name.
fn before(line: &str, name: &str) -> Option<f64> {
    let (rest, _) = line.split_once(name)?;
    rest.split_whitespace().next_back()?.parse().ok()
}

/// The bounds of a time in µs, and how many were within.
type Bucket = (f64, f64, f64);

/// `(       6,      10 ]      922  11.526%  27.966% ##`.
fn buckets(text: &str) -> Vec<Bucket> {
    let one = |line: &str| {
        let (bounds, rest) = line.trim().strip_prefix(['[', '('])?.split_once(']')?;
        let (low, high) = bounds.split_once(',')?;
        let count = rest.split_whitespace().next()?;
        Some((
            low.trim().parse().ok()?,
            high.trim().parse().ok()?,
            count.parse().ok()?,
        ))
    };
    text.lines().filter_map(one).collect()
}

/// As RocksDB computes it: within a bucket all are equally likely.
fn percentile(buckets: &[Bucket], part: f64) -> Option<f64> {
    let wanted = part * buckets.iter().map(|bucket| bucket.2).sum::<f64>();
    let mut sum = 0.0;
    for &(low, high, count) in buckets {
        if sum + count >= wanted {
            return Some(low + (high - low) * (wanted - sum) / count);
        }
        sum += count;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
readwhilewriting :     568.238 micros/op 1759 ops/sec 4.500 seconds 900 operations;   48.7 MB/s (855 of 900 found)

Microseconds per read:
Count: 900 Average: 120.5000  StdDev: 15.89
Min: 1  Median: 100.0000  Max: 742
Percentiles: P50: 100.00 P75: 187.50 P99: 477.50 P99.9: 497.75 P99.99: 499.77
------------------------------------------------------
[       0,       1 ]      100  11.111%  11.111% ##
(       1,      50 ]      200  22.222%  33.333% ####
(      50,     150 ]      300  33.333%  66.667% #######
(     150,     250 ]      200  22.222%  88.889% ####
(     250,     500 ]      100  11.111% 100.000% ##

STATISTICS:
rocksdb.db.get.micros P50 : 120.403670 P95 : 2767.0 P99 : 6074.1 P100 : 46740.0 COUNT : 900 SUM : 4534646
rocksdb.db.write.micros P50 : 35.344577 P95 : 157.5 P99 : 494.25 P100 : 121042.000000 COUNT : 2000 SUM : 70000
";

    #[test]
    fn what_it_writes_is_read() {
        let run = parse(TEXT).unwrap();
        assert_eq!((run.seconds, run.reads_a_second()), (4.5, 200.0));
        let expected = Reads {
            count: 900,
            mean: 120.5,
            p50: 100.0,
            p90: 275.0,
            p99: 477.5,
            most: 742.0,
        };
        assert_eq!(run.reads, expected);
        let expected = Writes {
            count: 2000,
            mean: 35.0,
            p95: 157.5,
            p99: 494.25,
        };
        assert_eq!(run.writes, expected);
        assert!(parse("put or merge error: No space left on device").is_err());
    }

    #[test]
    fn percentiles_are_those_that_it_prints_itself() {
        let buckets = buckets(TEXT);
        assert_eq!(buckets.len(), 5);
        for (part, printed) in [(0.5, 100.0), (0.99, 477.5)] {
            let computed = percentile(&buckets, part).unwrap();
            assert!((computed - printed).abs() < 0.01, "{part}: {computed}");
        }
    }
}
