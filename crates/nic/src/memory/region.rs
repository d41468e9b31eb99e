//! A memory region: what its keys allow and where its bytes are.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use verbatim_device::control::{Access, Backing, Segment};
use verbatim_roce::AtomicOp;

use super::mapping::{MappedPart, Mappings};
use super::process::Owner;
use super::regions::{Denied, Domain};
use crate::error::Refused;

/// The most pieces of a region.
const MAX_PIECES: usize = 8192;

#[derive(Debug)]
enum Place {
    Mapped(MappedPart),
    Process { address: u64 },
}

/// A stretch of a region's addresses with one way to its bytes.
#[derive(Debug)]
struct Piece {
    start: u64,
    /// Not included.
    end: u64,
    place: Place,
}

#[derive(Debug)]
pub struct Region {
    pub context: u32,
    pub pd: u32,
    pub access: Access,
    /// Windows that are bound to it; it stays as it is until there are none.
    pub windows: u32,
    start: u64,
    length: u64,
    pieces: Vec<Piece>,
    owner: Rc<Owner>,
}

/// What a program asks for (`Request::RegMr`).
#[derive(Debug)]
pub struct Registration<'a> {
    pub context: u32,
    pub pd: u32,
    pub address: u64,
    pub length: u64,
    pub iova: u64,
    pub access: Access,
    pub segments: &'a [Segment],
    pub fds: &'a [OwnedFd],
}

impl Region {
    pub fn new(
        wanted: &Registration<'_>,
        mappings: &mut Mappings,
        owner: &Rc<Owner>,
    ) -> Result<Self, Refused> {
        let Registration {
            address,
            length,
            iova,
            access,
            ..
        } = *wanted;
        check_access(access, iova)?;
        if address.checked_add(length).is_none() || iova.checked_add(length).is_none() {
            return Err(Refused::invalid(format!(
                "{length} bytes at {address:#x} (iova {iova:#x}) are no range"
            )));
        }
        if wanted.segments.len() > MAX_PIECES {
            let count = wanted.segments.len();
            return Err(Refused::invalid(format!(
                "{count} segments: a region has at most {MAX_PIECES}"
            )));
        }
        // A region without bytes (of on-chip memory, say) needs no place for them.
        let segments = if length == 0 { &[] } else { wanted.segments };
        let pieces = segments
            .iter()
            .enumerate()
            .map(|(index, segment)| piece(wanted, index, segment, mappings, owner))
            .collect::<Result<Vec<_>, _>>()?;
        let ends = pieces.first().zip(pieces.last());
        let covered = pieces.windows(2).all(|pair| pair[0].end == pair[1].start)
            && ends.map_or((iova, iova), |(first, last)| (first.start, last.end)) == (iova, iova + length);
        if !covered {
            return Err(Refused::invalid(
                "the segments are not contiguous or do not cover the region",
            ));
        }
        Ok(Self {
            context: wanted.context,
            pd: wanted.pd,
            access,
            windows: 0,
            start: iova,
            length,
            pieces,
            owner: Rc::clone(owner),
        })
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Gives the region other rights, which its memory must allow.
    pub fn set_access(&mut self, access: Access) -> Result<(), Refused> {
        check_access(access, self.start)?;
        let writable = |piece: &Piece| match &piece.place {
            Place::Mapped(part) => part.mapping.is_writable(),
            Place::Process { .. } => true,
        };
        if access.contains(Access::LOCAL_WRITE) && !self.pieces.iter().all(writable) {
            return Err(Refused::new(
                libc::EACCES,
                "the region's file was opened for reading only: give its memory anew with the right to write",
            ));
        }
        self.access = access;
        Ok(())
    }

    /// Whether `rights` on the range are given to `domain`.
    #[inline]
    pub fn check(&self, domain: Domain, address: u64, length: u64, rights: Access) -> Result<(), Denied> {
        if self.pd != domain.pd {
            return Err(Denied::WrongDomain);
        }
        if !self.contains(address, length) {
            return Err(Denied::OutOfRange);
        }
        if !self.access.contains(rights) {
            return Err(Denied::MissingRight);
        }
        Ok(())
    }

    /// Whether the range is inside the region.
    #[inline]
    pub fn contains(&self, address: u64, length: u64) -> bool {
        address
            .checked_sub(self.start)
            .is_some_and(|at| at <= self.length && length <= self.length - at)
    }

    /// Copies out of the region; the range was checked.
    #[inline]
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<(), Denied> {
        self.for_pieces(address, out.len(), |place, at, range| {
            let out = &mut out[range];
            match place {
                Place::Mapped(part) => part
                    .mapping
                    .read(part.at + at, out)
                    .map_err(|_| Denied::Truncated),
                Place::Process { address } => self
                    .owner
                    .read(address + at, out)
                    .map_err(|_| Denied::Unreachable),
            }
        })
    }

    /// Copies into the region; the range was checked.
    #[inline]
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), Denied> {
        self.for_pieces(address, data.len(), |place, at, range| {
            let data = &data[range];
            match place {
                Place::Mapped(part) => part
                    .mapping
                    .write(part.at + at, data)
                    .map_err(|_| Denied::Truncated),
                Place::Process { address } => self
                    .owner
                    .write(address + at, data)
                    .map_err(|_| Denied::Unreachable),
            }
        })
    }

