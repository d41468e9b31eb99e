//! The core of a volume that moves to another host while it is in use, without I/O.
//!
//! - [`Engine`]: at the source. Requests of the tenant and the ends of I/O go in, I/O and answers come out. It knows extents, not
//!   data: opens no file, sends nothing, reads no clock.
//! - [`Receiver`]: at the destination. It keeps what an earlier connection has left under way apart from the next one.
//! - [`decision`]: which copy may serve, by what is on the disks, whatever crashes.
//! - [`trust`], [`opening`], [`resize`]: failed flushes; data that are opened; growth.
//!
//! ```text
//!            Migrated             in flight         to be migrated
//!  0 ─────────────────── write tail ─────── read head ───────────────── length
//!      a change goes to       a change waits       a change stays
//!      both disks                                  at the source
//! ```
//!
//! That is the double write of "SmartNIC-Enabled Live Migration for Storage-Optimized VMs" (APSys 2024), with a map of chunks in the
//! place of the three regions, so that chunks that fell behind are copied again. Its algorithm as printed loses data; these
//! rules do not, and `tests/world` shows both:
//!
//! 1. A chunk is read only when no change of it is under way. (As printed, a change that was issued before the chunk's turn may
//!    still be on its way to the source's disk when the copy reads there.)
//! 2. A change that overlaps a chunk in flight waits until the destination has that chunk. (As printed, it may overtake the older copy.)
//! 3. Changes that overlap each other are carried out one after the other, so that both disks agree.
//! 4. What the destination may lack is marked: a change that was acknowledged without it, one that failed, a copy that was given up.
//!    A marked chunk is not read before everything that is still on its way there has come to its end.
//! 5. What a destination had acknowledged counts only as long as that process lives; what it had flushed is complete only in the
//!    session in which it was flushed.
//!
//! The tenant comes first: a chunk is copied only if what is in flight leaves room ([`pace`]), and a destination that is silent
//! for [`Config::silence`] is not waited for any longer.

pub mod decision;
mod dirty;
mod engine;
mod extent;
pub mod opening;
pub mod pace;
mod receiver;
pub mod resize;
pub mod together;
pub mod trust;

pub use engine::{
    Action, Config, Ended, Engine, Event, Failure, HoldFailure, Link, Op, Pointers, Report, RequestId,
    Standing, Status, Ticket, Time,
};
pub use extent::Extent;
pub use receiver::{Arrival, Line, Receiver, Task};
