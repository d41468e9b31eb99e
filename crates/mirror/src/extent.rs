//! A range of bytes of a volume.

use std::ops::RangeInclusive;

/// `length` bytes from `offset` on: at least one, and the end does not overflow. Code that takes a request
/// from outside checks this.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}

impl Extent {
    /// The extent of `length` bytes from `offset` on, if it is within a volume of `size` bytes.
    pub fn within(size: u64, offset: u64, length: u64) -> Option<Self> {
        let end = offset.checked_add(length)?;
        (length > 0 && end <= size).then_some(Self { offset, length })
    }

    /// The byte after the last one.
    pub fn end(self) -> u64 {
        self.offset + self.length
    }

    /// Whether the extents have a byte in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }

    /// The numbers of the chunks of this size that the extent touches.
    pub fn chunks(self, chunk_bytes: u64) -> RangeInclusive<u64> {
        self.offset / chunk_bytes..=(self.end() - 1) / chunk_bytes
    }

    /// The extent of this chunk in a volume of `size` bytes; the last chunk may be shorter.
    pub fn of_chunk(chunk: u64, chunk_bytes: u64, size: u64) -> Self {
        let offset = chunk * chunk_bytes;
        Self {
            offset,
            length: chunk_bytes.min(size - offset),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_within_is_an_extent() {
        assert!(Extent::within(10, 9, 1).is_some());
        for (offset, length) in [(9, 2), (10, 0), (0, 0), (11, 1), (u64::MAX, 2), (2, u64::MAX)] {
            assert_eq!(Extent::within(10, offset, length), None, "{offset} {length}");
        }
    }

    #[test]
    fn chunks_are_those_that_it_touches() {
        let extent = Extent { offset: 7, length: 2 };
        assert_eq!(extent.chunks(8), 0..=1);
        assert_eq!(extent.chunks(4), 1..=2);
        assert_eq!(Extent::of_chunk(1, 8, 10), Extent { offset: 8, length: 2 });
    }
}
