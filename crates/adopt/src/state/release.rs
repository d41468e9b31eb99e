//! The way back: pages that no claim covers become private anonymous memory again.
//!
//! Where the pages are mapped is asked for where they were adopted, and all mappings are read only if they are not there.
//! That the program has not mapped them elsewhere *as well* (`mremap` can do that to shared memory) must be known before
//! their space in the file is used again, but not at once: what was returned is left in the file until enough has come
//! together for one sweep over the mappings of the file.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use crate::maps::{self, FileId, Mapping};
use crate::pages::{CHUNK_BYTES, chunks, overlap, page_bytes};
use crate::plan::is_off_limits;
use crate::region::{Released, Token};
use crate::spans::Piece;
use crate::sys::swap::{self, Attributes};
use crate::sys::uffd;
use crate::threads;

use super::{Keeper, State};

/// How often something smaller than [`CHUNK_BYTES`] may be returned out of the middle of a mapping. The kernel does not
/// join such pages with their neighbours again, and a process has a limit of mappings (`vm.max_map_count`), so further ones
/// wait until their neighbours go too.
const SPLITS_MAX: usize = 64;

/// One sweep for each so many mappings that it looks at.
const MAPPINGS_PER_RELEASE: usize = 32;

/// How much may be left in the file until the next sweep, in bytes.
const LEFT_BYTES_MAX: u64 = 64 << 20;

/// What was returned, and is in the file until the next sweep.
#[derive(Debug, Default)]
pub struct Leftovers {
    ranges: Vec<Range<u64>>,
    bytes: u64,
    /// How many mappings and spans the last sweep looked at.
    last_sweep: usize,
    /// How often a mapping was split, since the file was empty.
    splits: usize,
}

