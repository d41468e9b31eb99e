//! Binding a memory window by a work request: of type 2, whose new key the program picks.

use verbatim_verbs::{MwBind, MwType};

use crate::abi::{ibv_mw, ibv_mw_bind_info};
use crate::convert::window_access;
use crate::ffi::Errno;
use crate::handles::{MrHandle, MwHandle};

/// What the program asks for.
///
/// # Safety
/// `mw` is NULL or alive, and so is the region that `info` names.
pub unsafe fn bind(mw: *mut ibv_mw, rkey: u32, info: &ibv_mw_bind_info) -> Result<MwBind, Errno> {
    // SAFETY: the caller's contract.
    let window = unsafe { MwHandle::lend(mw) }?;
    if window.core.mw.mw_type() != MwType::Two {
        return Err(Errno::INVALID);
    }
    let lkey = if info.mr.is_null() {
        // Nothing is bound to nothing.
        if info.length != 0 {
            return Err(Errno::INVALID);
        }
        0
    } else {
        // SAFETY: the caller's contract.
        unsafe { MrHandle::lend(info.mr) }?.core.mr.lkey()
    };
    Ok(MwBind {
        mw_rkey: window.core.mw.rkey(),
        new_rkey: rkey,
        lkey,
        address: info.addr,
        length: info.length,
        access: window_access(info.mw_access_flags)?,
    })
}
