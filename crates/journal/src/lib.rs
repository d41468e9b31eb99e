//! An append-only log of opaque records on a disk, for decisions that must outlive crashes.
//!
//! [`Log`] keeps its records in a folder of *segments*, `NNNNNNNN.log` (hexadecimal). Only the one with the highest number is
//! written to.
//!
//! ```text
//!  00000003.log                          00000004.log
//!  ┌────────┬────────┬────────┬─ ─ ─ ┐   ┌────────┬────────┬────────┬────────
//!  │ header │ record │ record │ torn     │ header │ record │ record │ …
//!  │  base  │        │        │      │   │   ·    │        │        │
//!  └────────┴────────┴────────┴─ ─ ─ ┘   └───┼────┴────────┴────────┴────────
//!                             ▲              │
//!                             └──────────────┘ continues segment 3, which is good up to here
//!
//!  a frame, all numbers little-endian:
//!   0        4         8          12      16    20
//!  ┌────────┬─────────┬──────────┬───────┬─────┬─────────┐
//!  │ length │ durable │ previous │ check │ crc │ payload │
//!  └────────┴─────────┴──────────┴───────┴─────┴─────────┘
//!
//!  a header's payload:
//!   0       8         12     16        20       24    28
//!  ┌───────┬─────────┬──────┬─────────┬────────┬─────┬───────┐
//!  │ magic │ version │ kind │ segment │ length │ crc │ whole │
//!  └───────┴─────────┴──────┴─────────┴────────┴─────┴───────┘
//! ```
//!
//! | field of a frame | |
//! | --- | --- |
//! | `length` | of the payload in bytes, at most [`MAX_RECORD`] |
//! | `durable` | up to this offset the segment was on the disk for certain when the frame was written |
//! | `previous` | the `crc` of the frame before it; 0 in the header's |
//! | `check` | CRC-32C over the segment's number and the frame's offset (4 bytes each), `length`, `durable`, `previous` |
//! | `crc` | CRC-32C over all of that and the payload |
//!
//! So a frame is good only at its place behind its predecessor: not in another segment, not after what was there before. The
//! `check` is looked at before the length is believed.
//!
//! | field of a header | |
//! | --- | --- |
//! | `magic` | `vrbt-log` |
//! | `version` | 1 |
//! | `kind` | 0: the log begins here (*base*); 1: it continues another segment |
//! | `segment`, `length`, `crc` | of a segment that continues another: its number, up to where it is good, the last `crc` there |
//! | `whole` | this many bytes of the new segment were on the disk before it got its name |
//!
//! # Replay
//! From the last segment back along the headers to the base. What lies behind the end that the next header names was cut off,
//! and is not looked at; nor is a segment that no header names: it was begun, but never used.
//!
//! # What is torn and what is damaged
//! A crash may leave anything behind the last byte that was synced: that is a *torn* end. It never had a promise and is cut off.
//! *Damage* is what no crash can do: a bad frame where `whole` or the `durable` of a good frame says that all was on the disk; a
//! segment that ends before the end that its successor names, or that is missing, or whose header is bad (a segment gets its
//! name when its header is on the disk). The records that can be read are replayed then all the same, in order. Damage stays
//! where it is: every [`Log::open`] reports it, until [`Log::rewrite`] replaces the records, which keeps damaged segments as
//! `NNNNNNNN.damaged`.
//!
//! # Writing
//! A new segment is written as `NNNNNNNN.new`, synced, renamed, and the folder synced. An append that fails is taken back by
//! truncating and syncing the segment. If that fails too, or if the sync of an append has failed, the segment is given up: after
//! a failed fsync(2) Linux may drop the dirty pages and call them clean, so that the next fsync succeeds and says nothing. A
//! new segment then continues the old one from the last byte that was on the disk for certain, with copies of the unsynced records
//! that were accepted since.
//!
//! The same holds across processes: [`Log::open`] cannot know how the last sync of the process before it went, although the page
//! cache shows its records. It writes all records that no `durable` vouches for again, in place, and syncs them before it
//! returns them.

mod folder;
mod frame;
mod log;
mod replay;
mod segment;
mod storage;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;

pub use folder::Folder;
pub use log::Log;
pub use storage::{Storage, StorageFile};

/// The longest record in bytes.
pub const MAX_RECORD: usize = 1 << 20;

/// What a record takes beside its own bytes.
pub const RECORD_OVERHEAD: u64 = frame::HEADER as u64;

/// The longest segment in bytes; more goes on in the next one.
pub const MAX_SEGMENT: u64 = 256 << 20;

/// When a record must be on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// Before [`Log::append`] returns, with all records before it.
    Synced,
    /// At the latest with the next synced record. A crash before that may lose it, and those after it.
    Later,
}

/// What [`Log::open`] has read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replayed {
    /// The records in the order in which they were appended.
    pub records: Vec<Vec<u8>>,
    /// The first place where records may be missing that were on the disk.
    pub damage: Option<Damage>,
    /// All such places, in order, each as the number of records before it. What is missing there was appended after these records, and
    /// before the rest.
    pub gaps: Vec<usize>,
}

/// A place where something was on the disk once and is not any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Damage {
    /// The segment's number, which is its file's name.
    pub segment: u32,
    /// The offset in it from which on something is bad or missing, in bytes.
    pub offset: u64,
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { segment, offset } = self;
        write!(
            f,
            "{} is damaged or missing from byte {offset} on: records may be lost",
            segment::name(*segment)
        )
    }
}

/// The log cannot be opened, written anew, or given more space.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process has it open.
    #[error("the journal is in use by another process")]
    InUse,
    /// It was written by a later version of this program.
    #[error("{name} has format version {version}, this program knows version {known} only; start a later release", name = segment::name(*.segment), known = segment::VERSION)]
    Version {
        /// The segment's number.
        segment: u32,
        /// Its version.
        version: u32,
    },
    /// The disk refuses.
    #[error("cannot {doing}: {source}")]
    Io {
        /// What it was asked for.
        doing: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A record was not appended.
#[derive(Debug, thiserror::Error)]
pub enum AppendError {
    /// The record is not in the log and never will be, whatever crashes come.
    #[error("the record was not written: {0}")]
    NotWritten(#[source] io::Error),
    /// After a crash the record may be there or not, since it could not be taken back either. The next append tries that again
    /// first: from its success on the record is not in the log.
    #[error("the record may or may not be written: {0}")]
    Unknown(#[source] io::Error),
}
