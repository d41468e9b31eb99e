//! One-sided RDMA between daemons: the memory of another host, read and written.
//!
//! ```text
//!  active side                                              passive side
//!  Connection ── End ──────── (any channel that both trust) ────── End ── Connection
//!   write(local, remote) ─── WRITE ───────────────────────────► Buffer
//!   read(local, remote)  ◄── READ responses ──────────────────── Buffer
//! ```
//!
//! - Start at [`Device::open`], or [`Device::choose`] where a host has several RNICs, and [`Device::connection`]. The two sides exchange their [`End`]s and their buffers' [`Exposed`]s over a
//!   channel of theirs, and call [`Connection::connect`]. From then on the passive side does nothing.
//! - Requests are carried out in order, and [`Connection::wait`] says when one is done. A *window* bounds how many bytes are in
//!   flight: who posts more waits for room.
//! - A connection has a protection domain of its own: what the other side may reach are the buffers of this connection, and no
//!   others.
//! - What is there already, a file in memory, is read in place where it is [`Lent`].
//! - When a connection is dropped, first its queue pair goes, then its buffers: nothing lands late, in either of them.
//!
//! It is built on `verbatim_verbs`, and so works on each of its backends.

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "the one place for it")]
mod buffer;
mod connection;
mod device;
mod error;
mod lent;
mod opened;
mod which;
mod window;

pub use buffer::{Buffer, Exposed};
pub use connection::{Canceller, Connection, End, Options, Ticket};
pub use device::Device;
pub use error::Error;
pub use lent::Lent;
pub use verbatim_verbs::QpClass;
pub use which::Which;
