//! How many claims each range of the memory file has.
//!
//! Spans are keyed by file offset, not by address: the program may move or unmap adopted memory, and its address may
//! then belong to something else.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::region::Adopted;
use crate::sys::swap::Attributes;

#[derive(Debug, Clone, Copy)]
struct Span {
    end: u64,
    address: u64,
    attributes: Attributes,
    claims: u64,
}

impl Piece {
    /// Where it was mapped.
    pub fn addresses(&self) -> Range<usize> {
        let start = self.address as usize;
        start..start + (self.offsets.end - self.offsets.start) as usize
    }
}

impl Span {
    /// Whether `self`, which starts at the offset `start`, goes on in `next`, both in the file and in memory.
    fn continues(&self, start: u64, next_start: u64, next: &Self) -> bool {
        self.end == next_start && self.address + (self.end - start) == next.address
    }
}

/// A part of the file, and what is known of its mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub offsets: Range<u64>,
    /// Where it was mapped when it was adopted.
    pub address: u64,
    /// What the memory was told before it was adopted.
    pub attributes: Attributes,
}

/// The ranges of the memory file that are in use.
#[derive(Debug, Default)]
pub struct Spans {
    by_offset: BTreeMap<u64, Span>,
}

impl Spans {
    /// A newly adopted range, with one claim.
    pub fn insert(&mut self, range: Range<u64>, address: u64, attributes: Attributes) {
        let span = Span {
            end: range.end,
            address,
            attributes,
            claims: 1,
        };
        self.by_offset.insert(range.start, span);
    }

    /// A range that was thought to be left, and is still mapped: it is in use, without a claim.
    pub fn insert_unclaimed(&mut self, range: Range<u64>, address: u64) {
        self.insert(range.clone(), address, Attributes::default());
        self.drop_claim(range);
    }

    /// One more claim on a range, which may be made of parts of several spans. False, without an effect, if some of it
    /// is not in use.
    pub fn claim(&mut self, range: Range<u64>) -> bool {
        if !self.covers(&range) {
            return false;
        }
        self.split(&range);
        for (_, span) in self.by_offset.range_mut(range) {
            span.claims += 1;
        }
        true
    }

    /// One claim less on a range; the parts of it that have none left.
    pub fn drop_claim(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        self.split(&range);
        let mut unclaimed: Vec<Range<u64>> = Vec::new();
        for (&start, span) in self.by_offset.range_mut(range) {
            span.claims = span.claims.saturating_sub(1);
            if span.claims > 0 {
                continue;
            }
            match unclaimed.last_mut() {
                Some(last) if last.end == start => last.end = span.end,
                _ => unclaimed.push(start..span.end),
            }
        }
        unclaimed
    }

    /// Forgets a range: its pages are no longer in the file.
    pub fn remove(&mut self, range: Range<u64>) {
        self.split(&range);
        let starts: Vec<u64> = self.by_offset.range(range).map(|(start, _)| *start).collect();
        for start in starts {
            self.by_offset.remove(&start);
        }
    }

    /// How much of a range is in use, in bytes.
    pub fn used_bytes(&mut self, range: &Range<u64>) -> u64 {
        self.pieces(range)
            .map(|piece| piece.offsets.end - piece.offsets.start)
            .sum()
    }

    /// The parts of a range that are in use.
    pub fn pieces(&mut self, range: &Range<u64>) -> impl Iterator<Item = Piece> {
        self.split(range);
        self.by_offset.range(range.clone()).map(|(&start, span)| Piece {
            offsets: start..span.end,
            address: span.address,
            attributes: span.attributes,
        })
    }

    /// Joins what has no claim round `at`, if that itself has none: the whole of it, as far as it is contiguous in the file and
    /// in memory, and whether claimed memory of the same kind goes on beside it.
    pub fn unclaimed_around(&mut self, at: u64) -> Option<(Range<u64>, bool)> {
        let (&start, span) = self.by_offset.range(..=at).next_back()?;
        if span.end <= at || span.claims > 0 {
            return None;
        }
        let (mut start, mut span) = (start, *span);
        let mut beside_claimed = false;
        while let Some((&before_start, before)) = self.by_offset.range(..start).next_back()
            && before.continues(before_start, start, &span)
        {
            if before.claims > 0 || before.attributes != span.attributes {
                beside_claimed |= before.claims > 0;
                break;
            }
            (start, span.address) = (before_start, before.address);
        }
        while let Some(after) = self.by_offset.get(&span.end)
            && span.continues(start, span.end, after)
        {
            if after.claims > 0 || after.attributes != span.attributes {
                beside_claimed |= after.claims > 0;
                break;
            }
            span.end = after.end;
        }
        let range = start..span.end;
        self.remove(range.clone());
        self.by_offset.insert(start, span);
        Some((range, beside_claimed))
    }

