//! Which segments make the log, and what is in them.

use std::collections::{BTreeMap, BTreeSet};

use crate::segment::{Before, Place, Segment};
use crate::{Damage, Replayed};

/// All segments by number; nothing for those whose header is bad.
pub type Segments = BTreeMap<u32, Option<Segment>>;

/// The log that some segments make.
#[derive(Debug)]
pub struct Chain {
    /// The last segment.
    pub head: Option<u32>,
    /// The first one. There is none if it is missing.
    pub base: Option<u32>,
    /// The bytes in all but the last one that belong to the log.
    pub bytes_before: u64,
    /// What is in it.
    pub replayed: Replayed,
    /// The segments where something is wrong.
    pub damaged: BTreeSet<u32>,
}

impl Chain {
    /// Follows the headers from the last segment back to the first one.
    pub fn new(segments: &Segments) -> Self {
        let head = good_below(segments, None);
        let mut damage = Vec::new();
        let mut parts = Vec::new();
        let mut base = None;
        // The segment to look at, and the place where it must be good to.
        let mut next = head.map(|segment| (segment, None));
        while let Some((segment, promised)) = next {
            let end = promised.map_or(u64::MAX, |place: Place| place.offset);
            let last = segment.place(end);
            if promised.is_some_and(|place| place != last) {
                damage.push((segment.number, last.offset));
            }
            damage.extend(segment.damages.iter().map(|offset| (segment.number, *offset)));
            parts.push((segment, end));
            next = match segment.before {
                Before::Nothing => {
                    base = Some(segment.number);
                    None
                }
                Before::Place(place) => match segments.get(&place.segment) {
                    Some(Some(before)) => Some((before, Some(place))),
                    _ => {
                        damage.push((place.segment, 0));
                        good_below(segments, Some(segment.number)).map(|segment| (segment, None))
                    }
                },
            };
        }
        let bad = segments.iter().filter(|(_, segment)| segment.is_none());
        let bad = bad.filter(|(number, _)| base.is_none_or(|base| **number > base));
        damage.extend(bad.map(|(number, _)| (*number, 0)));

        let lengths = parts
            .iter()
            .skip(1)
            .map(|(segment, end)| segment.place(*end).offset);
        let records = parts
            .iter()
            .rev()
            .flat_map(|(segment, end)| segment.records(0, *end));
        let starts = parts.iter().flat_map(|(segment, end)| {
            let frames = segment.frames(0, *end);
            frames.map(|frame| (segment.number, frame.start as u64))
        });
        // Behind a segment that nobody can read, the next one begins with copies of records from before it.
        let behind = |place: (u32, u64)| {
            let lost = segments.get(&place.0).is_none_or(Option::is_none);
            let mut later = parts.iter().map(|(segment, _)| *segment);
            let next = later.rfind(|segment| segment.number > place.0);
            match next.map(|next| (next, next.before)) {
                Some((next, Before::Place(before))) if lost && before.segment < place.0 => {
                    (next.number, next.whole)
                }
                _ => place,
            }
        };
        let mut gaps: Vec<usize> = damage
            .iter()
            .map(|place| behind(*place))
            .map(|place| starts.clone().filter(|start| *start < place).count())
            .collect();
        gaps.sort_unstable();
        gaps.dedup();
        Self {
            head: head.map(|segment| segment.number),
            base,
            bytes_before: lengths.sum(),
            replayed: Replayed {
                records: records.map(<[u8]>::to_vec).collect(),
                damage: damage
                    .iter()
                    .min()
                    .map(|&(segment, offset)| Damage { segment, offset }),
                gaps,
            },
            damaged: damage.iter().map(|(segment, _)| *segment).collect(),
        }
    }
}

/// The segment with the highest number below `limit` whose header is good.
fn good_below(segments: &Segments, limit: Option<u32>) -> Option<&Segment> {
    let mut below = segments
        .iter()
        .rev()
        .filter(|(number, _)| limit.is_none_or(|limit| **number < limit));
    below.find_map(|(_, segment)| segment.as_ref())
}
