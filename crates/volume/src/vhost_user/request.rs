//! Requests of a guest. Any content of the queue gets an answer, and nothing outside of the guest's memory or
//! its disk is touched.

use verbatim_mirror::Extent;
use virtio_bindings::bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};
use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, GuestAddress};

use super::config::{MAX_QUEUE_SIZE, SECTOR};
use super::memory::{Memory, gather};
use crate::room::MAX_REQUEST;

/// Bytes of a request's head: type, 4 reserved bytes, first sector.
const HEAD: usize = 16;

/// Bytes of a range of DISCARD and WRITE_ZEROES: first sector, sectors, flags.
const RUN: usize = 16;

/// Bytes of an answer to GET_ID.
pub const ID: usize = 20;

/// The most segments of a request: a chain has no more descriptors than the queue (§2.7.5.3.1).
const MAX_SEGMENTS: usize = MAX_QUEUE_SIZE as usize;

/// The flag of WRITE_ZEROES that allows to give space back.
const UNMAP: u32 = 1;

/// A part of a guest's memory, from a descriptor of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The address of the first byte.
    pub address: GuestAddress,
    /// The number of bytes, perhaps none.
    pub length: u32,
}

/// The operation of a request, within the bounds of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Read this extent.
    Read(Extent),
    /// Write the request's data to this extent.
    Write(Extent),
    /// Write zeros.
    Zero {
        /// The extent.
        extent: Extent,
        /// Space may be given back.
        may_free: bool,
    },
    /// Make answered writes durable.
    Flush,
    /// Return the disk's name.
    Id,
    /// Do nothing: the request is empty.
    Nothing,
    /// Refuse an impossible request, with this status.
    Refused(u8),
}

/// One request.
#[derive(Debug)]
pub struct Request {
    /// The number of the chain in the guest's queue.
    pub head: u16,
    /// The operation.
    pub asked: Asked,
    /// The part that the guest has written: the head, and data.
    readable: Vec<Segment>,
    /// The part for data to the guest.
    pub writable: Vec<Segment>,
    /// Address of the status byte; `None` if the guest has left no room for one.
    pub status: Option<GuestAddress>,
}

fn total(segments: &[Segment]) -> u64 {
    segments.iter().map(|segment| u64::from(segment.length)).sum()
}

impl Request {
    /// Parses a chain of descriptors for a disk of `size` bytes.
    pub fn parse(memory: &Memory, head: u16, chain: impl Iterator<Item = Descriptor>, size: u64) -> Self {
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        let mut is_whole = false;
        let mut is_ordered = true;
        for descriptor in chain {
            // An indirect table might have 65,535 descriptors, and as many requests of this size as there is
            // room for would take gigabytes.
            if readable.len() + writable.len() == MAX_SEGMENTS {
                is_whole = false;
                break;
            }
            let segment = Segment {
                address: descriptor.addr(),
                length: descriptor.len(),
            };
            match descriptor.is_write_only() {
                true => writable.push(segment),
                false => {
                    is_ordered &= writable.is_empty();
                    readable.push(segment);
                }
            }
            // A chain ends early if it is a circle, or leads to no valid descriptor.
            is_whole = !descriptor.has_next();
        }
        let status = take_status(&mut writable);
        let mut request = Self {
            head,
            asked: Asked::Refused(VIRTIO_BLK_S_IOERR as u8),
            readable,
            writable,
            status,
        };
        if is_whole && is_ordered && request.status.is_some() {
            request.asked = request.meaning(memory, size);
        }
        request
    }

