//! Virtual machines with a Linux kernel of our choice, for tests that need a kernel which this machine does not run: its
//! RDMA drivers (rxe), its block devices, its dirty tracking.
//!
//! ```text
//!  test, or `testbed run`                              virtual machine (QEMU, TCG if there is no KVM)
//!  ┌─────────────────────────┐   Unix sockets,         ┌───────────────────────────────────────────┐
//!  │ Vm ── owns the process  │   one per port          │ pid 1 `guest`: root, modules, agent       │
//!  │ Session ── a command ───┼── virtio-serial ───────►│  └ agent: one thread per port, one        │
//!  └─────────────────────────┘                         │    command at a time on each              │
//!   bridge `switch` of a lab, ─ tap ── virtio-net ─────┤ eth0                                      │
//!   or of the machine's own                            │ /: this machine's files, read-only by 9p, │
//!                                                      │    under a tmpfs that takes the writes    │
//!                                                      └───────────────────────────────────────────┘
//! ```
//!
//! So every program of this machine is there, unmodified and under the same path: what was just built, perftest,
//! Python. Nothing is installed into an image; the image is a kernel that `setup.sh --vm` fetched and an initial RAM disk
//! of a few modules and this very program, built in a fraction of a second and cached by its content.
//!
//! # Invariants
//!
//! - A machine cannot change a file of this one: its root is exported read-only.
//! - A machine dies with the [`Vm`] that owns it, even if that process is killed; one that was started by `testbed up`
//!   lives until `testbed down`.
//! - What is in the cache is whole: it is built aside and renamed.
//!
//! Where to start: [`Vm::boot`], then `guest` for the other side, and `channel` for what they say to each other.

mod channel;
mod cpio;
mod error;
mod guest;
mod image;
mod kernel;
mod names;
mod network;
mod qemu;
mod session;
mod state;
mod tsc;
mod vm;

pub use error::{Error, Result};
pub use guest::run_role;
pub use image::{Contents, Image};
pub use kernel::Kernel;
pub use network::{Address, Network};
pub use session::{Command, Ended, Output, Session};
pub use state::{Names, VmRecord};
pub use vm::{Vm, VmConfig};
