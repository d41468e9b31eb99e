//! What is known of the process's mappings, so that smaps is not read for each region.
//!
//! Whether pages may move is told by `VmFlags`, which only smaps has, and to read smaps takes time for every mapping and
//! every page below. What one look at it found to be plain memory is therefore trusted for some more adoptions: as
//! many as make the look cheap for each of them, for a short while, until a region is released, and only as long as the
//! mapping has the bounds that it should have.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::error::AdoptError;
use crate::maps::{self, FileId, Mapping};
use crate::pages::overlap;

/// One adoption for each so many mappings that were looked at.
const MAPPINGS_PER_USE: usize = 4;

/// A program that tells memory something new (`MADV_WIPEONFORK`, a protection key) between two registrations in it is
/// not in such a hurry.
const TRUSTED_FOR: Duration = Duration::from_millis(100);

/// What a look at smaps has left.
#[derive(Debug)]
pub struct Look {
    /// Mappings of plain memory that have not moved since: start and end.
    plain: BTreeMap<usize, usize>,
    uses_left: usize,
    until: Instant,
}

impl Look {
    /// The mappings that overlap `range`; from `last`, if all of them are known or are of our file.
    pub fn at(
        last: &mut Option<Self>,
        range: &Range<usize>,
        ours: Option<FileId>,
    ) -> Result<Vec<Mapping>, AdoptError> {
        if let Some(known) = Self::known(last.as_ref(), range, ours) {
            if let Some(look) = last {
                look.uses_left = look.uses_left.saturating_sub(1);
            }
            return Ok(known);
        }
        let all = maps::as_far_as(range)?;
        let plain = all.iter().filter(|mapping| mapping.is_plain());
        *last = Some(Self {
            plain: plain
                .map(|mapping| (mapping.range.start, mapping.range.end))
                .collect(),
            uses_left: all.len() / MAPPINGS_PER_USE,
            until: Instant::now() + TRUSTED_FOR,
        });
        Ok(all
            .into_iter()
            .filter(|mapping| overlap(&mapping.range, range).is_some())
            .collect())
    }

    fn known(last: Option<&Self>, range: &Range<usize>, ours: Option<FileId>) -> Option<Vec<Mapping>> {
        let last = last.filter(|look| look.uses_left > 0 && Instant::now() < look.until);
        let mut found = maps::covering(range)?;
        for mapping in &mut found {
            if ours.is_some_and(|file| mapping.is_shared(file)) {
                continue;
            }
            mapping.assume_plain();
            if last?.plain.get(&mapping.range.start) != Some(&mapping.range.end) || !mapping.is_plain() {
                return None;
            }
        }
        Some(found)
    }

    /// The range has moved: what is left of its mapping lies on both sides.
    pub fn take(&mut self, range: &Range<usize>) {
        let Some((&start, &end)) = self.plain.range(..=range.start).next_back() else {
            return;
        };
        if end < range.end {
            return;
        }
        self.plain.remove(&start);
        for part in [start..range.start, range.end..end] {
            if !part.is_empty() {
                self.plain.insert(part.start, part.end);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_moved_is_taken_out() {
        let mut look = Look {
            plain: BTreeMap::from([(0, 100), (200, 300)]),
            uses_left: 1,
            until: Instant::now(),
        };
        look.take(&(0..10));
        look.take(&(50..60));
        look.take(&(290..300));
        look.take(&(150..160));
        assert_eq!(
            look.plain.into_iter().collect::<Vec<_>>(),
            [(10, 50), (60, 100), (200, 290)]
        );
    }
}
