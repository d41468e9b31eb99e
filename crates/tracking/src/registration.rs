//! Which mappings are registered with a tracker's userfaultfd.
//!
//! The kernel takes the userfaultfd from a mapping that mremap(2) has moved, and from a neighbour that it is merged with there
//! (`mm/mremap.c`, `mm/userfaultfd.c`). Pages of the neighbour keep the mark of protected pages, and writes do not remove
//! it: registered again, they would count as clean. So
//!
//! - the marks are removed where a mapping is registered: all of its pages are written then;
//! - a mapping that is registered is not registered again. If it loses the userfaultfd just then, the scan that follows says so (EPERM).

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::PAGE;
use crate::ranges::Ranges;
use crate::sys::uffd::{self, WPALLOWED, Wanted};

/// The mappings of one process that are registered, by the last look.
#[derive(Debug, Default)]
pub struct Registration {
    registered: Ranges,
}

impl Registration {
    /// Registers these mappings, which come in order. Afterwards those that it knows ([`Registration::knows`]) are registered, or were
    /// a moment ago; the others are somebody else's, or not there any more: the errors of the kernel are of them.
    pub fn settle(
        &mut self,
        uffd: BorrowedFd<'_>,
        pagemap: &File,
        mappings: &[Range<u64>],
    ) -> Result<(), io::Error> {
        let mut registered = Ranges::default();
        let mut failed = None;
        let mut new: Vec<Range<u64>> = Vec::new();
        for mapping in mappings {
            match self.is_registered(pagemap, mapping)? {
                true => registered.insert(mapping.clone()),
                false => new.push(mapping.clone()),
            }
        }
        // Neighbours are registered in one step: while one is registered and the other is not, the kernel merges them no more, and who
        // moves both at once gets EFAULT.
        for neighbours in new.chunk_by(|one, next| one.end == next.start) {
            let whole = neighbours[0].start..neighbours[neighbours.len() - 1].end;
            if register(uffd, &whole).is_ok() {
                registered.insert(whole);
                continue;
            }
            for mapping in neighbours {
                match register(uffd, mapping) {
                    Ok(()) => registered.insert(mapping.clone()),
                    Err(error) => failed = Some(error),
                }
            }
        }
        self.registered = registered;
        failed.map_or(Ok(()), Err)
    }

    /// Whether all of a mapping was registered by the last look.
    pub fn knows(&self, mapping: &Range<u64>) -> bool {
        self.registered.covers(mapping)
    }

    /// Whether a mapping is registered since a look before: by its first page, since a mapping is registered as a whole.
    fn is_registered(&self, pagemap: &File, mapping: &Range<u64>) -> io::Result<bool> {
        let first = mapping.start..mapping.start + PAGE;
        let mut is_registered = false;
        if self.knows(&first) {
            uffd::scan_few(pagemap, &first, Wanted::Whole, |region| {
                is_registered |= region.categories & WPALLOWED != 0;
            })?;
        }
        Ok(is_registered)
    }
}

fn register(uffd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<()> {
    uffd::register(uffd, range)?;
    uffd::unprotect(uffd, range)
}
