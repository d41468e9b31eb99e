//! How busy this host's processors are.

/// Of the last ten seconds, for how many percent some task waited for a processor (`some avg10` of `/proc/pressure/cpu`); 0 where the
/// kernel does not tell.
pub fn waiting_percent() -> u32 {
    let pressure = std::fs::read_to_string("/proc/pressure/cpu").unwrap_or_default();
    parse(&pressure).unwrap_or(0)
}

fn parse(pressure: &str) -> Option<u32> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some "))?;
    let average = some
        .split_ascii_whitespace()
        .find_map(|field| field.strip_prefix("avg10="))?;
    Some(average.parse::<f64>().ok()? as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_words_are_read() {
        let text = "some avg10=12.70 avg60=3.10 avg300=0.80 total=123\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(parse(text), Some(12));
        assert_eq!(parse(""), None);
        assert!(waiting_percent() <= 100);
    }
}
