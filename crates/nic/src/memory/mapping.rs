//! Mapped files: adopted memory, reached by a plain copy.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};
use std::sync::atomic::AtomicU64;

use rustix::fs::{FileType, OFlags};
use rustix::mm::{MapFlags, ProtFlags};
use verbatim_mapped::Truncated;

use super::place::place;
use crate::account::Account;
use crate::error::Refused;
use crate::tenant::Payer;

const PAGE: u64 = 4096;

/// `TMPFS_MAGIC` of statfs(2). Pages of other file systems may come from a server that never answers, and the RNIC
/// would wait for it.
const TMPFS: i64 = 0x0102_1994;

/// A stretch of a file, mapped.
#[derive(Debug)]
pub struct FileMapping {
    base: NonNull<u8>,
    offset: u64,
    bytes: u64,
    writable: bool,
    truncated: Rc<Cell<bool>>,
    /// Of its program, of its tenant, and of the RNIC.
    accounts: [Rc<Account>; 3],
}

impl FileMapping {
    /// Runs an access to a part of the mapping. Once a page of one of its context's files was missing, nothing is accessed
    /// any more: zeroes that stand in its place are nobody's data, and each page of them costs the RNIC a mapping.
    #[inline]
    fn guarded(&self, start: usize, length: usize, access: impl FnOnce()) -> Result<(), Truncated> {
        if self.truncated.get() {
            return Err(Truncated);
        }
        verbatim_mapped::guarded(start, length, access).inspect_err(|_| self.truncated.set(true))
    }

    /// Copies out of the mapping, from `at` on.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    #[inline]
    pub fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Truncated> {
        let from = self.address(at, out.len());
        let length = out.len();
        // SAFETY: the source is mapped, readable memory (checked by `address`); the program may write it meanwhile,
        // which is why it is only copied as bytes. The destination is this process's own, so they do not overlap.
        let copy = || unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), length) };
        self.guarded(from as usize, length, copy)
    }

    /// Copies into the mapping, from `at` on. The mapping must be writable.
    ///
    /// # Panics
    /// If the range is not inside the mapping, or the mapping is read-only.
    #[inline]
    pub fn write(&self, at: u64, data: &[u8]) -> Result<(), Truncated> {
        assert!(
            self.writable,
            "regions with a right to write are registered on writable mappings only"
        );
        let to = self.address(at, data.len());
        // SAFETY: the destination is mapped, writable memory that holds no Rust object; see `read`.
        let copy = || unsafe { place(data, to) };
        self.guarded(to as usize, data.len(), copy)
    }

    /// Whether its file could be opened for writing.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Runs `each` on the eight bytes at `at` as one word; `None` if they are not aligned in this process.
    ///
    /// # Panics
    /// As [`FileMapping::write`].
    pub fn atomic(&self, at: u64, each: impl FnOnce(&AtomicU64) -> u64) -> Option<Result<u64, Truncated>> {
        assert!(
            self.writable,
            "regions with the right to atomics are registered on writable mappings only"
        );
        let to = self.address(at, size_of::<u64>()).cast::<u64>();
        if !to.is_aligned() {
            return None;
        }
        let mut value = 0;
        let done = self.guarded(to as usize, size_of::<u64>(), || {
            // SAFETY: eight bytes of mapped, writable memory (checked by `address`), aligned, which hold no Rust object
            // and which other processes touch by their own atomic instructions.
            value = each(unsafe { AtomicU64::from_ptr(to) });
        });
        Some(done.map(|()| value))
    }

    #[inline]
    fn address(&self, at: u64, length: usize) -> *mut u8 {
        assert!(
            at <= self.bytes && length as u64 <= self.bytes - at,
            "the access lies inside the mapping"
        );
        // SAFETY: inside the mapping.
        unsafe { self.base.as_ptr().add(at as usize) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; pages that the SIGBUS handler replaced are part of it.
        let unmapped =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.bytes as usize) };
        debug_assert!(unmapped.is_ok(), "a whole mapping can be unmapped");
        self.accounts.iter().for_each(|account| account.end(self.bytes));
    }
}

/// A part of a mapping that several regions may share.
#[derive(Debug, Clone)]
pub struct MappedPart {
    pub mapping: Rc<FileMapping>,
    /// Where the part starts in the mapping.
    pub at: u64,
}

/// The mappings of one context, so that regions over the same pages share them.
#[derive(Debug)]
pub struct Mappings {
    by_file: HashMap<(u64, u64), Vec<Weak<FileMapping>>>,
    truncated: Rc<Cell<bool>>,
    of_program: Rc<Account>,
    payer: Payer,
    locked: bool,
}

