//! The clock of completions' timestamps: `CLOCK_MONOTONIC` in nanoseconds, whose frequency and width
//! `ibv_query_device_ex` tells.

use std::ffi::c_int;

use libc::timespec;

use crate::abi::*;
use crate::clock::now_ns;
use crate::ffi::{Code, Errno, verb};
use crate::verbs::ContextHandle;

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