    fn meaning(&self, memory: &Memory, size: u64) -> Asked {
        let failed = Asked::Refused(VIRTIO_BLK_S_IOERR as u8);
        let unknown = Asked::Refused(VIRTIO_BLK_S_UNSUPP as u8);
        let mut head = [0; HEAD];
        if !gather(memory, &self.readable, 0, &mut head) {
            return failed;
        }
        let kind = u32::from_le_bytes(head[..4].try_into().expect("four bytes"));
        let sector = u64::from_le_bytes(head[8..].try_into().expect("eight bytes"));
        let extent = |sector: u64, bytes: u64| {
            let offset = sector.checked_mul(SECTOR)?;
            Extent::within(size, offset, bytes)
        };
        let data = |length: u64| {
            let is_good = length.is_multiple_of(SECTOR) && length <= MAX_REQUEST.into();
            is_good.then(|| extent(sector, length)).flatten()
        };
        match kind {
            VIRTIO_BLK_T_IN => {
                let is_there = self.writable.iter().all(|part| is_within(memory, *part));
                match (is_there, data(total(&self.writable))) {
                    (true, Some(extent)) => Asked::Read(extent),
                    _ => failed,
                }
            }
            VIRTIO_BLK_T_OUT => data(self.data_length()).map_or(failed, Asked::Write),
            VIRTIO_BLK_T_FLUSH => Asked::Flush,
            VIRTIO_BLK_T_GET_ID => Asked::Id,
            VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
                let mut run = [0; RUN];
                // One run of sectors, as the configuration space says.
                if self.data_length() != RUN as u64 || !gather(memory, &self.readable, HEAD as u64, &mut run)
                {
                    return failed;
                }
                let sector = u64::from_le_bytes(run[..8].try_into().expect("eight bytes"));
                let sectors = u32::from_le_bytes(run[8..12].try_into().expect("four bytes"));
                let flags = u32::from_le_bytes(run[12..].try_into().expect("four bytes"));
                let is_discard = kind == VIRTIO_BLK_T_DISCARD;
                let allowed = if is_discard { 0 } else { UNMAP };
                if flags & !allowed != 0 {
                    return unknown;
                }
                let may_free = is_discard || flags & UNMAP != 0;
                match extent(sector, u64::from(sectors) * SECTOR) {
                    Some(extent) => Asked::Zero { extent, may_free },
                    None if sectors == 0 => Asked::Nothing,
                    None => failed,
                }
            }
            _ => unknown,
        }
    }

    /// Bytes that the guest has written behind the head.
    fn data_length(&self) -> u64 {
        total(&self.readable).saturating_sub(HEAD as u64)
    }

    /// KiB that the request's data need while it is in flight.
    pub fn needed_kib(&self) -> usize {
        match self.asked {
            Asked::Read(extent) | Asked::Write(extent) => extent.length.div_ceil(1024) as usize,
            _ => 0,
        }
    }

    /// The data of a write; `None` if they are not in the guest's memory.
    pub fn data(&self, memory: &Memory) -> Option<Vec<u8>> {
        let length = self.data_length();
        if length > MAX_REQUEST.into() {
            return None;
        }
        let mut data = vec![0; length as usize];
        gather(memory, &self.readable, HEAD as u64, &mut data).then_some(data)
    }
}

/// Whether the segment is in the guest's memory.
fn is_within(memory: &Memory, segment: Segment) -> bool {
    use vm_memory::{GuestMemory, Permissions};
    let length = segment.length as usize;
    length == 0 || GuestMemory::check_range(memory, segment.address, length, Permissions::Write)
}

