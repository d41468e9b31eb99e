//! Memory that an RNIC reaches, mapped for a while.

#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsFd;
use std::ptr::{self, NonNull};

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use verbatim_channel::MrRecord;

use crate::error::VerbsError;

const PAGE: u64 = 4096;

/// Pages of a region, as many as it touches in its program.
pub struct Mapped {
    base: NonNull<std::ffi::c_void>,
    bytes: usize,
    /// Where in its page the region begins.
    within: u64,
}

impl Mapped {
    /// Maps the memory of a region: the pages of `file` that it lies in there, and private ones elsewhere.
    pub fn new(mr: &MrRecord, file: Option<&File>) -> Result<Self, VerbsError> {
        let start = mr.address & !(PAGE - 1);
        let end = mr
            .address
            .checked_add(mr.length)
            .and_then(|end| end.checked_next_multiple_of(PAGE))
            .ok_or_else(|| VerbsError::Invalid("memory beyond the end of the address space".to_owned()))?;
        // An empty region has an address all the same.
        let bytes = usize::try_from((end - start).max(PAGE)).unwrap_or(usize::MAX);
        let mut this = Self::private(bytes)?;
        this.within = mr.address - start;
        let Some(file) = file else { return Ok(this) };
        for segment in &mr.segments {
            let Some(offset) = segment.offset else { continue };
            let from = segment.address & !(PAGE - 1);
            let to = (segment.address + segment.length).next_multiple_of(PAGE);
            // What is in the file is whole pages of the program's.
            let offset = offset - (segment.address - from);
            if from < start || to > end {
                return Err(VerbsError::Invalid("a segment outside of its region".to_owned()));
            }
            // SAFETY: within the mapping that was just made, which nobody uses yet.
            let placed = unsafe {
                mmap(
                    this.base.as_ptr().byte_add((from - start) as usize),
                    (to - from) as usize,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::SHARED | MapFlags::FIXED,
                    file.as_fd(),
                    offset,
                )
            };
            placed.map_err(|errno| VerbsError::os("mmap of the memory file", errno))?;
        }
        Ok(this)
    }

    /// Private pages.
    pub fn private(bytes: usize) -> Result<Self, VerbsError> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping where nothing is.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), bytes, rights, MapFlags::PRIVATE) };
        let base = base.map_err(|errno| VerbsError::os("mmap", errno))?;
        Ok(Self {
            base: NonNull::new(base).expect("nothing is mapped at address 0"),
            bytes,
            within: 0,
        })
    }

    /// Sets `count` bytes from `at` on, byte by byte as an RNIC may read them meanwhile.
    pub fn set(&self, at: usize, count: usize, byte: impl Fn(usize) -> u8) {
        assert!(at + count <= self.bytes);
        for index in 0..count {
            // SAFETY: within the mapping.
            unsafe {
                self.base
                    .as_ptr()
                    .cast::<u8>()
                    .add(at + index)
                    .write_volatile(byte(index))
            };
        }
    }

    /// The first of `count` bytes from `at` on that is another one.
    pub fn differs(&self, at: usize, count: usize, byte: impl Fn(usize) -> u8) -> Option<usize> {
        assert!(at + count <= self.bytes);
        (0..count).find(|index| {
            // SAFETY: within the mapping.
            let there = unsafe { self.base.as_ptr().cast::<u8>().add(at + index).read_volatile() };
            there != byte(*index)
        })
    }

    /// Where the region begins.
    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64 + self.within
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody has a reference into it.
        let _ = unsafe { munmap(self.base.as_ptr(), self.bytes) };
    }
}
