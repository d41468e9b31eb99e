//! QEMU's present state, which may differ from its command line: disks replaced by a snapshot or a mirror,
//! media that were changed or ejected, devices and networks that were added or removed.
//!
//! ```text
//!  QMP ──► Now ──┬─ Arguments::carried ─► a command line that starts the same machine, and the files that it needs
//!                └─ of a domain: compared with libvirt's description
//! ```
//!
//! The next QEMU is started with the present state, not with the original one. A state that a command line
//! cannot express is refused.

mod carried;
mod devices;
mod domain;
mod drives;
mod forwards;
mod line;
mod networks;
mod nodes;
mod now;
mod remote;
#[cfg(test)]
mod tests;

pub use carried::{Carried, File};
pub use now::Now;
pub use remote::{Remote, Server};
