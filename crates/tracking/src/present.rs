//! Which pages of a process's private memory have content.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use crate::PAGE;
use crate::error::Error;
use crate::maps::{self, Mapping};
use crate::ranges::Ranges;
use crate::sys::uffd::{self, Wanted};

/// The bits of a page that is in memory, or swapped out, in an entry of `/proc/PID/pagemap`.
const THERE: u64 = 0b11 << 62;

/// Bytes of an entry.
const ENTRY: usize = 8;

/// The pages of a process's private memory without a file that are there, in memory or swapped out, as it is now. All that CRIU can
/// leave out of its images is among them.
pub fn present(pid: u32) -> Result<Ranges, Error> {
    let text = maps::read(pid)?;
    let pagemap = File::open(format!("/proc/{pid}/pagemap"));
    let pagemap = pagemap.map_err(Error::io("open the page map of a process"))?;
    let mut found = Ranges::default();
    for mapping in maps::parse(&text).filter(Mapping::is_anonymous) {
        if scan(&pagemap, &mapping.range, &mut found).is_err() {
            // A kernel before Linux 6.7.
            read(&pagemap, &mapping.range, &mut found)
                .map_err(Error::io("read the page map of a process"))?;
        }
    }
    Ok(found)
}

fn scan(pagemap: &File, range: &Range<u64>, found: &mut Ranges) -> std::io::Result<()> {
    uffd::scan(pagemap, [range.clone()], Wanted::All, |region| {
        found.insert(region.start..region.end);
    })
}

fn read(pagemap: &File, range: &Range<u64>, found: &mut Ranges) -> std::io::Result<()> {
    let mut buffer = vec![0; ENTRY * 8192];
    let mut at = range.start;
    while at < range.end {
        let pages = ((range.end - at) / PAGE).min((buffer.len() / ENTRY) as u64);
        let wanted = &mut buffer[..pages as usize * ENTRY];
        let read = pagemap.read_at(wanted, at / PAGE * ENTRY as u64)? / ENTRY;
        if read == 0 {
            // The memory is gone: the process ends.
            return Ok(());
        }
        let (entries, _) = wanted[..read * ENTRY].as_chunks::<ENTRY>();
        for entry in entries {
            if u64::from_ne_bytes(*entry) & THERE != 0 {
                found.insert(at..at + PAGE);
            }
            at += PAGE;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_what_was_touched_and_nothing_else() {
        const PAGES: u64 = 64;
        // So much the allocator gets from the kernel, which gives pages when they are touched; a huge page is larger.
        let mut memory = vec![0u8; ((PAGES + 1) * PAGE) as usize];
        let start = (memory.as_ptr() as u64).next_multiple_of(PAGE);
        let skipped = (start - memory.as_ptr() as u64) as usize;
        let touched = [0, 1, 7, PAGES - 1];
        for page in touched {
            memory[skipped + (page * PAGE) as usize] = 1;
        }
        let whole = start..start + PAGES * PAGE;
        let pages = touched.map(|page| start + page * PAGE..start + (page + 1) * PAGE);
        let wanted = Ranges::from_iter(pages);
        let found = present(std::process::id()).unwrap();
        assert_eq!(found.intersection(&Ranges::from_iter([whole.clone()])), wanted);
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let mut by_entries = Ranges::default();
        read(&pagemap, &whole, &mut by_entries).unwrap();
        assert_eq!(by_entries, wanted);
        drop(memory);
    }
}