impl Leftovers {
    fn due(&self) -> bool {
        !self.ranges.is_empty()
            && (self.ranges.len() > self.last_sweep / MAPPINGS_PER_RELEASE || self.bytes > LEFT_BYTES_MAX)
    }
}

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
        self.look = None;
        let mut released = Released::default();
        if token.generation != self.generation {
            return released;
        }
        let mut unclaimed = Vec::new();
        for piece in token.pieces {
            released.claimed_bytes += piece.end - piece.start;
            unclaimed.extend(self.spans.drop_claim(piece));
        }
        released.claimed_bytes -= unclaimed.iter().map(|range| range.end - range.start).sum::<u64>();
        if !unclaimed.is_empty() {
            self.give_back(&unclaimed, &mut released);
        }
        released.kept_bytes = unclaimed.iter().map(|range| self.spans.used_bytes(range)).sum();
        released
    }

    /// Returns what can be returned; `None` if the file cannot be opened.
    fn give_back(&mut self, unclaimed: &[Range<u64>], released: &mut Released) -> Option<()> {
        let file = self.file.as_ref()?;
        let opened = file.open().ok()?;
        let id = file.id(opened.as_fd()).ok()?;
        let mut keeper = None;
        for range in unclaimed {
            let mut at = range.start;
            while at < range.end {
                // Returned already with what is before it, if it is not there any more.
                let Some((run, beside_claimed)) = self.spans.unclaimed_around(at) else {
                    break;
                };
                at = run.end;
                if self.waits(&run, beside_claimed) {
                    continue;
                }
                let keeper = keeper.get_or_insert_with(|| self.keeper(uffd::Kind::Shared));
                let Some(keeper) = keeper else { continue };
                let returned = self.return_from_where_it_was(&run, id, opened.as_fd(), keeper);
                released.returned_bytes += returned;
                let rest = run.start + returned..run.end;
                self.leave(run.start..rest.start);
                if !rest.is_empty() {
                    self.return_from_anywhere(rest, id, opened.as_fd(), keeper, released);
                }
            }
        }
        let nothing_is_adopted = self.spans.count() == 0;
        if nothing_is_adopted {
            self.leftovers.splits = 0;
        }
        if nothing_is_adopted || self.leftovers.due() {
            self.sweep();
        }
        Some(())
    }

    /// Whether a run stays in the file until its neighbours go too.
    fn waits(&mut self, run: &Range<u64>, beside_claimed: bool) -> bool {
        let splits = beside_claimed && run.end - run.start < CHUNK_BYTES as u64;
        if splits && self.leftovers.splits >= SPLITS_MAX {
            return true;
        }
        self.leftovers.splits += usize::from(splits);
        false
    }

    /// Returns a run as far as it is mapped where it was adopted, and was plain memory then; how many bytes that is, from its start.
    fn return_from_where_it_was(
        &mut self,
        run: &Range<u64>,
        id: FileId,
        opened: BorrowedFd<'_>,
        keeper: &Keeper,
    ) -> u64 {
        let pieces: Vec<Piece> = self.spans.pieces(run).collect();
        let mut returned = 0;
        for piece in pieces {
            let Some(mut mappings) = where_it_was(&piece, id) else {
                break;
            };
            let place = Place {
                addresses: piece.addresses(),
                offset: piece.offsets.start,
            };
            mappings.iter_mut().for_each(Mapping::assume_plain);
            let done = return_place(&place, &mappings, opened, keeper, false);
            returned += done;
            if done < piece.offsets.end - piece.offsets.start {
                break;
            }
        }
        returned
    }

    /// Returns a range from wherever it is mapped, as far as possible; the rest stays in use.
    fn return_from_anywhere(
        &mut self,
        range: Range<u64>,
        id: FileId,
        opened: BorrowedFd<'_>,
        keeper: &Keeper,
        released: &mut Released,
    ) {
        let Some(places) = places(id, &range) else { return };
        // One span, by which alone it is known what the program wants.
        let dont_fork = self.spans.dont_fork(range.clone()).next().is_some();
        let mut kept = Vec::new();
        let ambiguous = places
            .windows(2)
            .any(|pair| overlap(&pair[0].offsets(), &pair[1].offsets()).is_some());
        for place in &places {
            let returned = match maps::overlapping(&place.addresses) {
                Ok(mappings) if !ambiguous => return_place(place, &mappings, opened, keeper, dont_fork),
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
            self.leave(free_from..kept.start.max(free_from));
            free_from = free_from.max(kept.end);
        }
        self.leave(free_from..range.end);
    }

    /// Its pages are no longer mapped where they were known to be. The next sweep frees its space.
    fn leave(&mut self, range: Range<u64>) {
        if !range.is_empty() {
            self.spans.remove(range.clone());
            self.leftovers.bytes += range.end - range.start;
            self.leftovers.ranges.push(range);
        }
    }

    /// Frees the space of what was left and of what is in use without a claim, unless the program has it mapped. False if
    /// nothing could be done.
    pub fn sweep(&mut self) -> bool {
        let opened = self.file.as_ref().and_then(|file| {
            let opened = file.open_for_a_look().ok()?;
            Some((file.id(opened.as_fd()).ok()?, opened))
        });
        let Some((id, opened)) = opened else { return false };
        let Some(mapped) = places(id, &(0..u64::MAX)) else {
            return false;
        };
        let mapped = disjoint(mapped);
        self.leftovers.last_sweep = mapped.len() + self.spans.count();
        let left = std::mem::take(&mut self.leftovers.ranges);
        self.leftovers.bytes = 0;
        for range in left {
            for (part, address) in divide_by_mapped(&range, &mapped) {
                match address {
                    // Whatever it is for, the same pages may be adopted there again.
                    Some(address) => self.spans.insert_unclaimed(part, address),
                    None => self.vacate(opened.as_fd(), part),
                }
            }
        }
        let unclaimed: Vec<Range<u64>> = self.spans.unclaimed().collect();
        for range in unclaimed {
            for (part, address) in divide_by_mapped(&range, &mapped) {
                if address.is_none() {
                    self.spans.remove(part.clone());
                    self.vacate(opened.as_fd(), part);
                }
            }
        }
        true
    }
}

