//! What a worker knows of the tasks, and how the next one gets to know it: a snapshot in shared memory, and the events since.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::segments::{Segment, Segments};

/// Events of `<linux/userfaultfd.h>`.
pub const PAGEFAULT: u8 = 0x12;
const FORK: u8 = 0x13;
const REMAP: u8 = 0x14;
const REMOVE: u8 = 0x15;
const UNMAP: u8 = 0x16;
/// Our own: nothing is left of a task, and its descriptor is closed.
const CLOSED: u8 = 0xf0;

/// A change of a task's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A child, with this descriptor.
    Fork(i32),
    /// Pages got another address.
    Remap {
        /// Their old one.
        from: u64,
        /// Their new one.
        to: u64,
        /// How many bytes.
        bytes: u64,
    },
    /// What was there from the first to before the second address reads as zero, or is not mapped any more.
    Removed(u64, u64),
    /// The task is done with.
    Closed,
}

impl Event {
    /// From `struct uffd_msg`, or one of ours; `None` for a fault and for what is not known.
    pub fn decode(message: [u64; 4]) -> Option<Self> {
        let [kind, a, b, c] = message;
        match kind as u8 {
            FORK => Some(Self::Fork(a as u32 as i32)),
            REMAP => Some(Self::Remap {
                from: a,
                to: b,
                bytes: c,
            }),
            REMOVE | UNMAP => Some(Self::Removed(a, b)),
            CLOSED => Some(Self::Closed),
            _ => None,
        }
    }

    /// The message of [`Event::Closed`].
    pub fn closed() -> [u64; 4] {
        [CLOSED.into(), 0, 0, 0]
    }
}

/// A task, or a child that was forked meanwhile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Task {
    /// Name of its cache file: the number of the task that CRIU dumped.
    pub cache: u32,
    /// What is left.
    pub segments: Segments,
}

/// All of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct State {
    /// Numbers of the tasks whose descriptors came.
    pub arrived: Vec<u32>,
    /// CRIU said that no more will come.
    pub filling: bool,
    /// Pages that were to be filled, in bytes.
    pub bytes: u64,
    /// Open tasks by the number of their descriptor, less that of the first.
    pub tasks: BTreeMap<u32, Task>,
}

impl State {
    /// The lowest number that no task has.
    pub fn free(&self) -> u32 {
        (0..)
            .zip(self.tasks.keys())
            .find(|(free, used)| free != *used)
            .map_or(self.tasks.len() as u32, |(free, _)| free)
    }

    /// What is left, in bytes.
    pub fn left(&self) -> u64 {
        self.tasks.values().map(|task| task.segments.bytes()).sum()
    }

    /// How many segments there are.
    pub fn segments(&self) -> usize {
        self.tasks.values().map(|task| task.segments.len()).sum()
    }

    /// A task came.
    pub fn add(&mut self, vpid: u32, segments: Segments) -> u32 {
        let index = self.free();
        self.bytes += segments.bytes();
        self.arrived.push(vpid);
        self.tasks.insert(
            index,
            Task {
                cache: vpid,
                segments,
            },
        );
        index
    }

    /// An event of task `index` takes effect. What is not needed any more is returned. A child gets the number
    /// that [`State::free`] says.
    pub fn apply(&mut self, index: u32, event: Event) -> Vec<Segment> {
        let free = self.free();
        let Some(task) = self.tasks.get_mut(&index) else {
            return Vec::new();
        };
        match event {
            Event::Fork(_) => {
                let child = Task {
                    cache: task.cache,
                    segments: task.segments.forked(),
                };
                self.bytes += child.segments.bytes();
                self.tasks.insert(free, child);
                Vec::new()
            }
            Event::Remap { from, to, bytes } => {
                task.segments.moved(from, to, bytes);
                Vec::new()
            }
            Event::Removed(from, to) => task.segments.take(from..to),
            Event::Closed => {
                self.tasks.remove(&index);
                Vec::new()
            }
        }
    }

