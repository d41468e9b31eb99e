//! Which pages of a task are still to be filled.

use std::collections::BTreeMap;
use std::ops::Range;

/// Pages that are not filled yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First address, as the task has it now.
    pub start: u64,
    /// Behind the last.
    pub end: u64,
    /// Where `start` lay when the task was dumped: the offset in the cache.
    pub origin: u64,
    /// A forked child has it, too.
    pub inherited: bool,
}

impl Segment {
    /// The part of it within `range`, if there is one.
    fn within(&self, range: &Range<u64>) -> Option<Self> {
        let (start, end) = (self.start.max(range.start), self.end.min(range.end));
        (start < end).then_some(Self {
            start,
            end,
            origin: self.origin + (start - self.start),
            inherited: self.inherited,
        })
    }

    /// Where its content lies in the cache.
    pub fn origins(&self) -> Range<u64> {
        self.origin..self.origin + (self.end - self.start)
    }
}

/// All that is left of one task. Segments do not overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Segments {
    by_start: BTreeMap<u64, Segment>,
    bytes: u64,
}

impl Segments {
    /// How much is left, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Of how many segments it consists.
    pub fn len(&self) -> usize {
        self.by_start.len()
    }

    /// Nothing is left.
    pub fn is_empty(&self) -> bool {
        self.by_start.is_empty()
    }

    /// In ascending order.
    pub fn iter(&self) -> impl Iterator<Item = &Segment> {
        self.by_start.values()
    }

    /// The one with the lowest address.
    pub fn first(&self) -> Option<Segment> {
        self.by_start.values().next().copied()
    }

    /// The part of a segment from `address` on.
    pub fn at(&self, address: u64) -> Option<Segment> {
        let (_, segment) = self.by_start.range(..=address).next_back()?;
        segment.within(&(address..u64::MAX))
    }

    /// Adds one, in the place of whatever was there.
    pub fn insert(&mut self, segment: Segment) {
        if segment.start < segment.end {
            self.take(segment.start..segment.end);
            self.put(segment);
        }
    }

    fn put(&mut self, segment: Segment) {
        self.bytes += segment.end - segment.start;
        self.by_start.insert(segment.start, segment);
    }

    /// Takes out what lies in `range`.
    pub fn take(&mut self, range: Range<u64>) -> Vec<Segment> {
        if range.start >= range.end {
            return Vec::new();
        }
        let before = self.by_start.range(..range.start).next_back();
        let first = before.filter(|(_, segment)| segment.end > range.start);
        let from = first.map_or(range.start, |(start, _)| *start);
        let touched: Vec<u64> = self
            .by_start
            .range(from..range.end)
            .map(|(start, _)| *start)
            .collect();
        let mut taken = Vec::with_capacity(touched.len());
        for start in touched {
            let segment = self.by_start.remove(&start).expect("it was found just now");
            self.bytes -= segment.end - segment.start;
            for rest in [0..range.start, range.end..u64::MAX] {
                if let Some(rest) = segment.within(&rest) {
                    self.put(rest);
                }
            }
            taken.extend(segment.within(&range));
        }
        taken
    }

    /// The task moved `bytes` from address `from` to address `to`.
    pub fn moved(&mut self, from: u64, to: u64, bytes: u64) {
        let taken = self.take(from..from.saturating_add(bytes));
        self.take(to..to.saturating_add(bytes));
        for segment in taken {
            let start = to + (segment.start - from);
            self.put(Segment {
                start,
                end: start + (segment.end - segment.start),
                ..segment
            });
        }
    }

    /// What a child has that is forked now.
    pub fn forked(&self) -> Self {
        let mut child = Self::default();
        self.iter()
            .filter(|segment| segment.inherited)
            .for_each(|segment| child.put(*segment));
        child
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    const PAGES: u64 = 64;

    /// The same, page by page.
    fn pages(segments: &Segments) -> Vec<Option<(u64, bool)>> {
        let mut pages = vec![None; PAGES as usize];
        for segment in segments.iter() {
            for page in segment.start..segment.end {
                let slot = &mut pages[page as usize];
                assert_eq!(*slot, None, "segments overlap at {page}");
                *slot = Some((segment.origin + (page - segment.start), segment.inherited));
            }
        }
        pages
    }

    #[test]
    fn segments_are_what_a_table_of_pages_says() {
        for seed in 0..300 {
            let mut random = StdRng::seed_from_u64(seed);
            let mut segments = Segments::default();
            let mut table = vec![None; PAGES as usize];
            for _ in 0..60 {
                let start = random.random_range(0..PAGES);
                let length = random.random_range(1..=PAGES - start);
                match random.random_range(0..4) {
                    0 => {
                        let length = length.min(8);
                        let (origin, inherited) = (random.random_range(0..1000), random.random());
                        let end = start + length;
                        segments.insert(Segment {
                            start,
                            end,
                            origin,
                            inherited,
                        });
                        (start..end).for_each(|page| {
                            table[page as usize] = Some((origin + (page - start), inherited));
                        });
                    }
                    1 => {
                        segments.take(start..start + length);
                        table[start as usize..(start + length) as usize].fill(None);
                    }
                    2 => {
                        let to = random.random_range(0..=PAGES - length);
                        if to + length > start && start + length > to {
                            continue;
                        }
                        segments.moved(start, to, length);
                        for page in 0..length {
                            table[(to + page) as usize] = table[(start + page) as usize].take();
                        }
                    }
                    _ => {
                        segments = segments.forked();
                        for page in &mut table {
                            page.take_if(|(_, inherited)| !*inherited);
                        }
                    }
                }
                assert_eq!(pages(&segments), table, "seed {seed}");
                let left = table.iter().flatten().count() as u64;
                assert_eq!((segments.bytes(), segments.is_empty()), (left, left == 0));
                for (page, entry) in table.iter().enumerate() {
                    let origin = segments
                        .at(page as u64)
                        .map(|found| (found.origin, found.inherited));
                    assert_eq!(origin, *entry, "seed {seed}, page {page}");
                }
            }
        }
    }
}
