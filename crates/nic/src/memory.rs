//! Programs' memory as the RNIC reaches it.
//!
//! ```text
//!  key ─► Regions ─► Region ─► Piece ─┬─► FileMapping   adopted memory: a copy (place.rs)    (mapping.rs, verbatim-mapped)
//!                                     └─► Owner         any other: /proc/PID/mem (process.rs)
//! ```
//!
//! Every access names a key, a protection domain, a range and a right, and is checked against all four, each time:
//! the values come from rings and packets, and the region may be gone since the last one. Nothing outside this folder
//! touches a program's memory.

#[allow(unsafe_code)]
mod mapping;
#[allow(unsafe_code)]
mod place;
mod process;
mod region;
mod regions;
#[allow(unsafe_code)]
mod windows;

pub use mapping::Mappings;
pub use process::Owner;
pub use region::{Region, Registration};
pub use regions::{Denied, Domain, Regions};
pub use windows::{BindWanted, Window};
