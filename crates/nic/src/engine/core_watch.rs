//! Whether the RNIC gets its core, and telling its programs.

use std::time::Duration;

use verbatim_roce::Time;

use super::Nic;
use crate::run_queue::RunQueue;
use crate::starvation::Starvation;

/// What the loop knows of its core.
#[derive(Debug, Default)]
pub struct CoreWatch {
    /// Nothing where the kernel does not count: then nobody is told anything.
    queue: Option<RunQueue>,
    starvation: Starvation,
}

impl CoreWatch {
    /// For the calling thread.
    pub fn begin(&mut self) {
        self.queue = RunQueue::of_this_thread();
    }

    fn waited(&self) -> Option<Duration> {
        self.queue.as_ref()?.waited()
    }

    /// What programs are to be told, if it is time for it: who has come since the last time has not heard it.
    #[inline]
    fn news(&mut self, now: Time) -> Option<bool> {
        match self.starvation.is_due(now) {
            true => self.look(now),
            false => None,
        }
    }

    #[inline(never)]
    fn look(&mut self, now: Time) -> Option<bool> {
        let was_starved = self.starvation.is_starved();
        let is_starved = self.starvation.look(now, self.waited()?);
        (was_starved || is_starved).then_some(is_starved)
    }

    /// When there will be something to tell, of an RNIC that sleeps until then.
    pub fn next(&self) -> Option<Time> {
        self.starvation.end()
    }

    /// How often the RNIC was starved.
    pub fn times(&self) -> u64 {
        self.starvation.times()
    }
}

impl Nic {
    /// Tells programs that poll whether to leave it a core, if that has changed.
    #[inline]
    pub(super) fn watch_core(&mut self, now: Time) {
        if let Some(starved) = self.core.news(now) {
            self.clients
                .for_each_context(|_, context| context.set_starved(starved));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_when_the_schedulers_count_grows_and_when_it_does_not_any_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("schedstat");
        let waited = |millis: u64| std::fs::write(&path, format!("77 {}000000 5\n", millis)).unwrap();
        let at = |millis: u64| Time::from_nanos(millis * 1_000_000);
        waited(500);
        let mut core = CoreWatch {
            queue: RunQueue::open(&path),
            ..CoreWatch::default()
        };
        assert_eq!(core.news(at(1)), None);
        waited(501);
        assert_eq!(core.news(at(3)), None, "a short wait");
        waited(601);
        assert_eq!(core.news(at(3)), None, "not yet time");
        assert_eq!(core.news(at(103)), Some(true));
        assert_eq!(core.news(at(104)), Some(true), "for those that have come since");
        let end = core.next().unwrap();
        assert_eq!(core.news(end), Some(false));
        assert_eq!((core.news(at(60_000)), core.next()), (None, None));
        assert_eq!(core.times(), 1);
    }

    #[test]
    fn where_the_kernel_does_not_count_nobody_is_told_anything() {
        let mut core = CoreWatch::default();
        assert!((0..100).all(|second| core.news(Time::from_nanos(second * 1_000_000_000)).is_none()));
    }
}
