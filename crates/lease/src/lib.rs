//! The core of remote memory, without I/O: it decides which copy of each page of a swap disk counts, for any
//! behaviour of the servers.
//!
//! A disk has up to two *copies*: a server's memory, which is asked first, and its stand-in: a file, or a
//! second server's memory. [`Engine`] takes the client's requests and the ends of I/O, and returns the reads
//! and writes to do. It opens nothing, sends nothing, reads no clock, and allocates only when it is made.
//!
//! ```text
//!  a page is    zero     nothing was written, or it was discarded: no copy is asked
//!               both     each copy has the last write
//!               one      the other copy is behind: it was away, has failed, or is not done yet
//!               lost     no copy has it: it reads as an error, never as something else, until it is written again
//! ```
//!
//! The rules. `tests/model.rs` and `tests/exhaustive.rs` put each of them out of force to show that it is needed:
//!
//! 1. Overlapping requests are carried out one after the other, unless both only read. A write has ended for
//!    the client when one copy has it. Writes of one page reach each copy in the order in which they came.
//! 2. When a write begins, no copy counts for its pages any more. A copy counts again when it has
//!    acknowledged the write, and no later one has begun by then.
//! 3. A request waits for a page that only a write in flight can still give to a copy.
//! 4. Pages of a copy that was away count if its memory is the same and they were not written meanwhile; with
//!    new memory none count.
//! 5. I/O at a copy that was given up must have ended before the copy is back: the caller ensures this by
//!    destroying the old queue pair. Writes in flight at that copy count as not written.
//! 6. A disk goes to another host as the state of its pages ([`Map`]), when no slot is in use, and only if
//!    each page is at a copy that goes along. A copy that does not go along is new there, and has no pages.
//! 7. A copy that is behind is filled from the other ([`Engine::refill`]), a little at a time. A page that
//!    cannot be read there is tried again later, and delays no other page. A copy that cannot take a page is
//!    filled further later.
//! 8. A copy that is about to leave is still read. It gets only writes for which the other copy is not there,
//!    or that the other copy cannot take.

#![forbid(unsafe_code)]

mod engine;
mod events;
mod map;
mod pages;
mod slots;

pub use engine::Engine;
pub use events::{Action, Config, Event, Quirk};
pub use map::Map;
pub use pages::Counts;
pub use slots::{Copy, Extent, Failure, Op, SlotId};