    /// The parts of a range that the program wants no child to have, in order.
    pub fn dont_fork(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let before = self.by_offset.range(..range.start).next_back();
        let spans = before.into_iter().chain(self.by_offset.range(range.clone()));
        spans
            .filter(|(_, span)| span.attributes.dont_fork)
            .map(move |(&start, span)| start.max(range.start)..span.end.min(range.end))
            .filter(|part| !part.is_empty())
    }

    /// Ranges that are in use without a claim.
    pub fn unclaimed(&self) -> impl Iterator<Item = Range<u64>> {
        let unclaimed = self.by_offset.iter().filter(|(_, span)| span.claims == 0);
        unclaimed.map(|(&start, span)| start..span.end)
    }

    /// How many there are, adjacent ones counted one by one.
    pub fn count(&self) -> usize {
        self.by_offset.len()
    }

    /// All ranges in use, in order; those that continue each other are one.
    pub fn iter(&self) -> impl Iterator<Item = Adopted> {
        let mut spans = self.by_offset.iter().map(|(&offset, span)| Adopted {
            address: span.address,
            length: span.end - offset,
            offset,
        });
        let mut current = spans.next();
        std::iter::from_fn(move || {
            let mut joined = current.take()?;
            for next in spans.by_ref() {
                if next.offset == joined.offset + joined.length
                    && next.address == joined.address + joined.length
                {
                    joined.length += next.length;
                } else {
                    current = Some(next);
                    break;
                }
            }
            Some(joined)
        })
    }

    fn covers(&self, range: &Range<u64>) -> bool {
        let mut reached = range.start;
        if let Some((_, span)) = self.by_offset.range(..=range.start).next_back() {
            reached = reached.max(span.end);
        }
        for (&start, span) in self.by_offset.range(range.start..range.end) {
            if start > reached {
                return false;
            }
            reached = reached.max(span.end);
        }
        reached >= range.end
            && self
                .by_offset
                .range(..=range.start)
                .next_back()
                .is_some_and(|(_, s)| s.end > range.start)
    }

    /// Makes the bounds of `range` bounds of spans.
    fn split(&mut self, range: &Range<u64>) {
        for at in [range.start, range.end] {
            if let Some((&start, span)) = self.by_offset.range_mut(..at).next_back()
                && span.end > at
            {
                let rest = Span {
                    address: span.address + (at - start),
                    ..*span
                };
                span.end = at;
                self.by_offset.insert(at, rest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn claims_are_counted_per_page_range() {
        let mut spans = Spans::default();
        spans.insert(0..10, 1000, Attributes::default());
        spans.insert(10..20, 2000, Attributes::default());
        assert!(spans.claim(5..15), "across two spans");
        assert!(!spans.claim(15..25), "partly outside");
        assert!(!spans.claim(30..31));
        assert_eq!(spans.drop_claim(0..10), vec![0..5]);
        assert_eq!(spans.drop_claim(5..15), vec![5..10]);
        assert_eq!(spans.drop_claim(10..20), vec![10..20]);
    }

    #[test]
    fn iterates_joined_and_forgets_parts() {
        let mut spans = Spans::default();
        spans.insert(0..10, 1000, Attributes::default());
        spans.insert(10..20, 2000, Attributes::default());
        assert!(spans.claim(4..6));
        let all: Vec<_> = spans.iter().map(|a| (a.address, a.length, a.offset)).collect();
        assert_eq!(all, [(1000, 10, 0), (2000, 10, 10)]);
        spans.remove(8..12);
        let all: Vec<_> = spans.iter().map(|a| (a.address, a.length, a.offset)).collect();
        assert_eq!(all, [(1000, 8, 0), (2002, 8, 12)]);
        assert!(!spans.claim(7..9));
    }

    #[test]
    fn what_has_no_claim_is_joined_up_to_what_has_one() {
        let mut spans = Spans::default();
        for index in 0..6 {
            spans.insert(
                index * 10..index * 10 + 10,
                1000 + index * 10,
                Attributes::default(),
            );
        }
        assert_eq!(spans.unclaimed_around(25), None);
        assert_eq!(spans.drop_claim(20..30), vec![20..30]);
        assert_eq!(spans.unclaimed_around(25), Some((20..30, true)));
        assert_eq!(spans.drop_claim(30..60).len(), 1);
        assert_eq!(spans.unclaimed_around(25), Some((20..60, true)));
        assert_eq!(spans.drop_claim(0..20).len(), 1);
        assert_eq!(spans.unclaimed_around(59), Some((0..60, false)));
        assert_eq!(spans.count(), 1);
        spans.insert(60..70, 5000, Attributes::default());
        assert_eq!(
            spans.unclaimed_around(0),
            Some((0..60, false)),
            "elsewhere in memory"
        );
        assert_eq!(spans.used_bytes(&(55..65)), 10);
        assert_eq!(
            spans
                .unclaimed()
                .map(|range| range.end - range.start)
                .sum::<u64>(),
            60
        );
    }
}
