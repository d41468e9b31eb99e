//! The clock of completions' timestamps: `CLOCK_MONOTONIC` in nanoseconds, whose frequency and width
//! `ibv_query_device_ex` tells.

use std::ffi::c_int;

use libc::{clockid_t, timespec};

use crate::abi::*;
use crate::ffi::{Code, Errno, verb};
use crate::verbs::ContextHandle;

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

/// `ibv_query_rt_values_ex`(3), through the context's table. As with other devices, the raw clock is a plain count in
/// `tv_nsec`.
///
/// # Safety
/// `context` is NULL or open, `values` NULL or valid.
pub unsafe extern "C" fn query_rt_values(context: *mut ibv_context, values: *mut ibv_values_ex) -> c_int {
    let code: Code = verb("ibv_query_rt_values_ex", || {
        // SAFETY: the caller's contract.
        let values = unsafe {
            ContextHandle::lend(context)?;
            values.as_mut().ok_or(Errno::INVALID)?
        };
        values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
        if values.comp_mask != 0 {
            values.raw_clock = timespec {
                tv_sec: 0,
                tv_nsec: now_ns(libc::CLOCK_MONOTONIC) as i64,
            };
        }
        Ok(())
    });
    code.0
}
