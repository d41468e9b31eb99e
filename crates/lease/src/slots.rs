//! Requests that are under way: each has a slot, which is a buffer of the caller's, too.

use std::ops::Range;

/// The number of a slot; the caller has a buffer for each.
pub type SlotId = u16;

/// One of the two copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copy {
    /// The server's memory, which is asked first.
    First,
    /// What stands in for it.
    Second,
}

impl Copy {
    /// Both, in the order in which they are asked.
    pub const BOTH: [Self; 2] = [Self::First, Self::Second];

    /// 0 or 1.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// Pages in a row; at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The first.
    pub page: u64,
    /// How many.
    pub count: u64,
}

impl Extent {
    /// Their numbers.
    pub fn pages(self) -> Range<u64> {
        self.page..self.page + self.count
    }

    /// Whether they have a page in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.page < other.page + other.count && other.page < self.page + self.count
    }

    /// Whether that page is one of them.
    pub fn contains(self, page: u64) -> bool {
        self.pages().contains(&page)
    }
}

/// What a client wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// The pages' content into the slot's buffer.
    Read,
    /// What is in the slot's buffer.
    Write,
    /// Zeros, or whatever: the client does not need them any more.
    Zero,
}

/// Why a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// No copy that is there has the pages, or can take them.
    Lost,
    /// A copy that is there said this errno.
    Errno(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Client(Op),
    /// That copy gets what the other has.
    Refill(Copy),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Others that overlap come first, or a page is still on its way to a copy.
    Waiting,
    Running,
    /// The client has its answer; copies may still be written.
    Replied,
}

/// The write of a slot to one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writing {
    /// That copy gets nothing.
    Not,
    /// An earlier one of the same pages is under way there.
    Queued,
    Running,
    Done,
    Failed(Failure),
}

#[derive(Debug, Clone, Copy)]
pub struct Slot {
    pub kind: Kind,
    pub extent: Extent,
    pub phase: Phase,
    /// Reads under way of each copy.
    pub reads: [u32; 2],
    /// A read failed; the request is planned again when none is under way.
    pub has_failed: bool,
    /// Copies that failed while they were there: they are not asked again.
    pub avoids: [bool; 2],
    pub writes: [Writing; 2],
    /// A bit for each of its pages that something later has changed.
    pub superseded: u64,
}

impl Slot {
    pub fn new(kind: Kind, extent: Extent) -> Self {
        Self {
            kind,
            extent,
            phase: Phase::Waiting,
            reads: [0; 2],
            has_failed: false,
            avoids: [false; 2],
            writes: [Writing::Not; 2],
            superseded: 0,
        }
    }

    /// Whether `later` must wait for this one, until the client has its answer.
    pub fn comes_before(&self, later: &Self) -> bool {
        let changes = |slot: &Self| slot.kind != Kind::Client(Op::Read);
        self.phase != Phase::Replied
            && self.extent.overlaps(later.extent)
            && (changes(self) || changes(later))
    }

    /// Whether it is still to be written there.
    pub fn is_writing(&self, copy: Copy) -> bool {
        matches!(self.writes[copy.index()], Writing::Queued | Writing::Running)
    }
}
