//! A device's pages, kept in the page cache: a kernel may drop pages that it calls clean at any time.

use std::fs::File;
use std::path::Path;

/// Pages that stay in the page cache until this is dropped.
pub struct Pinned {
    start: *mut std::ffi::c_void,
    length: usize,
}

impl Pinned {
    /// The first `length` bytes of a device or file, which are read if necessary.
    pub fn of(path: &Path, length: usize) -> Self {
        let file = File::open(path).expect("it can be read");
        let (read, shared) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice, which nobody reads or writes.
        let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, read, shared, &file, 0) };
        let start = start.expect("it is mapped");
        // SAFETY: the mapping is ours, and has that length.
        unsafe { rustix::mm::mlock(start, length) }.expect("its pages can be locked");
        Self { start, length }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing has a reference into it.
        let _ = unsafe { rustix::mm::munmap(self.start, self.length) };
    }
}
