//! Registered memory that the RNIC may change at any time: it is only ever copied to and from.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use verbatim_verbs::{Access, Context, Mr, Pd};

use crate::error::Error;
use crate::opened::Opened;

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Memory of this process: private and anonymous, or of a file in memory.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    length: usize,
    file: Option<OwnedFd>,
}

// SAFETY: plain bytes, which the RNIC changes in any case; they are only ever copied to and from.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn map(length: usize) -> Result<Self, Error> {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, ACCESS, MapFlags::PRIVATE) };
        Ok(Self::at(start.map_err(Error::os("mmap"))?, length, None))
    }

    /// All of it is in memory from now on, in huge pages where the kernel has some for it, and is never swapped out.
    fn map_locked(length: usize) -> Result<Self, Error> {
        use rustix::mm::{Advice, madvise, mlock, mmap};
        let file = rustix::fs::memfd_create("verbatim-far", MemfdFlags::CLOEXEC);
        let file = file.map_err(Error::os("memfd_create"))?;
        rustix::fs::ftruncate(&file, length as u64).map_err(Error::os("ftruncate"))?;
        // SAFETY: as in `map`.
        let start = unsafe { mmap(std::ptr::null_mut(), length, ACCESS, MapFlags::SHARED, &file, 0) };
        let memory = Self::at(start.map_err(Error::os("mmap"))?, length, Some(file));
        let start = memory.start.as_ptr().cast();
        // SAFETY: the whole mapping; a hint, which changes no content.
        let _ = unsafe { madvise(start, length, Advice::LinuxHugepage) };
        // SAFETY: as above. Where there is no memory for it this is an error, and a touch would end the process.
        unsafe { madvise(start, length, Advice::LinuxPopulateWrite) }
            .map_err(Error::os("madvise(MADV_POPULATE_WRITE)"))?;
        // SAFETY: as above.
        unsafe { mlock(start, length) }.map_err(Error::os("mlock"))?;
        Ok(memory)
    }

    /// A file of a tmpfs, or a memfd, which is at least so long and stays so: it can be read.
    pub(crate) fn map_file(file: OwnedFd, length: usize) -> Result<Self, Error> {
        // SAFETY: a new mapping at an address that the kernel chooses. What the file does not have is never touched by this process.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        Ok(Self::at(start.map_err(Error::os("mmap"))?, length, Some(file)))
    }

    /// Where it is in this process.
    pub(crate) fn address(&self) -> u64 {
        self.start.as_ptr() as u64
    }

    /// Bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length as u64
    }

    /// Registers all of it.
    pub(crate) fn register(&self, domain: &Domain, access: Access) -> Result<Arc<Mr>, Error> {
        let (address, length) = (self.address(), self.length());
        let region = match &self.file {
            Some(file) => domain.pd.reg_file((file.as_fd(), 0), (address, length), access),
            None => domain.pd.reg_mr(address, length, address, access),
        };
        region.map_err(Error::verbs("a buffer cannot be registered"))
    }

    fn at(start: *mut std::ffi::c_void, length: usize, file: Option<OwnedFd>) -> Self {
        let start = NonNull::new(start.cast()).expect("mmap never returns the null page here");
        Self { start, length, file }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing refers to any more.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// What a connection's queue pair can reach, as long as one of its buffers lives.
#[derive(Debug)]
pub(crate) struct Domain {
    pd: Arc<Pd>,
    opened: Arc<Opened>,
}

impl Domain {
    pub(crate) fn new(opened: Arc<Opened>) -> Result<Arc<Self>, Error> {
        let pd = opened.context.alloc_pd();
        let pd = pd.map_err(Error::verbs("a connection cannot be made"))?;
        Ok(Arc::new(Self { pd, opened }))
    }

    pub(crate) fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.opened.context
    }

    pub(crate) fn gid_index(&self) -> u8 {
        self.opened.gid_index
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // An RNIC that is gone has none any more.
        let _ = self.pd.dealloc();
    }
}

/// Registered memory of a connection.
#[derive(Debug)]
pub struct Buffer {
    region: Arc<Mr>,
    memory: Arc<Memory>,
    _domain: Arc<Domain>,
}

/// What the other side must know of a buffer to read and write it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exposed {
    /// Its address.
    pub address: u64,
    /// Its remote key.
    pub rkey: u32,
    /// Bytes.
    pub length: u64,
}

impl Buffer {
    pub(crate) fn register(domain: &Arc<Domain>, length: usize) -> Result<Arc<Self>, Error> {
        let page = rustix::param::page_size();
        let memory = Memory::map(length.max(1).next_multiple_of(page))?;
        Self::over(domain, Arc::new(memory))
    }

    pub(crate) fn register_locked(domain: &Arc<Domain>, length: usize) -> Result<Arc<Self>, Error> {
        let page = rustix::param::page_size();
        let memory = Memory::map_locked(length.max(1).next_multiple_of(page))?;
        Self::over(domain, Arc::new(memory))
    }

    /// The same memory as another buffer's, for another connection.
    pub(crate) fn share(&self, domain: &Arc<Domain>) -> Result<Arc<Self>, Error> {
        Self::over(domain, Arc::clone(&self.memory))
    }

    fn over(domain: &Arc<Domain>, memory: Arc<Memory>) -> Result<Arc<Self>, Error> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        Ok(Arc::new(Self {
            region: memory.register(domain, access)?,
            memory,
            _domain: Arc::clone(domain),
        }))
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.memory.length()
    }

    /// For the other side.
    pub fn exposed(&self) -> Exposed {
        Exposed {
            address: self.memory.address(),
            rkey: self.region.rkey(),
            length: self.length(),
        }
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// Copies into it.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check(offset, bytes.len() as u64)?;
        // SAFETY: inside of the mapping, as just checked; nobody has a reference to it.
        unsafe {
            self.memory
                .start
                .add(offset as usize)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
        }
        Ok(())
    }

    /// Copies out of it.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.check(offset, bytes.len() as u64)?;
        // SAFETY: as above.
        unsafe {
            self.memory
                .start
                .add(offset as usize)
                .copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len());
        }
        Ok(())
    }

    /// An error unless the range is in it.
    pub(crate) fn check(&self, offset: u64, length: u64) -> Result<(), Error> {
        check(self.length(), offset, length)
    }
}

impl Exposed {
    /// An error unless the range is in it.
    pub(crate) fn check(&self, offset: u64, length: u64) -> Result<(), Error> {
        check(self.length, offset, length)
    }
}

fn check(buffer: u64, offset: u64, length: u64) -> Result<(), Error> {
    match offset.checked_add(length).is_some_and(|end| end <= buffer) {
        true => Ok(()),
        false => Err(Error::Range {
            offset,
            length,
            buffer,
        }),
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Before its memory goes. An RNIC that is gone has no region any more.
        let _ = self.region.dereg();
    }
}
