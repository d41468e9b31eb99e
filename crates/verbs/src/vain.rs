//! Polls in vain, while the RNIC that they wait for has to wait for a core.
//!
//! On a machine with few cores a software RNIC may get none because of the very threads that poll for what it does. To yield is not
//! enough then: a thread that yields stays runnable, and where it and the RNIC are in different control groups, or others use
//! the cores as well, the scheduler may come back to it rather than to the RNIC. A thread that sleeps leaves its core for certain.
//! So while its RNIC says that it is starved (`verbatim_device::layout::Signs`), a thread that has polled in vain for a while naps
//! between its polls.
//!
//! What that costs is bounded. A nap is an eighth of the time for which the thread has waited already, so that what it waits for
//! is late by an eighth, and never by more than [`LONGEST`] and what the kernel's timers add. Who waits for less than eight times
//! [`SHORTEST`] never naps, whatever the RNIC says: dialogues stay as they are. It is the thread that waits, not the queue: who finds
//! completions in one queue does not nap because another is empty, and who polls many queues in turn naps once in a round. Who does
//! other things between its polls does not nap: it is for them that it needs the core.

use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::thread::{NanosleepRelativeResult, nanosleep};
use rustix::time::Timespec;

use crate::sys;

/// A nap is this part of the time that was waited.
const PART: u64 = 8;

/// A shorter nap is not worth its two switches.
const SHORTEST: u64 = 50_000;

/// The longest nap in ns.
const LONGEST: u64 = 1_000_000;

/// A thread that takes longer for the polls between two pauses does other things as well.
const BUSY: u64 = 50_000;

/// Who has not polled for so long begins to wait anew.
const AWAY: u64 = 10_000_000;

/// So many pauses at other queues, and the one at which a thread naps is taken for one that it polls no more.
const MOST_QUEUES: u32 = 64;

/// An RNIC of this process was starved once: threads note what they find from then on.
static NOTED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// How often this thread has found something, while that was noted.
    static FOUND: Cell<u32> = const { Cell::new(0) };
    static WAIT: Cell<Wait> = const { Cell::new(Wait::NONE) };
}

/// A poll has found something.
#[inline]
pub fn found() {
    if NOTED.load(Relaxed) {
        note();
    }
}

#[cold]
fn note() {
    FOUND.set(FOUND.get().wrapping_add(1));
}

/// After a series of polls of `queue`, any number that names it, that found nothing: lets others run, its RNIC in the first place.
pub fn pause(queue: usize, is_starved: bool) {
    if !is_starved {
        return sys::yield_now();
    }
    NOTED.store(true, Relaxed);
    let mut wait = WAIT.get();
    match wait.nap(sys::monotonic_ns(), FOUND.get(), queue) {
        None => sys::yield_now(),
        Some(nap) => sleep(nap),
    }
    wait.paused = sys::monotonic_ns();
    WAIT.set(wait);
}

/// A signal ends it early: the program may have been waiting for that.
fn sleep(nap: Duration) {
    #[cfg(test)]
    NAPS.set(NAPS.get() + 1);
    let nap = Timespec {
        tv_sec: nap.as_secs() as i64,
        tv_nsec: nap.subsec_nanos().into(),
    };
    let (NanosleepRelativeResult::Ok
    | NanosleepRelativeResult::Interrupted(_)
    | NanosleepRelativeResult::Err(_)) = nanosleep(&nap);
}

/// How a thread waits.
#[derive(Debug, Clone, Copy)]
struct Wait {
    /// What it had found when it began.
    found: u32,
    /// When it began.
    since: u64,
    /// When its last pause ended.
    paused: u64,
    /// The queue at which it naps.
    queue: usize,
    /// Pauses at others since.
    others: u32,
}

impl Wait {
    const NONE: Self = Self {
        found: 0,
        since: 0,
        paused: 0,
        queue: 0,
        others: 0,
    };

