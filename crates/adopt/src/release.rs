//! The way back: pages that no claim covers become private anonymous memory again.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use crate::adopter::{Released, Token};
use crate::error::AdoptError;
use crate::maps::{self, FileId};
use crate::pages::{overlap, page_bytes};
use crate::plan::is_off_limits;
use crate::state::{Keeper, State, chunks};
use crate::sys::swap::{self, Attributes};
use crate::sys::uffd;
use crate::threads;

/// Where a part of the file is mapped.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub addresses: Range<usize>,
    pub offset: u64,
}

impl Place {
    fn offsets(&self) -> Range<u64> {
        self.offset..self.offset + self.addresses.len() as u64
    }
}

impl State {
    pub fn release(&mut self, token: Token) -> Released {
        self.check_process();
        let mut released = Released::default();
        if token.generation != self.generation {
            return released;
        }
        let mut unclaimed = Vec::new();
        for piece in token.pieces {
            released.claimed_bytes += piece.end - piece.start;
            unclaimed.extend(self.spans.drop_claim(piece));
        }
        let unclaimed_bytes: u64 = unclaimed.iter().map(|range| range.end - range.start).sum();
        released.claimed_bytes -= unclaimed_bytes;
        if unclaimed_bytes > 0 && self.give_back(unclaimed, &mut released).is_none() {
            released.kept_bytes = unclaimed_bytes - released.returned_bytes - released.gone_bytes;
        }
        released
    }

    /// `None` if some of it must stay in the file. What is done is counted.
    fn give_back(&mut self, unclaimed: Vec<Range<u64>>, released: &mut Released) -> Option<()> {
        let file = self.file.as_ref()?;
        let opened = file.open().ok()?;
        let id = file.id(opened.as_fd()).ok()?;
        let keeper = self.keeper(uffd::Kind::Shared);
        let mut complete = Some(());
        for range in unclaimed {
            let mut kept = Vec::new();
            let places = places(id, &range)?;
            let ambiguous = places
                .windows(2)
                .any(|pair| overlap(&pair[0].offsets(), &pair[1].offsets()).is_some());
            for place in &places {
                let returned = match &keeper {
                    Some(keeper) if !ambiguous => return_place(place, opened.as_fd(), keeper),
                    _ => 0,
                };
                released.returned_bytes += returned;
                kept.push(place.offset + returned..place.offsets().end);
            }
            let kept_or_moved: u64 = places.iter().map(|place| place.addresses.len() as u64).sum();
            if !ambiguous {
                released.gone_bytes += (range.end - range.start) - kept_or_moved;
            }
            kept.retain(|kept| !kept.is_empty());
            let mut free_from = range.start;
            for kept in kept {
                complete = None;
                self.forget(opened.as_fd(), free_from..kept.start.max(free_from));
                free_from = free_from.max(kept.end);
            }
            self.forget(opened.as_fd(), free_from..range.end);
        }
        complete
    }

    fn forget(&mut self, opened: BorrowedFd<'_>, range: Range<u64>) {
        if !range.is_empty() {
            self.spans.remove(range.clone());
            self.vacate(opened, range);
        }
    }
}

/// Where the program has a range of the file mapped, in the order of the file. It may have moved or unmapped some of
/// it since the adoption; what is at the old addresses is then none of our business.
pub(crate) fn places(id: FileId, range: &Range<u64>) -> Option<Vec<Place>> {
    let mut places: Vec<Place> = maps::all()
        .ok()?
        .into_iter()
        .filter(|mapping| mapping.is_shared(id))
        .filter_map(|mapping| {
            let offsets = mapping.offset..mapping.offset + mapping.range.len() as u64;
            let shared = overlap(&offsets, range)?;
            let start = mapping.range.start + (shared.start - mapping.offset) as usize;
            let length = (shared.end - shared.start) as usize;
            Some(Place {
                addresses: start..start + length,
                offset: shared.start,
            })
        })
        .collect();
    places.sort_by_key(|place| place.offset);
    Some(places)
}

/// Moves a place out of the file, from its start as far as possible; how many bytes that is.
fn return_place(place: &Place, opened: BorrowedFd<'_>, keeper: &Keeper) -> u64 {
    let Ok(parts) = divide(place, opened) else {
        return 0;
    };
    let mut data = 0..0;
    let mut returned = 0;
    for Part {
        addresses,
        offset,
        attributes,
        off_limits,
    } in parts
    {
        let length = addresses.len() as u64;
        let keeper = keeper.as_ref();
        if off_limits || swap::move_out(addresses, opened, offset, keeper, &attributes, &mut data).is_err() {
            break;
        }
        returned += length;
    }
    returned
}

/// What moves out of the file in one step.
#[derive(Debug)]
pub(crate) struct Part {
    pub addresses: Range<usize>,
    pub offset: u64,
    pub attributes: Attributes,
    /// Whether the calling thread needs it itself.
    pub off_limits: bool,
}

/// Divides a place into chunks; a hole of the file is one chunk, however long (it is looked up again when it moves:
/// what is a hole now may have data then).
pub(crate) fn divide(place: &Place, opened: BorrowedFd<'_>) -> Result<Vec<Part>, AdoptError> {
    let mappings = maps::overlapping(&place.addresses)?;
    let off_limits = threads::off_limits(&mappings, &place.addresses);
    let mut parts = Vec::new();
    for mapping in mappings {
        let Some(mut left) = overlap(&mapping.range, &place.addresses) else {
            continue;
        };
        // Where the next data is, as far as it is known: to ask for each chunk would take quadratic time.
        let mut next_data = 0;
        while let Some(mut addresses) = chunks(left.clone()).next() {
            let offset = place.offset + (addresses.start - place.addresses.start) as u64;
            if next_data < offset + addresses.len() as u64 {
                next_data = swap::next_data(opened, offset)
                    .unwrap_or(Some(offset))
                    .unwrap_or(u64::MAX);
            }
            let hole_bytes = usize::try_from(next_data.saturating_sub(offset)).unwrap_or(usize::MAX);
            let hole_end = addresses
                .start
                .saturating_add(hole_bytes - hole_bytes % page_bytes())
                .min(left.end);
            addresses.end = addresses.end.max(hole_end);
            left.start = addresses.end;
            parts.push(Part {
                off_limits: is_off_limits(&addresses, &off_limits),
                attributes: mapping.attributes(),
                addresses,
                offset,
            });
        }
    }
    Ok(parts)
}
