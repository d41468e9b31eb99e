//! Volumes: local disks of programs and virtual machines, which move to another host while they are in use.
//!
//! One daemon on each host, apart from the agent, so that I/O outlives the agent's death and its upgrade.
//!
//! ```text
//!  client ── NBD ──► nbd::local ───► Volume ── verbatim_mirror::Engine decides
//!                                      │ ├──► disk: threads, the file or block device
//!                                      │ └──► peer::source ── TLS ──► peer::destination of the other daemon ──► disk
//!  verbatim volume … ── Unix socket ──► control ──► daemon ──► folder: sidecars
//! ```
//!
//! - [`Volume`] carries out the engine's actions. The engine is behind a lock; each event is handled, and its
//!   actions are handed on, under this lock, so that actions leave in order. Nothing under it waits. Messages
//!   to the destination leave by the volume's `outlet`.
//! - [`folder`]: the disk state of a volume, and its replacement.
//! - [`nbd`]: the protocol, and its servers: threads for clients on this machine, tasks for clients by TLS.
//! - `vhost_user`: a volume as the disk of a virtual machine; requests are taken out of the guest's memory.
//! - `device`: a volume as a block device of this machine, by FUSE and a loop device, which outlives the
//!   daemon.
//! - `callers`: limits for connections, and for the time until they prove their identity. `room`: limits for
//!   requests in flight.
//! - `own_thread`: a thread for each connection between daemons; `background`: copies' threads yield to
//!   tenants'.
//! - [`peer`]: the two sides of a move; [`transport`]: whether chunks go by RDMA; [`wire`]: the messages of
//!   both sides.
//! - [`command`]: `verbatim volume …`.

mod background;
mod callers;
mod client;
pub mod command;
pub mod control;
mod daemon;
mod device;
mod disk;
pub mod faults;
pub mod folder;
pub mod fuzzing;
mod jail;
pub mod nbd;
mod outlet;
mod own_thread;
pub mod peer;
mod progress;
mod quick;
mod reserve;
mod room;
mod store;
mod tls;
pub mod transport;
mod vhost_user;
mod volume;
pub mod wire;
mod words;

pub use daemon::{Config, end_waiting, run};
/// The messages of FUSE. The disks of tests speak them, too.
#[doc(hidden)]
pub use device::protocol as fuse_protocol;
pub use device::run_role;
pub use tls::Hosts;
pub use volume::Volume;
