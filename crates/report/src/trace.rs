//! A byte counter over time.

use std::time::Duration;

/// Readings of a byte counter that only grows.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    /// Seconds and bytes, in the order of time.
    readings: Vec<(f64, u64)>,
}

/// What passed between two readings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// The earlier reading's time, in seconds.
    pub from: f64,
    /// The later one's.
    pub to: f64,
    /// The mean in between, in bits per second.
    pub bits: f64,
}

impl Trace {
    /// Adds a reading; one that is not later than the last is left out.
    pub fn push(&mut self, at: Duration, bytes: u64) {
        let at = at.as_secs_f64();
        if self.readings.last().is_none_or(|(last, _)| *last < at) {
            self.readings.push((at, bytes));
        }
    }

    /// How many readings there are.
    pub fn len(&self) -> usize {
        self.readings.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.readings.is_empty()
    }

    /// What passed between each two readings of which both lie in `from..=to` (seconds).
    pub fn rates(&self, from: f64, to: f64) -> Vec<Rate> {
        let begin = self.readings.partition_point(|(at, _)| *at < from);
        let end = self.readings.partition_point(|(at, _)| *at <= to).max(begin);
        self.readings[begin..end]
            .windows(2)
            .map(|pair| rate(pair[0], pair[1]))
            .collect()
    }

    /// The mean from `from` to `to` (seconds) in bits per second; `None` outside of the readings. Between two readings the
    /// counter is taken to grow evenly.
    pub fn mean(&self, from: f64, to: f64) -> Option<f64> {
        let bytes = self.bytes_at(to)? - self.bytes_at(from)?;
        (to > from).then(|| bytes.max(0.0) * 8.0 / (to - from))
    }

    fn bytes_at(&self, at: f64) -> Option<f64> {
        let after = self.readings.partition_point(|(time, _)| *time < at);
        let (later, bytes) = *self.readings.get(after)?;
        if later == at {
            return Some(bytes as f64);
        }
        let (earlier, before) = *self.readings.get(after.checked_sub(1)?)?;
        Some(before as f64 + bytes.saturating_sub(before) as f64 * (at - earlier) / (later - earlier))
    }
}

fn rate((from, before): (f64, u64), (to, after): (f64, u64)) -> Rate {
    // A counter that starts again (another RNIC at that place) counts as a standstill.
    Rate {
        from,
        to,
        bits: after.saturating_sub(before) as f64 * 8.0 / (to - from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(readings: &[(u64, u64)]) -> Trace {
        let mut trace = Trace::default();
        for (milliseconds, bytes) in readings {
            trace.push(Duration::from_millis(*milliseconds), *bytes);
        }
        trace
    }

    #[test]
    fn rates_are_bits_per_second_of_the_time_that_passed() {
        let trace = trace(&[(0, 0), (5, 625_000), (25, 625_000), (30, 1_250_000)]);
        let rates: Vec<_> = trace
            .rates(0.0, 1.0)
            .iter()
            .map(|rate| (rate.bits / 1e6).round())
            .collect();
        assert_eq!(rates, [1000.0, 0.0, 1000.0]);
        assert_eq!(trace.rates(0.004, 0.026).len(), 1);
        assert!(trace.rates(2.0, 1.0).is_empty());
    }

    #[test]
    fn time_does_not_go_back_and_a_counter_that_does_is_a_standstill() {
        let trace = trace(&[(10, 100), (10, 200), (5, 300), (20, 50)]);
        assert_eq!(trace.len(), 2);
        assert_eq!(trace.rates(0.0, 1.0)[0].bits, 0.0);
        assert_eq!(trace.mean(0.01, 0.02), Some(0.0));
    }

    #[test]
    fn the_mean_is_interpolated_and_unknown_outside() {
        let trace = trace(&[(0, 0), (10, 1_000), (20, 1_000)]);
        let mean = trace.mean(0.005, 0.015).unwrap();
        assert!((mean - 500.0 * 8.0 / 0.010).abs() < 1e-6, "{mean}");
        assert_eq!(trace.mean(0.015, 0.025), None);
        assert_eq!(trace.mean(0.015, 0.015), None);
        assert_eq!(Trace::default().mean(0.0, 1.0), None);
    }
}
