//! What is asked of a region of memory, and what comes of it.

use std::ops::Range;

/// How the RNIC reaches a segment of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Through the memory file, from this offset on.
    File {
        /// Page aligned.
        offset: u64,
    },
    /// Through the process, by `/proc/PID/mem`.
    Process,
}

/// The answer to [`Adopter::adopt`](crate::Adopter::adopt).
#[derive(Debug)]
pub struct Adoption {
    /// Address ranges, contiguous and in order, that cover the region rounded out to pages.
    pub segments: Vec<(Range<u64>, Backing)>,
    /// To be given to [`Adopter::release`](crate::Adopter::release) when the region is deregistered. Dropping it keeps the pages in the file.
    pub token: Token,
}

/// A claim on ranges of the memory file. Void in the child after a fork, where nothing is adopted.
#[derive(Debug)]
#[must_use = "the pages stay in the file until the token is released"]
pub struct Token {
    pub(crate) generation: u64,
    pub(crate) pieces: Vec<Range<u64>>,
}

/// What became of a token's pages, and of pages beside them that were kept before, in bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// Private anonymous memory again.
    pub returned_bytes: u64,
    /// Another token covers them.
    pub claimed_bytes: u64,
    /// No longer mapped by the program; the file's space is free again.
    pub gone_bytes: u64,
    /// Still in the file: they cannot be moved safely now, or many small mappings would come of it, so that they wait
    /// for their neighbours. Used again when the same pages are adopted again.
    pub kept_bytes: u64,
}

/// An adopted range, for the road map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adopted {
    /// Where it was mapped when it was adopted.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Where it is in the memory file.
    pub offset: u64,
}

/// How an [`Adopter`](crate::Adopter) may work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Use a userfaultfd for all faults: by a descriptor that the agent sent, by `/dev/userfaultfd`, or by
    /// `userfaultfd(2)` with `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd`. Default true.
    pub full: bool,
    /// Where there is none and the process has other threads: use one for faults from user mode, which needs no
    /// privilege. Another thread's *system call* on a page in transit then fails with `EFAULT`, once in a blue moon;
    /// without this such a region stays [`Backing::Process`]. Default false.
    pub user_mode: bool,
    /// Threads other than the caller that never touch the program's memory while pages move (the guest library's own
    /// helper, asleep). They do not count when it is decided whether the process has one thread. Default 0.
    pub own_threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            full: true,
            user_mode: false,
            own_threads: 0,
        }
    }
}
