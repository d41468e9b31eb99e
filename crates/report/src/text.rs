//! Numbers in words.

use std::time::Duration;

/// "12.3 ms"; seconds from ten of them on.
pub fn milliseconds(time: Duration) -> String {
    if time >= Duration::from_secs(10) {
        return format!("{:.1} s", time.as_secs_f64());
    }
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

/// "5 B", "1.5 KiB", "12.0 MiB".
pub fn bytes(count: u64) -> String {
    if count < 1024 {
        return format!("{count} B");
    }
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = count as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", units[unit])
}

/// "status 0", or that it did not end.
pub fn exit_status(status: Option<i32>) -> String {
    status.map_or_else(
        || "did not end".to_owned(),
        |status| format!("exit status {status}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(1 << 20), "1.0 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(milliseconds(Duration::from_micros(132_140)), "132.1 ms");
        assert_eq!(milliseconds(Duration::from_secs(62)), "62.0 s");
    }
}
