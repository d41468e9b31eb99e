//! On-chip memory (ibv_alloc_dm(3)): memory that is the RNIC's, which the program reaches by copies only.
//!
//! With an RNIC of software it is memory of the process like any other, which is adopted when it is registered: so it moves as
//! all memory does.

#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use rustix::mm::{MapFlags, ProtFlags};

use crate::context::{Context, busy};
use crate::error::VerbsError;

/// Allocations are page aligned, as their mappings are.
const MAX_LOG_ALIGN: u32 = 12;

/// A stretch of on-chip memory.
#[derive(Debug)]
pub struct Dm {
    context: Arc<Context>,
    memory: NonNull<u8>,
    length: u64,
    mapped: usize,
    /// Regions in it; changed under the context's lock.
    pub(crate) users: AtomicUsize,
}

// SAFETY: the RNIC reads and writes it in any case; it is only ever copied to and from, as plain bytes.
unsafe impl Send for Dm {}
// SAFETY: as above.
unsafe impl Sync for Dm {}

impl Dm {
    pub(crate) fn alloc(
        context: &Arc<Context>,
        length: u64,
        log_align: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = context.process();
        let _pass = process.control.enter();
        if context.is_dead() {
            return Err(context.dead("alloc_dm"));
        }
        if length == 0 || log_align > MAX_LOG_ALIGN {
            return Err(VerbsError::Invalid(format!(
                "on-chip memory of {length} bytes aligned to 2^{log_align}; there must be a byte, and at most 2^{MAX_LOG_ALIGN} can be kept"
            )));
        }
        let limit = context.device_attr().max_dm_size;
        let mut in_use = process.dm_bytes.lock();
        if length > limit.saturating_sub(*in_use) {
            return Err(VerbsError::Refused {
                verb: "alloc_dm",
                errno: libc::ENOMEM,
                message: format!("{length} bytes more than the {in_use} in use; a process may have {limit}"),
            });
        }
        let dm = Arc::new(Self::map(context, length)?);
        *in_use += length;
        drop(in_use);
        context.objects.lock().dms.push(dm.clone());
        process.changed();
        Ok(dm)
    }

    fn map(context: &Arc<Context>, length: u64) -> Result<Self, VerbsError> {
        let page = rustix::param::page_size() as u64;
        let mapped = length.next_multiple_of(page) as usize;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let memory = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        };
        let memory = memory.map_err(|errno| VerbsError::os("mmap", errno))?;
        let memory = NonNull::new(memory.cast::<u8>()).expect("mmap never returns the null page here");
        Ok(Self {
            context: context.clone(),
            memory,
            length,
            mapped,
            users: AtomicUsize::new(0),
        })
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Where this process has it mapped.
    pub(crate) fn address(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    pub(crate) fn check(&self, offset: u64, length: u64) -> Result<(), VerbsError> {
        if offset.checked_add(length).is_some_and(|end| end <= self.length) {
            return Ok(());
        }
        Err(VerbsError::Invalid(format!(
            "{length} bytes at {offset} are not inside on-chip memory of {} bytes",
            self.length
        )))
    }

    /// Copies into it (ibv_memcpy_to_dm(3)).
    pub fn copy_to(&self, offset: u64, bytes: &[u8]) -> Result<(), VerbsError> {
        self.check(offset, bytes.len() as u64)?;
        // SAFETY: inside of the mapping, as just checked; nobody has a reference to it.
        unsafe {
            self.memory
                .add(offset as usize)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len());
        }
        Ok(())
    }

    /// Copies out of it (ibv_memcpy_from_dm(3)).
    pub fn copy_from(&self, offset: u64, bytes: &mut [u8]) -> Result<(), VerbsError> {
        self.check(offset, bytes.len() as u64)?;
        // SAFETY: as above.
        unsafe {
            self.memory
                .add(offset as usize)
                .copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len());
        }
        Ok(())
    }

    /// Frees it; `EBUSY` while a region is in it.
    pub fn free(&self) -> Result<(), VerbsError> {
        let process = self.context.process();
        let _pass = process.control.enter();
        let object = || format!("on-chip memory of {} bytes", self.length);
        let mut objects = self.context.objects.lock();
        busy(&self.users, object)?;
        let position = objects.dms.iter().position(|dm| std::ptr::eq(&**dm, self));
        let position = position.ok_or_else(|| VerbsError::Gone { object: object() })?;
        objects.dms.swap_remove(position);
        drop(objects);
        *process.dm_bytes.lock() -= self.length;
        process.changed();
        Ok(())
    }
}

impl Drop for Dm {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nobody else has a pointer into it.
        let _ = unsafe { rustix::mm::munmap(self.memory.as_ptr().cast(), self.mapped) };
    }
}
