//! Room in a ring of bytes.

use crate::error::Error;

/// Positions count all bytes that have ever been in the ring, and what was left out at its end; so they never repeat.
#[derive(Debug)]
pub struct Ring {
    bytes: u64,
    /// Everything before it is free.
    begin: u64,
    /// Everything from it on is free.
    end: u64,
}

impl Ring {
    /// An empty one.
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            begin: 0,
            end: 0,
        }
    }

    /// The position of `length` bytes in one piece, which are free until [`Self::take`] takes some of them; `None` until something
    /// is freed.
    pub fn room(&self, length: u64) -> Option<u64> {
        let at = self.end % self.bytes;
        // A run does not go round the corner.
        let position = match at + length <= self.bytes {
            true => self.end,
            false => self.end + (self.bytes - at),
        };
        let begin = match self.is_empty() {
            // What is left out at the end of an empty ring is not in anybody's way.
            true => position,
            false => self.begin,
        };
        (position + length - begin <= self.bytes).then_some(position)
    }

    /// Takes `length` bytes at a position that [`Self::room`] gave.
    pub fn take(&mut self, position: u64, length: u64) {
        debug_assert!(position >= self.end);
        if self.is_empty() {
            self.begin = position;
        }
        self.end = position + length;
    }

    /// Everything before `position` is free, as some of it may have been before.
    pub fn free(&mut self, position: u64) -> Result<(), Error> {
        if position > self.end {
            return Err(Error::Malformed("room is freed that was not taken"));
        }
        self.begin = self.begin.max(position);
        Ok(())
    }

    /// Whether nothing is in it.
    pub fn is_empty(&self) -> bool {
        self.begin == self.end
    }
}

/// Where a run lies in a ring of `bytes`; an error unless it lies in one piece.
pub fn offset(position: u64, length: u64, bytes: u64) -> Result<u64, Error> {
    let offset = position % bytes.max(1);
    match offset.checked_add(length).is_some_and(|end| end <= bytes) {
        true => Ok(offset),
        false => Err(Error::Malformed("a run is longer than its ring")),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Runs never touch each other, lie in one piece, and room comes back.
        #[test]
        fn runs_do_not_touch_each_other(
            steps in prop::collection::vec((1..=64u64, any::<bool>()), 1..400),
            bytes in 64..=200u64,
        ) {
            let mut ring = Ring::new(bytes);
            let mut runs: VecDeque<(u64, u64)> = VecDeque::new();
            for (length, frees) in steps {
                if frees && let Some((position, length)) = runs.pop_front() {
                    ring.free(position + length).unwrap();
                }
                let Some(position) = ring.room(length) else {
                    prop_assert!(!runs.is_empty() , "an empty ring of {bytes} has no room for {length}");
                    continue;
                };
                // Only what was taken of the room counts.
                let taken = length.div_ceil(2);
                let offset = offset(position, length, bytes).unwrap();
                for (other, length) in &runs {
                    let begin = other % bytes;
                    prop_assert!(offset + taken <= begin || begin + length <= offset);
                }
                ring.take(position, taken);
                runs.push_back((position, taken));
            }
            while let Some((position, length)) = runs.pop_front() {
                ring.free(position + length).unwrap();
            }
            prop_assert!(ring.is_empty());
        }
    }

    #[test]
    fn room_that_was_not_taken_cannot_be_freed() {
        let mut ring = Ring::new(100);
        ring.take(0, 40);
        ring.free(20).unwrap();
        ring.free(19).unwrap();
        assert_eq!(ring.room(81), None, "what was free before stays so");
        assert!(ring.free(41).is_err() && !ring.is_empty());
        ring.free(40).unwrap();
        assert!(ring.is_empty());
    }

    #[test]
    fn a_run_beyond_its_ring_is_refused() {
        assert_eq!(offset(250, 50, 100).unwrap(), 50);
        assert!(offset(251, 50, 100).is_err());
        assert!(offset(0, u64::MAX, 100).is_err() && offset(3, 1, 0).is_err());
    }
}
