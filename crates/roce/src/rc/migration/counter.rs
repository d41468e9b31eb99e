//! The counter of authenticated messages: no message is accepted twice, and none after a later one.

use serde::{Deserialize, Serialize};

/// Which message of one end this is. An end begins a new epoch each time that it goes on after a stop, so what it says then
/// comes after all that it said while it was stopped: also after what the place that it has left goes on to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(in crate::rc) struct Counter {
    pub epoch: u32,
    pub number: u32,
}

impl Counter {
    /// The next message; `None` when there can be no more in this epoch.
    pub fn next(self) -> Option<Counter> {
        let number = self.number.checked_add(1)?;
        Some(Counter { number, ..self })
    }

    /// Before the first message of the next epoch; `None` when there are no more.
    pub fn next_epoch(self) -> Option<Counter> {
        let epoch = self.epoch.checked_add(1)?;
        Some(Counter { epoch, number: 0 })
    }
}

impl From<u64> for Counter {
    fn from(value: u64) -> Counter {
        Counter {
            epoch: (value >> 32) as u32,
            number: value as u32,
        }
    }
}

impl From<Counter> for u64 {
    fn from(counter: Counter) -> u64 {
        u64::from(counter.epoch) << 32 | u64::from(counter.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_epoch_is_after_all_of_the_old_one() {
        let late = Counter {
            epoch: 1,
            number: u32::MAX,
        };
        assert_eq!(late.next(), None);
        let first = late.next_epoch().and_then(Counter::next).unwrap();
        assert!(first > late);
        assert_eq!(u64::from(first), (2 << 32) + 1);
        assert_eq!(Counter::from(u64::from(first)), first);
        assert_eq!(Counter::from(u64::MAX).next_epoch(), None);
    }
}
