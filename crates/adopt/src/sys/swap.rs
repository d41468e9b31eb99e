//! The two moves: private pages into the file, and back.
//!
//! ```text
//!            program's range            aside                  file
//! move_in    hold (wait on missing)
//!            mremap DONTUNMAP ────────► pages
//!            (empty)                    pwrite ──────────────► pages
//!            mremap MAP_FIXED ◄─── mmap ◄───────────────────── (shared, not inherited)
//!            let go                     munmap
//!
//! move_out                              fresh pages
//!            hold (wait on minor too)
//!            MADV_DONTNEED              pread ◄─────────────── pages
//!            mremap MAP_FIXED ◄──────── pages
//!            let go
//! ```
//!
//! `mremap` moves the page table entries under the lock of the address space, so that no thread writes to a page
//! that is being copied. Replacing the empty mapping is atomic as well; threads that wait in a fault retry and find
//! the new one.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::fs::{SeekFrom, seek};
use rustix::io::{Errno, pread, pwrite};
use rustix::mm::{Advice, MapFlags, MlockFlags, MprotectFlags, MremapFlags, ProtFlags};
use rustix::mm::{madvise, mlock, mlock_with, mmap, mmap_anonymous, mprotect, mremap_fixed, munlock, munmap};

use super::present;
use super::uffd::Userfaultfd;

/// What is looked at page by page, in bytes.
const LITTLE_BYTES: usize = 64 << 10;

/// What a mapping was told by `mlock` and `madvise`, and what moves along.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attributes {
    /// Readable, writable.
    pub access: (bool, bool),
    /// `mlock`, `MLOCK_ONFAULT`.
    pub locked: (bool, bool),
    /// `MADV_DONTFORK`
    pub dont_fork: bool,
    /// `MADV_DONTDUMP`
    pub dont_dump: bool,
    /// `MADV_HUGEPAGE`
    pub huge: bool,
    /// `MADV_NOHUGEPAGE`
    pub no_huge: bool,
    /// `MAP_NORESERVE`
    pub no_reserve: bool,
}

impl Attributes {
    /// Readable and writable, and nothing else was said.
    pub const PLAIN: Self = Self {
        access: (true, true),
        locked: (false, false),
        dont_fork: false,
        dont_dump: false,
        huge: false,
        no_huge: false,
        no_reserve: false,
    };
}

/// Moves `range`, which is private, anonymous and writable, into the file at `offset`, where the file is empty. On an
/// error everything is as it was, and the file may have content at `offset`. Without a userfaultfd the caller vouches
/// that no other thread touches the range.
pub fn move_in(
    range: Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    keeper: Option<&Userfaultfd>,
    pagemap: Option<BorrowedFd<'_>>,
    attributes: &Attributes,
) -> Result<(), Errno> {
    let (start, length) = (pointer(range.start), range.len());
    // An address to go to: without one the kernel takes a hint from a register that the wrapper leaves alone.
    // SAFETY: a new mapping disturbs nobody.
    let aside = unsafe {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        mmap_anonymous(ptr::null_mut(), length, ProtFlags::empty(), flags)
    }?;
    let held = keeper.map(|keeper| keeper.hold(range.clone())).transpose();
    let taken = held.and_then(|held| {
        let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
        // SAFETY: the content keeps its addresses: other threads wait for it, and this one does not touch it (see the
        // module `sys`). What is replaced is ours and empty.
        unsafe { mremap_fixed(start, length, length, flags, aside) }.map(|_| held)
    });
    let held = match taken {
        Ok(held) => held,
        Err(error) => {
            // SAFETY: empty, and nobody else knows the address.
            let _ = unsafe { munmap(aside, length) };
            return Err(error);
        }
    };
    let moved = copy_in(aside.addr()..aside.addr() + length, file, offset, pagemap)
        .and_then(|()| map_from_file(start, length, file, offset));
    if let Err(error) = moved {
        // The kernel can refuse this for lack of memory only, for a moment: there is nothing else to do than to try
        // again, since the program's memory is elsewhere.
        // SAFETY: the content goes back to its addresses.
        while unsafe { mremap_fixed(aside, length, length, MremapFlags::MAYMOVE, start) }.is_err() {
            rustix::thread::sched_yield();
        }
        return Err(error);
    }
    drop(held);
    // SAFETY: the content is in the file; nobody else knows the address.
    let _ = unsafe { munmap(aside, length) };
    apply(range, attributes);
    Ok(())
}