impl Mappings {
    /// Of a program that has this account, and a tenant that pays for it.
    pub fn new(of_program: Rc<Account>, payer: Payer) -> Self {
        Self {
            by_file: HashMap::new(),
            truncated: Rc::default(),
            of_program,
            payer,
            locked: false,
        }
    }

    /// All pages are in memory from their registration on, and none is in no file.
    pub fn locked(self, locked: bool) -> Self {
        Self { locked, ..self }
    }

    /// Whether that is so.
    pub fn is_locked(&self) -> bool {
        self.locked
    }

    /// Whether an access found a file shorter than it was at registration.
    pub fn truncated(&self) -> bool {
        self.truncated.get()
    }

    /// Maps `bytes` bytes of the file from `offset` on, or finds them mapped.
    pub fn map(
        &mut self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        write: bool,
    ) -> Result<MappedPart, Refused> {
        let stat = rustix::fs::fstat(file).map_err(|errno| Refused::os("fstat", errno))?;
        let system = rustix::fs::fstatfs(file).map_err(|errno| Refused::os("fstatfs", errno))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile || system.f_type as i64 != TMPFS {
            return Err(Refused::invalid(
                "registered memory must lie in a regular file on tmpfs, or a memfd",
            ));
        }
        if !offset.is_multiple_of(PAGE) || bytes == 0 {
            return Err(Refused::invalid(format!(
                "{bytes} bytes at file offset {offset:#x} are not whole pages"
            )));
        }
        let size = (stat.st_size as u64).next_multiple_of(PAGE);
        let end = offset
            .checked_add(bytes)
            .filter(|end| *end <= size)
            .ok_or_else(|| {
                Refused::invalid(format!(
                    "the file has {size} bytes, not {bytes} from {offset:#x} on"
                ))
            })?;
        let known = self.by_file.entry((stat.st_dev, stat.st_ino)).or_default();
        known.retain(|mapping| mapping.strong_count() > 0);
        let shared = known.iter().filter_map(Weak::upgrade).find(|mapping| {
            mapping.offset <= offset && end <= mapping.offset + mapping.bytes && (mapping.writable || !write)
        });
        if let Some(mapping) = shared {
            return Ok(MappedPart {
                at: offset - mapping.offset,
                mapping,
            });
        }
        let mapping = Rc::new(self.new_mapping(file, offset, bytes, write)?);
        let known = self.by_file.entry((stat.st_dev, stat.st_ino)).or_default();
        known.push(Rc::downgrade(&mapping));
        // Files come and go; their entries must not stay.
        if self.by_file.len() > 64 {
            self.by_file
                .retain(|_, known| known.iter().any(|mapping| mapping.strong_count() > 0));
        }
        Ok(MappedPart { mapping, at: 0 })
    }

