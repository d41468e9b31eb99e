//! A whole file, mapped to be read by any thread.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rustix::mm::{MapFlags, ProtFlags};

use crate::sigbus::{self, Truncated};

/// A file, mapped from its beginning. Reading what is a hole on tmpfs stores a page of zeroes there: look for holes first
/// (`SEEK_DATA`).
#[derive(Debug)]
pub struct ReadOnly {
    base: NonNull<u8>,
    bytes: usize,
    /// Device and inode.
    file: (u64, u64),
    /// A page was missing: what stands in its place is nobody's.
    truncated: AtomicBool,
}

// SAFETY: the memory is only read, as bytes, and stays mapped as long as this lives.
unsafe impl Send for ReadOnly {}
// SAFETY: as above.
unsafe impl Sync for ReadOnly {}

impl ReadOnly {
    /// Maps all of a file that is not empty. Installs the process's handler of SIGBUS.
    pub fn map(file: &File) -> io::Result<Self> {
        sigbus::install();
        let metadata = file.metadata()?;
        let bytes = usize::try_from(metadata.len()).map_err(io::Error::other)?;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ,
                MapFlags::SHARED,
                file,
                0,
            )
        }?;
        Ok(Self {
            base: NonNull::new(base.cast()).ok_or_else(|| io::Error::other("a mapping at address 0"))?,
            bytes,
            file: (metadata.dev(), metadata.ino()),
            truncated: AtomicBool::new(false),
        })
    }

    /// Whether it is this file as long as it is now, and no page of it was missing so far.
    pub fn is_of(&self, file: &File) -> io::Result<bool> {
        let metadata = file.metadata()?;
        let same = self.file == (metadata.dev(), metadata.ino()) && self.bytes as u64 == metadata.len();
        Ok(same && !self.truncated.load(Relaxed))
    }

    /// Copies out of it, from `at` on; an error also where the file was shorter when it was mapped. Who writes to the file meanwhile is
    /// seen or not, byte by byte.
    pub fn read(&self, at: u64, out: &mut [u8]) -> Result<(), Truncated> {
        let inside = usize::try_from(at)
            .ok()
            .filter(|at| *at <= self.bytes && out.len() <= self.bytes - at);
        let at = inside.ok_or(Truncated)?;
        if self.truncated.load(Relaxed) {
            return Err(Truncated);
        }
        // SAFETY: inside the mapping.
        let from = unsafe { self.base.as_ptr().add(at) };
        let length = out.len();
        // SAFETY: the source is mapped, readable memory, which holds no Rust object; others may write it meanwhile, which is why it is
        // only copied as bytes. The destination is the caller's own, so they do not overlap.
        let copy = || unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), length) };
        sigbus::guarded(from as usize, length, copy).inspect_err(|_| self.truncated.store(true, Relaxed))
    }
}

impl Drop for ReadOnly {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; pages that the SIGBUS handler replaced are part of it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a whole mapping can be unmapped");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    const PAGE: u64 = 4096;

    fn file(pages: u64) -> File {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        for page in 0..pages {
            file.write_all_at(&[page as u8 + 1; PAGE as usize], page * PAGE)
                .unwrap();
        }
        file
    }

    #[test]
    fn what_is_written_meanwhile_is_read() {
        let file = file(3);
        let mapped = ReadOnly::map(&file).unwrap();
        let mut out = [0; 8];
        mapped.read(2 * PAGE - 4, &mut out).unwrap();
        assert_eq!(out, [2, 2, 2, 2, 3, 3, 3, 3]);
        file.write_all_at(&[9; 2], 2 * PAGE).unwrap();
        mapped.read(2 * PAGE - 4, &mut out).unwrap();
        assert_eq!(out, [2, 2, 2, 2, 9, 9, 3, 3]);
        mapped.read(3 * PAGE, &mut []).unwrap();
        assert!(mapped.is_of(&file).unwrap());
        file.set_len(4 * PAGE).unwrap();
        assert!(!mapped.is_of(&file).unwrap(), "it is longer now");
        assert!(!mapped.is_of(&self::file(3)).unwrap(), "another one");
    }

    #[test]
    fn what_is_cut_off_is_an_error_from_then_on_in_every_thread() {
        let file = file(3);
        let mapped = ReadOnly::map(&file).unwrap();
        file.set_len(PAGE).unwrap();
        let mut out = [0; 8];
        mapped.read(PAGE - 8, &mut out).unwrap();
        std::thread::scope(|scope| {
            // Used, so that the compiler leaves the copy there.
            let other = scope.spawn(|| mapped.read(PAGE - 4, std::hint::black_box(&mut [0; 8])));
            assert_eq!(other.join().unwrap(), Err(Truncated));
        });
        assert_eq!(mapped.read(0, &mut out), Err(Truncated));
        file.set_len(3 * PAGE).unwrap();
        assert!(!mapped.is_of(&file).unwrap(), "zeroes stand for a page of it");
    }

    #[test]
    fn nothing_behind_its_end_is_read() {
        let mapped = ReadOnly::map(&file(1)).unwrap();
        for at in [PAGE - 4, PAGE, u64::MAX] {
            assert_eq!(mapped.read(at, &mut [0; 8]), Err(Truncated), "{at}");
        }
        mapped.read(PAGE - 8, &mut [0; 8]).unwrap();
    }
}