    /// Whether to nap now, and for how long. Times are in ns.
    fn nap(&mut self, now: u64, found: u32, queue: usize) -> Option<Duration> {
        let between = now.saturating_sub(self.paused);
        if found != self.found || between > AWAY {
            *self = Self {
                found,
                since: now,
                queue,
                others: 0,
                ..*self
            };
            return None;
        }
        if between > BUSY {
            return None;
        }
        if queue != self.queue && self.others < MOST_QUEUES {
            self.others += 1;
            return None;
        }
        (self.queue, self.others) = (queue, 0);
        let nap = (now.saturating_sub(self.since) / PART).min(LONGEST);
        (nap >= SHORTEST).then(|| Duration::from_nanos(nap))
    }
}

#[cfg(test)]
thread_local! {
    static NAPS: Cell<u32> = const { Cell::new(0) };
}

/// How often this thread has napped.
#[cfg(test)]
pub fn naps() -> u32 {
    NAPS.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A thread that polls, with its clock.
    struct Thread {
        wait: Wait,
        now: u64,
        found: u32,
    }

    impl Thread {
        fn new() -> Self {
            Self {
                wait: Wait::NONE,
                now: 1_000_000_000,
                found: 0,
            }
        }

        /// So many ns after its last pause it has polled a queue in vain once more. How many ns it naps.
        fn polls(&mut self, queue: usize, nanos: u64) -> u64 {
            self.now += nanos;
            let nap = self.wait.nap(self.now, self.found, queue);
            let nap = nap.map_or(0, |nap| nap.as_nanos() as u64);
            self.now += nap;
            self.wait.paused = self.now;
            nap
        }

        /// Polls a queue until it naps: for how long it had waited, and its nap.
        fn first_nap(&mut self) -> (u64, u64) {
            let start = self.now;
            let nap = (0..10_000).map(|_| self.polls(1, 1_000)).find(|nap| *nap > 0);
            let nap = nap.expect("it naps in the end");
            (self.now - nap - start, nap)
        }
    }

    #[test]
    fn what_is_waited_for_is_late_by_an_eighth() {
        let mut thread = Thread::new();
        let (waited, nap) = thread.first_nap();
        assert_eq!(
            (waited, nap),
            (401_000, 50_000),
            "the first pause begins the wait"
        );
        let begin = thread.now - nap - (waited - 1_000);
        let mut longest = 0;
        while longest < LONGEST {
            let nap = thread.polls(1, 1_000);
            assert!(nap >= SHORTEST && nap <= (thread.now - nap - begin) / PART);
            longest = nap;
        }
        assert!((0..1000).all(|_| thread.polls(1, 1_000) == LONGEST));
    }

    #[test]
    fn who_finds_something_waits_anew() {
        let mut thread = Thread::new();
        for _ in 0..10 {
            thread.first_nap();
            thread.found += 1;
            assert!((0..400).all(|_| thread.polls(1, 1_000) == 0));
        }
    }

    #[test]
    fn who_finds_something_in_one_queue_does_not_nap_at_another() {
        let mut thread = Thread::new();
        for turn in 0..10_000 {
            thread.found += u32::from(turn % 300 == 0);
            assert_eq!(thread.polls(1, 1_000), 0);
        }
    }

    #[test]
    fn who_does_other_things_between_its_polls_does_not_nap() {
        let mut thread = Thread::new();
        assert!((0..10_000).all(|_| thread.polls(1, BUSY + 1) == 0));
    }

    #[test]
    fn who_comes_back_after_a_time_waits_anew() {
        let mut thread = Thread::new();
        thread.first_nap();
        assert_eq!(thread.polls(1, AWAY + 1), 0);
        assert_eq!(thread.first_nap(), (400_000, 50_000));
    }

    #[test]
    fn who_polls_many_queues_naps_once_in_a_round() {
        let mut thread = Thread::new();
        let mut round = |queues: usize| {
            (0..queues)
                .filter(|queue| thread.polls(*queue, 1_000) > 0)
                .count()
        };
        assert!(
            (0..1_000)
                .map(|_| round(MOST_QUEUES as usize))
                .all(|naps| naps <= 1)
        );
        assert_eq!(round(MOST_QUEUES as usize), 1);
    }

    #[test]
    fn who_turns_to_another_queue_naps_there() {
        let mut thread = Thread::new();
        thread.first_nap();
        let pauses = (1..).find(|_| thread.polls(2, 1_000) > 0);
        assert_eq!(pauses, Some(MOST_QUEUES + 1));
        assert!(thread.polls(2, 1_000) > 0);
    }
}
