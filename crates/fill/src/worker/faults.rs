//! Faults: threads that wait for a page.

use std::sync::atomic::Ordering;

use super::{Worker, fill};
use crate::sys::descriptors;
use crate::sys::uffd::{self, Outcome};

/// Pages that are put in place with the one that a thread waits for.
const TOGETHER: u64 = 4;

impl Worker<'_> {
    /// Answers all that can be answered now. Whether there were any.
    pub(super) fn answer_faults(&mut self) -> bool {
        if self.is_stalled() {
            return false;
        }
        let mut answered = false;
        for _ in 0..self.faults.len() {
            let Some((task, address)) = self.faults.pop_front() else {
                break;
            };
            if self.answer(task, address) {
                answered = true;
            } else {
                self.faults.push_back((task, address));
            }
        }
        answered
    }

    /// `false` if it must be tried again.
    fn answer(&mut self, index: u32, address: u64) -> bool {
        let page = rustix::param::page_size() as u64;
        let address = address & !(page - 1);
        let Some(task) = self.state.tasks.get(&index) else {
            return true;
        };
        let header = self.region.header();
        let uffd = descriptors::at(self.numbers.task(index));
        let outcome = match task.segments.at(address) {
            Some(segment) => {
                let bytes = (TOGETHER * page).min(segment.end - address);
                self.copy(index, segment, bytes)
            }
            None => {
                let outcome = uffd::zero(uffd, address, page);
                if matches!(outcome, Outcome::Done(_)) {
                    header.zeros.fetch_add(1, Ordering::Relaxed);
                }
                outcome
            }
        };
        match outcome {
            Outcome::EventFirst => return false,
            Outcome::NoMemory | Outcome::Failed(_) if outcome != Outcome::Failed(libc::EINVAL) => {
                self.stall(outcome);
                return false;
            }
            Outcome::Done(_) => self.goes_on(),
            // It is there already, or the mapping is not: the thread finds out.
            _ => {
                uffd::wake(uffd, address, page);
            }
        }
        header.faults.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Memory could not be had, and it is not yet time to try again.
    pub(super) fn is_stalled(&self) -> bool {
        let now = std::time::Instant::now();
        self.stalled.as_ref().is_some_and(|(.., until)| *until > now)
    }

    /// Memory can be had again.
    pub(super) fn goes_on(&mut self) {
        if let Some((_, why, _)) = self.stalled.take() {
            (self.say)(&format!("goes on after: {why}"));
        }
    }

    /// Tries again later, and says why.
    pub(super) fn stall(&mut self, outcome: Outcome) {
        let why = match outcome {
            Outcome::NoMemory => {
                "the kernel has no memory for the tasks' pages; raise the memory limit of the container or free memory of the host"
                    .to_owned()
            }
            other => format!("pages cannot be put in place: {other:?} (see errno(3)); is the cache whole?"),
        };
        let pause = match &self.stalled {
            None => {
                (self.say)(&why);
                fill::PAUSES[0]
            }
            Some((pause, ..)) => (*pause * 2).min(fill::PAUSES[1]),
        };
        self.stalled = Some((pause, why, std::time::Instant::now() + pause));
    }
}
