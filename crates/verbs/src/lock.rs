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

#![allow(unsafe_code)]

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, compiler_fence};
use std::time::Duration;

use parking_lot::lock_api::{self, GuardSend, RawMutex};
use rustix::io::Errno;
use rustix::thread::{MembarrierCommand, futex, membarrier};

const FREE: u32 = 0;
const HELD: u32 = 1;

/// How often it is looked at before its holder is waited for: as long as a request takes.
const LOOKS: u32 = 100;

/// Where the kernel has no such barrier (a filter of system calls may take it away), whoever waits looks again so often.
const WITHOUT_BARRIER: Duration = Duration::from_millis(1);

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
        let limit = (!barrier()).then(|| WITHOUT_BARRIER.try_into().expect("a millisecond"));
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

/// A full barrier in every thread of this process that runs; false if there is none to be had.
fn barrier() -> bool {
    match membarrier(MembarrierCommand::PrivateExpedited) {
        Ok(()) => true,
        // Once in the life of a process, and once more after CRIU has restored it.
        Err(Errno::PERM) => {
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
