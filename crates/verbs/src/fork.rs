//! What a forked child must not have: its parent's RNIC.
//!
//! A child that kept the connection would keep the parent's physical objects alive beyond its end, and one that wrote to
//! the queues would corrupt them. So the child's handler replaces each descriptor by one of `/dev/null` and each mapping
//! of the RNIC's memory by private zeroes at the same address. Objects that the child inherited are then dead without
//! being dangerous: control verbs fail, posts go nowhere, polls find nothing. Devices that it opens itself are its own.
//!
//! The C ABI registers the three functions with `pthread_atfork`. Between the first and one of the others the record is
//! locked. In the child they allocate nothing.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::nap;
use crate::process::Process;

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

/// What is locked while a thread forks.
struct InFork {
    asleep: MutexGuard<'static, usize>,
    record: MutexGuard<'static, Record>,
}

thread_local! {
    static IN_FORK: RefCell<Option<InFork>> = const { RefCell::new(None) };
}

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

/// For the `prepare` handler of `pthread_atfork`. Handlers run on the thread that forks, so that what this locks is
/// unlocked by the same thread.
pub fn before_fork() {
    let asleep = nap::lock_for_fork();
    if let Some(adopter) = Process::existing_global().and_then(|process| process.adopter_in_use()) {
        adopter.before_fork();
    }
    let in_fork = InFork {
        asleep,
        record: record(),
    };
    // A thread whose thread-locals are gone is about to end, and does not fork.
    let _ = IN_FORK.try_with(|slot| slot.replace(Some(in_fork)));
}

/// For the `parent` handler.
pub fn after_fork_in_parent() {
    if let Some(adopter) = Process::existing_global().and_then(|process| process.adopter_in_use()) {
        adopter.after_fork_parent();
    }
    let _ = IN_FORK.try_with(RefCell::take);
}

/// For the `child` handler.
pub fn after_fork_in_child() {
    // First of all: until it has its copies, the child would write to the parent's pages.
    if let Some(adopter) = Process::existing_global().and_then(|process| process.adopter_in_use()) {
        adopter.after_fork_child();
    }
    let _ = IN_FORK.try_with(|slot| {
        if let Some(mut in_fork) = slot.take() {
            in_fork
                .record
                .held
                .iter()
                .for_each(|(_, thing)| take_away(*thing));
            *in_fork.asleep = 0;
        }
    });
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
