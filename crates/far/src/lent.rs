//! A file in memory that the other side reads, in place.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use verbatim_verbs::{Access, Mr};

use crate::buffer::{Domain, Exposed, Memory};
use crate::error::Error;

/// A file that the other side of a connection may read, and nobody may write that way. Nothing of it is copied: who reads it gets
/// what is in it at that moment.
///
/// On an RNIC that the kernel drives all of it is pinned, and what is a hole in it becomes memory.
#[derive(Debug)]
pub struct Lent {
    region: Arc<Mr>,
    // Behind the region: it is deregistered first.
    memory: Memory,
    _domain: Arc<Domain>,
}

impl Lent {
    pub(crate) fn register(domain: &Arc<Domain>, file: OwnedFd, length: u64) -> Result<Self, Error> {
        let there = rustix::fs::fstat(&file).map_err(Error::os("fstat"))?.st_size;
        let buffer = u64::try_from(there).unwrap_or(0);
        let bytes = usize::try_from(length).ok();
        let Some(bytes) = bytes.filter(|bytes| (1..=buffer).contains(&(*bytes as u64))) else {
            return Err(Error::Range {
                offset: 0,
                length,
                buffer,
            });
        };
        let memory = Memory::map_file(file, bytes)?;
        Ok(Self {
            region: memory.register(domain, Access::REMOTE_READ)?,
            memory,
            _domain: Arc::clone(domain),
        })
    }

    /// For the other side.
    pub fn exposed(&self) -> Exposed {
        Exposed {
            address: self.memory.address(),
            rkey: self.region.rkey(),
            length: self.memory.length(),
        }
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // Before its memory goes. An RNIC that is gone has no region any more.
        let _ = self.region.dereg();
    }
}
