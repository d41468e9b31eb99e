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
//! - [`Volume`] carries out what the engine wants. The engine is behind a lock, and each event is handled, and its actions are handed on,
//!   under that lock, so that actions leave in order. Nothing under it waits.
//!   What goes to the destination leaves by its `outlet`.
//! - [`folder`]: what is on the disk of a volume, and how it is replaced.
//! - [`nbd`]: the protocol, and its servers: by threads for clients on this machine, by tasks for those that come by TLS.
//! - `vhost_user`: a volume as the disk of a virtual machine, out of whose memory requests are taken.
//! - `device`: a volume as a block device of this machine, by FUSE and a loop device, which outlives the daemon.
//! - `callers`: limits for connections, and for the time until they prove their identity. `room`: limits for
//!   requests in flight.
//! - `own_thread`: connections between daemons have a thread each; `background`: those for what is copied yield to tenants'.
//! - [`peer`]: the two sides of a move; [`transport`]: whether chunks go by RDMA; [`wire`]: what they say to each other.
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
