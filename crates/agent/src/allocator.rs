//! What glibc keeps of freed memory: enough for the buffers of a session that runs, and an agent that has moved a hundred
//! instances shall have no more than one that has moved few.

/// To be called before the runtime is made: otherwise what is freed is kept for each thread that has ever been busy at the same
/// time as others, and a busy host makes that many threads.
pub fn share_freed_memory() {
    const ARENAS: i32 = 2;
    /// Longer than any buffer for parts of files. Those beyond come from the kernel, with page faults, each time.
    const LONGEST_KEPT_BYTES: i32 = 4 << 20;
    /// What may be kept until [`return_freed_memory`].
    const KEPT_BYTES: i32 = 32 << 20;
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) only sets limits of the allocator; no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LONGEST_KEPT_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
    }
}

/// Gives the kernel back what a session has needed. To be called when one has ended, in nobody's blackout: it takes some
/// milliseconds, in which other threads may wait for memory.
pub fn return_freed_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) may be called by any thread at any time.
    unsafe {
        libc::malloc_trim(0);
    }
}
