//! A set of pages, a bit for each.

use std::ops::Range;

use verbatim_tracking::{PAGE, Ranges};

/// Bits of a word.
const WORD: u64 = u64::BITS as u64;

/// Pages of a RAM of a certain size, by their numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bits {
    words: Vec<u64>,
    pages: u64,
    /// Number of pages in the set.
    count: u64,
}

impl Bits {
    /// An empty set for this many pages.
    pub fn none(pages: u64) -> Self {
        Self {
            words: vec![0; pages.div_ceil(WORD) as usize],
            pages,
            count: 0,
        }
    }

    /// Parses the bytes of [`Bits::bytes`] for all pages; `None` if they are not for this many pages.
    pub fn from_bytes(pages: u64, bytes: &[u8]) -> Option<Self> {
        let mut bits = Self::none(pages);
        let (words, rest) = bytes.as_chunks();
        if words.len() != bits.words.len() || !rest.is_empty() {
            return None;
        }
        for (word, bytes) in bits.words.iter_mut().zip(words) {
            *word = u64::from_le_bytes(*bytes);
        }
        bits.count = bits.words.iter().map(|word| u64::from(word.count_ones())).sum();
        match bits.run(pages, u64::MAX, |index| bits.words[index]) {
            None => Some(bits),
            Some(_) => None,
        }
    }

    /// The number of pages in the set.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The number of pages that the set can have.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether a page is in the set.
    pub fn contains(&self, page: u64) -> bool {
        page < self.pages && self.words[(page / WORD) as usize] >> (page % WORD) & 1 == 1
    }

    /// Adds pages.
    pub fn insert(&mut self, pages: Range<u64>) {
        self.change(pages, |word, mask| word | mask);
    }

    /// Removes pages.
    pub fn remove(&mut self, pages: Range<u64>) {
        self.change(pages, |word, mask| word & !mask);
    }

    fn change(&mut self, pages: Range<u64>, change: fn(u64, u64) -> u64) {
        assert!(pages.end <= self.pages, "{pages:?} of {} pages", self.pages);
        let mut page = pages.start;
        while page < pages.end {
            let end = pages.end.min((page / WORD + 1) * WORD);
            let mask = u64::MAX >> (WORD - (end - page)) << (page % WORD);
            let word = &mut self.words[(page / WORD) as usize];
            let changed = change(*word, mask);
            self.count = self.count + u64::from(changed.count_ones()) - u64::from(word.count_ones());
            *word = changed;
            page = end;
        }
    }

    /// The words with these pages as bytes, and the position of the first one.
    pub fn bytes(&self, pages: Range<u64>) -> (u64, Vec<u8>) {
        let (first, end) = (pages.start / WORD, pages.end.div_ceil(WORD));
        let words = &self.words[first as usize..end as usize];
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        (first * size_of::<u64>() as u64, bytes)
    }

    /// The first pages from `from` on that are in the set and not in `other`: one run, of at most `most`
    /// pages.
    pub fn run_without(&self, other: &Self, from: u64, most: u64) -> Option<Range<u64>> {
        self.run(from, most, |index| self.words[index] & !other.words[index])
    }

    /// The runs of pages in the set, within a range.
    pub fn runs(&self, within: Range<u64>) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        let mut from = within.start;
        while let Some(run) = self.run(from, u64::MAX, |index| self.words[index]) {
            if run.start >= within.end {
                break;
            }
            runs.push(run.start..run.end.min(within.end));
            from = run.end;
        }
        runs
    }

    /// `word`: the word with this index, or its replacement.
    fn run(&self, from: u64, most: u64, word: impl Fn(usize) -> u64) -> Option<Range<u64>> {
        let mut start = None;
        let mut page = from;
        let last = self.words.len() as u64 * WORD;
        while page < last {
            let bits = word((page / WORD) as usize) >> (page % WORD);
            let left = WORD - page % WORD;
            match start {
                None if bits == 0 => page += left,
                None => {
                    page += u64::from(bits.trailing_zeros());
                    start = Some(page);
                }
                Some(begun) => {
                    let ones = u64::from(bits.trailing_ones()).min(left);
                    page += ones;
                    if ones < left || page - begun >= most {
                        return Some(begun..page.min(begun.saturating_add(most)));
                    }
                }
            }
        }
        start.map(|begun| begun..page.min(begun.saturating_add(most)))
    }
}

/// The pages of a range of bytes.
pub fn pages(range: &Range<u64>) -> Range<u64> {
    range.start / PAGE..range.end.div_ceil(PAGE)
}

/// The bytes of a range of pages.
pub fn bytes(pages: &Range<u64>) -> Range<u64> {
    pages.start * PAGE..pages.end * PAGE
}

impl From<&Bits> for Ranges {
    fn from(bits: &Bits) -> Self {
        bits.runs(0..bits.pages).iter().map(bytes).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 300;

    fn some() -> impl Strategy<Value = Vec<(bool, Range<u64>)>> {
        let range = (0..PAGES, 0..PAGES).prop_map(|(one, other)| one.min(other)..one.max(other));
        proptest::collection::vec((any::<bool>(), range), 0..20)
    }

    fn both(changes: &[(bool, Range<u64>)]) -> (Bits, BTreeSet<u64>) {
        let (mut bits, mut set) = (Bits::none(PAGES), BTreeSet::new());
        for (goes_in, range) in changes {
            match goes_in {
                true => {
                    bits.insert(range.clone());
                    set.extend(range.clone());
                }
                false => {
                    bits.remove(range.clone());
                    set.retain(|page| !range.contains(page));
                }
            }
        }
        (bits, set)
    }

    proptest! {
        #[test]
        fn it_is_a_set(one in some(), other in some(), from in 0..PAGES, most in 1..PAGES) {
            let ((bits, set), (others, other_set)) = (both(&one), both(&other));
            prop_assert_eq!(bits.count(), set.len() as u64);
            for page in 0..PAGES + 100 {
                prop_assert_eq!(bits.contains(page), set.contains(&page));
            }
            let found: BTreeSet<u64> = bits.runs(from..PAGES).into_iter().flatten().collect();
            prop_assert_eq!(found, set.range(from..).copied().collect::<BTreeSet<_>>());
            let left: BTreeSet<u64> = set.difference(&other_set).copied().collect();
            let run = left.range(from..).next().map(|first| {
                let end = (*first..).take(most as usize).take_while(|page| left.contains(page)).last();
                *first..end.unwrap() + 1
            });
            prop_assert_eq!(bits.run_without(&others, from, most), run);
            let (_, bytes) = bits.bytes(0..PAGES);
            prop_assert_eq!(Bits::from_bytes(PAGES, &bytes), Some(bits.clone()));
            prop_assert!(Bits::from_bytes(PAGES, &bytes[1..]).is_none());
            let ranges = Ranges::from(&bits);
            prop_assert_eq!(ranges.bytes(), bits.count() * PAGE);
        }
    }

    #[test]
    fn pages_that_there_are_not_are_refused() {
        let (_, mut bytes) = Bits::none(PAGES).bytes(0..PAGES);
        *bytes.last_mut().unwrap() = 0x80;
        assert_eq!(Bits::from_bytes(PAGES, &bytes), None);
    }
}
