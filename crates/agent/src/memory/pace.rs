//! Holds what is sent ahead to a rate, so that it leaves the links and the processors to those who use them.
//!
//! Two limits: the operator's, and one that holds only while others use the RNIC of either host. The latter lets a round go twice as fast as the
//! one before: the first one takes long and is in nobody's way, and those behind it still come to an end where the program writes much.

use std::num::NonZeroU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::others::Others;

/// So much goes at once, at the speed of the way: what that takes is also what the last round will take, which has no limit.
const BURST_BYTES: u64 = 8 << 20;

/// Beside others, bursts are shorter: who waits for a link or a processor does not wait long.
const BURST_BYTES_BESIDE: u64 = 6 << 20;

/// A burst is no more than what may be sent in this time, so that also a slow pace is an even one.
const BURST_TIME: Duration = Duration::from_millis(250);

/// How fast the first round goes beside others, in bytes per second.
const BESIDE: u64 = 50 << 20;

/// Who sends and receives less, in bytes per second, is not held up by anything.
const NOTICEABLE: u64 = 16 << 20;

/// For so long what the other host said of its RNIC is believed.
const BELIEVED: Duration = Duration::from_secs(1);

/// Of all rounds that are held to it.
#[derive(Debug)]
pub struct Pace {
    most: Option<NonZeroU64>,
    adaptive: Option<Mutex<Adaptive>>,
    burst: Mutex<Burst>,
}

#[derive(Debug)]
struct Adaptive {
    here: Others,
    /// What the other host has said, and when.
    there: Option<(Instant, u64)>,
    round: u32,
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
            most: bytes_per_second,
            adaptive: None,
            burst: Mutex::new(burst),
        }
    }

    /// Slower while others use the RNIC here, or that of the other host.
    pub fn beside(mut self, others: Others) -> Self {
        self.adaptive = Some(Mutex::new(Adaptive {
            here: others,
            there: None,
            round: 1,
        }));
        self
    }

    fn adaptive(&self) -> Option<MutexGuard<'_, Adaptive>> {
        let adaptive = self.adaptive.as_ref()?;
        Some(adaptive.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks at who uses the RNIC here. It may block.
    pub fn look(&self) {
        _ = self.beside_others();
    }

    /// What is held to it goes by this queue pair.
    pub fn goes_by(&self, qpn: u32) {
        if let Some(mut adaptive) = self.adaptive() {
            adaptive.here.without(qpn);
        }
    }

    /// The other host's RNIC sends and receives so much for others.
    pub fn hear(&self, bytes_per_second: u64) {
        if let Some(mut adaptive) = self.adaptive() {
            adaptive.there = Some((Instant::now(), bytes_per_second));
        }
    }

    /// A round begins, counted from 1.
    pub fn begin(&self, round: u32) {
        if let Some(mut adaptive) = self.adaptive() {
            adaptive.round = round;
        }
    }

    /// The rate that holds while others use an RNIC; `None` while they do not.
    fn beside_others(&self) -> Option<u64> {
        let mut adaptive = self.adaptive()?;
        let there = adaptive.there.filter(|(at, _)| at.elapsed() < BELIEVED);
        let most = adaptive
            .here
            .bytes_per_second()
            .max(there.map_or(0, |(_, bytes)| bytes));
        (most >= NOTICEABLE).then(|| beside(adaptive.round))
    }

    /// Whether it goes beside others, at a rate that leaves them what they need: it is not to wait for them, too.
    pub fn is_beside_others(&self) -> bool {
        self.beside_others().is_some()
    }

    /// Takes note of `bytes` that leave, and blocks until more may. Before it waits for that, `left` waits until those before
    /// have left.
    pub fn pass(&self, bytes: u64, left: impl FnOnce()) {
        let beside = self.beside_others();
        let Some(rate) = slower(self.most, beside) else {
            return;
        };
        let mut burst = self.burst.lock().unwrap_or_else(PoisonError::into_inner);
        burst.bytes += bytes;
        if burst.bytes < burst_bytes(rate, beside.is_some()) {
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

fn slower(most: Option<NonZeroU64>, beside: Option<u64>) -> Option<NonZeroU64> {
    let beside = beside.and_then(NonZeroU64::new);
    most.into_iter().chain(beside).min()
}

fn beside(round: u32) -> u64 {
    BESIDE.saturating_mul(1 << round.saturating_sub(1).min(16))
}

fn burst_bytes(rate: NonZeroU64, is_beside: bool) -> u64 {
    let slow = rate.get() as f64 * BURST_TIME.as_secs_f64();
    let most = match is_beside {
        true => BURST_BYTES_BESIDE,
        false => BURST_BYTES,
    };
    most.min(slow as u64).max(1)
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
        let of = |rate| burst_bytes(NonZeroU64::new(rate).unwrap(), false);
        assert_eq!(of(1 << 30), BURST_BYTES);
        assert_eq!(of(4 << 20), 1 << 20);
        assert_eq!(of(1), 1);
        let beside = NonZeroU64::new(BESIDE).unwrap();
        assert_eq!(burst_bytes(beside, true), BURST_BYTES_BESIDE);
    }

    #[test]
    fn beside_others_the_slower_limit_holds_and_rounds_become_faster() {
        let most = NonZeroU64::new(10 << 20);
        assert_eq!(slower(None, None), None);
        assert_eq!(slower(most, Some(beside(1))), most);
        assert_eq!(slower(None, Some(beside(1))), NonZeroU64::new(BESIDE));
        assert_eq!(
            (beside(0), beside(2), beside(3)),
            (BESIDE, 2 * BESIDE, 4 * BESIDE)
        );
        assert!(beside(u32::MAX) > 1 << 40);
    }

    #[test]
    fn what_the_other_host_says_counts() {
        let pace = Pace::new(None).beside(Others::new("/nowhere/nic.sock".into()));
        assert!(!pace.is_beside_others());
        pace.hear(NOTICEABLE - 1);
        assert!(!pace.is_beside_others());
        pace.hear(NOTICEABLE);
        pace.begin(2);
        assert_eq!(pace.beside_others(), Some(2 * BESIDE));
        // Without others a limit is the operator's alone.
        assert_eq!(Pace::new(None).beside_others(), None);
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
