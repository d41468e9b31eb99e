//! The rest, in pieces.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Worker;
use crate::segments::Segment;
use crate::source::Source;
use crate::sys::descriptors;
use crate::sys::uffd::{self, Outcome};

/// Bytes that are put in place between two looks at events and faults.
const PIECE: u64 = 256 << 10;
/// The same while threads have to wait for pages.
const SMALL_PIECE: u64 = 64 << 10;
/// Bytes of the cache that are given back at a time, at least; more where a snapshot is long.
const STEP: u64 = 8 << 20;
/// Bytes that are given back in one call: 0.1 ms.
const CALL: u64 = 1 << 20;
/// For the moment in which a task goes on after an event that was read; nothing tells when it does.
pub(super) const AGAIN: Duration = Duration::from_micros(30);
/// Until CRIU has made a mapping.
const NOT_YET: Duration = Duration::from_micros(500);
/// While there is no memory: first, and at most.
pub(super) const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(200)];

impl Worker<'_> {
    /// Copies from the start of `segment`, of task `index`, `bytes` at most. What is in place then is not left any more.
    pub(super) fn copy(&mut self, index: u32, segment: Segment, bytes: u64) -> Outcome {
        let Some(cache) = self.state.tasks.get(&index).map(|task| task.cache) else {
            return Outcome::Gone;
        };
        let content = match self.source(cache) {
            Some(source) => source.content(segment.origin, bytes),
            None => return Outcome::Failed(libc::ENOENT),
        };
        let (source, mut bytes) = match content {
            Ok(content) => content,
            Err(error) => return Outcome::Failed(error.raw_os_error().unwrap_or(libc::EIO)),
        };
        let uffd = descriptors::at(self.numbers.task(index));
        let page = rustix::param::page_size() as u64;
        let outcome = loop {
            match uffd::copy(uffd, segment.start, source, bytes) {
                // Part of it may be another mapping since an mprotect(2).
                Outcome::NotThere if bytes > page => bytes = (bytes / 2).next_multiple_of(page),
                outcome => break outcome,
            }
        };
        let there = match outcome {
            Outcome::Done(bytes) => bytes,
            Outcome::Exists => page,
            _ => return outcome,
        };
        self.no_longer_left(index, segment.start, there);
        outcome
    }

    fn source(&mut self, cache: u32) -> Option<&mut Source> {
        if !self.sources.contains_key(&cache) {
            match Source::open(&self.config.cache, cache) {
                Ok(source) => self.sources.insert(cache, source),
                Err(error) => {
                    (self.say)(&error);
                    return None;
                }
            };
        }
        self.sources.get_mut(&cache)
    }

    fn no_longer_left(&mut self, index: u32, start: u64, bytes: u64) {
        if let Some(task) = self.state.tasks.get_mut(&index) {
            let (cache, taken) = (task.cache, task.segments.take(start..start + bytes));
            self.is_done(cache, &taken);
        }
    }

    /// Puts one piece in place. Whether that is so.
    pub(super) fn fill_next(&mut self) -> bool {
        if self.is_stalled() {
            return false;
        }
        let now = Instant::now();
        self.paused.retain(|_, until| *until > now);
        let tasks: Vec<u32> = self.state.tasks.keys().copied().collect();
        for index in tasks {
            if self.paused.contains_key(&index) {
                continue;
            }
            let Some(segment) = self.state.tasks[&index].segments.first() else {
                continue;
            };
            if self.fill_one(index, segment, now) {
                return true;
            }
        }
        false
    }

    fn fill_one(&mut self, index: u32, segment: Segment, now: Instant) -> bool {
        let piece = if self.faults.is_empty() && now > self.quiet_from {
            PIECE
        } else {
            SMALL_PIECE
        };
        let outcome = self.copy(index, segment, piece.min(segment.end - segment.start));
        let page = rustix::param::page_size() as u64;
        match outcome {
            Outcome::Done(_) => self.goes_on(),
            Outcome::Exists => {
                uffd::wake(descriptors::at(self.numbers.task(index)), segment.start, page);
            }
            Outcome::EventFirst => {
                self.paused.insert(index, now + AGAIN);
                return false;
            }
            Outcome::NotThere if !self.state.filling => {
                self.paused.insert(index, now + NOT_YET);
                return false;
            }
            Outcome::NotThere => {
                self.region.header().unplaced.fetch_add(1, Ordering::Relaxed);
                self.no_longer_left(index, segment.start, page);
            }
            Outcome::Gone => {
                self.no_longer_left(index, 0, u64::MAX);
                self.close_task(index);
            }
            Outcome::NoMemory | Outcome::Failed(_) => {
                self.stall(outcome);
                return false;
            }
        }
        true
    }

    /// Gives memory of caches back, a part of it at a time. Whether there was any.
    pub(super) fn give_back(&mut self) -> bool {
        // A snapshot takes 10 ns for each segment.
        let step = STEP.max(self.state.segments() as u64 * 1024);
        if self.done_bytes >= step {
            self.snapshot();
        }
        let Some((cache, range)) = self.free.pop() else {
            return false;
        };
        let end = range.end.min(range.start + CALL);
        if end < range.end {
            self.free.push((cache, end..range.end));
        }
        let say = self.say;
        if let Some(source) = self.source(cache)
            && let Err(error) = source.punch(&(range.start..end))
        {
            say(&format!("memory of the cache cannot be given back: {error}"));
            self.free.clear();
        }
        true
    }

    /// Lets go of tasks that lack nothing any more.
    pub(super) fn close_finished(&mut self) {
        if !self.state.filling {
            return;
        }
        while let Some((index, _)) = self.state.tasks.iter().find(|(_, task)| task.segments.is_empty()) {
            let index = *index;
            self.close_task(index);
            if self.state.tasks.contains_key(&index) {
                return;
            }
        }
        if self.state.tasks.is_empty() && self.done_bytes > 0 {
            self.snapshot();
        }
    }
}
