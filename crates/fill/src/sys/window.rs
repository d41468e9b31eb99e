//! A part of a cache file, mapped for reading.

use std::fs::File;
use std::io;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// It is unmapped when it is dropped, and no child gets it.
#[derive(Debug)]
pub struct Window {
    address: *mut std::ffi::c_void,
    bytes: usize,
}

impl Window {
    /// Maps `bytes` of `file` from `offset` on, both in whole pages.
    pub fn new(file: &File, offset: u64, bytes: usize) -> io::Result<Self> {
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let address =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, file, offset) }?;
        let window = Self { address, bytes };
        // SAFETY: the range is this mapping.
        unsafe { rustix::mm::madvise(address, bytes, Advice::LinuxDontFork) }?;
        Ok(window)
    }

    /// Where in this process the byte at `offset` of the window lies. Only the kernel reads there.
    pub fn address(&self, offset: usize) -> usize {
        assert!(offset < self.bytes, "offset {offset} is outside of the window");
        self.address.addr() + offset
    }

    /// Makes page table entries for a part of it, so that a copy need not wait for them. That fails where pages cannot be
    /// read, which a copy says, too.
    pub fn populate(&self, offset: usize, bytes: usize) {
        assert!(offset <= self.bytes && bytes <= self.bytes - offset);
        // SAFETY: the range lies within this mapping, whose contents do not change.
        let _ = unsafe {
            libc::madvise(
                self.address.wrapping_byte_add(offset),
                bytes,
                libc::MADV_POPULATE_READ,
            )
        };
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody has a reference into it.
        let _ = unsafe { rustix::mm::munmap(self.address, self.bytes) };
    }
}
