//! State of each page: a bit for each copy, and one for zeros.

use serde::Serialize;

use crate::slots::{Copy, Extent};

/// Numbers of pages by the copies that have them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Pages of zeros, which no copy needs to have.
    pub zero: u64,
    /// Pages at both copies.
    pub both: u64,
    /// Pages at the first copy alone, the server's.
    pub first_only: u64,
    /// Pages at the second copy alone.
    pub second_only: u64,
    /// Pages with a write in flight, and lost pages.
    pub neither: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Pages {
    count: u64,
    zero: Vec<u64>,
    valid: [Vec<u64>; 2],
}

fn place(page: u64) -> (usize, u64) {
    ((page / 64) as usize, 1 << (page % 64))
}

impl Pages {
    /// All pages are zeros.
    pub fn new(count: u64) -> Self {
        let words = count.div_ceil(64) as usize;
        Self {
            count,
            zero: vec![u64::MAX; words],
            valid: [vec![0; words], vec![0; words]],
        }
    }

    pub fn count(&self) -> u64 {
        self.count
    }

    pub fn is_zero(&self, page: u64) -> bool {
        let (word, bit) = place(page);
        self.zero[word] & bit != 0
    }

    pub fn has(&self, copy: Copy, page: u64) -> bool {
        let (word, bit) = place(page);
        self.valid[copy.index()][word] & bit != 0
    }

    /// A copy has this page.
    pub fn set(&mut self, copy: Copy, page: u64) {
        let (word, bit) = place(page);
        self.valid[copy.index()][word] |= bit;
    }

    /// No copy counts for these pages any more; they become zeros or not.
    pub fn change(&mut self, extent: Extent, to_zero: bool) {
        for page in extent.pages() {
            let (word, bit) = place(page);
            self.valid[0][word] &= !bit;
            self.valid[1][word] &= !bit;
            match to_zero {
                true => self.zero[word] |= bit,
                false => self.zero[word] &= !bit,
            }
        }
    }

    /// No page is zeros, and no copy has any.
    pub fn lost(count: u64) -> Self {
        let words = count.div_ceil(64) as usize;
        Self {
            count,
            zero: vec![0; words],
            valid: [vec![0; words], vec![0; words]],
        }
    }

    /// Number of pages that none of these copies has, but another one has; without zeros.
    pub fn only_elsewhere(&self, copies: [bool; 2]) -> u64 {
        let words = self.zero.iter().enumerate();
        let counts = words.map(|(word, zero)| {
            let of = |here: bool| {
                let some = (0..2).filter(|copy| copies[*copy] == here);
                some.fold(0, |bits, copy| bits | self.valid[copy][word])
            };
            u64::from((of(false) & !of(true) & !zero).count_ones())
        });
        counts.sum()
    }

    /// The copies in exchanged order.
    pub fn exchanged(self) -> Self {
        let [first, second] = self.valid;
        Self {
            valid: [second, first],
            ..self
        }
    }

    /// The words of all three bitmaps, one after the other.
    pub fn words(&self) -> impl Iterator<Item = u64> + '_ {
        let all = [&self.zero, &self.valid[0], &self.valid[1]];
        all.into_iter().flatten().copied()
    }

    /// Parses the words of [`Self::words`].
    pub fn from_words(count: u64, words: &[u64]) -> Option<Self> {
        let each = count.div_ceil(64) as usize;
        if words.len() != 3 * each {
            return None;
        }
        let part = |at: usize| words[at * each..][..each].to_vec();
        Some(Self {
            count,
            zero: part(0),
            valid: [part(1), part(2)],
        })
    }

    /// A copy has no page any more.
    pub fn forget(&mut self, copy: Copy) {
        self.valid[copy.index()].fill(0);
    }

    /// The first page at `from` or behind it that `has` has and `lacks` lacks.
    pub fn behind(&self, has: Copy, lacks: Copy, from: u64) -> Option<u64> {
        let word_at =
            |word: usize| self.valid[has.index()][word] & !self.valid[lacks.index()][word] & !self.zero[word];
        let (first, _) = place(from);
        (first..self.zero.len())
            .find_map(|word| {
                let mut bits = word_at(word);
                if word == first {
                    bits &= u64::MAX << (from % 64);
                }
                (bits != 0).then(|| word as u64 * 64 + u64::from(bits.trailing_zeros()))
            })
            .filter(|page| *page < self.count)
    }

    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for (word, zero) in self.zero.iter().enumerate() {
            let here = match self.count - word as u64 * 64 {
                left @ 0..64 => (1 << left) - 1,
                _ => u64::MAX,
            };
            let [first, second] = [self.valid[0][word], self.valid[1][word]];
            let of = |bits: u64| u64::from((bits & here).count_ones());
            counts.zero += of(*zero);
            counts.both += of(!zero & first & second);
            counts.first_only += of(!zero & first & !second);
            counts.second_only += of(!zero & !first & second);
            counts.neither += of(!zero & !first & !second);
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_behind_is_found_from_any_page_on() {
        let mut pages = Pages::new(130);
        for page in [3, 64, 129] {
            pages.change(Extent { page, count: 1 }, false);
            pages.set(Copy::First, page);
        }
        let find = |from| pages.behind(Copy::First, Copy::Second, from);
        assert_eq!(
            [find(0), find(4), find(65), find(129)],
            [3, 64, 129, 129].map(Some)
        );
        assert_eq!(pages.behind(Copy::Second, Copy::First, 0), None);
        let counts = pages.counts();
        assert_eq!((counts.zero, counts.first_only, counts.both), (127, 3, 0));
        pages.forget(Copy::First);
        assert_eq!(pages.counts().neither, 3);
    }
}
