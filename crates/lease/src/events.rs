//! Inputs and outputs of the engine: its interface with the code that does the I/O.

use crate::slots::{Copy, Extent, Failure, Op, SlotId};

/// Parameters of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Length of the disk.
    pub pages: u64,
    /// The most requests in flight.
    pub slots: SlotId,
    /// The longest READ or WRITE; 64 pages at most. A discard may be as long as the disk.
    pub slot_pages: u64,
    /// A rule to put out of force; `None` except in tests.
    pub quirk: Option<Quirk>,
}

/// Rules that a test puts out of force, to see that the violation is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Quirk {
    /// Requests that overlap do not wait for each other.
    NoTurns,
    /// Writes of the same page reach a copy in any order.
    NoOrder,
    /// A copy counts when a write to it is done, even if a later one has begun since.
    LateCounts,
    /// A page that is on its way to a copy is called lost.
    NoPatience,
    /// A copy that is back counts as it did, even if its memory is new.
    TrustsNewMemory,
    /// A write that was in flight when its copy went counts as written.
    TrustsUnanswered,
    /// A write that one copy cannot take is refused, although a copy that is about to leave could take it.
    RefusesWhileLeaving,
    /// A page that cannot be read for a copy that is behind is read again at once.
    FillsOverAndOver,
    /// A disk goes to another host although a copy that stays is the only one with some page.
    LeavesBehind,
}

/// An input of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A client's request, which has this slot until [`Action::Release`].
    Request {
        /// A free slot.
        slot: SlotId,
        /// The operation.
        op: Op,
        /// Pages of the disk.
        extent: Extent,
    },
    /// [`Action::Read`] is done. `Err` if the copy reported an error and is still there.
    ReadDone {
        /// The slot of the action.
        slot: SlotId,
        /// The copy of the action.
        copy: Copy,
        /// An errno.
        result: Result<(), i32>,
    },
    /// [`Action::Write`] is done, likewise.
    WriteDone {
        /// The slot of the action.
        slot: SlotId,
        /// The copy of the action.
        copy: Copy,
        /// An errno.
        result: Result<(), i32>,
    },
    /// A copy is there. No earlier I/O is in flight there any more.
    Up {
        /// The copy.
        copy: Copy,
        /// Its memory is the same as before.
        kept: bool,
    },
    /// A copy is gone, or given up. Its I/O in flight causes no event any more.
    Down {
        /// The copy.
        copy: Copy,
    },
    /// A copy is about to leave.
    Leaving {
        /// The copy.
        copy: Copy,
    },
    /// A copy that was about to leave stays.
    Stays {
        /// The copy.
        copy: Copy,
    },
    /// A copy that reported an error may be filled again.
    Retry,
}

/// An output of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Read these pages from this copy into the slot's buffer.
    Read {
        /// The slot.
        slot: SlotId,
        /// The copy to read from.
        copy: Copy,
        /// Pages of the disk; part of the slot's pages.
        extent: Extent,
    },
    /// Write zeros into the slot's buffer, at once.
    Clear {
        /// The slot.
        slot: SlotId,
        /// Pages of the disk; part of the slot's pages.
        extent: Extent,
    },
    /// Write the slot's buffer to this copy. The buffer does not change before [`Action::Release`].
    Write {
        /// The slot.
        slot: SlotId,
        /// The copy to write to.
        copy: Copy,
        /// All of the slot's pages.
        extent: Extent,
    },
    /// Answer a client's request.
    Reply {
        /// The slot.
        slot: SlotId,
        /// The result.
        result: Result<(), Failure>,
    },
    /// The slot is free: no I/O of it is in flight. (The caller may still need its buffer for the answer.)
    Release {
        /// The slot.
        slot: SlotId,
    },
    /// A copy that is about to leave may go: the other copy has all its pages.
    Drained {
        /// The copy.
        copy: Copy,
    },
}
