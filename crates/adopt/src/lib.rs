//! Registered memory is adopted: its pages move into a file that the software RNIC and the agent map too.
//!
//! [`Adopter::adopt`] takes the private anonymous pages of a memory region, moves them into the process's file in the
//! instance's runtime folder (`mem/PID`, on tmpfs) and maps the file over the same addresses, `MAP_SHARED`.
//! [`Adopter::release`] turns them back into private anonymous memory when no region needs them any more. The program
//! runs on all the while: a thread that touches a page in transit waits in the page fault until the page is at its new
//! place (`userfaultfd(2)`), whether it touches it by an instruction or within a system call. Nothing that the program
//! can observe changes, except that the pages are shared with whoever maps the file.
//!
//! The crate starts no thread, keeps no file descriptor open but those of userfaultfd and of the memory file
//! (see [`Adopter::close_files`]) and leaves no lock behind in a child of `fork`. While it works, signals
//! are blocked in the calling thread. Start at [`Adopter`].
//!
//! What a registration or its end costs does not depend on what else the process has mapped: a single mapping is asked
//! for by its address (`PROCMAP_QUERY`, Linux 6.11; `/proc/self/maps` before), and what must be read as a whole is read
//! once for many.
//!
//! # What stays where it is
//!
//! [`Backing::Process`] is the answer for memory that cannot be moved: file mappings, shared memory, read-only and
//! executable pages, huge TLB pages, memory with a protection key, a guard, a seal or a userfaultfd of the program's
//! own, the main stack, thread stacks with their thread descriptors (the kernel wakes `pthread_join` by a futex whose
//! key would change), and everything when other threads cannot be kept out (see [`Options`]). A page that is not mapped
//! or not readable is an error, `EFAULT`.
//!
//! # What a program could notice
//!
//! - `MADV_DONTNEED` on adopted pages does not zero them, as on any shared mapping. It concerns allocators that give
//!   back memory which is still registered; on hardware such memory would part from what the RNIC sees.
//! - A futex that is not `FUTEX_PRIVATE_FLAG` and has sleepers at the moment of adoption: its key changes with the
//!   mapping, so that a later wake-up misses them. Process-shared locks in private memory are rare and pointless.
//! - What writes to pages by their frames and not by their addresses, and is in flight at the moment of adoption or release,
//!   writes to the old page: direct I/O (`O_DIRECT`, registered io_uring buffers), and `process_vm_writev` from any process
//!   between looking its pages up and filling them. The kernel does not tell which pages are pinned.
//! - What a program tells memory (`MADV_WIPEONFORK`, `MADV_DONTFORK`, a protection key, a name) between two registrations in
//!   it that are less than 100 ms apart, without ending one in between, may be lost.
//! - `MADV_DONTFORK`, `MADV_DONTDUMP` and hints about huge pages that a program gives to memory while it is registered may end
//!   with the registration, and a child of `fork` has a copy of such memory.
//! - A child that is made without libc's `fork` (`_Fork`, `clone`, `clone3`) and has memory of its own does not have adopted pages:
//!   an access ends it (SIGSEGV), as in a child after `ibv_fork_init` elsewhere. At the moment of adoption it finds zeros in pages
//!   in transit. It would share what the program gives to children while it is registered (`MADV_DOFORK`), and the pages of which
//!   another thread makes a copy for a child of libc's `fork` at that very moment. Children that run in their parent's memory
//!   (`vfork`, `posix_spawn`) have all of it.

#![deny(unsafe_code)]

mod adopter;
mod error;
mod fork;
mod look;
mod maps;
mod memfile;
mod pages;
mod plan;
mod region;
mod space;
mod spans;
mod state;
#[allow(unsafe_code, reason = "the one place for it")]
mod sys;
mod threads;

pub use adopter::Adopter;
pub use error::AdoptError;
pub use region::{Adopted, Adoption, Backing, Options, Released, Token};
