//! Sets of addresses, as ranges of whole pages.

use std::ops::Range;

/// Disjoint ranges of addresses in ascending order; neighbours that touch are one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Adds a range. At the end, where ranges that are found in order go, this takes no time.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        match self.0.last_mut() {
            Some(last) if range.start > last.end => self.0.push(range),
            Some(last) if range.start >= last.start => last.end = last.end.max(range.end),
            None => self.0.push(range),
            Some(_) => self.insert_before(range),
        }
    }

    fn insert_before(&mut self, range: Range<u64>) {
        let from = self.0.partition_point(|own| own.end < range.start);
        let to = self.0.partition_point(|own| own.start <= range.end);
        let merged = match from < to {
            true => self.0[from].start.min(range.start)..self.0[to - 1].end.max(range.end),
            false => range,
        };
        self.0.splice(from..to, [merged]);
    }

    /// Adds all of another set.
    pub fn union(&mut self, other: &Self) {
        let (mut own, mut others) = (
            std::mem::take(&mut self.0).into_iter().peekable(),
            other.iter().peekable(),
        );
        loop {
            let next = match (own.peek(), others.peek()) {
                (Some(mine), Some(theirs)) if mine.start <= theirs.start => own.next(),
                (_, Some(_)) => others.next(),
                (_, None) => own.next(),
            };
            match next {
                Some(range) => self.insert(range),
                None => return,
            }
        }
    }

    /// Whether all of a range is in it.
    pub fn covers(&self, range: &Range<u64>) -> bool {
        let at = self.0.partition_point(|own| own.end < range.end);
        self.0.get(at).is_some_and(|own| own.start <= range.start)
    }

    /// Takes all of another set away.
    pub fn subtract(&mut self, other: &Self) {
        let mut left = Self::default();
        let mut index = 0;
        for own in &self.0 {
            while index < other.0.len() && other.0[index].end <= own.start {
                index += 1;
            }
            let (mut from, mut at) = (own.start, index);
            while let Some(hole) = other.0.get(at).filter(|hole| hole.start < own.end) {
                left.insert(from..hole.start.max(from));
                from = from.max(hole.end);
                at += 1;
            }
            left.insert(from..own.end.max(from));
        }
        *self = left;
    }

    /// What is in both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        let (mut both, mut mine, mut theirs) = (Self::default(), 0, 0);
        while let (Some(own), Some(others)) = (self.0.get(mine), other.0.get(theirs)) {
            let (start, end) = (own.start.max(others.start), own.end.min(others.end));
            both.insert(start..end.max(start));
            match own.end < others.end {
                true => mine += 1,
                false => theirs += 1,
            }
        }
        both
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// How many bytes they are together.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an address is in one of them.
    pub fn contains(&self, address: u64) -> bool {
        let index = self.0.partition_point(|own| own.end <= address);
        self.0.get(index).is_some_and(|own| own.start <= address)
    }
}

impl FromIterator<Range<u64>> for Ranges {
    fn from_iter<T: IntoIterator<Item = Range<u64>>>(ranges: T) -> Self {
        let mut all = Self::default();
        ranges.into_iter().for_each(|range| all.insert(range));
        all
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pages(ranges: &Ranges) -> BTreeSet<u64> {
        let mut last = None;
        for range in ranges.iter() {
            assert!(
                range.start < range.end && last.is_none_or(|end| end < range.start),
                "{ranges:?}"
            );
            last = Some(range.end);
        }
        ranges.iter().flatten().collect()
    }

    fn any_ranges() -> impl Strategy<Value = Vec<Range<u64>>> {
        prop::collection::vec(
            (0u64..60, 0u64..9).prop_map(|(start, length)| start..start + length),
            0..20,
        )
    }

    #[test]
    fn a_range_is_covered_as_a_whole() {
        let ranges = Ranges::from_iter([2..4, 6..9]);
        for (range, is_in) in [
            (2..4, true),
            (3..4, true),
            (6..7, true),
            (3..7, false),
            (1..3, false),
            (4..5, false),
            (8..10, false),
            (10..11, false),
        ] {
            assert_eq!(ranges.covers(&range), is_in, "{range:?}");
        }
    }

    proptest! {
        #[test]
        fn they_are_sets(one in any_ranges(), other in any_ranges()) {
            let (ours, theirs): (Ranges, Ranges) = (one.iter().cloned().collect(), other.iter().cloned().collect());
            let (mine, others): (BTreeSet<u64>, BTreeSet<u64>) =
                (one.into_iter().flatten().collect(), other.into_iter().flatten().collect());
            prop_assert_eq!(&pages(&ours), &mine);
            prop_assert_eq!(ours.bytes(), mine.len() as u64);
            prop_assert_eq!(ours.is_empty(), mine.is_empty());
            let mut union = ours.clone();
            union.union(&theirs);
            prop_assert_eq!(pages(&union), mine.union(&others).copied().collect::<BTreeSet<_>>());
            let mut difference = ours.clone();
            difference.subtract(&theirs);
            prop_assert_eq!(pages(&difference), mine.difference(&others).copied().collect::<BTreeSet<_>>());
            prop_assert_eq!(
                pages(&ours.intersection(&theirs)),
                mine.intersection(&others).copied().collect::<BTreeSet<_>>()
            );
            for address in 0..70 {
                prop_assert_eq!(ours.contains(address), mine.contains(&address));
            }
        }
    }
}
