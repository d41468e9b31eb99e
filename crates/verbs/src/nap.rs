//! Whether the helper thread sleeps: then it touches none of the program's memory.
//!
//! Adopting memory is simplest where no other thread can touch it (`verbatim_adopt::Options`). The helper thread
//! would spoil that: its heap is the program's. So it says when it sleeps, and whoever adopts keeps it asleep for the
//! moment that this takes. The lock is in static memory and waits by futex alone, since any page of the heap may be the
//! one that is in transit.

use std::sync::{Mutex, MutexGuard, PoisonError};

use verbatim_adopt::{Adopter, Options};

static ASLEEP: Mutex<usize> = Mutex::new(0);

fn asleep() -> MutexGuard<'static, usize> {
    ASLEEP.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Across a fork: nobody changes the count, and the child, which has no helper thread, starts from none.
pub fn lock_for_fork() -> MutexGuard<'static, usize> {
    asleep()
}

/// For a helper thread: runs `sleep`, which touches its own stack only.
pub fn asleep_while<T>(sleep: impl FnOnce() -> T) -> T {
    *asleep() += 1;
    let result = sleep();
    *asleep() -= 1;
    result
}

/// Runs `work`, which moves pages, with helper threads that sleep now kept asleep.
pub fn while_asleep<T>(adopter: &Adopter, work: impl FnOnce(&Adopter) -> T) -> T {
    let asleep = asleep();
    adopter.set_options(Options {
        own_threads: *asleep,
        ..Options::default()
    });
    work(adopter)
}
