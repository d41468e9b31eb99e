//! A volume as the disk of a virtual machine by vhost-user-blk: QEMU shares its guest's memory and queues,
//! and this daemon takes requests out of them (Virtual I/O Device 1.2, §2.7 and §5.2; the vhost-user protocol
//! as QEMU's documentation has it).
//!
//! ```text
//!  QEMU ── messages ──► connection ──► backend: memory, queues, configuration
//!  guest ── kick ──► ring (a thread for each queue) ── request, memory ──► Volume
//! ```
//!
//! - [`connection`]: one front end, from its first message to its end. One at a time: two would write to one
//!   disk.
//! - [`backend`]: the handlers of messages.
//! - [`ring`]: one queue at work. Its thread alone touches the guest's memory; other threads hand their
//!   results to it.
//! - [`request`]: a guest's requests, all of which are checked.
//! - [`memory`]: the guest's memory. [`inflight`]: requests in flight, in a file that outlives this daemon.
//! - [`hostile`]: a guest that writes anything, for tests; `cases`: rings that make no sense, one by one.
//! - [`config`]: features, and the configuration space. [`length`]: the length of the disk, and the front
//!   end's knowledge of it.
//!
//! The crates `vhost` and `virtio-queue` have the messages and the queues. Not `vhost-user-backend`: it
//! refuses the inflight file, without which a daemon that was killed loses some of its guest's requests, and
//! its threads cannot wait for requests that other threads carry out.

mod backend;
#[cfg(test)]
mod cases;
mod config;
mod connection;
pub(crate) mod hostile;
mod inflight;
mod length;
mod memory;
mod request;
mod ring;

pub use connection::Server;
