//! Holds what is sent ahead to a rate, so that it leaves the link and the processors to those who use them.

use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So much goes at once, at the speed of the way: what that takes is also what the last round will take, which has no limit.
const BURST_BYTES: u64 = 8 << 20;

/// A burst is no more than what may be sent in this time, so that also a slow pace is an even one.
const BURST_TIME: Duration = Duration::from_millis(250);

/// Of all rounds that are held to it.
#[derive(Debug)]
pub struct Pace {
    bytes_per_second: Option<NonZeroU64>,
    burst: Mutex<Burst>,
}

#[derive(Debug)]
struct Burst {
    bytes: u64,
    begun: Instant,
    waited: Duration,
}

impl Pace {
    /// `None` is no limit.
    pub fn new(bytes_per_second: Option<NonZeroU64>) -> Self {
        let burst = Burst {
            bytes: 0,
            begun: Instant::now(),
            waited: Duration::ZERO,
        };
        Self {
            bytes_per_second,
            burst: Mutex::new(burst),
        }
    }

    /// Takes note of `bytes` that leave, and blocks until more may. Before it waits for that, `left` waits until those before
    /// have left.
    pub fn pass(&self, bytes: u64, left: impl FnOnce()) {
        let Some(rate) = self.bytes_per_second else {
            return;
        };
        let mut burst = self.burst.lock().unwrap_or_else(PoisonError::into_inner);
        burst.bytes += bytes;
        if burst.bytes < burst_bytes(rate) {
            return;
        }
        left();
        let due = burst.begun + Duration::from_secs_f64(burst.bytes as f64 / rate.get() as f64);
        let wait = due.saturating_duration_since(Instant::now());
        std::thread::sleep(wait);
        *burst = Burst {
            bytes: 0,
            begun: Instant::now(),
            waited: burst.waited + wait,
        };
    }

    /// For how long it has held up whoever sends.
    pub fn waited(&self) -> Duration {
        let burst = self.burst.lock().unwrap_or_else(PoisonError::into_inner);
        burst.waited
    }
}

fn burst_bytes(rate: NonZeroU64) -> u64 {
    let slow = rate.get() as f64 * BURST_TIME.as_secs_f64();
    BURST_BYTES.min(slow as u64).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(bytes_per_second: u64) -> Pace {
        Pace::new(NonZeroU64::new(bytes_per_second))
    }

    #[test]
    fn without_a_limit_nothing_is_held_up() {
        let pace = pace(0);
        pace.pass(u64::MAX, || panic!("it does not wait"));
        assert_eq!(pace.waited(), Duration::ZERO);
    }

    #[test]
    fn bursts_are_short() {
        let of = |rate| burst_bytes(NonZeroU64::new(rate).unwrap());
        assert_eq!(of(1 << 30), BURST_BYTES);
        assert_eq!(of(4 << 20), 1 << 20);
        assert_eq!(of(1), 1);
    }

    #[test]
    fn the_rate_is_kept_over_many_bursts() {
        let pace = pace(64 << 20);
        let (begun, mut waits) = (Instant::now(), 0);
        for _ in 0..48 {
            pace.pass(256 << 10, || waits += 1);
        }
        // A quarter of the rate's second for 12 MiB, less what is left of a burst of 8 MiB.
        assert_eq!(waits, 1);
        assert!(begun.elapsed() >= Duration::from_millis(125));
        assert!(pace.waited() > Duration::ZERO && pace.waited() <= begun.elapsed());
    }

    #[test]
    fn time_that_passed_anyway_is_not_waited_for_again() {
        let pace = pace(1 << 30);
        // As over a way that is slower than the limit.
        pace.pass(BURST_BYTES, || std::thread::sleep(Duration::from_millis(20)));
        assert_eq!(pace.waited(), Duration::ZERO);
    }
}
