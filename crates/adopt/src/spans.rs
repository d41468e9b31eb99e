//! How many claims each range of the memory file has.
//!
//! Spans are keyed by file offset, not by address: the program may move or unmap adopted memory, and its address may
//! then belong to something else.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::adopter::Adopted;

#[derive(Debug, Clone, Copy)]
struct Span {
    end: u64,
    address: u64,
    claims: u64,
}

/// The ranges of the memory file that are in use.
#[derive(Debug, Default)]
pub struct Spans {
    by_offset: BTreeMap<u64, Span>,
}

impl Spans {
    /// A newly adopted range, with one claim.
    pub fn insert(&mut self, range: Range<u64>, address: u64) {
        let span = Span {
            end: range.end,
            address,
            claims: 1,
        };
        self.by_offset.insert(range.start, span);
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
        self.by_offset
            .retain(|start, _| !(range.start..range.end).contains(start));
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
        spans.insert(0..10, 1000);
        spans.insert(10..20, 2000);
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
        spans.insert(0..10, 1000);
        spans.insert(10..20, 2000);
        assert!(spans.claim(4..6));
        let all: Vec<_> = spans.iter().map(|a| (a.address, a.length, a.offset)).collect();
        assert_eq!(all, [(1000, 10, 0), (2000, 10, 10)]);
        spans.remove(8..12);
        let all: Vec<_> = spans.iter().map(|a| (a.address, a.length, a.offset)).collect();
        assert_eq!(all, [(1000, 8, 0), (2002, 8, 12)]);
        assert!(!spans.claim(7..9));
    }
}
