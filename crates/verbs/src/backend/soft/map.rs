//! The arena: the one place where the RNIC's memory becomes ring ends.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags};
use verbatim_device::layout::{CONTEXT_BYTES, ContextPage, CqLayout, QpLayout, RecvLayout, SIGNS_OFFSET};
use verbatim_device::ring::{CqConsumer, Doorbell, RecvProducer, SendProducer, Signs};

use crate::backend::{CqPlace, QpPlace, SrqPlace};
use crate::held;

/// A mapped arena and the eventfd that wakes its RNIC. Ring ends keep an `Arc` of it.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    wake: OwnedFd,
    doorbell: Doorbell,
    signs: Signs,
    /// A child of this process shall have neither the memory nor the eventfd. Forgotten before they go.
    held: Option<[held::Held; 2]>,
}

// SAFETY: the memory is shared with another process in any case; what is in it is reached through the ring ends, each
// of which has one owner, and through the doorbell, which is atomics.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps the RNIC's memory.
    pub fn map(memory: &OwnedFd, bytes: u64, wake: OwnedFd) -> io::Result<Self> {
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        if bytes < CONTEXT_BYTES || rustix::fs::fstat(memory)?.st_size as u64 != bytes {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the RNIC's memory is not of {bytes} bytes as it says"),
            ));
        }
        // SAFETY: a new mapping of a file that is as long as that, at an address that the kernel chooses.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                memory,
                0,
            )?
        };
        let base = NonNull::new(base.cast::<u8>()).expect("mmap never returns the null page here");
        // SAFETY: the context page is at the start of the arena, which is longer, and stays mapped as long as self,
        // which nobody uses the doorbell without.
        let doorbell = unsafe { Doorbell::new(base.cast::<ContextPage>()) };
        // SAFETY: as above; they lie behind the context page, in front of the first queue.
        let signs = unsafe { Signs::new(base.add(SIGNS_OFFSET as usize).cast()) };
        Ok(Self {
            held: Some([
                held::hold_mapping(base.as_ptr() as usize, length),
                held::hold_fd(wake.as_fd()),
            ]),
            base,
            bytes: length,
            wake,
            doorbell,
            signs,
        })
    }

    /// `bytes` from `offset` on; `None` if the arena does not have them, or if they are not aligned as a queue is.
    fn part(&self, offset: u64, bytes: u64) -> Option<NonNull<u8>> {
        let end = offset.checked_add(bytes)?;
        if offset < CONTEXT_BYTES || end > self.bytes as u64 || !offset.is_multiple_of(64) {
            return None;
        }
        // SAFETY: inside of the mapping, as just checked.
        Some(unsafe { self.base.add(offset as usize) })
    }

    /// The program's ends of a queue pair. The caller keeps the arena for as long as it has them, and has dropped those
    /// that there were before.
    pub fn qp_ends(&self, place: &QpPlace) -> Option<(SendProducer, RecvProducer)> {
        let layout = QpLayout::new(&place.cap);
        let base = self.part(place.offset, layout.bytes)?;
        // SAFETY: the RNIC put the queue there, zeroed, page aligned, inside of the mapping; it is mapped as long as the
        // ends are used, and they are the only ones (the caller's promises; `Device::qp_ends` is called once per ring).
        unsafe {
            Some((
                SendProducer::new(base, &layout),
                RecvProducer::new(base, &layout.recv),
            ))
        }
    }

    /// The program's end of a completion queue, likewise.
    pub fn cq_end(&self, place: &CqPlace) -> Option<CqConsumer> {
        let layout = CqLayout::new(place.entries);
        let base = self.part(place.offset, layout.bytes)?;
        // SAFETY: as above.
        unsafe { Some(CqConsumer::new(base, &layout)) }
    }

    /// The program's end of a shared receive queue, likewise.
    pub fn srq_end(&self, place: &SrqPlace) -> Option<RecvProducer> {
        let layout = RecvLayout::shared(&place.attr);
        let base = self.part(place.offset, layout.bytes)?;
        // SAFETY: as above.
        unsafe { Some(RecvProducer::new(base, &layout)) }
    }

    /// Whether the RNIC says that it has to wait for a core.
    #[inline]
    pub fn is_starved(&self) -> bool {
        self.signs.is_starved()
    }

    /// Tells the RNIC of new requests at a slot.
    #[inline]
    pub fn ring(&self, slot: u32) {
        if self.doorbell.ring(slot) {
            // Fails only when the counter is about to overflow, and then the RNIC is awake already.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        self.held = None;
        // SAFETY: mapped by `map` with this length; ring ends hold an `Arc` of self, so none is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}
