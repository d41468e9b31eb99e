//! The core of remote memory, without I/O: which copy of each page of a swap disk counts, whatever its server does.
//!
//! A disk has up to two *copies*: memory of a server, which is asked first, and what stands in for it: a file, or a second
//! server's memory. [`Engine`] takes requests of the client and the ends of I/O, and says what is to be read and written where. It
//! opens nothing, sends nothing, reads no clock, and allocates only when it is made.
//!
//! ```text
//!  a page is    zero     nothing was written, or it was discarded: no copy is asked
//!               both     each copy has what was written last
//!               one      the other copy is behind: it was away, has failed, or is not done yet
//!               lost     no copy has it: it reads as an error, never as something else, until it is written again
//! ```
//!
//! The rules, each of which `tests/model.rs` puts out of force to show that it is needed:
//!
//! 1. Requests that overlap are carried out one after the other, unless both only read. A write has come to its end for the
//!    client when one copy has it. Writes of one page reach each copy in the order in which they came.
//! 2. When a write begins, no copy counts for its pages any more. A copy counts again when it has said that it has the write, and no
//!    later one has begun by then.
//! 3. A page that only a write under way can still give to a copy is waited for.
//! 4. Of a copy that was away, its pages count if it is the same memory and nobody wrote them meanwhile; of new memory none does.
//! 5. What a copy that was given up still does with its pages must have come to its end before it is back: that is for the caller to
//!    see to, by destroying the old queue pair. What it had under way counts as not written.
//! 6. A disk goes to another host as what is known of its pages ([`Map`]), when nothing is under way, and only if each page is at a copy that goes
//!    along. A copy that does not is new there, and has nothing.
//! 7. A copy that is behind is filled again from the other ([`Engine::refill`]), a little at a time. What cannot be read there, or written here, is tried
//!    again later, and keeps nothing else back.
//! 8. A copy that is about to leave is still read, and is written only what the other one is not there for, or cannot take.

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
