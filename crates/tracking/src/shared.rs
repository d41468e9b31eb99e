//! The tracker of a file that a process maps and shares.

use std::fs::File;
use std::io;
use std::ops::Range;

use crate::PAGE;
use crate::armed::Armed;
use crate::error::Error;
use crate::maps::{self, Area, MappedFile};
use crate::ranges::Ranges;
use crate::registration::Registration;
use crate::sys::uffd::{self, PRESENT, SWAPPED, WPALLOWED, WRITTEN, Wanted};

/// What one process writes to a file of tmpfs through its shared mappings is tracked: the RAM of a virtual machine, for one.
/// Dropping it ends that; it may be dropped whatever the process does.
///
/// Who else writes to the file is not seen. Pages of such a file can leave the page tables of the process: what is in none of
/// them, not even as a page that is protected, counts as written, if the file has memory there. A hole is nothing that was written, and the kernel is
/// not asked to note anything for its pages, of which a virtual machine can have many.
#[derive(Debug)]
pub struct FileTracker {
    armed: Armed,
    file: MappedFile,
    registration: Registration,
}

impl FileTracker {
    /// Begins to track what a process writes to a file. The first look finds all that is mapped of it, and what leaves the page
    /// tables just then is found by the second.
    pub fn arm(pid: u32, file: &File) -> Result<Self, Error> {
        Ok(Self {
            armed: Armed::arm(pid)?,
            file: MappedFile::of(file).map_err(Error::io("look at a file"))?,
            registration: Registration::default(),
        })
    }

    /// What was written since the last look, in bytes from the file's beginning, while the process runs; all that is written from
    /// now on is found by the next. `data` is where the file had memory at some time since the look before, or before the first: what has come since,
    /// and is in no page table any more, is found by a later look that knows of it, or by the last.
    pub fn look(&mut self, data: &Ranges) -> Result<Ranges, Error> {
        let (text, pagemap) = self.armed.memory()?;
        let file = self.file;
        let of = |text: &str| mappings(text, file).collect();
        let settled = self.registration.settle(&self.armed, &text, &pagemap, of)?;
        if let Some(error) = settled.failed {
            return Err(Error::io("protect a mapping")(error));
        }
        let mut written = Ranges::default();
        for area in &settled.mappings {
            let scanned = match self.registration.knows(&area.range) {
                true => look_at(&pagemap, area, data, &mut written),
                false => Err(rustix::io::Errno::PERM.into()),
            };
            match scanned {
                Ok(()) => {}
                // Not all of it is protected: nothing is known of it.
                Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                    written.insert(in_file(area, area.range.clone()));
                }
                Err(error) => return Err(Error::io("scan the page map of a process")(error)),
            }
        }
        Ok(written)
    }

    /// What was written since the last look, by a process that stands still. Nothing is protected or changed. `data` is where the file has memory.
    pub fn last_look(&mut self, data: &Ranges) -> Result<Ranges, Error> {
        let (text, pagemap) = self.armed.memory()?;
        let mut written = Ranges::default();
        for area in mappings(&text, self.file) {
            let known = self.registration.knows(&area.range);
            let scanned = uffd::scan(&pagemap, [area.range.clone()], Wanted::Whole, |region| {
                let protected = region.categories & (WPALLOWED | WRITTEN) == WPALLOWED;
                let is_clean = known && protected && region.categories & (PRESENT | SWAPPED) != 0;
                if !is_clean {
                    written.insert(in_file(&area, region.start..region.end));
                }
            });
            scanned.map_err(Error::io("scan the page map of a process"))?;
        }
        Ok(written.intersection(data))
    }
}

/// The mappings of a file in the text of `maps`, none of which is private: what is written there stays in the process.
fn mappings(text: &str, file: MappedFile) -> impl Iterator<Item = Area> {
    let ours = maps::parse(text).filter(move |mapping| !mapping.is_private && mapping.file == file);
    ours.map(|mapping| mapping.area())
}

/// Finds what was written in a mapping, and protects it.
fn look_at(pagemap: &File, area: &Area, data: &Ranges, written: &mut Ranges) -> io::Result<()> {
    let whole = Ranges::from_iter([area.range.clone()]);
    for (wanted, ranges) in [
        (Wanted::AbsentAndProtect, in_tables(area, data)),
        (Wanted::WrittenAndProtect, whole),
    ] {
        uffd::scan(pagemap, ranges.iter(), wanted, |region| {
            written.insert(in_file(area, region.start..region.end));
        })?;
    }
    Ok(())
}

/// Bytes that the entries of one page table are about.
const TABLE: u64 = 512 * PAGE;

/// Where in a mapping parts of its file are, rounded to whole page tables: so there are few of them, however many holes there are between pages.
fn in_tables(mapping: &Area, data: &Ranges) -> Ranges {
    let Range { start, end } = mapping.range;
    let in_file = mapping.offset..mapping.offset + (end - start);
    let ours = Ranges::from_iter([in_file]);
    let parts = data.intersection(&ours);
    let address = |offset: u64| offset - mapping.offset + start;
    let tables = parts.iter().map(|part| {
        let first = address(part.start) / TABLE * TABLE;
        let last = address(part.end).next_multiple_of(TABLE);
        first.max(start)..last.min(end)
    });
    tables.collect()
}

/// Where in the file a part of a mapping is.
fn in_file(mapping: &Area, range: Range<u64>) -> Range<u64> {
    let offset = |address: u64| address - mapping.range.start + mapping.offset;
    offset(range.start)..offset(range.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_file_are_found_in_a_mapping_by_page_tables() {
        // It begins and ends within tables, and in the middle of its file.
        let start = 100 * TABLE + 3 * PAGE;
        let mapping = Area {
            range: start..start + 4 * TABLE,
            offset: 7 * PAGE,
        };
        let of = |parts: &[(u64, u64)]| {
            let parts = parts.iter().map(|&(start, end)| start..end).collect();
            let found = in_tables(&mapping, &parts);
            found
                .iter()
                .map(|range| (range.start, range.end))
                .collect::<Vec<_>>()
        };
        let (end, in_file) = (start + 4 * TABLE, mapping.offset + 4 * TABLE);
        assert!(of(&[]).is_empty());
        assert!(of(&[(0, 7 * PAGE), (in_file, 99 * TABLE)]).is_empty());
        assert_eq!(of(&[(0, 8 * PAGE)]), [(start, 101 * TABLE)]);
        let page = |number: u64| ((7 + number) * PAGE, (8 + number) * PAGE);
        // Neighbours in one table are one.
        assert_eq!(of(&[page(600), page(700)]), [(101 * TABLE, 102 * TABLE)]);
        assert_eq!(
            of(&[page(0), page(2047)]),
            [(start, 101 * TABLE), (104 * TABLE, end)]
        );
        assert_eq!(of(&[(0, u64::MAX)]), [(start, end)]);
    }
}
