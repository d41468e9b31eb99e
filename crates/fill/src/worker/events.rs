//! Events of tasks, and how they are put down.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Worker;
use crate::segments::Segment;
use crate::source::punchable;
use crate::state::{Event, PAGEFAULT, State};
use crate::sys::descriptors;
use crate::sys::region::LOG_SLOTS;

/// Events of one task that are read before others get their turn.
const MOST_EVENTS: usize = 256;
/// So long after a fault the next one is expected.
const QUIET: Duration = Duration::from_millis(5);

impl Worker<'_> {
    /// Takes up what the worker before this one has put down, also an event that it has read and nothing more.
    pub(super) fn replay(&mut self) {
        let header = self.region.header();
        let made = header.snapshots.load(Ordering::SeqCst);
        if made != 0 {
            (self.state, self.log_start) = State::load(self.region.half(made));
        }
        let log = header.log.load(Ordering::SeqCst);
        for index in self.log_start..log {
            let (task, message) = header.event(index).expect("what is in the log was written");
            if let Some(event) = Event::decode(message) {
                self.apply(task, event);
            }
        }
        if let Some((task, message)) = header.event(log) {
            self.put_down(task, message);
        }
    }

    fn apply(&mut self, task: u32, event: Event) {
        let cache = self.state.tasks.get(&task).map(|task| task.cache);
        let dropped = self.state.apply(task, event);
        if let Some(cache) = cache {
            self.is_done(cache, &dropped);
        }
    }

    /// Content that some task does not need any more.
    pub(super) fn is_done(&mut self, cache: u32, segments: &[Segment]) {
        let done = self.done.entry(cache).or_default();
        for origins in segments.iter().map(Segment::origins) {
            self.done_bytes += origins.end - origins.start;
            match done.last_mut() {
                Some(last) if last.end == origins.start => last.end = origins.end,
                _ => done.push(origins),
            }
        }
    }

    /// Reads what has happened to a task.
    pub(super) fn read_events(&mut self, index: u32) {
        if !self.state.tasks.contains_key(&index) {
            return;
        }
        for _ in 0..MOST_EVENTS {
            // A child needs a number. Until one is free the task that forks waits.
            if !self.has_room() || self.state.free() >= self.numbers.room {
                return;
            }
            let header = self.region.header();
            let log = header.log.load(Ordering::SeqCst);
            match header.read_event(log, index, descriptors::at(self.numbers.task(index))) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    (self.say)(&format!("the events of task {index} cannot be read: {error}"));
                    return;
                }
            }
            let Some((_, message)) = header.event(log) else {
                return;
            };
            if message[0] as u8 == PAGEFAULT {
                // A thread whose fault is lost is woken and faults again: this one need not be put down.
                self.faults.push_back((index, message[2]));
                self.quiet_from = Instant::now() + QUIET;
            } else {
                self.put_down(index, message);
            }
        }
    }

    /// An event that is at the end of the log takes effect. Doing it twice has the effect of once, up to the point where the log
    /// grows.
    fn put_down(&mut self, task: u32, message: [u64; 4]) {
        let header = self.region.header();
        let Some(event) = Event::decode(message) else {
            return;
        };
        let child = self.state.free();
        if let Event::Fork(descriptor) = event {
            let placed = descriptors::copy_to(descriptor, self.numbers.task(child));
            placed.expect("the number of a task is below the limit");
        }
        header.log.fetch_add(1, Ordering::SeqCst);
        self.apply(task, event);
        if let Event::Fork(descriptor) = event {
            descriptors::close(descriptor);
            if self.waiter.is_made() {
                self.waiter.add_task(child);
            }
        }
    }

    /// There is a free slot in the log, if need be after a snapshot.
    fn has_room(&mut self) -> bool {
        let log = self.region.header().log.load(Ordering::SeqCst);
        log - self.log_start < LOG_SLOTS - 1 || self.snapshot()
    }

    /// Puts the state down, after which what no task needs any more can be given back. `false` if it does not fit.
    pub(super) fn snapshot(&mut self) -> bool {
        let header = self.region.header();
        let made = header.snapshots.load(Ordering::SeqCst);
        let log = header.log.load(Ordering::SeqCst);
        if !self.state.save(log, self.region.half(made + 1)) {
            return false;
        }
        header.snapshots.store(made + 1, Ordering::SeqCst);
        self.log_start = log;
        for (cache, done) in std::mem::take(&mut self.done) {
            let free = punchable(done, &self.state.needed(cache));
            self.free.extend(free.into_iter().map(|range| (cache, range)));
        }
        self.done_bytes = 0;
        true
    }

    /// A task with nothing left.
    pub(super) fn close_task(&mut self, index: u32) {
        if !self.has_room() {
            return;
        }
        let header = self.region.header();
        let log = header.log.load(Ordering::SeqCst);
        header.put_event(log, index, Event::closed());
        header.log.fetch_add(1, Ordering::SeqCst);
        self.apply(index, Event::Closed);
        self.paused.remove(&index);
        self.faults.retain(|(task, _)| *task != index);
        self.waiter.remove_task(index);
        descriptors::close(self.numbers.task(index));
    }
}
