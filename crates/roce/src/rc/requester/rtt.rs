//! How long answers take, and when one is overdue (RFC 6298, with a floor that suits a data centre).

use std::time::Duration;

/// As long as nothing is known, answers are overdue after so many times the floor.
const UNKNOWN: u32 = 16;

/// Doublings of the timeout at most.
const MAX_BACKOFF: u32 = 12;

/// The estimate. It has no sample while `smoothed` is zero.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rtt {
    smoothed_ns: u64,
    variation_ns: u64,
    min_ns: u64,
}

impl Rtt {
    /// A packet that was sent once was answered after this time.
    pub fn sample(&mut self, rtt: Duration) {
        let rtt = u64::try_from(rtt.as_nanos())
            .unwrap_or(u64::MAX >> 8)
            .clamp(1, u64::MAX >> 8);
        if self.smoothed_ns == 0 {
            *self = Rtt {
                smoothed_ns: rtt,
                variation_ns: rtt / 2,
                min_ns: rtt,
            };
            return;
        }
        self.variation_ns = (self.variation_ns * 3 + self.smoothed_ns.abs_diff(rtt)) / 4;
        self.smoothed_ns = ((self.smoothed_ns * 7 + rtt) / 8).max(1);
        self.min_ns = self.min_ns.min(rtt);
    }

    /// The shortest one, if there was any.
    pub fn min(&self) -> Option<Duration> {
        (self.min_ns > 0).then(|| Duration::from_nanos(self.min_ns))
    }

    /// The usual one; zero if there was none.
    pub fn smoothed(&self) -> Duration {
        Duration::from_nanos(self.smoothed_ns)
    }

    /// Do packets wait on the way? They do if it takes clearly longer than it can take.
    pub fn is_queueing(&self) -> bool {
        self.smoothed_ns > self.min_ns + self.min_ns / 2
    }

    /// When an answer is overdue, after so many timeouts in a row.
    pub fn timeout(&self, floor: Duration, backoff: u32) -> Duration {
        let usual = match self.smoothed_ns {
            // A partner that is far, or slow, is no loss; RFC 6298 waits a second.
            0 => floor * UNKNOWN,
            smoothed => Duration::from_nanos(smoothed + 4 * self.variation_ns).max(floor),
        };
        usual * (1 << backoff.min(MAX_BACKOFF))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_the_samples() {
        let ms = Duration::from_millis;
        let floor = Duration::from_micros(10);
        let mut rtt = Rtt::default();
        assert_eq!((rtt.min(), rtt.timeout(floor, 0)), (None, floor * UNKNOWN));
        rtt.sample(ms(8));
        assert_eq!(rtt.timeout(floor, 0), ms(24));
        for _ in 0..100 {
            rtt.sample(ms(4));
        }
        assert_eq!(rtt.min(), Some(ms(4)));
        let timeout = rtt.timeout(floor, 0);
        assert!(timeout >= ms(4) && timeout < ms(5), "{timeout:?}");
        assert_eq!(rtt.timeout(floor, 3), timeout * 8);
        assert_eq!(rtt.timeout(ms(100), 0), ms(100));
    }
}
