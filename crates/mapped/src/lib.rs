//! Files that somebody else may cut off, mapped and read all the same.
//!
//! What programs in containers have registered lies in files, which the RNIC and the agent map: a read through a mapping takes a
//! fifth of what pread(2) takes. But the program may truncate its files, and who touches what is missing gets SIGBUS. An
//! access through [`guarded`] is an error then, and nothing else.

#![deny(unsafe_op_in_unsafe_fn)]
#![allow(unsafe_code)]

mod read_only;
mod sigbus;

pub use read_only::ReadOnly;
pub use sigbus::{Truncated, guarded, install};