/// The mappings of a piece at the addresses where it was adopted; `None` if they are others, or if it was not plain memory.
fn where_it_was(piece: &Piece, id: FileId) -> Option<Vec<Mapping>> {
    if piece.attributes != Attributes::PLAIN {
        return None;
    }
    let addresses = piece.addresses();
    let mappings = maps::covering(&addresses)?;
    let as_adopted = |mapping: &Mapping| {
        let first = mapping.range.start.max(addresses.start);
        mapping.is_shared(id)
            && mapping.offset + (first - mapping.range.start) as u64
                == piece.offsets.start + (first - addresses.start) as u64
    };
    mappings.iter().all(as_adopted).then_some(mappings)
}

/// Divides a range of the file at the bounds of its mappings, which are disjoint and in the order of the file; each part with
/// the address that it is mapped at, if it is.
fn divide_by_mapped(range: &Range<u64>, mapped: &[Place]) -> Vec<(Range<u64>, Option<u64>)> {
    let mut parts = Vec::new();
    let mut at = range.start;
    let first = mapped.partition_point(|place| place.offsets().end <= range.start);
    for place in &mapped[first..] {
        let Some(shared) = overlap(&place.offsets(), &(at..range.end)) else {
            break;
        };
        if at < shared.start {
            parts.push((at..shared.start, None));
        }
        let address = place.addresses.start as u64 + (shared.start - place.offset);
        at = shared.end;
        parts.push((shared, Some(address)));
    }
    if at < range.end {
        parts.push((at..range.end, None));
    }
    parts
}

/// Where the program has a range of the file mapped, in the order of the file. It may have moved or unmapped some of
/// it since the adoption; what is at the old addresses is then none of our business.
pub(crate) fn places(id: FileId, range: &Range<u64>) -> Option<Vec<Place>> {
    let mut places: Vec<Place> = maps::shared_of(id)
        .ok()?
        .into_iter()
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

/// Without what is mapped twice: the first mapping of it is left.
fn disjoint(places: Vec<Place>) -> Vec<Place> {
    let mut reached = 0;
    let clipped = places.into_iter().filter_map(|place| {
        let skip = reached.max(place.offset) - place.offset;
        reached = reached.max(place.offsets().end);
        let start = place.addresses.start + skip as usize;
        (start < place.addresses.end).then_some(Place {
            addresses: start..place.addresses.end,
            offset: place.offset + skip,
        })
    });
    clipped.collect()
}

/// Moves a place, which lies in `mappings`, out of the file, from its start as far as possible; how many bytes that is. Whether children
/// have what takes its place the mappings do not tell.
fn return_place(
    place: &Place,
    mappings: &[Mapping],
    opened: BorrowedFd<'_>,
    keeper: &Keeper,
    dont_fork: bool,
) -> u64 {
    let off_limits = threads::off_limits(mappings, &place.addresses);
    let mut data = 0..0;
    let mut returned = 0;
    for Part {
        addresses,
        offset,
        attributes,
        off_limits,
    } in divide(place, mappings, &off_limits, opened)
    {
        let length = addresses.len() as u64;
        let keeper = keeper.as_ref();
        let attributes = Attributes {
            dont_fork,
            ..attributes
        };
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

/// Divides a place into chunks by the mappings, in the order of addresses, that it lies in; a hole of the file is one chunk,
/// however long (it is looked up again when it moves: what is a hole now may have data then).
pub(crate) fn divide(
    place: &Place,
    mappings: &[Mapping],
    off_limits: &[Range<usize>],
    opened: BorrowedFd<'_>,
) -> Vec<Part> {
    let mut parts = Vec::new();
    let first = mappings.partition_point(|mapping| mapping.range.end <= place.addresses.start);
    for mapping in &mappings[first..] {
        let Some(mut left) = overlap(&mapping.range, &place.addresses) else {
            break;
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
                off_limits: is_off_limits(&addresses, off_limits),
                attributes: mapping.attributes(),
                addresses,
                offset,
            });
        }
    }
    parts
}

#[cfg(test)]
#[allow(unsafe_code, reason = "mappings to play with")]
mod tests;
