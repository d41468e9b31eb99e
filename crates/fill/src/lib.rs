//! Fills the memory of a container that CRIU restores lazily, from a cache on this host that has every page.
//!
//! `criu restore --lazy-pages` (4.2.1, unpatched) connects to `lazy-pages.socket` in its work directory and sends, for each task, its
//! number and a userfaultfd. [`Filler::start`] makes that socket, and two helper processes that outlive whoever starts them: a
//! *worker*, which answers faults and fills the rest, and a *guardian*. What a task's page map does not have reads as zeros.
//!
//! If the last descriptor of a userfaultfd is closed too early, pages that are missing read as zeros, and nobody is told. So both processes
//! have one table of descriptors, and all state is in memory that they share: whichever dies is replaced by the other, at any
//! instruction, and no page is lost. If both die at once that is noticed ([`Phase::Lost`]), and the container must be ended.
//!
//! ```text
//!   CRIU ── lazy-pages.socket ──┐                 ┌── control socket ── Filler (agent)
//!                            ┌──▼─────────────────▼──┐
//!                            │ worker                │── UFFDIO_COPY ──► tasks
//!                            └──┬─────────────────┬──┘
//!             one table of descriptors      shared memory: snapshot, events since
//!                            ┌──┴─────────────────┴──┐
//!                            │ guardian              │
//!                            └───────────────────────┘
//! ```
//!
//! # What the caller must see to
//!
//! - The program calls [`main`] before it makes a thread if it is called [`PROGRAM_NAME`].
//! - Whoever stops the agent must not kill its whole control group: the helpers belong to it.
//! - Before tasks run it looks whether the phase is [`Phase::Refused`].
//!
//! # What is not seen
//!
//! - Two threads of a task, of which one moves pages by mremap(2) to where another has just unmapped something: the kernel may tell
//!   of the two in the wrong order. CRIU's own daemon has the same gap.
//! - A program that asks for `MADV_WIPEONFORK` or `MADV_DONTFORK` after the restore and forks before the fill is over.
//! - `mremap` that moves pages to a fixed address and makes them fewer at once: kernels may tell the old length.

#![deny(unsafe_code)]

mod client;
mod config;
pub mod images;
mod numbers;
mod protocol;
mod roles;
mod segments;
mod source;
mod state;
#[allow(unsafe_code, reason = "the one place for it")]
mod sys;
mod worker;

use std::ffi::OsString;
use std::process::ExitCode;

pub use client::{Error, Filler, Watch};
pub use config::Config;
pub use images::{ImageError, left_to_fill, tasks};
pub use protocol::{Phase, Status};

/// Name (`argv[0]`) under which a program runs as a helper process: it then calls [`main`].
pub const PROGRAM_NAME: &str = "verbatim-fill";

/// The helper process. `args` are all of its arguments, its name first. To be called before any thread is made.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    match Config::parse(args) {
        Some(config) => roles::start(&config),
        None => {
            eprintln!("{PROGRAM_NAME} is started by the agent: IMAGES CACHE WORK CONTROL LOG");
            ExitCode::from(2)
        }
    }
}