    fn new_mapping(
        &self,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
        write: bool,
    ) -> Result<FileMapping, Refused> {
        let flags = rustix::fs::fcntl_getfl(file).map_err(|errno| Refused::os("fcntl", errno))?;
        let writable = flags & OFlags::ACCMODE == OFlags::RDWR;
        if write && !writable {
            return Err(Refused::new(
                libc::EACCES,
                "a region with a right to write needs a file opened for reading and writing",
            ));
        }
        let access = if writable {
            ProtFlags::READ | ProtFlags::WRITE
        } else {
            ProtFlags::READ
        };
        let bytes = bytes.next_multiple_of(PAGE);
        self.of_program.check(bytes)?;
        self.payer.check_mapping(bytes)?;
        let [of_tenant, of_all] = self.payer.mapped();
        let accounts = [Rc::clone(&self.of_program), of_tenant, of_all];
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                access,
                MapFlags::SHARED,
                file,
                offset,
            )
        }
        .map_err(|errno| Refused::os("mmap", errno))?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at address 0 unless asked to");
        accounts.iter().for_each(|account| account.begin(bytes));
        // It is unmapped again if it cannot be had.
        let mapping = FileMapping {
            base,
            offset,
            bytes,
            writable,
            truncated: Rc::clone(&self.truncated),
            accounts,
        };
        if self.locked {
            verbatim_paging::populate(base.as_ptr() as usize, bytes as usize, writable).map_err(|error| {
                Refused::new(
                    libc::ENOMEM,
                    format!("registered memory cannot be locked: {error}"),
                )
            })?;
        }
        Ok(mapping)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::fd::{AsFd, OwnedFd};

    fn mappings() -> Mappings {
        let account = Account::new("this test", 3, 64 * PAGE);
        Mappings::new(Rc::new(account), Payer::of_test())
    }

    fn memfd(pages: u64) -> OwnedFd {
        let memfd = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memfd, pages * PAGE).unwrap();
        memfd
    }

    #[test]
    fn regions_over_the_same_pages_share_a_mapping() {
        let file = memfd(8);
        let mut mappings = mappings();
        let all = mappings.map(file.as_fd(), 0, 8 * PAGE, true).unwrap();
        let part = mappings.map(file.as_fd(), 2 * PAGE, PAGE, true).unwrap();
        assert!(Rc::ptr_eq(&all.mapping, &part.mapping));
        assert_eq!(part.at, 2 * PAGE);
        part.mapping.write(part.at + 3, b"there").unwrap();
        let mut out = [0; 5];
        rustix::io::pread(&file, &mut out, 2 * PAGE + 3).unwrap();
        assert_eq!(&out, b"there");
        let weak = Rc::downgrade(&all.mapping);
        drop((all, part));
        assert!(weak.upgrade().is_none(), "the last region unmaps");
    }

    #[test]
    fn what_is_locked_is_in_memory_before_anything_is_accessed() {
        let present = |locked| {
            let file = memfd(8);
            let part = mappings()
                .locked(locked)
                .map(file.as_fd(), 0, 8 * PAGE, true)
                .unwrap();
            assert_eq!(part.mapping.bytes, 8 * PAGE);
            rustix::fs::fstat(&file).unwrap().st_blocks as u64 * 512
        };
        assert_eq!((present(false), present(true)), (0, 8 * PAGE));
    }

    #[test]
    fn a_truncated_file_is_an_error_and_no_crash() {
        verbatim_mapped::install();
        let file = memfd(4);
        let mut mappings = mappings();
        let part = mappings.map(file.as_fd(), 0, 4 * PAGE, true).unwrap();
        part.mapping.write(0, &[1; 3 * PAGE as usize]).unwrap();
        assert!(!mappings.truncated());
        rustix::fs::ftruncate(&file, PAGE).unwrap();
        let mut out = [0; 2 * PAGE as usize];
        assert_eq!(part.mapping.read(PAGE - 8, &mut out), Err(Truncated));
        // An optimiser leaves out a read that nobody uses.
        std::hint::black_box(&out);
        assert!(mappings.truncated());
        assert_eq!(part.mapping.write(3 * PAGE, &[1]), Err(Truncated));
        let other = mappings.map(memfd(1).as_fd(), 0, PAGE, true).unwrap();
        for (part, at) in [(&part, PAGE - 8), (&part, 0), (&other, 0)] {
            let read = part.mapping.read(at, &mut out[..8]);
            assert_eq!(read, Err(Truncated), "a page of zeroes is not its data");
        }
        assert_eq!(part.mapping.atomic(0, |_| 0), Some(Err(Truncated)));
    }

    #[test]
    fn one_program_does_not_take_all_mappings() {
        let file = memfd(100);
        let mut mappings = mappings();
        let pages = [1, 3, 5].map(|page| mappings.map(file.as_fd(), page * PAGE, PAGE, true).unwrap());
        let refused = mappings.map(file.as_fd(), 7 * PAGE, PAGE, true).unwrap_err();
        assert!(
            refused.errno == libc::ENOMEM && refused.message.contains("this test has 3 mapped files"),
            "{}",
            refused.message
        );
        assert!(
            mappings.map(file.as_fd(), 3 * PAGE, PAGE, true).is_ok(),
            "it is mapped"
        );
        drop(pages);
        let mut errno = |bytes| {
            mappings
                .map(file.as_fd(), 0, bytes, true)
                .err()
                .map(|refused| refused.errno)
        };
        assert_eq!(errno(65 * PAGE), Some(libc::ENOMEM));
        assert_eq!(errno(64 * PAGE), None);
    }

    #[test]
    fn files_that_cannot_be_trusted_are_refused() {
        let file = memfd(2);
        let mut mappings = mappings();
        let mut errno =
            |fd: BorrowedFd<'_>, offset, bytes| mappings.map(fd, offset, bytes, true).unwrap_err().errno;
        assert_eq!(errno(file.as_fd(), PAGE, 2 * PAGE), libc::EINVAL);
        assert_eq!(errno(file.as_fd(), 1, PAGE), libc::EINVAL);
        assert_eq!(errno(file.as_fd(), PAGE, u64::MAX), libc::EINVAL);
        let null = std::fs::File::open("/dev/zero").unwrap();
        assert_eq!(errno(null.as_fd(), 0, PAGE), libc::EINVAL);
        let procfs = std::fs::File::open("/proc/self/maps").unwrap();
        assert_eq!(errno(procfs.as_fd(), 0, PAGE), libc::EINVAL);
    }
}
