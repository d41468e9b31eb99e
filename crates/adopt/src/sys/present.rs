//! Which pages of a range have content.

use std::ops::Range;
use std::os::fd::BorrowedFd;

use rustix::io::{Errno, pread};
use rustix::ioctl::{ioctl, opcode};

// `struct page_region`, `struct pm_scan_arg` and their bits: <linux/fs.h>, Linux 6.7.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

#[repr(C)]
struct PmScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGEMAP_SCAN: rustix::ioctl::Opcode = opcode::read_write::<PmScanArg>(b'f', 16);

/// Bits 63 and 62 of a pagemap entry: present, swapped (proc_pid_pagemap(5)).
const ENTRY_HAS_CONTENT: u64 = 0b11 << 62;

/// Calls `visit` for each run of pages of `range` that has content: present or swapped out, and not the shared page of
/// zeros where the kernel tells. Without a pagemap everything counts as content.
pub fn for_each_run(
    pagemap: Option<BorrowedFd<'_>>,
    range: Range<usize>,
    mut visit: impl FnMut(Range<usize>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let Some(pagemap) = pagemap else {
        return visit(range);
    };
    let mut start = range.start;
    while start < range.end {
        let mut regions = [PageRegion::default(); 32];
        let mut scan = PmScanArg {
            size: size_of::<PmScanArg>() as u64,
            flags: 0,
            start: start as u64,
            end: range.end as u64,
            walk_end: 0,
            vec: regions.as_mut_ptr().addr() as u64,
            vec_len: regions.len() as u64,
            max_pages: 0,
            category_inverted: PAGE_IS_PFNZERO,
            category_mask: PAGE_IS_PFNZERO,
            category_anyof_mask: PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
            return_mask: PAGE_IS_PRESENT,
        };
        let Some(found) = scan_once(pagemap, &mut scan) else {
            return by_entries(pagemap, start..range.end, visit);
        };
        for region in regions.iter().take(found) {
            visit(region.start as usize..region.end as usize)?;
        }
        if scan.walk_end as usize <= start {
            return Err(Errno::IO);
        }
        start = scan.walk_end as usize;
    }
    Ok(())
}

/// `None` if the kernel has no `PAGEMAP_SCAN`.
fn scan_once(pagemap: BorrowedFd<'_>, scan: &mut PmScanArg) -> Option<usize> {
    struct Scan<'a>(&'a mut PmScanArg);
    // SAFETY: the opcode and its argument are those of PAGEMAP_SCAN; the kernel writes to the argument and to at most
    // `vec_len` entries of `vec`, which the caller owns.
    unsafe impl rustix::ioctl::Ioctl for Scan<'_> {
        type Output = usize;
        const IS_MUTATING: bool = true;
        fn opcode(&self) -> rustix::ioctl::Opcode {
            PAGEMAP_SCAN
        }
        fn as_ptr(&mut self) -> *mut std::ffi::c_void {
            (&raw mut *self.0).cast()
        }
        unsafe fn output_from_ptr(
            found: rustix::ioctl::IoctlOutput,
            _: *mut std::ffi::c_void,
        ) -> rustix::io::Result<usize> {
            usize::try_from(found).map_err(|_| Errno::IO)
        }
    }
    // SAFETY: as above.
    unsafe { ioctl(pagemap, Scan(scan)) }.ok()
}

fn by_entries(
    pagemap: BorrowedFd<'_>,
    range: Range<usize>,
    mut visit: impl FnMut(Range<usize>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let page = rustix::param::page_size();
    let mut at = range.start;
    while at < range.end {
        let mut entries = [[0u8; 8]; 512];
        let wanted = ((range.end - at) / page).min(entries.len());
        let bytes = &mut entries.as_flattened_mut()[..wanted * 8];
        if pread(pagemap, bytes, (at / page * 8) as u64) != Ok(wanted * 8) {
            return visit(at..range.end);
        }
        let has_content = |index: usize| u64::from_ne_bytes(entries[index]) & ENTRY_HAS_CONTENT != 0;
        let mut index = 0;
        while index < wanted {
            let first = index;
            while index < wanted && has_content(index) == has_content(first) {
                index += 1;
            }
            if has_content(first) {
                visit(at + first * page..at + index * page)?;
            }
        }
        at += wanted * page;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn both_ways_find_the_pages_that_were_written() {
        let page = rustix::param::page_size();
        let length = 100 * page;
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping disturbs nobody.
        let map = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                access,
                rustix::mm::MapFlags::PRIVATE,
            )
        }
        .unwrap();
        for index in [3, 4, 5, 50, 99] {
            // SAFETY: within the mapping.
            unsafe { map.cast::<u8>().add(index * page).write(7) };
        }
        let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
        let range = map.addr()..map.addr() + length;
        let runs_of = |scan: &dyn Fn(&mut Vec<Range<usize>>)| {
            let mut runs = Vec::new();
            scan(&mut runs);
            runs
        };
        let push = |runs: &mut Vec<Range<usize>>, run: Range<usize>| {
            runs.push((run.start - range.start) / page..(run.end - range.start) / page);
            Ok(())
        };
        let fd = Some(pagemap.as_fd());
        let by_scan = runs_of(&|runs| for_each_run(fd, range.clone(), |run| push(runs, run)).unwrap());
        let entries =
            runs_of(&|runs| by_entries(pagemap.as_fd(), range.clone(), |run| push(runs, run)).unwrap());
        assert_eq!(by_scan, [3..6, 50..51, 99..100]);
        assert_eq!(entries, by_scan);
        // SAFETY: nobody uses it any more.
        unsafe { rustix::mm::munmap(map, length) }.unwrap();
    }
}
