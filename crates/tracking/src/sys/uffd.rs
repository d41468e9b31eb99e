//! userfaultfd(2) and the scan of a page map (`Documentation/admin-guide/mm/pagemap.rst`), for another process.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::ioctl::{self, Updater, opcode};

/// Flags of the system call itself.
pub const USER_MODE_ONLY: u64 = 1;

const API: u64 = 0xaa;
/// `UFFD_FEATURE_WP_ASYNC`: writes clear the protection, and nobody waits.
const WP_ASYNC: u64 = 1 << 15;
/// `UFFDIO_REGISTER_MODE_WP`.
const REGISTER_WP: u64 = 1 << 1;

#[repr(C)]
struct ApiRequest {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct RegisterRequest {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

const UFFDIO_API: ioctl::Opcode = opcode::read_write::<ApiRequest>(0xaa, 0x3f);
const UFFDIO_REGISTER: ioctl::Opcode = opcode::read_write::<RegisterRequest>(0xaa, 0x00);
const UFFDIO_WRITEPROTECT: ioctl::Opcode = opcode::read_write::<ProtectRequest>(0xaa, 0x06);

#[repr(C)]
struct ProtectRequest {
    start: u64,
    length: u64,
    mode: u64,
}

/// Switches asynchronous write protection on.
pub fn set_up(uffd: BorrowedFd<'_>) -> io::Result<()> {
    let mut request = ApiRequest {
        api: API,
        features: WP_ASYNC,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_API reads and writes a `struct uffdio_api`, which is three u64.
    unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_API, _>::new(&mut request)) }?;
    Ok(())
}

/// Has the pages of a mapping protected when a scan says so.
pub fn register(uffd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<()> {
    let mut request = RegisterRequest {
        start: range.start,
        length: range.end - range.start,
        mode: REGISTER_WP,
        ioctls: 0,
    };
    // SAFETY: UFFDIO_REGISTER reads and writes a `struct uffdio_register`, which is four u64. What it changes is how faults in
    // another process are handled, and with write protection alone no fault waits for anybody.
    unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_REGISTER, _>::new(&mut request)) }?;
    Ok(())
}

/// Removes the protection of all pages of registered mappings.
pub fn unprotect(uffd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<()> {
    let mut request = ProtectRequest {
        start: range.start,
        length: range.end - range.start,
        mode: 0,
    };
    // SAFETY: UFFDIO_WRITEPROTECT reads a `struct uffdio_writeprotect`, which is three u64; it protects nothing in this mode.
    unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_WRITEPROTECT, _>::new(&mut request)) }?;
    Ok(())
}

/// Whether the memory that a userfaultfd was made for is still there: not after execve, and not when the process has ended.
pub fn has_memory(uffd: BorrowedFd<'_>) -> bool {
    // The last page of the lower half. Were there one, it would count as written, and nothing would be lost.
    let mut request = ProtectRequest {
        start: (1 << 47) - 2 * crate::PAGE,
        length: crate::PAGE,
        mode: 0,
    };
    // SAFETY: UFFDIO_WRITEPROTECT reads a `struct uffdio_writeprotect`, which is three u64; it protects nothing in this mode.
    let done = unsafe { ioctl::ioctl(uffd, Updater::<UFFDIO_WRITEPROTECT, _>::new(&mut request)) };
    done != Err(rustix::io::Errno::SRCH)
}

/// `PAGE_IS_WPALLOWED`: asynchronous write protection is possible there.
pub const WPALLOWED: u64 = 1 << 0;
/// `PAGE_IS_WRITTEN`: it is not protected, so it may have been written.
pub const WRITTEN: u64 = 1 << 1;
/// `PAGE_IS_PRESENT`.
pub const PRESENT: u64 = 1 << 3;
/// `PAGE_IS_SWAPPED`.
pub const SWAPPED: u64 = 1 << 4;

/// `PM_SCAN_WP_MATCHING`: what is found is protected in the same step.
const PROTECT: u64 = 1 << 0;
/// `PM_SCAN_CHECK_WPASYNC`: an error, EPERM, where that cannot be.
const CHECK: u64 = 1 << 1;

/// `struct page_region`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Region {
    pub start: u64,
    pub end: u64,
    pub categories: u64,
}

/// `struct pm_scan_arg`.
#[repr(C)]
struct ScanRequest {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_length: u64,
    most_pages: u64,
    inverted: u64,
    mask: u64,
    any_of: u64,
    returned: u64,
}

const PAGEMAP_SCAN: ioctl::Opcode = opcode::read_write::<ScanRequest>(b'f', 16);

/// Regions that one call may find.
const REGIONS: usize = 16 << 10;

/// What is looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// What was written of the pages that are there, in memory or swapped out. It is protected in the same step.
    WrittenAndProtect,
    /// What is in no page table, not even as a page that is protected: it is protected in the same step.
    AbsentAndProtect,
    /// The pages that are there, with what they are.
    All,
    /// All of the range, with what it is.
    Whole,
}

/// Looks at the pages of these ranges.
pub fn scan(
    pagemap: &File,
    ranges: impl IntoIterator<Item = Range<u64>>,
    wanted: Wanted,
    mut found: impl FnMut(Region),
) -> io::Result<()> {
    let mut regions = vec![Region::default(); REGIONS];
    ranges
        .into_iter()
        .try_for_each(|range| scan_one(pagemap, &range, wanted, &mut regions, &mut found))
}

/// The same for a range of few pages.
pub fn scan_few(
    pagemap: &File,
    range: &Range<u64>,
    wanted: Wanted,
    found: impl FnMut(Region),
) -> io::Result<()> {
    scan_one(pagemap, range, wanted, &mut [Region::default(); 4], found)
}

fn scan_one(
    pagemap: &File,
    range: &Range<u64>,
    wanted: Wanted,
    regions: &mut [Region],
    mut found: impl FnMut(Region),
) -> io::Result<()> {
    let mut from = range.start;
    let (flags, inverted, mask, any_of) = match wanted {
        Wanted::WrittenAndProtect => (PROTECT | CHECK, 0, WRITTEN, PRESENT | SWAPPED),
        Wanted::AbsentAndProtect => (PROTECT | CHECK, PRESENT | SWAPPED, PRESENT | SWAPPED, 0),
        Wanted::All => (0, 0, 0, PRESENT | SWAPPED),
        Wanted::Whole => (0, 0, 0, 0),
    };
    while from < range.end {
        let mut request = ScanRequest {
            size: size_of::<ScanRequest>() as u64,
            flags,
            start: from,
            end: range.end,
            walk_end: 0,
            regions: regions.as_mut_ptr().expose_provenance() as u64,
            regions_length: regions.len() as u64,
            most_pages: 0,
            inverted,
            mask,
            any_of,
            returned: WRITTEN | WPALLOWED | PRESENT | SWAPPED,
        };
        // SAFETY: the request is a `struct pm_scan_arg` of that size, and the vector has room for as many regions as it says. By
        // `libc`, since the number that the call returns counts.
        let count = unsafe {
            libc::ioctl(
                pagemap.as_fd().as_raw_fd(),
                u64::from(PAGEMAP_SCAN),
                &raw mut request,
            )
        };
        let Ok(count) = usize::try_from(count) else {
            return Err(io::Error::last_os_error());
        };
        regions[..count].iter().copied().for_each(&mut found);
        if request.walk_end <= from {
            return Err(io::Error::other("the kernel does not get on with a page map"));
        }
        from = request.walk_end;
    }
    Ok(())
}