/// Maps the file over the empty pages at `start`. The kernel gives the mapping to no child: it is told so before the program's addresses
/// lead there, since another thread may make a child at any moment.
fn map_from_file(
    start: *mut c_void,
    length: usize,
    file: BorrowedFd<'_>,
    offset: u64,
) -> Result<*mut c_void, Errno> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping disturbs nobody.
    let fresh = unsafe { mmap(ptr::null_mut(), length, access, MapFlags::SHARED, file, offset) }?;
    // SAFETY: nobody else knows `fresh`. What it replaces is empty, and the file has its content.
    let moved = unsafe { madvise(fresh, length, Advice::LinuxDontFork) }
        .and_then(|()| unsafe { mremap_fixed(fresh, length, length, MremapFlags::MAYMOVE, start) });
    if moved.is_err() {
        // SAFETY: nobody else knows the address.
        let _ = unsafe { munmap(fresh, length) };
    }
    moved
}

/// Whether children have `range`, a mapping of the file, from now on; as before if there are too many mappings.
pub fn inherit(range: Range<usize>, inherited: bool) {
    let advice = match inherited {
        true => Advice::LinuxDoFork,
        false => Advice::LinuxDontFork,
    };
    // SAFETY: changes no content.
    let _ = unsafe { madvise(pointer(range.start), range.len(), advice) };
}

/// In a child after `fork`: takes memory away that it would share.
pub fn take_away(range: Range<usize>) {
    // SAFETY: the child has no right to it, and finds that there is none.
    let _ = unsafe { munmap(pointer(range.start), range.len()) };
}

