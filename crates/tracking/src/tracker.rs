//! The tracker of one process.

use std::fs::File;
use std::ops::Range;

use crate::armed::Armed;
use crate::error::Error;
use crate::maps::{self, Mapping};
use crate::ranges::Ranges;
use crate::registration::Registration;
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
    registration: Registration,
}

impl Tracker {
    /// Begins to track a process. The first look finds all of its memory.
    pub fn arm(pid: u32) -> Result<Self, Error> {
        Ok(Self {
            armed: Armed::arm(pid)?,
            registration: Registration::default(),
        })
    }

    /// What was written since the last look, while the process runs; all that is written from now on is found by the next.
    pub fn look(&mut self) -> Result<Look, Error> {
        let (text, pagemap) = self.armed.memory()?;
        let of = |text: &str| {
            let anonymous = maps::parse(text).filter(Mapping::is_anonymous);
            anonymous.map(|mapping| mapping.area()).collect()
        };
        let settled = self.registration.settle(&self.armed, &text, &pagemap, of)?;
        let mut look = Look::default();
        for area in &settled.mappings {
            self.look_at(&pagemap, &area.range, &mut look.written)?;
        }
        Ok(look)
    }

    fn look_at(&self, pagemap: &File, range: &Range<u64>, written: &mut Ranges) -> Result<(), Error> {
        let mut found = Ranges::default();
        let scanned = match self.registration.knows(range) {
            true => uffd::scan(pagemap, [range.clone()], Wanted::WrittenAndProtect, |region| {
                note(&mut found, region)
            }),
            false => Err(rustix::io::Errno::PERM.into()),
        };
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
            let known = self.registration.knows(&range);
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
