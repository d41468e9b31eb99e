//! What the engine is told, and what it wants: its terms with whoever does the I/O.

use crate::slots::{Copy, Extent, Failure, Op, SlotId};

/// How a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Its length.
    pub pages: u64,
    /// How many requests are under way at most.
    pub slots: SlotId,
    /// The longest READ or WRITE; 64 pages at most. A discard may be as long as the disk.
    pub slot_pages: u64,
    /// A rule that is put out of force; `None` but in tests.
    pub quirk: Option<Quirk>,
}

/// What a test puts out of force, to see that it is noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quirk {
    /// Requests that overlap do not wait for each other.
    NoTurns,
    /// Writes of the same page reach a copy in any order.
    NoOrder,
    /// A copy counts when a write is done there, whatever has begun since.
    LateCounts,
    /// A page that is on its way to a copy is called lost.
    NoPatience,
    /// A copy that is back counts as it did, even if its memory is new.
    TrustsNewMemory,
    /// A write that was under way when its copy went counts as written.
    TrustsUnanswered,
    /// What a copy cannot take is refused, although one that is about to go could.
    RefusesWhileLeaving,
    /// What cannot be read for a copy that is behind is read again at once.
    FillsOverAndOver,
    /// A disk goes to another host although a page is at a copy alone that stays.
    LeavesBehind,
}

/// What has happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A client's request, which has that slot until [`Action::Release`].
    Request {
        /// A free one.
        slot: SlotId,
        /// What is wanted.
        op: Op,
        /// Which pages, of the disk.
        extent: Extent,
    },
    /// [`Action::Read`] is done. `Err` if the copy said an error and is still there.
    ReadDone {
        /// Of the action.
        slot: SlotId,
        /// Of the action.
        copy: Copy,
        /// An errno.
        result: Result<(), i32>,
    },
    /// [`Action::Write`] is done, likewise.
    WriteDone {
        /// Of the action.
        slot: SlotId,
        /// Of the action.
        copy: Copy,
        /// An errno.
        result: Result<(), i32>,
    },
    /// A copy is there. Nothing of before is under way there any more.
    Up {
        /// Which.
        copy: Copy,
        /// Its memory is the same as before.
        kept: bool,
    },
    /// A copy is gone, or given up. What was under way there makes no event any more.
    Down {
        /// Which.
        copy: Copy,
    },
    /// A copy is about to go.
    Leaving {
        /// Which.
        copy: Copy,
    },
    /// A copy that was about to go stays.
    Stays {
        /// Which.
        copy: Copy,
    },
    /// A copy that said an error may be filled again.
    Retry,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Those pages, from that copy into the slot's buffer.
    Read {
        /// The slot.
        slot: SlotId,
        /// From where.
        copy: Copy,
        /// Of the disk; part of the slot's pages.
        extent: Extent,
    },
    /// Zeros into the slot's buffer, at once.
    Clear {
        /// The slot.
        slot: SlotId,
        /// Of the disk; part of the slot's pages.
        extent: Extent,
    },
    /// The slot's buffer, to that copy. It does not change before [`Action::Release`].
    Write {
        /// The slot.
        slot: SlotId,
        /// To where.
        copy: Copy,
        /// All of the slot's pages.
        extent: Extent,
    },
    /// The answer to a request of the client.
    Reply {
        /// The slot.
        slot: SlotId,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Nothing is under way of that slot. (The caller may need its buffer for the answer still.)
    Release {
        /// The slot.
        slot: SlotId,
    },
    /// A copy that is about to go may go: all that it has is elsewhere.
    Drained {
        /// Which.
        copy: Copy,
    },
}
