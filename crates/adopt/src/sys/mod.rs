//! Everything unsafe: moving pages, userfaultfd, signals, thread addresses.
//!
//! While pages are in transit ("the window"), the thread that moves them must not touch them itself, and it cannot know
//! what lies in them: they may be heap pages with its own allocations. So what runs in the window allocates nothing,
//! uses only its stack and registers (the caller keeps stack and thread descriptors out, see [`crate::threads`]), and
//! enters the kernel without libc, which would write errno, act on cancellation, or be interposed.

pub mod kept;
pub mod memory;
pub mod procmap;
pub mod signals;
pub mod swap;
pub mod thread;
pub mod uffd;

mod present;
