//! What goes into the engine and comes out of it.

use std::time::Duration;

use serde::Serialize;

use crate::extent::Extent;

/// A time, since whatever the caller counts from.
pub type Time = Duration;

/// Names a request of the tenant; never the same twice in the life of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Names a step of the copy, or a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What the engine must know of a request. Data, offsets of reads, and what kind of change it is, stay with the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads. Goes to the local disk only.
    Read,
    /// A WRITE, WRITE_ZEROES or DISCARD. What is there afterwards is the same on every disk: a DISCARD leaves zeros.
    Change(Extent),
    /// Makes durable what was acknowledged before. It goes to the local disk only: until the commit that one is what counts, and the
    /// destination is flushed before the commit.
    Flush,
}

/// Why a request or a step has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The disk said so; its errno.
    Disk(i32),
    /// The volume is another host's now. The request was not carried out.
    Moved,
}

/// How far a chunk and the changes beside it may be apart, and how long anything is waited for.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// What is copied, and locked, in one piece.
    pub chunk_bytes: u64,
    /// So long a request of the tenant waits for the destination. After that it is acknowledged without it.
    pub silence: Duration,
    /// So long a hold may take. After that the tenant goes on here.
    pub hold: Duration,
    /// An answer of the destination that is overdue by this means that the connection is dead.
    pub dead: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            chunk_bytes: 256 << 10,
            silence: Duration::from_millis(200),
            hold: Duration::from_secs(2),
            dead: Duration::from_secs(10),
        }
    }
}

/// What has happened.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// The tenant wants this.
    Request {
        /// How it is called from now on.
        id: RequestId,
        /// What it is.
        op: Op,
    },
    /// The end of [`Action::Local`].
    LocalDone {
        /// The request.
        id: RequestId,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// The end of [`Action::Mirror`]: the destination's disk has it, or refused.
    MirrorDone {
        /// The request.
        id: RequestId,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Begin to move. The link is down yet, and the destination has nothing.
    Migrate {
        /// No more of the copy than this, if given.
        bytes_per_second: Option<u64>,
    },
    /// There is a connection to the destination, on which nothing is under way, and nothing of an earlier one will arrive any more.
    LinkUp {
        /// It is the process that has acknowledged everything so far. Else it counts as having nothing.
        keeps: bool,
    },
    /// It is lost. What was under way on it may or may not have arrived, or may still.
    LinkDown,
    /// The end of [`Action::ReadChunk`].
    ChunkRead {
        /// The step.
        ticket: Ticket,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// The end of [`Action::SendChunk`]: the destination's disk has it, or refused.
    ChunkSent {
        /// The step.
        ticket: Ticket,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// The end of [`Action::FlushMirror`].
    MirrorFlushed {
        /// The step.
        ticket: Ticket,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Take in nothing more, and bring the destination to the last byte. Only after [`Report::Mirrored`].
    Hold,
    /// After [`Report::Held`], or at any time of a hold: it is not committed. The migration is over, the tenant goes on here.
    Release,
    /// After [`Report::Held`]: it is committed.
    Moved,
    /// Give the migration up. Not between [`Report::Held`] and the decision: it is ignored there.
    Cancel,
    /// Time has passed.
    Tick,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Carry the request out here. Ends with [`Event::LocalDone`].
    Local {
        /// The request.
        id: RequestId,
    },
    /// Send the change to the destination. Ends with [`Event::MirrorDone`] or [`Event::LinkDown`]. May be asked for an id whose
    /// reply has left, so its data must be kept until this is carried out.
    Mirror {
        /// The request.
        id: RequestId,
    },
    /// Answer the tenant. The last that is heard of a request.
    Reply {
        /// The request.
        id: RequestId,
        /// How it went.
        result: Result<(), Failure>,
    },
    /// Read this here. Ends with [`Event::ChunkRead`].
    ReadChunk {
        /// The step.
        ticket: Ticket,
        /// The chunk.
        extent: Extent,
    },
    /// Send what was read. Ends with [`Event::ChunkSent`] or [`Event::LinkDown`].
    SendChunk {
        /// The step.
        ticket: Ticket,
    },
    /// What was read for this step is not needed any more.
    DropChunk {
        /// The step.
        ticket: Ticket,
    },
    /// Have the destination flush all that it has acknowledged. Ends with [`Event::MirrorFlushed`] or [`Event::LinkDown`].
    FlushMirror {
        /// The step.
        ticket: Ticket,
    },
    /// Close the connection; [`Event::LinkDown`] need not be told of it.
    Disconnect,
    /// Something that the one who moves the volume waits for.
    Report(Report),
}

/// What the one who moves a volume is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// The destination has everything, and gets every change. A hold will be short.
    Mirrored,
    /// Nothing is under way, and the destination has all of it on its disk. What comes now is a decision: [`Event::Release`] or
    /// [`Event::Moved`].
    Held,
    /// The hold has ended and the tenant goes on here; the migration goes on, too.
    HoldFailed(HoldFailure),
    /// The migration is over, without a commit.
    Ended(Ended),
}

/// Why a hold has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldFailure {
    /// The destination does not have everything (any more).
    NotMirrored,
    /// It took longer than [`Config::hold`].
    TooLong,
}

/// Why a migration has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// By [`Event::Cancel`] or [`Event::Release`].
    Cancelled,
    /// The destination's disk has failed, or is full.
    DestinationFailed(Failure),
    /// This disk has failed to read a chunk.
    SourceFailed(Failure),
}

/// Whether requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Standing {
    /// They are.
    Serving,
    /// They wait; those before are being brought to their end.
    Holding,
    /// They wait for the decision.
    Held,
    /// They are refused for ever.
    Moved,
}

/// How the destination is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// It gets changes.
    Up,
    /// It was silent: changes are acknowledged without it, and marked.
    Slow,
    /// There is no connection; the same.
    Down,
}

/// The paper's four pointers, in bytes from the beginning of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pointers {
    /// Below this, reads of this pass have been submitted.
    pub read_head: u64,
    /// Below this, they have been carried out.
    pub read_tail: u64,
    /// Below this, writes at the destination have been submitted.
    pub write_head: u64,
    /// Below this, they have been carried out.
    pub write_tail: u64,
}

/// Where a migration stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Status {
    /// The destination.
    pub link: Link,
    /// The destination has everything, and gets every change.
    pub is_mirrored: bool,
    /// How often the copy has begun at the beginning again.
    pub passes: u32,
    /// Of the pass that runs.
    pub pointers: Pointers,
    /// What the destination lacks.
    pub lacking_bytes: u64,
    /// What has been copied so far, chunks that were copied again included.
    pub copied_bytes: u64,
    /// How often the destination was silent or gone.
    pub interruptions: u32,
    /// TH.
    pub depth: u32,
}
