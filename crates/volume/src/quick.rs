//! Prediction whether a write returns at once.
//!
//! Linux has no write to the page cache of every file system that fails rather than waits (`RWF_NOWAIT` is
//! for a few of them). But waits of writes have lasting reasons, such as too many dirty pages, or a commit of
//! the journal. A slow write is therefore taken for a warning.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A slower write has waited for a lasting reason. A shorter wait may be one for a processor; and threads
/// that write to the same file wait for each other, which takes four times as much processor time as one
/// thread that waits now and then.
const LONG: Duration = Duration::from_millis(100);

/// Time after a slow write during which nothing is tried.
const DETOUR: Duration = Duration::from_secs(1);

/// Experience with writes so far.
#[derive(Debug)]
pub struct Quick {
    began: Instant,
    /// Time before which nothing is tried, in microseconds since `began`.
    not_before: AtomicU64,
}

impl Default for Quick {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            not_before: AtomicU64::new(0),
        }
    }
}

impl Quick {
    /// Runs the write, unless one was slow a short time ago.
    pub fn try_it<T>(&self, write: impl FnOnce() -> T) -> Option<T> {
        self.try_by(|| self.began.elapsed(), write)
    }

    /// The same, by a clock with the time since `began`.
    fn try_by<T>(&self, clock: impl Fn() -> Duration, write: impl FnOnce() -> T) -> Option<T> {
        let before = clock();
        if (before.as_micros() as u64) < self.not_before.load(Ordering::Relaxed) {
            return None;
        }
        let done = write();
        let after = clock();
        if after - before > LONG {
            let until = after + DETOUR;
            self.not_before.store(until.as_micros() as u64, Ordering::Relaxed);
        }
        Some(done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const MICROSECOND: Duration = Duration::from_micros(1);

    #[test]
    fn one_that_took_long_is_the_last_for_a_while() {
        let quick = Quick::default();
        let now = Cell::new(Duration::ZERO);
        let takes = |long: Duration| quick.try_by(|| now.get(), || now.set(now.get() + long));
        assert_eq!(takes(LONG), Some(()), "no longer than it may");
        assert_eq!(takes(LONG + MICROSECOND), Some(()), "nobody knew");
        assert_eq!(takes(MICROSECOND), None);
        now.set(now.get() + DETOUR - MICROSECOND);
        assert_eq!(takes(MICROSECOND), None);
        now.set(now.get() + MICROSECOND);
        assert_eq!(takes(MICROSECOND), Some(()), "the detour is over");
        assert_eq!(takes(MICROSECOND), Some(()));
    }
}
