//! Which parts of the memory file are in use: a bump allocator over a list of free ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Free and used offsets of the memory file. Lengths are multiples of a page.
#[derive(Debug, Default)]
pub struct Space {
    /// Free ranges below `end`: start to end, never adjacent to each other or to `end`.
    free: BTreeMap<u64, u64>,
    /// Everything from here on was never used, or is free again.
    end: u64,
}

impl Space {
    /// A contiguous range of that length: the first free one that is long enough, else at the end.
    pub fn allocate(&mut self, length: u64) -> Range<u64> {
        let fit = self
            .free
            .iter()
            .find(|(start, end)| **end - **start >= length)
            .map(|(start, end)| *start..*end);
        let start = match fit {
            Some(range) => {
                self.free.remove(&range.start);
                if range.start + length < range.end {
                    self.free.insert(range.start + length, range.end);
                }
                range.start
            }
            None => {
                self.end += length;
                self.end - length
            }
        };
        start..start + length
    }

    /// Gives a range back, whole allocations or parts of them.
    pub fn free(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        if let Some((&before, &before_end)) = self.free.range(..start).next_back()
            && before_end == start
        {
            self.free.remove(&before);
            start = before;
        }
        if let Some(after_end) = self.free.remove(&end) {
            end = after_end;
        }
        if end == self.end {
            self.end = start;
        } else {
            self.free.insert(start, end);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reuses_and_joins_what_was_freed() {
        let mut space = Space::default();
        let (a, b, c) = (space.allocate(10), space.allocate(20), space.allocate(30));
        assert_eq!((a.clone(), b.clone(), c.clone()), (0..10, 10..30, 30..60));
        space.free(a);
        assert_eq!(space.allocate(15), 60..75, "too long for the gap");
        space.free(b);
        assert_eq!(space.allocate(30), 0..30, "two gaps became one");
        space.free(c);
        space.free(60..75);
        assert_eq!(space.allocate(5), 30..35, "the end came back");
        assert!(space.free.is_empty());
    }
}