/// Moves `range`, a shared mapping of the file from `offset` on, back to private anonymous memory. On an error
/// everything is as it was; it is `EINVAL` if the range is locked and `attributes` do not say so. `data` is a range of the file that is known to have no hole, kept from call to call: to look
/// for the next hole each time would take quadratic time. Nobody makes holes meanwhile.
pub fn move_out(
    range: Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    keeper: Option<&Userfaultfd>,
    attributes: &Attributes,
    data: &mut Range<u64>,
) -> Result<(), Errno> {
    let length = range.len();
    let mut flags = MapFlags::PRIVATE;
    flags.set(MapFlags::NORESERVE, attributes.no_reserve);
    // SAFETY: a new mapping disturbs nobody.
    let fresh =
        unsafe { mmap_anonymous(ptr::null_mut(), length, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
    let copy = |fresh| copy_out(file, offset, fresh, length, data);
    let moved = replace(range.clone(), keeper, attributes, fresh, copy);
    match moved {
        Ok(()) => apply(range, attributes),
        Err(_) => {
            if attributes.locked.0 {
                apply(range, attributes);
            }
            // SAFETY: nobody else knows the address.
            let _ = unsafe { munmap(fresh, length) };
        }
    }
    moved
}

/// The window of [`move_out`]: `copy` fills `fresh`, which then takes the place of `range`.
fn replace(
    range: Range<usize>,
    keeper: Option<&Userfaultfd>,
    attributes: &Attributes,
    fresh: *mut c_void,
    copy: impl FnOnce(*mut c_void) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let (start, length) = (pointer(range.start), range.len());
    let _held = keeper.map(|keeper| keeper.hold(range)).transpose()?;
    if attributes.locked.0 {
        // SAFETY: locking is no matter of memory safety. `MADV_DONTNEED` refuses locked pages.
        unsafe { munlock(start, length) }?;
    }
    // SAFETY: takes entries from the page table; the content stays in the file.
    unsafe { madvise(start, length, Advice::LinuxDontNeed) }?;
    copy(fresh)?;
    if attributes.access != (true, true) {
        // SAFETY: nobody else knows the address.
        unsafe { mprotect(fresh, length, protection(attributes)) }?;
    }
    // SAFETY: `fresh` has the content of what it replaces, which others wait for.
    unsafe { mremap_fixed(fresh, length, length, MremapFlags::MAYMOVE, start) }?;
    Ok(())
}

/// In a child after `fork`, where pages cannot be in transit because this very thread runs on them: makes `range` a
/// private copy in place, at once but backed by the file.
pub fn make_private(
    range: Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    attributes: &Attributes,
) -> Result<(), Errno> {
    let (start, length) = (pointer(range.start), range.len());
    let flags = MapFlags::PRIVATE | MapFlags::FIXED;
    // SAFETY: the new mapping has the same content: that of the file.
    unsafe {
        mmap(
            start,
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            flags,
            file,
            offset,
        )
    }?;
    // SAFETY: gives each page its own copy, without a change of content.
    unsafe { madvise(start, length, Advice::LinuxPopulateWrite) }?;
    apply(range, attributes);
    // SAFETY: the access that the program had given these pages.
    unsafe { mprotect(start, length, protection(attributes)) }
}

fn copy_in(
    aside: Range<usize>,
    file: BorrowedFd<'_>,
    offset: u64,
    pagemap: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    present::for_each_run(pagemap, aside.clone(), |run| {
        // SAFETY: the run lies in `aside`, which nobody else knows.
        let mut bytes = unsafe { std::slice::from_raw_parts(pointer(run.start).cast::<u8>(), run.len()) };
        let mut at = offset + (run.start - aside.start) as u64;
        while !bytes.is_empty() {
            let written = pwrite(file, bytes, at)?;
            if written == 0 {
                return Err(Errno::IO);
            }
            bytes = bytes.get(written..).unwrap_or_default();
            at += written as u64;
        }
        Ok(())
    })
}

/// Fills fresh memory with what the file has from `offset` on; holes stay untouched.
fn copy_out(
    file: BorrowedFd<'_>,
    offset: u64,
    fresh: *mut c_void,
    length: usize,
    data: &mut Range<u64>,
) -> Result<(), Errno> {
    let end = offset + length as u64;
    let mut at = offset;
    while at < end {
        if !data.contains(&at) {
            let Some(start) = next_data(file, at)?.filter(|start| *start < end) else {
                break;
            };
            // To find the next hole takes time for all data before it.
            let data_end = match length <= LITTLE_BYTES {
                true => start - start % page_bytes() + page_bytes(),
                false => seek(file, SeekFrom::Hole(start))?,
            };
            *data = start..data_end;
            at = start;
        }
        let run_end = data.end.min(end);
        while at < run_end {
            let (skip, rest) = ((at - offset) as usize, (run_end - at) as usize);
            // SAFETY: within `fresh`, which is `length` bytes long and which nobody else knows.
            let bytes = unsafe { std::slice::from_raw_parts_mut(fresh.cast::<u8>().add(skip), rest) };
            match pread(file, bytes, at)? {
                0 => return Err(Errno::IO),
                read => at += read as u64,
            }
        }
    }
    Ok(())
}

/// The first offset from `at` on that is not in a hole, if there is one.
pub fn next_data(file: BorrowedFd<'_>, at: u64) -> Result<Option<u64>, Errno> {
    match seek(file, SeekFrom::Data(at)) {
        Ok(start) => Ok(Some(start)),
        Err(Errno::NXIO) => Ok(None),
        Err(error) => Err(error),
    }
}

fn page_bytes() -> u64 {
    rustix::param::page_size() as u64
}

/// Gives a new mapping what its predecessor was told. Advice may be refused; it was taken before for the same range.
fn apply(range: Range<usize>, attributes: &Attributes) {
    let (start, length) = (pointer(range.start), range.len());
    let advice = [
        (attributes.dont_fork, Advice::LinuxDontFork),
        (attributes.dont_dump, Advice::LinuxDontDump),
        (attributes.huge, Advice::LinuxHugepage),
        (attributes.no_huge, Advice::LinuxNoHugepage),
    ];
    for (_, advice) in advice.into_iter().filter(|(wanted, _)| *wanted) {
        // SAFETY: none of these changes content.
        let _ = unsafe { madvise(start, length, advice) };
    }
    let _ = match attributes.locked {
        (false, _) => Ok(()),
        // SAFETY: locking is no matter of memory safety.
        (true, true) => unsafe { mlock_with(start, length, MlockFlags::ONFAULT) },
        // SAFETY: as above.
        (true, false) => unsafe { mlock(start, length) },
    };
}

fn protection(attributes: &Attributes) -> MprotectFlags {
    let mut protection = MprotectFlags::empty();
    protection.set(MprotectFlags::READ, attributes.access.0);
    protection.set(MprotectFlags::WRITE, attributes.access.1);
    protection
}

/// Addresses come from the process's own list of mappings.
fn pointer(address: usize) -> *mut c_void {
    ptr::with_exposed_provenance_mut(address)
}
