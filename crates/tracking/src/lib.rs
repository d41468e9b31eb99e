//! What a process writes to its private memory, seen from outside, on a kernel without soft-dirty; and what it writes to a file that
//! it maps and shares, by the same means ([`FileTracker`]).
//!
//! ```text
//!  Tracker::arm ─► look ─ (stand_still_once, read) ─► look ─ … ─► [frozen] last_look ─ (read)
//! ```
//!
//! A userfaultfd is put into the process: one of its threads makes it and closes it again, and a copy of it is ours
//! ([`Tracker::arm`]). By it pages are protected asynchronously: the kernel notes the first write to a page, and nobody waits
//! (`UFFD_FEATURE_WP_ASYNC`, Linux 6.7). A look finds what was written since the one before, and protects it again in
//! one step (`PAGEMAP_SCAN`). A page is clean only if the kernel says that it is protected and was not written: what is new,
//! moved, or another program's is written by definition.
//!
//! **What a look does not see.** A system call that has looked its pages up before the look may write to them after it: direct reads,
//! process_vm_writev. So every thread stands still once between a look and the reading of pages ([`stand_still_once()`]).
//! What writes to pinned pages without any thread, rings of io_setup and io_uring or a device, is not seen at all
//! ([`pinned_writers()`]). Who wants to see that compares contents, for which [`present()`] says where they are.
//!
//! **What the process sees.** Its first thread stops for some 0.3 ms when it is armed, and each thread for some 20 µs at each
//! `stand_still_once`. A system call that it is in goes on or is begun again, as after a signal without a handler (signal(7));
//! those that end with EINTR then, epoll_wait for one, do so here. CRIU's freeze does the same.
//!
//! The kernel merges memory that is registered with memory that is not as little as it does memory of two kinds. Until the next look new
//! anonymous memory beside old one is a mapping of its own, and mremap(2) across both gives EFAULT, where it worked as long as
//! both were one mapping.
//!
//! **Pages that come later.** By the same means a process waits for pages of a file that it shares until they are brought
//! ([`FileFaults`]): there the userfaultfd stays in the process.

#![cfg_attr(not(target_arch = "x86_64"), allow(dead_code, unused_imports))]

mod armed;
mod error;
mod faults;
#[cfg(target_arch = "x86_64")]
mod inject;
mod maps;
mod memory;
mod pinned;
mod present;
mod ranges;
mod registration;
mod shared;
mod still;
mod supported;
#[allow(unsafe_code, reason = "ptrace, userfaultfd, process_vm_readv")]
mod sys;
mod tracker;

pub use error::Error;
pub use faults::{DEVICE, FileFaults, not_missing};
pub use maps::{MappedFile, maps_file, names_mapping};
pub use memory::Memory;
pub use pinned::{Writer, pinned_writers, shared_by_fork};
pub use present::present;
pub use ranges::Ranges;
pub use shared::FileTracker;
pub use still::stand_still_once;
pub use supported::{Unsupported, supported};
pub use tracker::{Look, Tracker};

/// Bytes in a page.
pub const PAGE: u64 = 4096;
