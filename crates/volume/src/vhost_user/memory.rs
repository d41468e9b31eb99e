//! The guest's memory, as the front end gives it.

use std::fs::File;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

use super::request::Segment;

/// The RAM of one guest.
pub type Memory = GuestMemoryMmap<()>;

/// The front end has cut off a file that it gave for memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost;

/// One region, by its address in the front end's own process: messages about rings use these addresses.
struct Place {
    user: u64,
    guest: u64,
    length: u64,
}

/// Memory that the front end gave in one message.
pub struct Ram {
    memory: Memory,
    places: Vec<Place>,
    /// From the first byte of all mappings to the end of the last one, in this process.
    span: (usize, usize),
}

impl Ram {
    /// Maps the regions. The error says what is wrong with them.
    pub fn map(regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<Self, String> {
        if regions.len() != files.len() {
            return Err("there is not one file for each region".into());
        }
        let mut mapped = Vec::new();
        let mut places = Vec::new();
        for (region, file) in regions.iter().zip(files) {
            is_so_long(&file, region.mmap_offset, region.memory_size)?;
            let mapping = region.mmap_region(file).map_err(|error| error.to_string())?;
            let region_there = Self::region(mapping, region.guest_phys_addr)?;
            mapped.push(region_there);
            places.push(Place {
                user: region.user_addr,
                guest: region.guest_phys_addr,
                length: region.memory_size,
            });
        }
        Self::new(mapped, places)
    }

    fn region(mapping: MmapRegion, guest: u64) -> Result<GuestRegionMmap, String> {
        GuestRegionMmap::new(mapping, GuestAddress(guest)).ok_or_else(|| "a region has no end".into())
    }

    fn new(mut regions: Vec<GuestRegionMmap>, places: Vec<Place>) -> Result<Self, String> {
        let ends = |region: &GuestRegionMmap| {
            let start = region.as_ptr() as usize;
            (start, start + region.size())
        };
        let start = regions.iter().map(|region| ends(region).0).min();
        let end = regions.iter().map(|region| ends(region).1).max();
        regions.sort_by_key(vm_memory::GuestMemoryRegion::start_addr);
        let memory = Memory::from_regions(regions).map_err(|error| error.to_string())?;
        verbatim_mapped::install();
        Ok(Self {
            memory,
            places,
            span: (start.unwrap_or_default(), end.unwrap_or_default()),
        })
    }

    /// One region at address 0, both for the guest and for the front end; for tests.
    pub fn of_mapping(mapping: MmapRegion) -> Self {
        let place = Place {
            user: 0,
            guest: 0,
            length: mapping.size() as u64,
        };
        let region = Self::region(mapping, 0).expect("it has an end");
        Self::new(vec![region], vec![place]).expect("one region")
    }

    /// Memory of this process, for tests.
    #[cfg(test)]
    pub fn anonymous(length: usize) -> Self {
        Self::of_mapping(MmapRegion::new(length).expect("mapped"))
    }

    /// The guest's address of a byte, by the front end's address of it.
    pub fn guest_address(&self, user: u64) -> Option<GuestAddress> {
        self.places.iter().find_map(|place| {
            let offset = user.checked_sub(place.user)?;
            (offset < place.length).then(|| GuestAddress(place.guest + offset))
        })
    }

    /// Runs an access to the guest's memory that touches no other mapped file.
    ///
    /// The front end may cut its files off at any time. Other mappings may lie between the guest's, but
    /// `access` does not touch them: a signal during the access concerns the guest's memory.
    pub fn touch<T>(&self, access: impl FnOnce(&Memory) -> T) -> Result<T, Lost> {
        let (start, end) = self.span;
        let mut done = None;
        let guarded = verbatim_mapped::guarded(start, end - start, || done = Some(access(&self.memory)));
        match (guarded, done) {
            (Ok(()), Some(done)) => Ok(done),
            _ => Err(Lost),
        }
    }

    /// The memory with one more region, at an address where no guest has memory.
    pub fn with(&self, region: GuestRegionMmap) -> Option<Memory> {
        self.memory.insert_region(std::sync::Arc::new(region)).ok()
    }

    /// The same as [`Ram::touch`] for a memory of [`Ram::with`].
    pub fn touch_other<T>(&self, other: &Memory, access: impl FnOnce(&Memory) -> T) -> Result<T, Lost> {
        self.touch(|_| access(other))
    }
}

/// An error unless the file has all of this part: the crate would map bytes behind its end, too.
pub fn is_so_long(file: &File, offset: u64, length: u64) -> Result<(), String> {
    let there = file.metadata().map_err(|error| error.to_string())?.len();
    match offset.checked_add(length) {
        Some(end) if end <= there => Ok(()),
        _ => Err(format!(
            "{length} bytes from {offset} on are not in a file of {there}"
        )),
    }
}

/// Copies bytes out of the segments into `data`, beginning with their byte `skip`. False if there are too
/// few, or a segment is not in the memory.
pub fn gather(memory: &Memory, segments: &[Segment], skip: u64, data: &mut [u8]) -> bool {
    use vm_memory::Bytes;
    let (mut skip, mut filled) = (skip, 0);
    for segment in segments {
        if skip >= u64::from(segment.length) {
            skip -= u64::from(segment.length);
            continue;
        }
        let there = (u64::from(segment.length) - skip) as usize;
        let wanted = there.min(data.len() - filled);
        let Some(from) = segment.address.0.checked_add(skip) else {
            return false;
        };
        let part = &mut data[filled..filled + wanted];
        if wanted > 0 && memory.read_slice(part, GuestAddress(from)).is_err() {
            return false;
        }
        (skip, filled) = (0, filled + wanted);
    }
    filled == data.len()
}

/// Copies `data` into the segments. False if they have too little room, or a segment is not in the memory.
pub fn scatter(memory: &Memory, segments: &[Segment], data: &[u8]) -> bool {
    use vm_memory::Bytes;
    let mut rest = data;
    for segment in segments {
        let (part, later) = rest.split_at(rest.len().min(segment.length as usize));
        if !part.is_empty() && memory.write_slice(part, segment.address).is_err() {
            return false;
        }
        rest = later;
    }
    rest.is_empty()
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    fn segment(address: u64, length: u32) -> Segment {
        Segment {
            address: GuestAddress(address),
            length,
        }
    }

    #[test]
    fn bytes_go_through_segments_in_order_and_none_is_taken_from_outside() {
        let ram = Ram::anonymous(8192);
        let segments = [segment(10, 3), segment(5, 0), segment(100, 4)];
        ram.touch(|memory| {
            assert!(scatter(memory, &segments, &[1, 2, 3, 4, 5]));
            assert!(
                !scatter(memory, &segments, &[0; 8]),
                "there is no room for so much"
            );
            assert!(scatter(memory, &segments, &[1, 2, 3, 4, 5]));
            let mut data = [0; 4];
            assert!(gather(memory, &segments, 1, &mut data));
            assert_eq!(data, [2, 3, 4, 5]);
            assert!(!gather(memory, &segments, 4, &mut data), "there are not so many");
            for outside in [segment(8190, 4), segment(u64::MAX - 1, 4), segment(1 << 40, 4)] {
                assert!(!gather(memory, &[outside], 0, &mut data));
                assert!(!gather(memory, &[outside], 2, &mut data[..2]));
                assert!(!scatter(memory, &[outside], &data));
            }
        })
        .expect("it is there");
    }

    #[test]
    fn memory_that_is_cut_off_is_lost_and_nothing_else() {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(1 << 20).expect("it grows");
        let region = VhostUserMemoryRegion::new(0, 1 << 20, 0x7000_0000, 0);
        let ram = Ram::map(&[region], vec![file.try_clone().expect("a copy")]).expect("mapped");
        assert_eq!(ram.guest_address(0x7000_0010), Some(GuestAddress(0x10)));
        assert_eq!(ram.guest_address(0x7010_0000), None);
        assert_eq!(ram.guest_address(0x6fff_ffff), None);
        let look = || ram.touch(|memory| memory.read_obj::<u8>(GuestAddress(0x8_0000)).expect("within"));
        assert_eq!(look(), Ok(0));
        file.set_len(4096).expect("it shrinks");
        assert_eq!(look(), Err(Lost));
        let longer = VhostUserMemoryRegion::new(0, 1 << 20, 0, 0);
        assert!(
            Ram::map(&[longer], vec![file]).is_err(),
            "the file is not so long"
        );
    }
}