    /// Which bytes of cache file `cache` some task still needs, ascending.
    pub fn needed(&self, cache: u32) -> Vec<Range<u64>> {
        let tasks = self.tasks.values().filter(|task| task.cache == cache);
        let mut needed: Vec<Range<u64>> = tasks
            .flat_map(|task| task.segments.iter().map(Segment::origins))
            .collect();
        needed.sort_unstable_by_key(|range| range.start);
        needed
    }

    /// Writes it all to `half`, with the place in the log from which on events are not in it. `false` if there is no room.
    pub fn save(&self, log: u64, half: &[AtomicU64]) -> bool {
        let words = 6 + self.arrived.len() + 3 * self.tasks.len() + 3 * self.segments();
        if words > half.len() {
            return false;
        }
        let mut to = half.iter();
        let mut put = |word: u64| to.next().expect("there is room").store(word, Ordering::Relaxed);
        put(log);
        put(self.bytes);
        put(self.filling.into());
        put(self.arrived.len() as u64);
        self.arrived.iter().for_each(|vpid| put((*vpid).into()));
        put(self.tasks.len() as u64);
        for (index, task) in &self.tasks {
            put((*index).into());
            put(task.cache.into());
            put(task.segments.len() as u64);
            for segment in task.segments.iter() {
                // An address of a page: its lowest bit is free.
                put(segment.start | u64::from(segment.inherited));
                put(segment.end);
                put(segment.origin);
            }
        }
        true
    }

    /// What was written to `half`, and from where on the log is not in it.
    pub fn load(half: &[AtomicU64]) -> (Self, u64) {
        let mut from = half.iter();
        let mut get = || from.next().map_or(0, |word| word.load(Ordering::Relaxed));
        let log = get();
        let mut state = Self {
            bytes: get(),
            filling: get() != 0,
            ..Self::default()
        };
        state.arrived = (0..get()).map(|_| get() as u32).collect();
        for _ in 0..get() {
            let index = get() as u32;
            let mut task = Task {
                cache: get() as u32,
                ..Task::default()
            };
            for _ in 0..get() {
                let (start, end, origin) = (get(), get(), get());
                task.segments.insert(Segment {
                    start: start & !1,
                    end,
                    origin,
                    inherited: start & 1 != 0,
                });
            }
            state.tasks.insert(index, task);
        }
        (state, log)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> State {
        let mut state = State::default();
        for vpid in [7, 9] {
            let mut segments = Segments::default();
            for (start, inherited) in [(0x1000, true), (0x8000, false)] {
                segments.insert(Segment {
                    start,
                    end: start + 0x3000,
                    origin: start,
                    inherited,
                });
            }
            state.add(vpid, segments);
        }
        state
    }

    #[test]
    fn what_was_saved_is_loaded() {
        let mut state = state();
        state.filling = true;
        let half: Vec<AtomicU64> = (0..100).map(|_| AtomicU64::new(u64::MAX)).collect();
        assert!(state.save(77, &half));
        assert_eq!(State::load(&half), (state.clone(), 77));
        assert!(!state.save(77, &half[..20]), "there is no room");
    }

    #[test]
    fn a_child_has_what_is_inherited_and_a_number_that_is_free() {
        let mut state = state();
        state.apply(0, Event::Closed);
        state.apply(1, Event::Fork(99));
        assert_eq!(state.tasks[&0].cache, 9);
        assert_eq!(state.tasks[&0].segments.bytes(), 0x3000);
        assert_eq!(state.free(), 2);
        assert_eq!(state.needed(9), [0x1000..0x4000, 0x1000..0x4000, 0x8000..0xb000]);
        let dropped = state.apply(1, Event::Removed(0x2000, 0x9000));
        assert_eq!(
            dropped.iter().map(Segment::origins).collect::<Vec<_>>(),
            [0x2000..0x4000, 0x8000..0x9000]
        );
        state.apply(
            1,
            Event::Remap {
                from: 0x9000,
                to: 0x100_0000,
                bytes: 0x1000,
            },
        );
        assert_eq!(
            state.tasks[&1].segments.at(0x100_0000).unwrap().origins(),
            0x9000..0xa000
        );
    }
}
