//! System calls that have no safe form elsewhere.

pub mod child;
pub mod missing;
pub mod ptrace;
pub mod read;
pub mod uffd;
