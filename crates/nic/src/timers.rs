//! When which queue pair wants to be called.
//!
//! A deadline moves with nearly every packet, mostly to later. So a queue pair has one entry in the heap, which stays
//! where it is when the deadline moves to later; when it comes up, the queue pair is asked and entered again.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use verbatim_roce::Time;

/// A queue pair's part: when its earliest entry comes up.
#[derive(Debug, Default, Clone, Copy)]
pub struct Alarm(Option<Time>);

/// The heap.
#[derive(Debug, Default)]
pub struct Timers(BinaryHeap<Reverse<(Time, u32)>>);

impl Timers {
    /// The queue pair wants to be called at `deadline`, or not at all.
    #[inline]
    pub fn set(&mut self, qpn: u32, alarm: &mut Alarm, deadline: Option<Time>) {
        let Some(deadline) = deadline else { return };
        if alarm.0.is_none_or(|armed| deadline < armed) {
            alarm.0 = Some(deadline);
            self.0.push(Reverse((deadline, qpn)));
        }
    }

    /// When to look next.
    pub fn next(&self) -> Option<Time> {
        self.0.peek().map(|Reverse((deadline, _))| *deadline)
    }

    /// Takes an entry that is due. The caller finds the queue pair's alarm, asks [`Alarm::rings`] whether the entry is
    /// the one that counts, and if so calls the queue pair and sets its timer again.
    pub fn pop_due(&mut self, now: Time) -> Option<(Time, u32)> {
        if self.next()? > now {
            return None;
        }
        self.0.pop().map(|Reverse(entry)| entry)
    }
}

impl Alarm {
    /// Whether the entry that came up is this alarm's latest one; it is then spent.
    pub fn rings(&mut self, entry: Time) -> bool {
        let rings = self.0 == Some(entry);
        if rings {
            self.0 = None;
        }
        rings
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_deadlines_cost_no_entry_and_earlier_ones_ring_first() {
        let at = Time::from_nanos;
        let mut timers = Timers::default();
        let mut alarm = Alarm::default();
        timers.set(7, &mut alarm, Some(at(100)));
        timers.set(7, &mut alarm, Some(at(200)));
        timers.set(7, &mut alarm, None);
        assert_eq!((timers.0.len(), timers.next()), (1, Some(at(100))));
        timers.set(7, &mut alarm, Some(at(50)));
        assert_eq!(timers.next(), Some(at(50)));
        assert_eq!(timers.pop_due(at(49)), None);
        assert_eq!(timers.pop_due(at(120)), Some((at(50), 7)));
        assert!(alarm.rings(at(50)));
        assert_eq!(timers.pop_due(at(120)), Some((at(100), 7)));
        assert!(!alarm.rings(at(100)), "superseded");
        assert_eq!(timers.pop_due(at(120)), None);
    }
}
