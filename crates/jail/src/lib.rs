//! What a process of ours gives up once it has what it needs: others' rights to its files, capabilities, system calls, paths.
//!
//! - [`umask`]: files are their owner's alone; programs that are started for others get the umask that was there before.
//! - [`Capabilities`]: those that stay, and no new ones by any program that is executed.
//! - [`Calls`]: the system calls that stay (seccomp). Others are refused with `EPERM`.
//! - [`procfs`]: a root directory that has processes in it and nothing else.
//! - [`Paths`]: folders that stay (landlock).
//!
//! Each step says what stands in its way, in words for a log: a kernel without it is no reason to not work. Which of it a process takes, and why, is in
//! docs/security.md.

#![deny(unsafe_code)]

#[allow(unsafe_code, reason = "system calls without a safe wrapper elsewhere")]
mod calls;
mod capabilities;
pub mod folders;
#[allow(unsafe_code, reason = "system calls without a safe wrapper elsewhere")]
mod paths;
pub mod procfs;
pub mod umask;

pub use calls::{Argument, Calls, Refused};
pub use capabilities::Capabilities;
pub use paths::{Access, Paths};
