//! Blocking all signals in the calling thread.

/// All signals are blocked while this lives.
#[derive(Debug)]
pub struct Blocked {
    before: u64,
}

impl Blocked {
    /// Blocks all signals, those that libc keeps for itself (cancellation, `setuid`) included: the C function leaves
    /// them out, so this is the system call.
    pub fn all() -> Self {
        Self { before: set_mask(!0) }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        set_mask(self.before);
    }
}

fn set_mask(mask: u64) -> u64 {
    let mut before = 0u64;
    // SAFETY: both pointers are valid for the 8 bytes that the kernel's signal set has (rt_sigprocmask(2)).
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const mask,
            &raw mut before,
            size_of::<u64>(),
        );
    }
    before
}
