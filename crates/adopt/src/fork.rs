//! `fork`: the child gets private copies of adopted pages, as it does of all private memory.
//!
//! Adopted pages are shared mappings, which the kernel shares with a child. So the child copies them before its `fork`
//! returns, and the parent's thread waits for that before its own returns: what it writes afterwards is not in the
//! copy. What *other* threads of the parent write while the child copies may be; a program with threads cannot rely on
//! either. Ranges with `MADV_DONTFORK` (`ibv_fork_init`) are absent in the child and cost nothing.
//!
//! Until it has its copies, whatever the child writes to these pages it writes to the parent's, and they may be heap
//! pages. So the parent lists what is to be copied, and the child allocates nothing until it is done. What libc's own
//! `fork` writes in the child before the handlers run is kept out of adopted pages where it matters
//! ([`crate::threads::off_limits`]); what is left is the lock of a stdio stream that shares a page with a region, which
//! a child of a process with threads resets.
//!
//! The three functions are handlers for `pthread_atfork(3)`, registered as early as possible (the child runs them in
//! the order of registration). `vfork` and `posix_spawn` do not call them and need none.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::adopter::{Adopter, Locked};
use crate::maps::{self, FileId};
use crate::state::release::{Part, divide, places};
use crate::sys::swap;
use crate::threads;

/// What is held from before a fork until after it, by the thread that forks.
struct InFork {
    locked: Locked<'static>,
    copy: Option<Copy>,
}

/// What it takes to copy: the file, and a pipe whose write end the child closes when it has its copies (or dies).
struct Copy {
    file: OwnedFd,
    parts: Vec<Part>,
    done: OwnedFd,
    copying: OwnedFd,
}

thread_local! {
    static IN_FORK: RefCell<Option<InFork>> = const { RefCell::new(None) };
}

impl Adopter {
    /// Before a fork: waits until no pages are in transit and keeps it so.
    pub fn before_fork(&'static self) {
        let mut locked = self.locked();
        locked.check_process();
        locked.look = None;
        let adopted = locked.spans.iter().next().is_some();
        let copy = locked.file.as_ref().filter(|_| adopted).and_then(|file| {
            let opened = file.open().ok()?;
            let id = file.id(opened.as_fd()).ok()?;
            let (done, copying) = pipe_with(PipeFlags::CLOEXEC).ok()?;
            Some(Copy {
                parts: parts(id, opened.as_fd()),
                file: opened,
                done,
                copying,
            })
        });
        let _ = IN_FORK.try_with(|slot| slot.replace(Some(InFork { locked, copy })));
    }

    /// After a fork, in the parent: waits until the child has its copies.
    pub fn after_fork_parent(&self) {
        let Some(in_fork) = take() else { return };
        if let Some(Copy { done, copying, .. }) = in_fork.copy {
            drop(copying);
            let _ = rustix::io::read(&done, &mut [0u8; 1]);
        }
        drop(in_fork.locked);
    }

    /// After a fork, in the child: copies, and forgets what the parent has adopted.
    pub fn after_fork_child(&self) {
        let Some(mut in_fork) = take() else { return };
        if let Some(copy) = &in_fork.copy {
            copy.make_private();
        }
        in_fork.locked.forget_parent();
    }
}

impl Copy {
    /// In the child. Allocates nothing.
    fn make_private(&self) {
        let file = self.file.as_fd();
        let mut data = 0..0;
        for Part {
            addresses,
            offset,
            attributes,
            off_limits,
        } in &self.parts
        {
            let copied = !off_limits
                && swap::move_out(addresses.clone(), file, *offset, None, attributes, &mut data).is_ok();
            if !copied {
                // For lack of memory at the side, or our own stack. If this fails too, the child shares the page,
                // which is the least bad of what is left.
                let _ = swap::make_private(addresses.clone(), file, *offset, attributes);
            }
        }
    }
}

/// Every mapping of the file that a child will have, in chunks.
fn parts(id: FileId, file: BorrowedFd<'_>) -> Vec<Part> {
    let places = places(id, &(0..u64::MAX)).unwrap_or_default();
    let all = places.iter().map(|place| place.addresses.start).min()
        ..places.iter().map(|place| place.addresses.end).max();
    let (Some(start), Some(end)) = (all.start, all.end) else {
        return Vec::new();
    };
    let mappings = maps::overlapping(&(start..end)).unwrap_or_default();
    let shared: Vec<_> = mappings
        .into_iter()
        .filter(|mapping| mapping.is_shared(id))
        .collect();
    let off_limits = threads::off_limits(&shared, &(start..end));
    let parts = places
        .iter()
        .flat_map(|place| divide(place, &shared, &off_limits, file));
    parts.filter(|part| !part.attributes.dont_fork).collect()
}

fn take() -> Option<InFork> {
    IN_FORK.try_with(|slot| slot.take()).ok().flatten()
}
