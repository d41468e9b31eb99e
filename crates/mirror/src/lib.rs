//! The core of a volume that moves to another host while it is in use, without I/O.
//!
//! - [`Engine`]: the source's side. Requests of the tenant and the ends of I/O go in, I/O and answers come
//!   out. It knows extents, but no data: it opens no file, sends nothing, reads no clock.
//! - [`Receiver`]: the destination's side. It keeps writes of an earlier connection apart from those of the
//!   next one.
//! - [`decision`]: the copy that may serve, by the state of the disks, after any crash.
//! - [`trust`], [`opening`], [`resize`]: failed flushes; data that are opened; growth.
//!
//! ```text
//!            Migrated             in flight         to be migrated
//!  0 ─────────────────── write tail ─────── read head ───────────────── length
//!      a change goes to       a change waits       a change stays
//!      both disks                                  at the source
//! ```
//!
//! This is the double write of "SmartNIC-Enabled Live Migration for Storage-Optimized VMs" (APSys 2024), with
//! a map of chunks in place of the three regions, so that chunks that fell behind are copied again. The
//! algorithm as printed loses data; these rules do not, and `tests/world` shows both:
//!
//! 1. A chunk is read only when no change of it is in flight. (As printed, a change that was issued before
//!    the chunk's turn may still be on its way to the source's disk when the copy reads there.)
//! 2. A change that overlaps a chunk in flight waits until the destination has that chunk. (As printed, it
//!    may overtake the older copy.)
//! 3. Changes that overlap each other are carried out one after the other, so that both disks agree.
//! 4. Data that the destination may lack are marked: a change that was acknowledged without it, a change that
//!    failed, a copy that was given up. A marked chunk is not read before everything that is still on its way
//!    there has ended.
//! 5. A destination's acknowledgements count only as long as its process lives; its flushed data are complete
//!    only in the session in which they were flushed.
//!
//! The tenant comes first: a chunk is copied only if there is room beside the requests in flight ([`pace`]),
//! and requests no longer wait for a destination that is silent for [`Config::silence`].

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