/// Takes the last byte for the guest, which is that of the status.
fn take_status(writable: &mut Vec<Segment>) -> Option<GuestAddress> {
    while let Some(last) = writable.last_mut() {
        if let Some(length) = last.length.checked_sub(1) {
            last.length = length;
            return last.address.checked_add(length.into());
        }
        writable.pop();
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use virtio_queue::{Queue, QueueOwnedT, QueueT};
    use vm_memory::Bytes;

    use super::super::memory::Ram;
    use super::*;

    const RAM: u64 = 1 << 16;
    const SIZE: u64 = 1 << 20;
    const QUEUE: u16 = 16;
    const NEXT: u16 = 1;
    const WRITABLE: u16 = 2;
    const INDIRECT: u16 = 4;
    /// Addresses of the rings and of the head of a request.
    const AVAILABLE: u64 = 0x1000;
    const HEADS: u64 = 0x3000;

    /// The request of these descriptors; the first one begins the chain.
    fn asks(ram: &Ram, descriptors: &[(u64, u32, u16, u16)]) -> Option<Request> {
        let mut queue = Queue::new(QUEUE).expect("a size");
        queue
            .try_set_avail_ring_address(GuestAddress(AVAILABLE))
            .expect("aligned");
        queue
            .try_set_used_ring_address(GuestAddress(0x2000))
            .expect("aligned");
        queue.set_ready(true);
        ram.touch(|memory| {
            for (number, &(address, length, flags, next)) in (0..).zip(descriptors) {
                let descriptor = Descriptor::new(address, length, flags, next);
                memory
                    .write_obj(descriptor, GuestAddress(16 * number))
                    .expect("within");
            }
            memory
                .write_obj(1u16, GuestAddress(AVAILABLE + 2))
                .expect("within");
            let chain = queue.iter(memory).expect("a ring").next()?;
            let request = Request::parse(memory, chain.head_index(), chain, SIZE);
            request.data(memory);
            Some(request)
        })
        .expect("it is there")
    }

    fn head(ram: &Ram, kind: u32, sector: u64) {
        ram.touch(|memory| {
            memory.write_obj(kind, GuestAddress(HEADS)).expect("within");
            memory.write_obj(sector, GuestAddress(HEADS + 8)).expect("within");
        })
        .expect("it is there");
    }

    const FAILED: Asked = Asked::Refused(VIRTIO_BLK_S_IOERR as u8);
    const UNKNOWN: Asked = Asked::Refused(VIRTIO_BLK_S_UNSUPP as u8);

    /// Head, data and status, in a driver's usual order.
    fn usual(ram: &Ram, kind: u32, sector: u64, length: u32, flags: u16) -> Asked {
        head(ram, kind, sector);
        let chain = [
            (HEADS, 16, NEXT, 1),
            (0x4000, length, NEXT | flags, 2),
            (0x9000, 1, WRITABLE, 0),
        ];
        let request = asks(ram, &chain).expect("a request");
        assert_eq!(request.status, Some(GuestAddress(0x9000)));
        request.asked
    }

    #[test]
    fn what_is_right_is_understood_and_what_is_out_of_bounds_is_refused() {
        let ram = Ram::anonymous(RAM as usize);
        let extent = Extent {
            offset: 1024,
            length: 4096,
        };
        assert_eq!(usual(&ram, 0, 2, 4096, WRITABLE), Asked::Read(extent));
        assert_eq!(usual(&ram, 1, 2, 4096, 0), Asked::Write(extent));
        assert_eq!(usual(&ram, 4, 0, 0, 0), Asked::Flush);
        assert_eq!(usual(&ram, 8, 0, 20, WRITABLE), Asked::Id);
        assert_eq!(usual(&ram, 2, 0, 512, WRITABLE), UNKNOWN);
        assert_eq!(usual(&ram, u32::MAX, 0, 512, 0), UNKNOWN);
        for (sector, length) in [
            (2048, 512),
            (2047, 1024),
            (u64::MAX, 512),
            (1 << 60, 512),
            (0, 100),
            (0, 0),
        ] {
            assert_eq!(
                usual(&ram, 0, sector, length, WRITABLE),
                FAILED,
                "{sector} {length}"
            );
            assert_eq!(usual(&ram, 1, sector, length, 0), FAILED, "{sector} {length}");
        }
        assert_eq!(
            usual(&ram, 0, 0, 1 << 20, WRITABLE),
            FAILED,
            "so much memory there is not"
        );
        assert_eq!(usual(&ram, 0, 0, MAX_REQUEST + 512, WRITABLE), FAILED);
    }

    #[test]
    fn runs_of_zeros_are_understood() {
        let ram = Ram::anonymous(RAM as usize);
        let run = |kind, sector: u64, sectors: u32, flags: u32| {
            let bytes = [
                &sector.to_le_bytes()[..],
                &sectors.to_le_bytes(),
                &flags.to_le_bytes(),
            ]
            .concat();
            ram.touch(|memory| memory.write_slice(&bytes, GuestAddress(0x4000)).expect("within"))
                .expect("it is there");
            usual(&ram, kind, 0, 16, 0)
        };
        let extent = Extent {
            offset: 512,
            length: 1024,
        };
        let zero = |may_free| Asked::Zero { extent, may_free };
        assert_eq!(run(11, 1, 2, 0), zero(true));
        assert_eq!(run(11, 1, 2, 1), UNKNOWN, "a discard does not unmap");
        assert_eq!(run(13, 1, 2, 0), zero(false));
        assert_eq!(run(13, 1, 2, 1), zero(true));
        assert_eq!(run(13, 1, 2, 2), UNKNOWN);
        assert_eq!(run(11, 1, 0, 0), Asked::Nothing);
        for (sector, sectors) in [(2048, 1), (1, u32::MAX), (u64::MAX, 1)] {
            assert_eq!(run(13, sector, sectors, 0), FAILED);
        }
        assert_eq!(usual(&ram, 11, 0, 32, 0), FAILED, "two runs");
    }

    #[test]
    fn circles_and_odd_orders_are_refused() {
        let ram = Ram::anonymous(RAM as usize);
        head(&ram, 0, 0);
        let circle = [(HEADS, 16, NEXT, 1), (0x4000, 512, NEXT | WRITABLE, 1)];
        assert_eq!(asks(&ram, &circle).expect("a request").asked, FAILED);
        let nowhere = [(HEADS, 16, NEXT, 1), (0x4000, 513, NEXT | WRITABLE, 99)];
        assert_eq!(asks(&ram, &nowhere).expect("a request").asked, FAILED);
        let backwards = [(0x4000, 513, NEXT | WRITABLE, 1), (HEADS, 16, 0, 0)];
        assert_eq!(asks(&ram, &backwards).expect("a request").asked, FAILED);
        let silent = [(HEADS, 16, 0, 0)];
        assert_eq!(asks(&ram, &silent).expect("a request").status, None);
        let short = [(HEADS, 15, NEXT, 1), (0x9000, 513, WRITABLE, 0)];
        assert_eq!(asks(&ram, &short).expect("a request").asked, FAILED);
        // An indirect table, longer than any queue.
        let long = 0x4000..0x4000 + 16 * (MAX_SEGMENTS as u64 + 1);
        ram.touch(|memory| {
            for (at, next) in long.clone().step_by(16).zip(1..) {
                let descriptor = Descriptor::new(HEADS, 0, NEXT, next);
                memory.write_obj(descriptor, GuestAddress(at)).expect("within");
            }
        })
        .expect("it is there");
        let outer = [(long.start, (long.end - long.start) as u32, INDIRECT, 0)];
        let request = asks(&ram, &outer).expect("a request");
        assert_eq!((request.asked, request.readable.len()), (FAILED, MAX_SEGMENTS));
        // An indirect table that names itself.
        let inner = [(0, 16, INDIRECT, 0)];
        assert_eq!(asks(&ram, &inner).expect("a request").asked, FAILED);
    }

    proptest! {
        /// For any bytes of the guest: an extent that is carried out is on the disk, and its data are in the
        /// memory and not too many.
        #[test]
        fn nonsense_is_answered(
            descriptors in proptest::collection::vec(
                (
                    prop_oneof![0..RAM + 64, any::<u64>(), Just(HEADS)],
                    prop_oneof![0..2048u32, Just(16), Just(512), any::<u32>()],
                    0..8u16,
                    0..QUEUE + 2,
                ),
                1..16,
            ),
            kind in prop_oneof![0..15u32, any::<u32>()],
            sector in prop_oneof![0..SIZE / 512 + 2, any::<u64>()],
        ) {
            let ram = Ram::anonymous(RAM as usize);
            head(&ram, kind, sector);
            if let Some(request) = asks(&ram, &descriptors) {
                match request.asked {
                    Asked::Read(extent) => {
                        prop_assert!(extent.end() <= SIZE && extent.length <= MAX_REQUEST.into());
                        prop_assert_eq!(total(&request.writable), extent.length);
                        for part in &request.writable {
                            let end = part.address.0.checked_add(part.length.into());
                            prop_assert!(part.length == 0 || end.is_some_and(|end| end <= RAM));
                        }
                    }
                    Asked::Write(extent) | Asked::Zero { extent, .. } => prop_assert!(extent.end() <= SIZE),
                    _ => {}
                }
                prop_assert!(request.status.is_some() || matches!(request.asked, Asked::Refused(_)));
            }
        }
    }
}
