//! What the tests share: mappings to play with, and an adopter on tmpfs.
#![allow(dead_code, reason = "each test uses a part of it")]

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};
use tempfile::TempDir;
use verbatim_adopt::{Adopter, Adoption, Backing, Options};

pub fn page() -> usize {
    rustix::param::page_size()
}

/// A folder on tmpfs where there is one.
pub fn mem_dir() -> TempDir {
    let shm = Path::new("/dev/shm");
    match shm.is_dir() {
        true => tempfile::tempdir_in(shm).unwrap(),
        false => tempfile::tempdir().unwrap(),
    }
}

/// An adopter for tests, which have other threads (those of the harness) that do not touch their memory.
pub fn adopter(dir: &TempDir, options: Options) -> Adopter {
    let adopter = Adopter::new(dir.path()).unwrap();
    adopter.set_options(options);
    adopter
}

/// Anonymous memory.
pub struct Region {
    start: usize,
    length: usize,
}

impl Region {
    pub fn new(pages: usize) -> Self {
        Self::with(pages, MapFlags::PRIVATE)
    }

    pub fn with(pages: usize, flags: MapFlags) -> Self {
        let length = pages * page();
        // SAFETY: a new mapping disturbs nobody.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        };
        Self {
            start: start.unwrap().expose_provenance(),
            length,
        }
    }

    pub fn address(&self) -> usize {
        self.start
    }

    pub fn length(&self) -> usize {
        self.length
    }

    pub fn pages(&self, pages: Range<usize>) -> Range<usize> {
        self.start + pages.start * page()..self.start + pages.end * page()
    }

    pub fn pointer(&self, offset: usize) -> *mut u8 {
        assert!(offset < self.length);
        std::ptr::with_exposed_provenance_mut(self.start + offset)
    }

    /// The word at a byte offset.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: within the mapping, which lives as long as `self`; aligned by the callers' choice of offsets.
        unsafe { AtomicU64::from_ptr(self.pointer(offset).cast()) }
    }

    /// Numbers all pages, each by `base` plus its index.
    pub fn number(&self, base: u64) {
        for index in 0..self.length / page() {
            self.word(index * page())
                .store(base + index as u64, Ordering::Relaxed);
        }
    }

    pub fn check_numbers(&self, base: u64) {
        for index in 0..self.length / page() {
            let number = self.word(index * page()).load(Ordering::Relaxed);
            assert_eq!(number, base + index as u64, "page {index}");
        }
    }

    pub fn unmap(&self, pages: Range<usize>) {
        let range = self.pages(pages);
        // SAFETY: the test does not touch these pages again.
        unsafe { munmap(std::ptr::with_exposed_provenance_mut(range.start), range.len()) }.unwrap();
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.unmap(0..self.length / page());
    }
}

pub fn adopt(adopter: &Adopter, range: Range<usize>) -> Adoption {
    adopter.adopt(range.start, range.len()).unwrap()
}

/// Which page of a region starts a segment, how many pages it has, and whether it is in the file.
pub fn shape(adoption: &Adoption, region: &Region) -> Vec<(usize, usize, bool)> {
    let number = |address: u64| (address as usize - region.address()) / page();
    adoption
        .segments
        .iter()
        .map(|(range, backing)| {
            let pages = number(range.end) - number(range.start);
            (number(range.start), pages, *backing != Backing::Process)
        })
        .collect()
}

/// The line of smaps about an address: permissions, and its `VmFlags`.
pub fn mapping_of(address: usize) -> (String, String) {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut header = "";
    for line in text.lines() {
        let bounds = line.split(' ').next().and_then(|range| range.split_once('-'));
        let bounds = bounds.and_then(|(start, end)| {
            Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
        });
        if let Some(bounds) = bounds {
            header = if bounds.contains(&address) { line } else { "" };
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| !header.is_empty()) {
            return (header.to_owned(), flags.trim().to_owned());
        }
    }
    panic!("{address:#x} is not mapped");
}

/// Whether this process may use a userfaultfd for all faults; says so if not.
pub fn has_full_rights() -> bool {
    let dir = mem_dir();
    let region = Region::new(1);
    let adoption = adopt(&adopter(&dir, Options::default()), region.pages(0..1));
    let full = matches!(adoption.segments[..], [(_, Backing::File { .. })]);
    if !full {
        eprintln!("skipped: no right to a userfaultfd that stops system calls too");
    }
    full
}
