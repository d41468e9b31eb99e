//! The tracker of a file that a process maps and shares.

use std::fs::File;
use std::ops::Range;

use crate::armed::Armed;
use crate::error::Error;
use crate::maps::{self, MappedFile, Mapping};
use crate::ranges::Ranges;
use crate::sys::uffd::{self, PRESENT, SWAPPED, WPALLOWED, WRITTEN, Wanted};

/// What one process writes to a file of tmpfs through its shared mappings is tracked: the RAM of a virtual machine, for one.
/// Dropping it ends that; it may be dropped whatever the process does.
///
/// Who else writes to the file is not seen. Pages of such a file can leave the page tables of the process: what is in none of
/// them, not even as a page that is protected, counts as written.
#[derive(Debug)]
pub struct FileTracker {
    armed: Armed,
    file: MappedFile,
    /// Mappings that are registered with our userfaultfd, by the last look.
    registered: Ranges,
}

impl FileTracker {
    /// Begins to track what a process writes to a file. The first look finds all that is mapped of it, and what leaves the page
    /// tables just then is found by the second.
    pub fn arm(pid: u32, file: &File) -> Result<Self, Error> {
        Ok(Self {
            armed: Armed::arm(pid)?,
            file: MappedFile::of(file).map_err(Error::io("look at a file"))?,
            registered: Ranges::default(),
        })
    }

    /// What was written since the last look, in bytes from the file's beginning, while the process runs; all that is written from
    /// now on is found by the next.
    pub fn look(&mut self) -> Result<Ranges, Error> {
        let (text, pagemap) = self.armed.memory()?;
        self.registered = Ranges::default();
        let mut written = Ranges::default();
        for mapping in self.mappings(&text) {
            let registered = uffd::register(self.armed.uffd(), &mapping.range);
            registered.map_err(Error::io("protect a mapping"))?;
            self.registered.insert(mapping.range.clone());
            for wanted in [Wanted::AbsentAndProtect, Wanted::WrittenAndProtect] {
                let scanned = uffd::scan(&pagemap, &mapping.range, wanted, |region| {
                    written.insert(in_file(&mapping, region.start..region.end));
                });
                scanned.map_err(Error::io("scan the page map of a process"))?;
            }
        }
        Ok(written)
    }

    /// What was written since the last look, by a process that stands still. Nothing is protected or changed.
    pub fn last_look(&mut self) -> Result<Ranges, Error> {
        let (text, pagemap) = self.armed.memory()?;
        let mut written = Ranges::default();
        for mapping in self.mappings(&text) {
            let ours = Ranges::from_iter([mapping.range.clone()]);
            let known = self.registered.intersection(&ours).bytes() == ours.bytes();
            let scanned = uffd::scan(&pagemap, &mapping.range, Wanted::Whole, |region| {
                let protected = region.categories & (WPALLOWED | WRITTEN) == WPALLOWED;
                let is_clean = known && protected && region.categories & (PRESENT | SWAPPED) != 0;
                if !is_clean {
                    written.insert(in_file(&mapping, region.start..region.end));
                }
            });
            scanned.map_err(Error::io("scan the page map of a process"))?;
        }
        Ok(written)
    }

    /// The mappings of the file, none of which is private: what is written there stays in the process.
    fn mappings<'a>(&self, text: &'a str) -> Vec<Mapping<'a>> {
        let ours = |mapping: &Mapping| !mapping.is_private && mapping.file == self.file;
        maps::parse(text).filter(ours).collect()
    }
}

/// Where in the file a part of a mapping is.
fn in_file(mapping: &Mapping<'_>, range: Range<u64>) -> Range<u64> {
    let offset = |address: u64| address - mapping.range.start + mapping.offset;
    offset(range.start)..offset(range.end)
}
