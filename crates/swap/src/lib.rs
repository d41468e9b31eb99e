//! Remote memory: the memory of another host as a swap disk.
//!
//! ```text
//!  guest, nbd-client … ── NBD ──► disk ── verbatim_lease::Engine decides
//!                                  │ ├──► remote: WRITE, READ ═══ RNIC ══════ RNIC ═══ a lease's memory, locked
//!                                  │ └──► backup: threads, a file
//!                                 link ── TLS ─────────────────────────────► server: owners of leases
//! ```
//!
//! - [`server`]: `verbatim memory serve`. It gives leases and takes them back; it is not on the path of a
//!   page.
//! - [`disk`]: one swap disk, in a process of its own, whose memory is all locked. One thread takes requests,
//!   posts to the RNIC and answers, so that nothing is handed over; it allocates nothing once the disk is
//!   ready.
//! - `device`: the disk as a block device of this machine, by the kernel's NBD client.
//! - [`link`]: the thread that asks for a lease, and asks again.
//! - [`control`]: orders of commands and agents to a disk's process. By these a disk goes to another host
//!   with its instance.
//! - [`command`]: `verbatim memory …` and `verbatim swap …`.

#![deny(unsafe_code)]

pub mod attach;
mod backup;
mod block;
pub mod command;
pub mod control;
#[allow(unsafe_code, reason = "system calls of the kernel's NBD client")]
mod device;
pub mod disk;
pub mod link;
mod negotiation;
mod remote;
pub mod server;
pub mod wire;
