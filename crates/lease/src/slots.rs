//! Requests in flight. Each has a slot, for which the caller has a buffer.

use std::ops::Range;

/// The number of a slot; the caller has a buffer for each.
pub type SlotId = u16;

/// One of the two copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Copy {
    /// The server's memory, which is asked first.
    First,
    /// Its stand-in.
    Second,
}

impl Copy {
    /// Both copies, in the order in which they are asked.
    pub const BOTH: [Self; 2] = [Self::First, Self::Second];

    /// 0 or 1.
    pub fn index(self) -> usize {
        self as usize
    }

    /// The other copy.
    pub fn other(self) -> Self {
        match self {
            Self::First => Self::Second,
            Self::Second => Self::First,
        }
    }
}

/// Pages in a row; at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The first page.
    pub page: u64,
    /// The number of pages.
    pub count: u64,
}

impl Extent {
    /// The numbers of the pages.
    pub fn pages(self) -> Range<u64> {
        self.page..self.page + self.count
    }

    /// Whether the extents have a page in common.
    pub fn overlaps(self, other: Self) -> bool {
        self.page < other.page + other.count && other.page < self.page + self.count
    }

    /// Whether this page is in the extent.
    pub fn contains(self, page: u64) -> bool {
        self.pages().contains(&page)
    }
}

/// An operation of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Read the pages into the slot's buffer.
    Read,
    /// Write the slot's buffer to the pages.
    Write,
    /// Discard the pages, which read as zeros: the client no longer needs them.
    Zero,
}

/// Reason why a request fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// No present copy has the pages, or can take them.
    Lost,
    /// A present copy reported this errno.
    Errno(i32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    Client(Op),
    /// This copy gets pages of the other one.
    Refill(Copy),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Overlapping requests come first, or a page is still on its way to a copy.
    Waiting,
    Running,
    /// The client has its answer; copies may still be written.
    Replied,
}

/// The write of a slot to one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Writing {
    /// This copy gets no write.
    Not,
    /// An earlier write of the same pages is in flight there.
    Queued,
    Running,
    Done,
    Failed(Failure),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    pub kind: Kind,
    pub extent: Extent,
    pub phase: Phase,
    /// Reads in flight at each copy.
    pub reads: [u32; 2],
    /// A read failed; the request is planned again when no read is in flight.
    pub has_failed: bool,
    /// Copies that failed while they were there: they are not asked again.
    pub avoids: [bool; 2],
    pub writes: [Writing; 2],
    /// A bit for each page that a later request has changed.
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

    /// Whether `later` has to wait for this request, until the client has its answer.
    pub fn comes_before(&self, later: &Self) -> bool {
        let changes = |slot: &Self| slot.kind != Kind::Client(Op::Read);
        self.phase != Phase::Replied
            && self.extent.overlaps(later.extent)
            && (changes(self) || changes(later))
    }

    /// Whether a write to this copy is queued or in flight.
    pub fn is_writing(&self, copy: Copy) -> bool {
        matches!(self.writes[copy.index()], Writing::Queued | Writing::Running)
    }
}
