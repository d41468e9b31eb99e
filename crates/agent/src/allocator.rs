//! What glibc keeps of freed memory: an agent that has moved a hundred instances shall have no more than one that has moved few.

/// To be called before the runtime is made: otherwise what is freed is kept for each thread that has ever been busy at the same
/// time as others, and a busy host makes that many threads.
pub fn share_freed_memory() {
    const ARENAS: i32 = 2;
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) only sets a limit of the allocator; no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
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
