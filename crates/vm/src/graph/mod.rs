//! What QEMU has now, which may be another thing than its command line says: disks with a snapshot or a mirror in their place, media that were changed or
//! ejected, devices and networks that were added or removed.
//!
//! ```text
//!  QMP ──► Now ──┬─ Arguments::carried ─► a command line that starts the same, and the files that it needs
//!                └─ of a domain: compared with libvirt's description
//! ```
//!
//! The next QEMU is started with what there is now, and not with what there was. What cannot be told by a command line is refused.

mod carried;
mod devices;
mod domain;
mod drives;
mod line;
mod networks;
mod nodes;
mod now;
#[cfg(test)]
mod tests;

pub use carried::{Carried, File};
pub use now::Now;
