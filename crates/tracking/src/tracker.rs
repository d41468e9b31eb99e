//! The tracker of one process.

use std::fs::File;
use std::ops::Range;

use crate::armed::Armed;
use crate::error::Error;
use crate::maps::{self, Mapping};
use crate::ranges::Ranges;
use crate::sys::uffd::{self, Region, WPALLOWED, WRITTEN, Wanted};

/// What a look found.
#[derive(Debug, Default)]
pub struct Look {
    /// Pages that were written since the look before, or are not known to be as they were then.
    pub written: Ranges,
}

/// The writes of one process are tracked. Dropping it ends that; it may be dropped whatever the process does.
#[derive(Debug)]
pub struct Tracker {
    armed: Armed,
    /// Mappings that are registered with our userfaultfd, by the last look.
    registered: Ranges,
}

impl Tracker {
    /// Begins to track a process. The first look finds all of its memory.
    pub fn arm(pid: u32) -> Result<Self, Error> {
        Ok(Self {
            armed: Armed::arm(pid)?,
            registered: Ranges::default(),
        })
    }

    /// What was written since the last look, while the process runs; all that is written from now on is found by the next.
    pub fn look(&mut self) -> Result<Look, Error> {
        let (text, pagemap) = self.armed.memory()?;
        self.registered = Ranges::default();
        let mut look = Look::default();
        for mapping in maps::parse(&text).filter(Mapping::is_anonymous) {
            if self.is_or_gets_registered(&pagemap, &mapping.range) {
                self.registered.insert(mapping.range.clone());
            }
            self.look_at(&pagemap, &mapping.range, &mut look.written)?;
        }
        Ok(look)
    }

    /// Registers a mapping that is not. False if it is somebody else's, or not there any more.
    ///
    /// The kernel takes our userfaultfd from a mapping that mremap(2) has moved, and from a neighbour that it was merged with.
    /// Pages of the neighbour then still bear the mark of protected pages, which writes do not remove; registered again, they would
    /// count as clean. So the marks are removed where a mapping is registered, and then all of it was written. A mapping that is
    /// registered is not registered again: if it loses the userfaultfd now, the scan that follows says so.
    fn is_or_gets_registered(&self, pagemap: &File, range: &Range<u64>) -> bool {
        let first = range.start..range.start + crate::PAGE;
        let mut is_registered = false;
        let scanned = uffd::scan(pagemap, [first], Wanted::Whole, |region| {
            is_registered |= region.categories & WPALLOWED != 0;
        });
        (scanned.is_ok() && is_registered)
            || (uffd::register(self.armed.uffd(), range).is_ok()
                && uffd::unprotect(self.armed.uffd(), range).is_ok())
    }

    fn look_at(&self, pagemap: &File, range: &Range<u64>, written: &mut Ranges) -> Result<(), Error> {
        let mut found = Ranges::default();
        let scanned = uffd::scan(pagemap, [range.clone()], Wanted::WrittenAndProtect, |region| {
            note(&mut found, region)
        });
        match scanned {
            Ok(()) => written.union(&found),
            // Not all of it is protected: nothing is known of it.
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                let all = uffd::scan(pagemap, [range.clone()], Wanted::All, |region| {
                    note(written, region)
                });
                all.map_err(Error::io("scan the page map of a process"))?;
            }
            Err(error) => return Err(Error::io("scan the page map of a process")(error)),
        }
        Ok(())
    }

    /// What was written since the last look, in a process that stands still. Nothing is protected or changed.
    pub fn last_look(&mut self) -> Result<Look, Error> {
        let (text, pagemap) = self.armed.memory()?;
        let mut look = Look::default();
        for mapping in maps::parse(&text).filter(Mapping::is_anonymous) {
            let range = mapping.range;
            let ours = Ranges::from_iter([range.clone()]);
            let known = self.registered.intersection(&ours).bytes() == ours.bytes();
            let scanned = uffd::scan(&pagemap, [range], Wanted::All, |region| {
                let is_clean = known && region.categories & (WPALLOWED | WRITTEN) == WPALLOWED;
                if !is_clean {
                    note(&mut look.written, region);
                }
            });
            scanned.map_err(Error::io("scan the page map of a process"))?;
        }
        Ok(look)
    }
}

fn note(ranges: &mut Ranges, region: Region) {
    ranges.insert(region.start..region.end);
}
