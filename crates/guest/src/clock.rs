//! The clocks of completions.

use libc::{clockid_t, timespec};

/// A clock of the system, in nanoseconds.
pub fn now_ns(clock: clockid_t) -> u64 {
    let mut now = timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: valid for writes. These clocks always exist.
    unsafe { libc::clock_gettime(clock, &raw mut now) };
    (now.tv_sec as u64)
        .wrapping_mul(1_000_000_000)
        .wrapping_add(now.tv_nsec as u64)
}
