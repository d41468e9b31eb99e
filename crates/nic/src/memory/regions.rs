//! From a key to bytes, with all the checks of IBA §10.6.3 (local) and §9.7.4.1.5 (remote).

use verbatim_device::control::Access;

use super::region::Region;
use crate::table::Table;

/// Why an access is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// No region has the key.
    NoSuchKey,
    /// The region belongs to another protection domain.
    WrongDomain,
    /// The range is not inside the region.
    OutOfRange,
    /// The region does not allow this.
    MissingRight,
    /// The file behind the region was truncated.
    Truncated,
    /// The process behind the region is gone, or has unmapped the memory.
    Unreachable,
}

/// Who accesses: regions of another protection domain are out of reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Domain {
    pub pd: u32,
}

/// All regions of the RNIC. A key is the region's 24-bit number and an 8-bit generation, the same for local and remote
/// use, as on the hardware that we know.
#[derive(Debug)]
pub struct Regions(Table<(u8, Region)>);

impl Regions {
    pub fn new(max: u32) -> Self {
        Self(Table::random(max))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds a region and gives its key; `None` if there are too many.
    pub fn insert(&mut self, region: Region) -> Option<u32> {
        let mut key = 0;
        self.0.insert_with(|index, generation| {
            key = index << 8 | u32::from(generation);
            (generation, region)
        })?;
        Some(key)
    }

    #[inline]
    pub fn get(&self, key: u32) -> Option<&Region> {
        let (generation, region) = self.0.get(key >> 8)?;
        (*generation == key as u8).then_some(region)
    }

    pub fn remove(&mut self, key: u32) -> Option<Region> {
        self.get(key)?;
        self.0.remove(key >> 8).map(|(_, region)| region)
    }

    /// The region behind the key, if it allows `rights` on the range.
    #[inline]
    pub fn check(
        &self,
        domain: Domain,
        key: u32,
        address: u64,
        length: u64,
        rights: Access,
    ) -> Result<&Region, Denied> {
        let region = self.get(key).ok_or(Denied::NoSuchKey)?;
        if region.pd != domain.pd {
            return Err(Denied::WrongDomain);
        }
        if !region.contains(address, length) {
            return Err(Denied::OutOfRange);
        }
        if !region.access.contains(rights) {
            return Err(Denied::MissingRight);
        }
        Ok(region)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::rc::Rc;

    use rustix::fs::MemfdFlags;
    use verbatim_device::control::{Backing, Segment};

    use super::super::{Mappings, Owner, Registration};
    use super::*;

    const PAGE: u64 = 4096;
    const BASE: u64 = 0x7000_0000_0000;
    const RW: Access = Access::LOCAL_WRITE.union(Access::REMOTE_WRITE);

    struct World {
        file: [OwnedFd; 1],
        mappings: Mappings,
        owner: Rc<Owner>,
    }

    impl World {
        fn new() -> Self {
            let file = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&file, 16 * PAGE).unwrap();
            Self {
                file: [file],
                mappings: Mappings::default(),
                owner: Rc::default(),
            }
        }

        fn register(
            &mut self,
            address: u64,
            length: u64,
            access: Access,
            segments: &[Segment],
        ) -> Result<Region, i32> {
            let wanted = Registration {
                context: 1,
                pd: 5,
                address,
                length,
                iova: address - BASE,
                access,
                segments,
                fds: &self.file,
            };
            Region::new(&wanted, &mut self.mappings, &self.owner).map_err(|refused| refused.errno)
        }
    }

    fn segment(page: u64, pages: u64, file_page: u64) -> Segment {
        Segment {
            address: BASE + page * PAGE,
            length: pages * PAGE,
            backing: Backing::File {
                fd_index: 0,
                offset: file_page * PAGE,
            },
        }
    }

    #[test]
    fn accesses_cross_segments_and_stay_inside() {
        let mut world = World::new();
        // Three pages of which the middle one lies elsewhere in the file; the region starts and ends inside of pages.
        let segments = [segment(0, 1, 4), segment(1, 1, 9), segment(2, 1, 5)];
        let region = world.register(BASE + 100, 2 * PAGE + 200, RW, &segments).unwrap();
        let mut regions = Regions::new(16);
        let key = regions.insert(region).unwrap();
        let domain = Domain { pd: 5 };
        let data: Vec<u8> = (0..2 * PAGE + 200).map(|n| (n % 251) as u8).collect();
        let region = regions.check(domain, key, 100, data.len() as u64, RW).unwrap();
        region.write(100, &data).unwrap();
        let mut out = vec![0; data.len()];
        region.read(100, &mut out).unwrap();
        assert_eq!(out, data);
        let mut middle = vec![0; PAGE as usize];
        rustix::io::pread(world.file[0].as_fd(), &mut middle, 9 * PAGE).unwrap();
        assert_eq!(middle, data[PAGE as usize - 100..][..PAGE as usize]);

        let denied = |pd, key, address, length, rights| {
            regions.check(Domain { pd }, key, address, length, rights).err()
        };
        assert_eq!(denied(5, key, 100, 2 * PAGE + 201, RW), Some(Denied::OutOfRange));
        assert_eq!(denied(5, key, 99, 1, RW), Some(Denied::OutOfRange));
        assert_eq!(denied(5, key, u64::MAX, 2, RW), Some(Denied::OutOfRange));
        assert_eq!(denied(5, key, 101, u64::MAX, RW), Some(Denied::OutOfRange));
        assert_eq!(denied(6, key, 100, 1, RW), Some(Denied::WrongDomain));
        assert_eq!(
            denied(5, key, 100, 1, Access::REMOTE_READ),
            Some(Denied::MissingRight)
        );
        assert_eq!(
            denied(5, key ^ 1, 100, 1, RW),
            Some(Denied::NoSuchKey),
            "another generation"
        );
        assert!(regions.remove(key ^ 1).is_none() && regions.remove(key).is_some());
        assert!(regions.get(key).is_none());
    }

    #[test]
    fn bad_registrations_are_refused() {
        let mut world = World::new();
        let whole = [segment(0, 4, 0)];
        assert!(world.register(BASE, 4 * PAGE, RW, &whole).is_ok());
        assert_eq!(
            world.register(BASE, 4 * PAGE, Access::REMOTE_WRITE, &whole).err(),
            Some(libc::EINVAL)
        );
        assert_eq!(world.register(BASE, 0, RW, &whole).err(), Some(libc::EINVAL));
        assert_eq!(
            world.register(BASE, 4 * PAGE + 1, RW, &whole).err(),
            Some(libc::EINVAL)
        );
        assert_eq!(
            world.register(BASE, u64::MAX, RW, &whole).err(),
            Some(libc::EINVAL)
        );
        assert_eq!(world.register(BASE, PAGE, RW, &[]).err(), Some(libc::EINVAL));
        let gap = [segment(0, 1, 0), segment(2, 1, 2)];
        assert_eq!(world.register(BASE, 3 * PAGE, RW, &gap).err(), Some(libc::EINVAL));
        let beyond = [segment(0, 2, 15)];
        assert_eq!(
            world.register(BASE, 2 * PAGE, RW, &beyond).err(),
            Some(libc::EINVAL)
        );
        let mut no_file = whole;
        no_file[0].backing = Backing::File {
            fd_index: 1,
            offset: 0,
        };
        assert_eq!(world.register(BASE, PAGE, RW, &no_file).err(), Some(libc::EBADF));
        no_file[0].backing = Backing::Process;
        assert_eq!(
            world.register(BASE, PAGE, RW, &no_file).err(),
            Some(libc::EOPNOTSUPP)
        );
    }
}
