//! From a key to bytes, with all the checks of IBA §10.6.3 (local) and §9.7.4.1.5 (remote).

use std::collections::BTreeSet;

use verbatim_device::control::{Access, KEYS_PER_HOST};

use super::region::Region;
use super::windows::Window;
use crate::config::HostNumber;
use crate::table::{Table, Unavailable};

/// Why an access is not allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Denied {
    /// No region or bound window has the key.
    NoSuchKey,
    /// The region or window belongs to another protection domain, or to another queue pair.
    WrongDomain,
    /// The range is not inside of it.
    OutOfRange,
    /// It does not allow this.
    MissingRight,
    /// The window is bound.
    InUse,
    /// The file behind the region was truncated.
    Truncated,
    /// The process behind the region is gone, or has unmapped the memory.
    Unreachable,
}

/// Who accesses: regions of another protection domain, and windows of another queue pair, are out of reach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Domain {
    pub pd: u32,
    pub qpn: u32,
}

/// What a key stands for.
#[derive(Debug)]
pub(super) enum Entry {
    Region(Region),
    Window(Window),
}

/// All regions and windows of the RNIC. A key is a 24-bit number and an 8-bit variant: of a region the generation of its
/// number (or what was asked for), the same for local and remote use, as on the hardware that we know; of a window what its
/// program chose at the last bind.
#[derive(Debug)]
pub struct Regions {
    entries: Table<(u8, Entry)>,
    pub(super) windows: usize,
    /// Type 2 windows by the queue pair that they are bound to.
    pub(super) by_qp: BTreeSet<(u32, u32)>,
}

impl Regions {
    /// Room for so many regions and windows together, with keys of this host.
    pub fn new(max: u32, host: HostNumber) -> Self {
        Self {
            entries: Table::random(max, host.first_of(KEYS_PER_HOST), 1..1 << 24),
            windows: 0,
            by_qp: BTreeSet::new(),
        }
    }

    /// How many regions there are.
    pub fn len(&self) -> usize {
        self.entries.len() - self.windows
    }

    /// How many windows there are.
    pub fn windows(&self) -> usize {
        self.windows
    }

    /// Whether one more fits, with this key if one is asked for.
    pub fn check(&self, key: Option<u32>) -> Result<(), Unavailable> {
        self.entries.check(key.map(|key| key >> 8))
    }

    /// Adds a region and gives its key, the one that is asked for if one is.
    pub fn insert(&mut self, region: Region, key: Option<u32>) -> Result<u32, Unavailable> {
        self.insert_entry(Entry::Region(region), key)
    }

    pub(super) fn insert_entry(&mut self, entry: Entry, key: Option<u32>) -> Result<u32, Unavailable> {
        if let Some(key) = key {
            let variant = key as u8;
            self.entries.insert_at(key >> 8, variant, || (variant, entry))?;
            return Ok(key);
        }
        let mut key = 0;
        let added = self.entries.insert_with(|number, generation| {
            key = number << 8 | u32::from(generation);
            (generation, entry)
        });
        added.map(|_| key).ok_or(Unavailable::Full)
    }

    #[inline]
    pub(super) fn find(&self, key: u32) -> Option<&Entry> {
        let (variant, entry) = self.entries.get(key >> 8)?;
        (*variant == key as u8).then_some(entry)
    }

    pub(super) fn numbered(&self, number: u32) -> Option<&(u8, Entry)> {
        self.entries.get(number)
    }

    pub(super) fn numbered_mut(&mut self, number: u32) -> Option<&mut (u8, Entry)> {
        self.entries.get_mut(number)
    }

    pub(super) fn remove_entry(&mut self, number: u32) -> Option<Entry> {
        self.entries.remove(number).map(|(_, entry)| entry)
    }

    /// The region with this key.
    #[inline]
    pub fn get(&self, key: u32) -> Option<&Region> {
        match self.find(key)? {
            Entry::Region(region) => Some(region),
            Entry::Window(_) => None,
        }
    }

    pub fn get_mut(&mut self, key: u32) -> Option<&mut Region> {
        self.get(key)?;
        match self.entries.get_mut(key >> 8)? {
            (_, Entry::Region(region)) => Some(region),
            (_, Entry::Window(_)) => None,
        }
    }

    pub fn remove(&mut self, key: u32) -> Option<Region> {
        self.get(key)?;
        match self.remove_entry(key >> 8)? {
            Entry::Region(region) => Some(region),
            Entry::Window(_) => unreachable!("it was a region"),
        }
    }

    /// The region behind a local key, if it allows `rights` on the range.
    #[inline]
    pub fn check_local(
        &self,
        domain: Domain,
        key: u32,
        address: u64,
        length: u64,
        rights: Access,
    ) -> Result<&Region, Denied> {
        let region = self.get(key).ok_or(Denied::NoSuchKey)?;
        region.check(domain, address, length, rights)?;
        Ok(region)
    }

    /// The region behind a remote key and the address in its terms, if the key allows `rights` on the range.
    #[inline]
    pub fn check_remote(
        &self,
        domain: Domain,
        key: u32,
        address: u64,
        length: u64,
        rights: Access,
    ) -> Result<(&Region, u64), Denied> {
        match self.find(key).ok_or(Denied::NoSuchKey)? {
            Entry::Region(region) => {
                region.check(domain, address, length, rights)?;
                Ok((region, address))
            }
            Entry::Window(window) => {
                let (key, address) = window.check(domain, address, length, rights)?;
                let region = self.get(key).ok_or(Denied::NoSuchKey)?;
                Ok((region, address))
            }
        }
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
    use crate::account::Account;

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
            let account = Rc::new(Account::new("this test", 64, 1 << 30));
            Self {
                file: [file],
                mappings: Mappings::new(account, crate::tenant::Payer::of_test()),
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
        let mut regions = Regions::new(16, HostNumber::default());
        let key = regions.insert(region, None).unwrap();
        let domain = Domain { pd: 5, qpn: 1 };
        let data: Vec<u8> = (0..2 * PAGE + 200).map(|n| (n % 251) as u8).collect();
        let region = regions
            .check_local(domain, key, 100, data.len() as u64, RW)
            .unwrap();
        region.write(100, &data).unwrap();
        let mut out = vec![0; data.len()];
        region.read(100, &mut out).unwrap();
        assert_eq!(out, data);
        let mut middle = vec![0; PAGE as usize];
        rustix::io::pread(world.file[0].as_fd(), &mut middle, 9 * PAGE).unwrap();
        assert_eq!(middle, data[PAGE as usize - 100..][..PAGE as usize]);

        let denied = |pd, key, address, length, rights| {
            regions
                .check_local(Domain { pd, qpn: 1 }, key, address, length, rights)
                .err()
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
        let empty = world.register(BASE, 0, RW, &[]).unwrap();
        assert!(
            empty.contains(0, 0) && !empty.contains(0, 1),
            "there is nothing in it"
        );
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
