//! Completions.

use std::ffi::c_int;

use verbatim_verbs::Wc;

use crate::abi::{ibv_cq, ibv_wc};
use crate::ffi::data_path;
use crate::handles::CqHandle;

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ibv_wc>() == size_of::<Wc>() && align_of::<ibv_wc>() == align_of::<Wc>());
    assert!(offset_of!(ibv_wc, imm_data) == offset_of!(Wc, imm));
    assert!(offset_of!(ibv_wc, wc_flags) == offset_of!(Wc, wc_flags));
    assert!(offset_of!(ibv_wc, dlid_path_bits) == offset_of!(Wc, dlid_path_bits));
};

/// `ibv_poll_cq`(3): how many completions, or a negative errno.
///
/// # Safety
/// `cq` is alive, `to` valid for writes of `room` entries.
pub unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, room: c_int, to: *mut ibv_wc) -> c_int {
    let poll = || {
        let Ok(room) = usize::try_from(room) else {
            return -libc::EINVAL;
        };
        if room == 0 {
            return 0;
        }
        if to.is_null() {
            return -libc::EINVAL;
        }
        // SAFETY: the caller's contract; the layouts are equal (above), and the core only writes.
        let (handle, to) = unsafe {
            (
                CqHandle::lend(cq.cast()),
                std::slice::from_raw_parts_mut(to.cast::<Wc>(), room),
            )
        };
        match handle {
            Ok(handle) => handle.core.cq.poll(to) as c_int,
            Err(errno) => -errno.raw(),
        }
    };
    data_path(poll, || -libc::EIO)
}

/// `ibv_req_notify_cq`(3): 0 or an errno.
///
/// # Safety
/// `cq` is alive.
pub unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    let arm = || {
        // SAFETY: the caller's contract: an `ibv_cq_ex` starts as an `ibv_cq` does.
        match unsafe { CqHandle::lend(cq.cast()) } {
            Ok(handle) => {
                handle.core.cq.arm(solicited_only != 0);
                0
            }
            Err(errno) => errno.raw(),
        }
    };
    data_path(arm, || libc::EIO)
}
