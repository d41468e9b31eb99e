//! Which mappings are registered with a tracker's userfaultfd.
//!
//! The kernel takes the userfaultfd from a mapping that mremap(2) has moved, and from a neighbour that it is merged with there
//! (`mm/mremap.c`, `mm/userfaultfd.c`). Pages of the neighbour keep the mark of protected pages, and writes do not remove
//! it: registered again, they would count as clean. So
//!
//! - the marks are removed where a mapping is registered: all of its pages are written then;
//! - a mapping that is registered is not registered again. If it loses the userfaultfd just then, the scan that follows says so (EPERM).
//!
//! Memory of which one part is registered and the other is not is two mappings, and mremap(2) across both gives EFAULT. So the process
//! stands still while its new mappings are read and registered.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::time::Duration;

use crate::PAGE;
use crate::armed::Armed;
use crate::error::Error;
use crate::maps::Area;
use crate::ranges::Ranges;
use crate::still::while_still;
use crate::sys::uffd::{self, WPALLOWED, Wanted};

/// Who does not stand still within this time runs on.
const STILL_LIMIT: Duration = Duration::from_millis(20);

/// More new mappings than this are registered while the process runs: each takes some microseconds.
const MOST_STILL: usize = 512;

/// A process with more mappings than this runs on while new ones are registered: to read them takes some microseconds each.
const MOST_MAPPINGS: usize = 4096;

/// The mappings of one process that are registered, by the last look.
#[derive(Debug, Default)]
pub struct Registration {
    registered: Ranges,
}

/// What a look found of mappings.
#[derive(Debug)]
pub struct Settled {
    /// Those that are looked at, in the order of their addresses.
    pub mappings: Vec<Area>,
    /// Why some are not registered: they are somebody else's, or not there any more.
    pub failed: Option<io::Error>,
}

impl Registration {
    /// Registers those of a process's mappings that `of` finds in the text of its `maps`, in order. Afterwards those that are known
    /// ([`Registration::knows`]) are registered, or were a moment ago.
    pub fn settle(
        &mut self,
        armed: &Armed,
        text: &str,
        pagemap: &File,
        of: impl Fn(&str) -> Vec<Area> + Sync,
    ) -> Result<Settled, Error> {
        let mut mappings = of(text);
        let mut new = self.unregistered(pagemap, &mappings)?;
        let mut registered = Vec::new();
        if new.len() > MOST_STILL {
            registered.extend(register_all(armed, &new));
            (mappings, new) = self.again(armed, pagemap, &of, &registered)?;
        }
        if mappings.len() > MOST_MAPPINGS {
            registered.extend(register_all(armed, &new));
        } else if !new.is_empty() {
            let still = while_still(armed.pid(), STILL_LIMIT, || {
                let (mappings, new) = self.again(armed, pagemap, &of, &registered)?;
                let more = register_all(armed, &new);
                Ok((mappings, more))
            });
            match still {
                Ok((seen, more)) => {
                    mappings = seen;
                    registered.extend(more);
                }
                // It does not stand still.
                Err(_) => registered.extend(register_all(armed, &new)),
            }
        }
        let mut failed = None;
        let mut fresh = Ranges::default();
        for (range, done) in registered {
            match done.and_then(|()| uffd::unprotect(armed.uffd(), &range)) {
                Ok(()) => fresh.insert(range),
                Err(error) => failed = Some(error),
            }
        }
        let mut all = Ranges::default();
        for Area { range, .. } in &mappings {
            if fresh.covers(range) || self.is_registered(pagemap, range)? {
                all.insert(range.clone());
            }
        }
        self.registered = all;
        Ok(Settled { mappings, failed })
    }

    /// Whether all of a mapping was registered by the last look.
    pub fn knows(&self, mapping: &Range<u64>) -> bool {
        self.registered.covers(mapping)
    }

    /// The mappings that there are now, and which of them are new beside those that were registered a moment ago.
    fn again(
        &self,
        armed: &Armed,
        pagemap: &File,
        of: impl Fn(&str) -> Vec<Area>,
        registered: &[(Range<u64>, io::Result<()>)],
    ) -> Result<(Vec<Area>, Vec<Range<u64>>), Error> {
        let mappings = of(&armed.mappings()?);
        let mut done = Ranges::default();
        for (range, result) in registered {
            if result.is_ok() {
                done.insert(range.clone());
            }
        }
        let mut new = self.unregistered(pagemap, &mappings)?;
        new.retain(|mapping| !done.covers(mapping));
        Ok((mappings, new))
    }

    /// Those that are not registered.
    fn unregistered(&self, pagemap: &File, mappings: &[Area]) -> Result<Vec<Range<u64>>, Error> {
        let mut new = Vec::new();
        for Area { range, .. } in mappings {
            if !self.is_registered(pagemap, range)? {
                new.push(range.clone());
            }
        }
        Ok(new)
    }

    /// Whether a mapping is registered since a look before: by its first page, since a mapping is registered as a whole.
    fn is_registered(&self, pagemap: &File, mapping: &Range<u64>) -> Result<bool, Error> {
        let first = mapping.start..mapping.start + PAGE;
        let mut is_registered = false;
        if self.knows(&first) {
            let scanned = uffd::scan_few(pagemap, &first, Wanted::Whole, |region| {
                is_registered |= region.categories & WPALLOWED != 0;
            });
            scanned.map_err(Error::io("scan the page map of a process"))?;
        }
        Ok(is_registered)
    }
}

/// Registers mappings, neighbours in one step, and says what became of each range.
fn register_all(armed: &Armed, mappings: &[Range<u64>]) -> Vec<(Range<u64>, io::Result<()>)> {
    let mut all = Vec::new();
    for neighbours in mappings.chunk_by(|one, next| one.end == next.start) {
        let whole = neighbours[0].start..neighbours[neighbours.len() - 1].end;
        match uffd::register(armed.uffd(), &whole) {
            Ok(()) => all.push((whole, Ok(()))),
            Err(_) => {
                let each = neighbours.iter();
                all.extend(each.map(|mapping| (mapping.clone(), uffd::register(armed.uffd(), mapping))));
            }
        }
    }
    all
}
