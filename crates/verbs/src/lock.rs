//! The lock of a queue: taken and let go for every request and every poll.
//!
//! Taking it costs one read-modify-write, letting it go a plain store. Whoever lets go must see that somebody waits, and
//! what lies between "it is free" and "does anybody wait" would be a full barrier, as dear as the other half. So the one who
//! waits, and who sleeps in any case, has the kernel put that barrier into every running thread (membarrier(2)):
//!
//! ```text
//!  lets go                       waits
//!  state = FREE                  waiting += 1
//!  (compiler barrier)            membarrier: all threads
//!  waiting? wake one             state == HELD? sleep
//! ```
//! Either the first sees `waiting`, or its store came before the barrier and the second sees `FREE`. Who takes the lock
//! after the barrier lets go after it as well, and sees `waiting`.
//!
//! A process that wants the barrier says so once, and CRIU says it again for a process that it restores, with all threads there
//! already: then the kernel waits until every processor has passed a quiet state (`synchronize_rcu`, 5 to 15 ms in the blackout). So
//! only a process whose threads meet often asks for it. Who waits in another one looks again after a while.

#![allow(unsafe_code)]

use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, compiler_fence};
use std::time::{Duration, Instant};

use parking_lot::lock_api::{self, GuardSend, RawMutex};
use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, futex, membarrier};

const FREE: u32 = 0;
const HELD: u32 = 1;

/// How often it is looked at before its holder is waited for: as long as a request takes.
const LOOKS: u32 = 100;

/// Without such a barrier whoever waits looks again so often. It is woken all the same, but for the rare case in the figure above.
const WITHOUT_BARRIER: Duration = Duration::from_millis(1);

/// A process whose threads wait for each other so often in a [`SPAN`] asks for the barrier. Two threads that share a queue do it
/// thousands of times a second; an order of the agent that meets a program's poll is a handful.
const OFTEN: u32 = 200;
/// How long that is counted.
const SPAN: Duration = Duration::from_secs(1);

/// A queue's lock.
pub type Mutex<T> = lock_api::Mutex<RawLock, T>;
/// While it is held.
pub type MutexGuard<'a, T> = lock_api::MutexGuard<'a, RawLock, T>;
/// While it is held; keeps the queue alive.
pub type ArcMutexGuard<T> = lock_api::ArcMutexGuard<RawLock, T>;

/// The lock without what it protects.
#[derive(Debug)]
pub struct RawLock {
    state: AtomicU32,
    /// How many wait for it.
    waiting: AtomicU32,
}

// SAFETY: `state` goes from FREE to HELD by one compare-and-exchange, and back only by the one who did that.
unsafe impl RawMutex for RawLock {
    const INIT: Self = Self {
        state: AtomicU32::new(FREE),
        waiting: AtomicU32::new(0),
    };

    type GuardMarker = GuardSend;

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    #[inline]
    fn try_lock(&self) -> bool {
        self.state.compare_exchange(FREE, HELD, Acquire, Relaxed).is_ok()
    }

    #[inline]
    unsafe fn unlock(&self) {
        self.state.store(FREE, Release);
        compiler_fence(SeqCst);
        if self.waiting.load(Relaxed) != 0 {
            self.wake();
        }
    }
}

impl RawLock {
    #[cold]
    fn wait(&self) {
        for _ in 0..LOOKS {
            if self.state.load(Relaxed) == FREE && self.try_lock() {
                return;
            }
            std::hint::spin_loop();
        }
        self.waiting.fetch_add(1, SeqCst);
        let limit = (!barrier(&WAITS)).then(|| WITHOUT_BARRIER.try_into().expect("a millisecond"));
        while !self.try_lock() {
            // Woken, interrupted, free already or too late: it is looked at again.
            let _ = futex::wait(&self.state, futex::Flags::PRIVATE, HELD, limit.as_ref());
        }
        self.waiting.fetch_sub(1, Relaxed);
    }

    #[cold]
    fn wake(&self) {
        let _ = futex::wake(&self.state, futex::Flags::PRIVATE, 1);
    }
}

/// The waits of this process.
static WAITS: Waits = Waits::new();

/// How often somebody has waited lately. Threads that count at the same time may lose some of it.
#[derive(Debug)]
struct Waits {
    /// The span that is counted: how many have passed since `first`.
    span: AtomicU32,
    count: AtomicU32,
    /// The first wait of all.
    first: OnceLock<Instant>,
}

impl Waits {
    const fn new() -> Self {
        Self {
            span: AtomicU32::new(0),
            count: AtomicU32::new(0),
            first: OnceLock::new(),
        }
    }

    /// Counts a wait that begins `now`; whether there have been many.
    fn are_many(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(*self.first.get_or_init(|| now));
        let span = (since.as_nanos() / SPAN.as_nanos()) as u32;
        if self.span.swap(span, Relaxed) != span {
            self.count.store(0, Relaxed);
        }
        self.count.fetch_add(1, Relaxed) >= OFTEN
    }
}

/// A full barrier in every thread of this process that runs; false if there is none to be had: a filter of system calls may take it
/// away, or it was not asked for yet.
fn barrier(waits: &Waits) -> bool {
    match membarrier(MembarrierCommand::PrivateExpedited) {
        Ok(()) => true,
        Err(Errno::PERM) if waits.are_many(Instant::now()) => {
            membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
                && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
        }
        Err(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    /// More threads than processors, so that holders lose the processor and others sleep: no count is lost, and no
    /// sleeper either, which the test would wait for.
    #[test]
    fn every_holder_is_alone_and_every_waiter_is_woken() {
        const THREADS: u64 = 8;
        const ROUNDS: u64 = 20_000;
        let count = Arc::new(Mutex::new(0u64));
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let count = count.clone();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let mut held = count.lock();
                        let before = *held;
                        if (round + thread) % 64 == 0 {
                            std::thread::yield_now();
                        }
                        *held = before + 1;
                    }
                });
            }
        });
        assert_eq!(*count.lock(), THREADS * ROUNDS);
    }

    #[test]
    fn who_waits_now_and_then_does_not_wait_often() {
        let (waits, start) = (Waits::new(), Instant::now());
        // The same moment counts as one span, whenever it is.
        for second in 0..3 {
            let now = start + SPAN * second;
            assert!((0..OFTEN).all(|_| !waits.are_many(now)), "{second}");
        }
        assert!(waits.are_many(start + SPAN * 2));
        assert!(!waits.are_many(start + SPAN * 3));
    }

    #[test]
    fn a_sleeper_is_woken() {
        let lock = Mutex::new(());
        let held = lock.lock();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| drop(lock.lock()));
            // SAFETY: only looked at.
            let raw = unsafe { lock.raw() };
            while raw.waiting.load(Relaxed) == 0 {
                std::thread::yield_now();
            }
            assert!(!waiter.is_finished() && !raw.try_lock());
            drop(held);
            waiter.join().unwrap();
        });
    }
}
