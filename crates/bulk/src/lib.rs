//! Runs of pages from one daemon to another, by one-sided RDMA, checked where they arrive.
//!
//! ```text
//!  Outgoing                                                     Incoming
//!   add(bytes) → own ring ─── WRITE (or READ by the other) ──────► ring
//!   next() → (item, Landed) ─ any channel that both trust ───────► take(Landed): copies out, compares fingerprints
//!   freed(position) ◄──────── the same channel ─────────────────── end of the run
//! ```
//!
//! - Each side has a *ring*, registered ahead. A *run* is up to [`Options::run_bytes`] of whole pages in it; what is sent about a run, and
//!   all that belongs before and behind it, stays in order ([`Outgoing::pass`]).
//! - The side that sends owns the room in both rings: a run lies at the same place in both, and its room is used again only when
//!   the other side has said so.
//! - Each page has a fingerprint, by a key that both sides have from a channel that nobody else reads. It is taken of the bytes that
//!   were put into the ring, and compared with a copy that nobody can reach any more. So a network that is not trusted with
//!   secrets is still not trusted to deliver: what it changes is noticed, and what it reads it reads.
//! - Memory that stands still need not go through a ring: it is lent as it lies ([`Lender`], [`Borrower`]), and compared in the same way.
//! - Who carries a run is chosen by [`Operation`]: the side that sends, by WRITEs, or the side that receives, by READs.

#![forbid(unsafe_code)]

mod error;
pub mod fingerprint;
mod incoming;
mod loan;
mod outgoing;
mod ring;

use serde::{Deserialize, Serialize};
use verbatim_far::{End, Exposed};

pub use error::Error;
pub use fingerprint::PAGE_BYTES;
pub use incoming::Incoming;
pub use loan::{Borrower, Lender, Loan, Wish};
pub use outgoing::{Outgoing, Run};
pub use verbatim_far::{Canceller, Device, QpClass, Ticket, Which};

/// The longest run that is taken, in bytes.
pub const MOST_RUN_BYTES: u64 = 4 << 20;

/// The largest ring that is made for another daemon, in bytes.
pub const MOST_RING_BYTES: u64 = 64 << 20;

/// Who carries a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// The side that sends, by WRITEs.
    Write,
    /// The side that receives, by READs.
    Read,
}

/// How runs go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Who carries them.
    pub operation: Operation,
    /// The longest run; whole pages, [`MOST_RUN_BYTES`] at most.
    pub run_bytes: u64,
    /// Of each ring; whole runs, [`MOST_RING_BYTES`] at most.
    pub ring_bytes: u64,
    /// The most bytes in flight.
    pub window_bytes: u64,
    /// Whose work goes first at the RNICs.
    pub class: QpClass,
    /// This side's ring is in memory that is never swapped out, and that no program's memory is adopted for
    /// ([`Connection::locked_buffer`](verbatim_far::Connection::locked_buffer)).
    pub locks: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            operation: Operation::Write,
            run_bytes: 1 << 20,
            ring_bytes: 8 << 20,
            window_bytes: 4 << 20,
            class: QpClass::Background,
            locks: false,
        }
    }
}

/// What the side that sends says first. It has the key: only a channel that nobody else reads may carry it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    end: End,
    ring: Exposed,
    key: Vec<u8>,
    ring_bytes: u64,
    window_bytes: u64,
    /// In the background.
    yields: bool,
}

impl std::fmt::Debug for Offer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Its key is a secret.
        let Self { end, ring_bytes, .. } = self;
        f.debug_struct("Offer")
            .field("end", end)
            .field("ring_bytes", ring_bytes)
            .finish_non_exhaustive()
    }
}

/// The answer to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Accepted {
    end: End,
    ring: Exposed,
}

/// A run that is in the ring of the side that receives, or may be fetched into it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Landed {
    /// Where: bytes that were in the ring before it.
    pub position: u64,
    /// Bytes; whole pages.
    pub length: u64,
    /// The fingerprint of each page, 32 bytes each.
    pub fingerprints: Vec<u8>,
    /// Who carries it.
    pub operation: Operation,
}

impl Landed {
    /// The position behind it. The room before that is free again when the run was taken.
    pub fn end(&self) -> u64 {
        self.position.saturating_add(self.length)
    }
}