    /// Executes an atomic operation on the eight bytes at `address` and gives what was there; the range was checked. In
    /// adopted memory it is atomic towards the program's own instructions too, elsewhere towards other requests.
    pub fn atomic(&self, address: u64, op: AtomicOp) -> Result<u64, Denied> {
        let in_place = self.word(address, |word| match op {
            AtomicOp::FetchAdd { add } => word.fetch_add(add, SeqCst),
            AtomicOp::CompareSwap { compare, swap } => word
                .compare_exchange(compare, swap, SeqCst, SeqCst)
                .unwrap_or_else(|seen| seen),
        });
        if let Some(done) = in_place {
            return done;
        }
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        let old = u64::from_ne_bytes(bytes);
        self.write(address, &op.apply(old).to_ne_bytes())?;
        Ok(old)
    }

    /// Stores eight bytes in one piece, where the memory allows it; the range was checked.
    pub fn store(&self, address: u64, data: [u8; 8]) -> Result<(), Denied> {
        let in_place = self.word(address, |word| {
            word.store(u64::from_ne_bytes(data), SeqCst);
            0
        });
        match in_place {
            Some(done) => done.map(|_| ()),
            None => self.write(address, &data),
        }
    }

    /// Runs `each` on eight bytes of adopted memory; `None` if they are not one word of it.
    fn word(&self, address: u64, each: impl FnOnce(&AtomicU64) -> u64) -> Option<Result<u64, Denied>> {
        let first = self.pieces.partition_point(|piece| piece.end <= address);
        let piece = self.pieces.get(first).filter(|piece| piece.end - address >= 8)?;
        let Place::Mapped(part) = &piece.place else {
            return None;
        };
        let done = part.mapping.atomic(part.at + (address - piece.start), each)?;
        Some(done.map_err(|_| Denied::Truncated))
    }

    #[inline]
    fn for_pieces(
        &self,
        address: u64,
        length: usize,
        mut each: impl FnMut(&Place, u64, std::ops::Range<usize>) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
        let first = match self.pieces.len() {
            1 => 0,
            _ => self.pieces.partition_point(|piece| piece.end <= address),
        };
        let end = address + length as u64;
        for piece in &self.pieces[first..] {
            let from = piece.start.max(address);
            let to = piece.end.min(end);
            if from >= to {
                break;
            }
            let range = (from - address) as usize..(to - address) as usize;
            each(&piece.place, from - piece.start, range)?;
        }
        Ok(())
    }
}

fn check_access(access: Access, iova: u64) -> Result<(), Refused> {
    let unknown = access.difference(Access::all());
    if !unknown.is_empty() {
        return Err(Refused::new(
            libc::EOPNOTSUPP,
            format!("access flags {:#x} are not known", unknown.bits()),
        ));
    }
    // ibv_reg_mr(3): remote write and remote atomic need local write.
    let remote = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if remote && !access.contains(Access::LOCAL_WRITE) {
        return Err(Refused::invalid(
            "remote write or atomic access without local write access",
        ));
    }
    if access.contains(Access::ZERO_BASED) && iova != 0 {
        return Err(Refused::invalid(format!(
            "a zero-based region starts at 0, not at {iova:#x}"
        )));
    }
    Ok(())
}

/// One piece of the region, cut to the region's range, in terms of the iova.
fn piece(
    wanted: &Registration<'_>,
    index: usize,
    segment: &Segment,
    mappings: &mut Mappings,
    owner: &Owner,
) -> Result<Piece, Refused> {
    let region_end = wanted.address + wanted.length;
    let segment_end = segment.address.checked_add(segment.length);
    let segment_end = segment_end.filter(|end| *end > segment.address).ok_or_else(|| {
        Refused::invalid(format!(
            "segment {index}: {} bytes at {:#x} are no range",
            segment.length, segment.address
        ))
    })?;
    let start = segment.address.max(wanted.address);
    let end = segment_end.min(region_end);
    if start >= end {
        return Err(Refused::invalid(format!(
            "segment {index} lies outside the region"
        )));
    }
    let skipped = start - segment.address;
    let place = match segment.backing {
        Backing::File { fd_index, offset } => {
            let file = wanted.fds.get(fd_index as usize).ok_or_else(|| {
                let sent = wanted.fds.len();
                Refused::new(
                    libc::EBADF,
                    format!("segment {index} names descriptor {fd_index} of {sent}"),
                )
            })?;
            let write = wanted.access.contains(Access::LOCAL_WRITE);
            let mut part = mappings.map(file.as_fd(), offset, segment.length, write)?;
            part.at += skipped;
            Place::Mapped(part)
        }
        Backing::Process => {
            if !owner.is_visible() {
                return Err(Refused::new(
                    libc::EOPNOTSUPP,
                    "the RNIC cannot reach the memory of this process: it runs in another PID namespace, or may not be looked into",
                ));
            }
            if mappings.is_locked() {
                return Err(Refused::new(
                    libc::EOPNOTSUPP,
                    "the RNIC is locked into memory, and memory that is in no file may be swapped out",
                ));
            }
            Place::Process { address: start }
        }
    };
    let rebased = |address: u64| wanted.iova + (address - wanted.address);
    Ok(Piece {
        start: rebased(start),
        end: rebased(end),
        place,
    })
}
