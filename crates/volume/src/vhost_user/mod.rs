//! A volume as the disk of a virtual machine by vhost-user-blk: QEMU gives its guest's memory and queues away, and this daemon takes requests out of
//! them (Virtual I/O Device 1.2, §2.7 and §5.2; the vhost-user protocol as QEMU's documentation has it).
//!
//! ```text
//!  QEMU ── messages ──► connection ──► backend: memory, queues, configuration
//!  guest ── kick ──► ring (a thread for each queue) ── request, memory ──► Volume
//! ```
//!
//! - [`connection`]: one front end, from its first message to its end. One at a time: two would write to one disk.
//! - [`backend`]: what the messages ask for.
//! - [`ring`]: one queue at work. Its thread alone touches the guest's memory; what other threads have done is handed to it.
//! - [`request`]: what a guest asks, of whom nothing is believed.
//! - [`memory`]: the guest's memory. [`inflight`]: which requests are under way, in a file that outlives this daemon.
//! - [`hostile`]: a guest that writes what it likes, for tests.
//! - [`config`]: features, and the configuration space. [`length`]: how large the disk is, and who has been told.
//!
//! The crates `vhost` and `virtio-queue` have the messages and the queues. Not `vhost-user-backend`: it refuses the file of requests under way,
//! without which a daemon that was killed loses some of its guest's requests, and its threads cannot wait for requests that others carry out.

mod backend;
mod config;
mod connection;
pub(crate) mod hostile;
mod inflight;
mod length;
mod memory;
mod request;
mod ring;

pub use connection::Server;
