//! What a forked child must not have: its parent's RNIC.
//!
//! A child that kept the connection would keep the parent's physical objects alive beyond its end, and one that wrote to
//! the queues would corrupt them. So the child's handler replaces each descriptor by one of `/dev/null` and each mapping
//! of the RNIC's memory by private zeroes at the same address. Objects that the child inherited are then dead without
//! being dangerous: control verbs fail, posts go nowhere, polls find nothing. Devices that it opens itself are its own.
//!
//! The C ABI registers the three functions with `pthread_atfork`. Between the first and one of the others the record is
//! locked. In the child they allocate nothing.

use std::cell::RefCell;
use std::sync::MutexGuard;

use crate::cm_line::Cm;
use crate::process::Process;
use crate::{held, nap};

/// What is locked while a thread forks. Dropped in this order.
struct InFork {
    asleep: MutexGuard<'static, usize>,
    record: held::Locked,
    /// The child has none of its parent's channels of rdma_cm, and may open its own.
    _cm: Option<parking_lot::MutexGuard<'static, Cm>>,
}

thread_local! {
    static IN_FORK: RefCell<Option<InFork>> = const { RefCell::new(None) };
}

/// For the `prepare` handler of `pthread_atfork`. Handlers run on the thread that forks, so that what this locks is
/// unlocked by the same thread.
pub fn before_fork() {
    // Who has it may need one of the others.
    let cm = Process::existing_global().map(|process| process.cm.lock());
    let asleep = nap::lock_for_fork();
    if let Some(adopter) = Process::existing_global().and_then(|process| process.adopter_in_use()) {
        adopter.before_fork();
    }
    let in_fork = InFork {
        asleep,
        record: held::lock(),
        _cm: cm,
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
            in_fork.record.take_away();
            *in_fork.asleep = 0;
        }
    });
}
