//! A memory region: what its keys allow and where its bytes are.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use verbatim_device::control::{Access, Backing, Segment};

use super::mapping::{MappedPart, Mappings};
use super::process::Owner;
use super::regions::Denied;
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
        let known = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        if !known.contains(access) {
            return Err(Refused::new(
                libc::EOPNOTSUPP,
                format!("access flags {:#x} are not known", access.bits()),
            ));
        }
        // `ibv_reg_mr(3)`: remote write and remote atomic need local write.
        let remote = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        if remote && !access.contains(Access::LOCAL_WRITE) {
            return Err(Refused::invalid(
                "remote write or atomic access without local write access",
            ));
        }
        if length == 0 || address.checked_add(length).is_none() || iova.checked_add(length).is_none() {
            return Err(Refused::invalid(format!(
                "{length} bytes at {address:#x} (iova {iova:#x}) are no range"
            )));
        }
        if wanted.segments.is_empty() || wanted.segments.len() > MAX_PIECES {
            let count = wanted.segments.len();
            return Err(Refused::invalid(format!(
                "{count} segments: a region has 1 to {MAX_PIECES}"
            )));
        }
        let pieces = wanted
            .segments
            .iter()
            .enumerate()
            .map(|(index, segment)| piece(wanted, index, segment, mappings, owner))
            .collect::<Result<Vec<_>, _>>()?;
        let covered = pieces.windows(2).all(|pair| pair[0].end == pair[1].start)
            && pieces[0].start == iova
            && pieces[pieces.len() - 1].end == iova + length;
        if !covered {
            return Err(Refused::invalid(
                "the segments are not contiguous or do not cover the region",
            ));
        }
        Ok(Self {
            context: wanted.context,
            pd: wanted.pd,
            access,
            start: iova,
            length,
            pieces,
            owner: Rc::clone(owner),
        })
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
                    "the RNIC cannot see the process whose memory this is: it runs in another PID namespace",
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
