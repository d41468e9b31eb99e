//! `fork`: the child gets private copies of adopted pages, as it does of all private memory.
//!
//! Adopted pages are shared mappings, which a child would share. So the kernel is told to give them to none
//! (`MADV_DONTFORK`): a child that is made without libc's `fork` (`_Fork`, `clone`, `clone3`) does not have them, as a child does
//! not have registered memory after `ibv_fork_init` elsewhere. For the length of a `fork` it has: the child copies them before its
//! `fork` returns, and the parent's thread waits for that before its own returns: what it writes afterwards is not in the
//! copy. What *other* threads of the parent write while the child copies may be; a program with threads cannot rely on
//! either. What the program itself gave `MADV_DONTFORK` before it was registered is absent in the child and costs nothing.
//!
//! Until it has its copies, whatever the child writes to these pages it writes to the parent's, and they may be heap
//! pages. So the parent lists what is to be copied, and the child allocates nothing until it is done. What libc's own
//! `fork` writes in the child before the handlers run is kept out of adopted pages where it matters
//! ([`crate::threads::off_limits`]); what is left is the lock of a stdio stream that shares a page with a region, which
//! a child of a process with threads resets.
//!
//! The three functions are handlers for `pthread_atfork(3)`, registered as early as possible (the child runs them in
//! the order of registration). `vfork` and `posix_spawn` do not call them and need none: such a child runs in its parent's memory.

use std::cell::RefCell;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::pipe::{PipeFlags, pipe_with};

use crate::adopter::{Adopter, Locked};
use crate::maps::{self, FileId, Mapping};
use crate::spans::Spans;
use crate::state::release::{Part, Place, divide, places};
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
    /// What children have for the length of this fork.
    lent: Vec<Place>,
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
        // Without descriptors to be had the child has no such memory, which shows, while what it shared would not.
        let copy = locked.file.as_ref().filter(|_| adopted).and_then(|file| {
            let opened = file.open().ok()?;
            let id = file.id(opened.as_fd()).ok()?;
            let (done, copying) = pipe_with(PipeFlags::CLOEXEC).ok()?;
            let lent = inherited(id, &locked.spans);
            let parts = parts(id, opened.as_fd(), &lent);
            // What the kernel refuses, for lack of memory, the child makes from the file all the same.
            lent.iter()
                .for_each(|place| swap::inherit(place.addresses.clone(), true));
            Some(Copy {
                parts,
                lent,
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
        if let Some(Copy {
            lent, done, copying, ..
        }) = in_fork.copy
        {
            lent.iter()
                .for_each(|place| swap::inherit(place.addresses.clone(), false));
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
            // For lack of memory at the side, or our own stack. If this fails too, the child is without it.
            if !copied && swap::make_private(addresses.clone(), file, *offset, attributes).is_err() {
                swap::take_away(addresses.clone());
            }
        }
    }
}

/// Every mapping of the file that a child will have.
fn inherited(id: FileId, spans: &Spans) -> Vec<Place> {
    let places = places(id, &(0..u64::MAX)).unwrap_or_default();
    places.iter().flat_map(|place| left_of(place, spans)).collect()
}

/// The same in chunks.
fn parts(id: FileId, file: BorrowedFd<'_>, inherited: &[Place]) -> Vec<Part> {
    let all = inherited.iter().map(|place| place.addresses.start).min()
        ..inherited.iter().map(|place| place.addresses.end).max();
    let (Some(start), Some(end)) = (all.start, all.end) else {
        return Vec::new();
    };
    let mappings = maps::overlapping(&(start..end)).unwrap_or_default();
    let mut shared: Vec<_> = mappings
        .into_iter()
        .filter(|mapping| mapping.is_shared(id))
        .collect();
    // Whether the program wants children to have it stands in the spans: the kernel was told by us.
    shared.iter_mut().for_each(Mapping::forget_dont_fork);
    let off_limits = threads::off_limits(&shared, &(start..end));
    let parts = inherited
        .iter()
        .flat_map(|place| divide(place, &shared, &off_limits, file));
    parts.collect()
}

/// A place without what the program wants no child to have.
fn left_of(place: &Place, spans: &Spans) -> Vec<Place> {
    let mut left = Vec::new();
    let (mut at, end) = (place.offset, place.offset + place.addresses.len() as u64);
    let mut push = |offsets: Range<u64>| {
        if !offsets.is_empty() {
            let start = place.addresses.start + (offsets.start - place.offset) as usize;
            left.push(Place {
                addresses: start..start + (offsets.end - offsets.start) as usize,
                offset: offsets.start,
            });
        }
    };
    for absent in spans.dont_fork(at..end) {
        push(at..absent.start);
        at = absent.end;
    }
    push(at..end);
    left
}

fn take() -> Option<InFork> {
    IN_FORK.try_with(|slot| slot.take()).ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::swap::Attributes;

    #[test]
    fn what_no_child_is_to_have_is_cut_out() {
        let mut spans = Spans::default();
        let absent = Attributes {
            dont_fork: true,
            ..Attributes::PLAIN
        };
        for (start, attributes) in [(0, absent), (10, Attributes::PLAIN), (20, absent), (40, absent)] {
            spans.insert(start..start + 10, 1000 + start, attributes);
        }
        let place = Place {
            addresses: 1005..1045,
            offset: 5,
        };
        let left: Vec<_> = left_of(&place, &spans)
            .into_iter()
            .map(|place| (place.addresses, place.offset))
            .collect();
        assert_eq!(left, [(1010..1020, 10), (1030..1040, 30)]);
        assert_eq!(left_of(&place, &Spans::default()).len(), 1);
    }
}
