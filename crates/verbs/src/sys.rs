//! Calls into the operating system that rustix does not wrap.

#![allow(unsafe_code)]

/// Lets others run.
pub fn yield_now() {
    std::thread::yield_now();
}

/// `CLOCK_MONOTONIC`, as RNICs stamp completions.
pub fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Runs `spawn` with all signals blocked, so that the thread that it starts never runs one of the program's handlers.
pub fn with_signals_blocked<T>(spawn: impl FnOnce() -> T) -> T {
    let mut before = std::mem::MaybeUninit::uninit();
    // SAFETY: both sets are initialised by the calls that are given them before they are read; a thread's signal mask is
    // its own.
    let before = unsafe {
        let mut all = std::mem::MaybeUninit::uninit();
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    };
    let result = spawn();
    // SAFETY: the set is the one that the thread had.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut()) };
    result
}
