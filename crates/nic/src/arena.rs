//! A context's arena: the shared memory in which its doorbells and queues lie (`verbatim_device::layout`).
//!
//! A sparse memfd whose length is sealed, so that a program can neither shrink it under the RNIC nor grow it. The RNIC
//! maps all of it once: address space is plentiful, and a queue costs no system call. Freed pages are given back to the
//! kernel by punching holes, and read as zeroes when they are used again.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::Refused;

const PAGE: u64 = 4096;

#[derive(Debug)]
pub struct Arena {
    memfd: OwnedFd,
    base: NonNull<u8>,
    bytes: u64,
    /// Free stretches, offset to length, never adjacent.
    free: RefCell<BTreeMap<u64, u64>>,
    /// Freed pages stay as they are.
    kept: Cell<bool>,
    /// Pages are in memory as long as they are in use.
    locked: bool,
}

impl Arena {
    /// A new arena of `bytes` bytes, all zeroes. What is allocated in one that is `locked` is in memory at once.
    pub fn new(bytes: u64, locked: bool) -> Result<Rc<Self>, Refused> {
        let memfd =
            rustix::fs::memfd_create("verbatim-arena", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
                .map_err(|errno| Refused::os("memfd_create", errno))?;
        rustix::fs::ftruncate(&memfd, bytes).map_err(|errno| Refused::os("ftruncate", errno))?;
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|errno| Refused::os("fcntl", errno))?;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory that exists.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                &memfd,
                0,
            )
        }
        .map_err(|errno| Refused::os("mmap", errno))?;
        let base = NonNull::new(base.cast()).expect("the kernel maps nothing at address 0 unless asked to");
        Ok(Rc::new(Self {
            memfd,
            base,
            bytes,
            free: RefCell::new(BTreeMap::from([(0, bytes)])),
            kept: Cell::new(false),
            locked,
        }))
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Zeroed memory, at a page boundary; it goes back when the block is dropped.
    pub fn allocate(self: &Rc<Self>, bytes: u64) -> Result<Block, Refused> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let mut free = self.free.borrow_mut();
        let fit = free
            .iter()
            .find(|(_, length)| **length >= bytes)
            .map(|(offset, length)| (*offset, *length));
        let Some((offset, length)) = fit else {
            return Err(Refused::new(
                libc::ENOMEM,
                format!("no {bytes} bytes are left in the context's arena"),
            ));
        };
        if self.locked {
            let start = self.base.as_ptr() as usize + offset as usize;
            verbatim_paging::populate(start, bytes as usize, true)
                .map_err(|error| Refused::new(libc::ENOMEM, format!("a queue cannot be locked: {error}")))?;
        }
        free.remove(&offset);
        if length > bytes {
            free.insert(offset + bytes, length - bytes);
        }
        Ok(Block {
            arena: Rc::clone(self),
            offset,
            bytes,
        })
    }

    /// The context ends, or the RNIC, and the program may live on: what the queues say now is the last that it finds there.
    pub fn keep(&self) {
        self.kept.set(true);
    }

    fn release(&self, mut offset: u64, mut bytes: u64) {
        if self.kept.get() {
            return;
        }
        // A hole that cannot be punched costs memory, nothing else.
        let _ = rustix::fs::fallocate(
            &self.memfd,
            FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            offset,
            bytes,
        );
        let mut free = self.free.borrow_mut();
        if let Some((before, length)) = free.range(..offset).next_back().map(|(o, l)| (*o, *l))
            && before + length == offset
        {
            free.remove(&before);
            (offset, bytes) = (before, bytes + length);
        }
        if let Some(length) = free.remove(&(offset + bytes)) {
            bytes += length;
        }
        free.insert(offset, bytes);
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is this arena's own, and every block keeps the arena alive.
        let unmapped =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast::<c_void>(), self.bytes as usize) };
        debug_assert!(unmapped.is_ok(), "a whole mapping can be unmapped");
    }
}

/// A piece of an arena.
#[derive(Debug)]
pub struct Block {
    arena: Rc<Arena>,
    offset: u64,
    bytes: u64,
}

impl Block {
    /// Where it starts in the arena.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Where it starts in this process. Valid for as long as the block lives.
    pub fn base(&self) -> NonNull<u8> {
        // SAFETY: blocks lie inside the arena's mapping.
        unsafe { self.arena.base.add(self.offset as usize) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.release(self.offset, self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_disjoint_zeroed_and_used_again() {
        let arena = Arena::new(8 * PAGE, false).unwrap();
        let a = arena.allocate(1).unwrap();
        let b = arena.allocate(PAGE + 1).unwrap();
        let c = arena.allocate(5 * PAGE).unwrap();
        assert_eq!([a.offset(), b.offset(), c.offset()], [0, PAGE, 3 * PAGE]);
        assert_eq!(arena.allocate(1).unwrap_err().errno, libc::ENOMEM);
        // SAFETY: the block is mapped and nobody else's.
        unsafe { b.base().write(7) };
        drop(b);
        let again = arena.allocate(2 * PAGE).unwrap();
        assert_eq!(again.offset(), PAGE);
        // SAFETY: as above.
        assert_eq!(unsafe { again.base().read() }, 0, "a hole was punched");
        drop((a, again, c));
        assert_eq!(
            *arena.free.borrow(),
            BTreeMap::from([(0, 8 * PAGE)]),
            "free stretches grow together"
        );
    }

    #[test]
    fn what_a_program_sees_stays_when_its_context_ends() {
        let arena = Arena::new(2 * PAGE, false).unwrap();
        let block = arena.allocate(PAGE).unwrap();
        // SAFETY: the block is mapped and nobody else's.
        unsafe { block.base().write(7) };
        arena.keep();
        drop(block);
        let mut byte = [0];
        rustix::io::pread(&*arena, &mut byte, 0).unwrap();
        assert_eq!(byte, [7]);
    }

    #[test]
    fn a_program_cannot_change_the_length() {
        let arena = Arena::new(2 * PAGE, false).unwrap();
        assert_eq!(rustix::fs::ftruncate(&arena, PAGE), Err(rustix::io::Errno::PERM));
        assert_eq!(
            rustix::fs::ftruncate(&arena, 4 * PAGE),
            Err(rustix::io::Errno::PERM)
        );
    }
}
