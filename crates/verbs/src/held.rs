//! The descriptors and mappings that a forked child must not have ([`crate::fork`]).

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Clone, Copy)]
enum Thing {
    Fd(RawFd),
    Mapping { address: usize, bytes: usize },
}

#[derive(Debug)]
struct Record {
    next: u64,
    held: Vec<(u64, Thing)>,
}

static RECORD: Mutex<Record> = Mutex::new(Record {
    next: 0,
    held: Vec::new(),
});

fn record() -> MutexGuard<'static, Record> {
    RECORD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that a child shall not have; until this is dropped.
#[derive(Debug)]
#[must_use]
pub struct Held(u64);

fn hold(thing: Thing) -> Held {
    let mut record = record();
    record.next += 1;
    let id = record.next;
    record.held.push((id, thing));
    Held(id)
}

/// A descriptor.
pub fn hold_fd(fd: BorrowedFd<'_>) -> Held {
    hold(Thing::Fd(fd.as_raw_fd()))
}

/// A shared mapping.
pub fn hold_mapping(address: usize, bytes: usize) -> Held {
    hold(Thing::Mapping { address, bytes })
}

impl Drop for Held {
    fn drop(&mut self) {
        record().held.retain(|(id, _)| *id != self.0);
    }
}

/// The record, locked: nothing is added to it and nothing taken out.
#[derive(Debug)]
pub struct Locked(MutexGuard<'static, Record>);

/// Locks it.
pub fn lock() -> Locked {
    Locked(record())
}

impl Locked {
    /// In the child: replaces each. Allocates nothing.
    pub fn take_away(&self) {
        self.0.held.iter().for_each(|(_, thing)| take_away(*thing));
    }
}

fn take_away(thing: Thing) {
    match thing {
        Thing::Fd(fd) => {
            // SAFETY: the path is a C string. The descriptor belongs to an object of this crate, which keeps it open and
            // only ever makes calls on it that fail cleanly on /dev/null.
            unsafe {
                let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC);
                if null >= 0 {
                    libc::dup3(null, fd, libc::O_CLOEXEC);
                    libc::close(null);
                } else {
                    libc::close(fd);
                }
            }
        }
        Thing::Mapping { address, bytes } => {
            // SAFETY: the range is a mapping of this crate's (it forgets it before it unmaps it), and what replaces it
            // has the same length and rights; queues of zeroes are empty queues.
            unsafe {
                libc::mmap(
                    address as *mut libc::c_void,
                    bytes,
                    libc::PROT_READ | libc::PROT_WRITE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                    -1,
                    0,
                );
            }
        }
    }
}
