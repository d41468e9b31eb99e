//! Inputs and outputs of the engine.

use std::time::Duration;

use serde::Serialize;

use crate::extent::Extent;

/// A time, since an instant of the caller's choice.
pub type Time = Duration;

/// Name of a tenant's request; unique in the life of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Name of a step of the copy, or of a flush.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A request as the engine sees it. Data, offsets of reads, and the kind of a change stay with the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Reads. Goes to the local disk only.
    Read,
    /// A WRITE, WRITE_ZEROES or DISCARD. The content afterwards is the same on every disk: a DISCARD leaves
    /// zeros.
    Change(Extent),
    /// Makes earlier acknowledged changes durable. It goes to the local disk only, which counts until the
    /// commit; the destination is flushed before the commit.
    Flush,
}

/// Reason why a request or a step has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Failure {
    /// The disk has failed, with this errno.
    Disk(i32),
    /// The volume has moved to another host. The request was not carried out.
    Moved,
}

/// Size of a chunk, and limits of waits.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Unit of copying and locking, in bytes.
    pub chunk_bytes: u64,
    /// Limit for a tenant's request to wait for the destination. After that it is acknowledged without the
    /// destination.
    pub silence: Duration,
    /// Limit for a hold. After that the tenant goes on here.
    pub hold: Duration,
    /// An answer of the destination that is overdue by this time means that the connection is dead.
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

/// An input of the engine.
#[derive(Debug, Clone, Copy)]
pub enum Event {
    /// A request of the tenant.
    Request {
        /// Its name from now on.
        id: RequestId,
        /// Its kind.
        op: Op,
    },
    /// The end of [`Action::Local`].
    LocalDone {
        /// The request.
        id: RequestId,
        /// The result.
        result: Result<(), Failure>,
    },
    /// The end of [`Action::Mirror`]: the destination's disk has the change, or refused it.
    MirrorDone {
        /// The request.
        id: RequestId,
        /// The result.
        result: Result<(), Failure>,
    },
    /// Begin to move. The link is still down, and the destination has no data.
    Migrate {
        /// Limit of the copy, if given.
        bytes_per_second: Option<u64>,
    },
    /// There is a new connection to the destination. No write is in flight on it, and none of an earlier
    /// connection will arrive any more.
    LinkUp {
        /// The destination's process is the one that has acknowledged everything so far. Otherwise it counts
        /// as having no data.
        keeps: bool,
    },
    /// The connection is lost. Messages in flight on it may have arrived, or may still arrive, or not.
    LinkDown,
    /// The end of [`Action::ReadChunk`].
    ChunkRead {
        /// The step.
        ticket: Ticket,
        /// The result.
        result: Result<(), Failure>,
    },
    /// The end of [`Action::SendChunk`]: the destination's disk has the chunk, or refused it.
    ChunkSent {
        /// The step.
        ticket: Ticket,
        /// The result.
        result: Result<(), Failure>,
    },
    /// The end of [`Action::FlushMirror`].
    MirrorFlushed {
        /// The step.
        ticket: Ticket,
        /// The result.
        result: Result<(), Failure>,
    },
    /// Accept no further requests, and complete the destination's data. Only after [`Report::Mirrored`].
    Hold,
    /// After [`Report::Held`], or at any time of a hold: the move is not committed. The migration is over,
    /// and the tenant goes on here.
    Release,
    /// After [`Report::Held`]: the move is committed.
    Moved,
    /// Give the migration up. Not between [`Report::Held`] and the decision: it is ignored there.
    Cancel,
    /// The clock has advanced.
    Tick,
}

/// An output of the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Carry the request out here. Ends with [`Event::LocalDone`].
    Local {
        /// The request.
        id: RequestId,
    },
    /// Send the change to the destination. Ends with [`Event::MirrorDone`] or [`Event::LinkDown`]. May follow
    /// the request's reply, so the data must be kept until this is carried out.
    Mirror {
        /// The request.
        id: RequestId,
    },
    /// Answer the tenant. The last message about a request.
    Reply {
        /// The request.
        id: RequestId,
        /// The result.
        result: Result<(), Failure>,
    },
    /// Read this chunk here. Ends with [`Event::ChunkRead`].
    ReadChunk {
        /// The step.
        ticket: Ticket,
        /// The chunk.
        extent: Extent,
    },
    /// Send the data of this step. Ends with [`Event::ChunkSent`] or [`Event::LinkDown`].
    SendChunk {
        /// The step.
        ticket: Ticket,
    },
    /// Discard the data of this step.
    DropChunk {
        /// The step.
        ticket: Ticket,
    },
    /// Make the destination flush everything that it has acknowledged. Ends with [`Event::MirrorFlushed`] or
    /// [`Event::LinkDown`].
    FlushMirror {
        /// The step.
        ticket: Ticket,
    },
    /// Close the connection. No [`Event::LinkDown`] is needed.
    Disconnect,
    /// A report to the mover of the volume.
    Report(Report),
}

/// A report to the mover of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// The destination has everything, and gets every change. A hold will be short.
    Mirrored,
    /// No request is in flight, and the destination has all data on its disk. A decision follows:
    /// [`Event::Release`] or [`Event::Moved`].
    Held,
    /// The hold has ended and the tenant goes on here; the migration goes on, too.
    HoldFailed(HoldFailure),
    /// The migration is over, without a commit.
    Ended(Ended),
}

/// Reason why a hold has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldFailure {
    /// The destination does not have everything (any more).
    NotMirrored,
    /// The hold took longer than [`Config::hold`].
    TooLong,
}

/// Reason why a migration has ended.
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
    /// Requests are answered.
    Serving,
    /// New requests wait; earlier ones have to end.
    Holding,
    /// Requests wait for the decision.
    Held,
    /// Requests are refused forever.
    Moved,
}

/// State of the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    /// The destination gets changes.
    Up,
    /// The destination was silent: changes are acknowledged without it, and marked.
    Slow,
    /// There is no connection: changes are acknowledged without the destination, and marked.
    Down,
}

/// The paper's four pointers, in bytes from the beginning of the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pointers {
    /// Below this, reads of this pass have been submitted.
    pub read_head: u64,
    /// Below this, these reads have been carried out.
    pub read_tail: u64,
    /// Below this, writes at the destination have been submitted.
    pub write_head: u64,
    /// Below this, these writes have been carried out.
    pub write_tail: u64,
}

/// State of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Status {
    /// State of the destination.
    pub link: Link,
    /// The destination has everything, and gets every change.
    pub is_mirrored: bool,
    /// Number of times that the copy has started again from the beginning.
    pub passes: u32,
    /// Pointers of the present pass.
    pub pointers: Pointers,
    /// Bytes that the destination lacks.
    pub lacking_bytes: u64,
    /// Bytes copied so far; chunks that were copied again count again.
    pub copied_bytes: u64,
    /// Number of times that the destination was silent or gone.
    pub interruptions: u32,
    /// TH: see [`crate::pace`].
    pub depth: u32,
}
