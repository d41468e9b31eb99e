//! What to do with each part of a region, decided before anything is changed.

use std::ops::Range;

use crate::error::AdoptError;
use crate::maps::{FileId, Mapping};
use crate::pages::{overlap, page_bytes};
use crate::sys::swap::Attributes;

/// A part of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Its addresses, page aligned.
    pub range: Range<usize>,
    /// What it is.
    pub kind: Kind,
}

/// What a part of a region is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Mapped from our file already, from this offset on.
    Ours(u64),
    /// Private anonymous memory that can be moved.
    Movable(Attributes),
    /// Anything else that can be read.
    Other,
}

/// Divides `range` by the mappings that it lies in.
pub fn divide(
    range: &Range<usize>,
    mappings: &[Mapping],
    ours: Option<FileId>,
    off_limits: &[Range<usize>],
) -> Result<Vec<Piece>, AdoptError> {
    let mut pieces = Vec::new();
    let mut reached = range.start;
    for mapping in mappings {
        // The list is read in several steps; mappings that merge in between may be listed twice in part.
        let Some(part) = overlap(&mapping.range, &(reached..range.end)) else {
            continue;
        };
        if part.start > reached || !mapping.readable() {
            return Err(AdoptError::Unmapped { address: reached });
        }
        reached = part.end;
        if ours.is_some_and(|file| mapping.is_shared(file)) {
            let offset = mapping.offset + (part.start - mapping.range.start) as u64;
            pieces.push(Piece {
                range: part,
                kind: Kind::Ours(offset),
            });
        } else if mapping.movable() {
            split(
                part,
                off_limits,
                &Kind::Movable(mapping.attributes()),
                &mut pieces,
            );
        } else {
            pieces.push(Piece {
                range: part,
                kind: Kind::Other,
            });
        }
    }
    match reached < range.end {
        true => Err(AdoptError::Unmapped { address: reached }),
        false => Ok(pieces),
    }
}

/// Whether any page of `range` is off limits.
pub fn is_off_limits(range: &Range<usize>, off_limits: &[Range<usize>]) -> bool {
    off_limits
        .iter()
        .any(|forbidden| overlap(forbidden, range).is_some())
}

fn split(range: Range<usize>, off_limits: &[Range<usize>], kind: &Kind, pieces: &mut Vec<Piece>) {
    let page = page_bytes();
    let forbidden = off_limits
        .iter()
        .map(|forbidden| {
            let end = forbidden.end.checked_next_multiple_of(page).unwrap_or(usize::MAX);
            forbidden.start - forbidden.start % page..end
        })
        .filter_map(|forbidden| overlap(&forbidden, &range))
        .min_by_key(|forbidden| forbidden.start);
    let Some(forbidden) = forbidden else {
        pieces.push(Piece {
            range,
            kind: kind.clone(),
        });
        return;
    };
    if range.start < forbidden.start {
        pieces.push(Piece {
            range: range.start..forbidden.start,
            kind: kind.clone(),
        });
    }
    if forbidden.end < range.end {
        pieces.push(Piece {
            range: forbidden.clone(),
            kind: Kind::Other,
        });
        split(forbidden.end..range.end, off_limits, kind, pieces);
    } else {
        pieces.push(Piece {
            range: forbidden,
            kind: Kind::Other,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn off_limits_pages_split_a_piece() {
        let page = page_bytes();
        let mut pieces = Vec::new();
        let off_limits = [5 * page + 1..5 * page + 2, 0..2 * page, 9 * page..20 * page];
        split(page..10 * page, &off_limits, &Kind::Ours(0), &mut pieces);
        let found: Vec<_> = pieces
            .iter()
            .map(|piece| {
                (
                    piece.range.start / page,
                    piece.range.end / page,
                    piece.kind != Kind::Other,
                )
            })
            .collect();
        assert_eq!(
            found,
            [
                (1, 2, false),
                (2, 5, true),
                (5, 6, false),
                (6, 9, true),
                (9, 10, false)
            ]
        );
    }
}
