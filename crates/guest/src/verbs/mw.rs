//! Memory windows. Those of type 1 are bound by `ibv_bind_mw`, which picks the new key; those of type 2 by a work request
//! that names it ([`data`](crate::data)).

use std::ffi::{c_int, c_uint};
use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_verbs::{Mw, MwRange, MwType};

use super::qp;
use super::users::User;
use crate::abi::*;
use crate::convert::window_access;
use crate::ffi::{CObject, Code, Errno, Handle, Pointer, verb};
use crate::handles::{MrHandle, MwHandle, PdHandle};

/// What follows a window's C part.
#[derive(Debug)]
pub struct MwCore {
    pub mw: Arc<Mw>,
    _pd: User,
}

impl CObject for ibv_mw {
    type Core = MwCore;
}

/// `ibv_alloc_mw`(3), through the context's table.
///
/// # Safety
/// `pd` is NULL or alive.
pub unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, raw_type: c_uint) -> *mut ibv_mw {
    let mw = verb::<Pointer<ibv_mw>>("ibv_alloc_mw", || {
        let mw_type = [MwType::One, MwType::Two]
            .into_iter()
            .find(|mw_type| *mw_type as c_uint == raw_type)
            .ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract.
        let handle = unsafe { PdHandle::lend(pd) }?;
        let mw = handle.core.pd.alloc_mw(mw_type)?;
        // SAFETY: the caller's contract.
        unsafe { give(pd, mw) }
    });
    mw.raw()
}

/// Gives a window to the program.
///
/// # Safety
/// `pd` is NULL or alive.
pub(super) unsafe fn give(pd: *mut ibv_pd, mw: Arc<Mw>) -> Result<NonNull<ibv_mw>, Errno> {
    // SAFETY: the caller's contract.
    let handle = unsafe { PdHandle::lend(pd) }?;
    let c = ibv_mw {
        // SAFETY: alive.
        context: unsafe { (*handle.c()).context },
        pd,
        rkey: mw.rkey(),
        handle: mw.rkey(),
        r#type: mw.mw_type() as c_uint,
    };
    let core = MwCore {
        mw,
        _pd: handle.core.users.add(),
    };
    Ok(Handle::give(c, core))
}

/// `ibv_dealloc_mw`(3), through the context's table.
///
/// # Safety
/// `mw` is NULL or alive, and not used afterwards if this succeeds.
pub unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    let code: Code = verb("ibv_dealloc_mw", || {
        let mw = NonNull::new(mw).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            MwHandle::lend(mw.as_ptr())?.core.mw.dealloc()?;
            drop(Handle::take(mw));
        }
        Ok(())
    });
    code.0
}

/// `ibv_bind_mw`(3), through the context's table.
///
/// # Safety
/// `qp` and `mw` are NULL or alive, `bind` NULL or valid with a region that is alive, if it names one.
pub unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    let code: Code = verb("ibv_bind_mw", || {
        // SAFETY: the caller's contract.
        let (qp, window, bind, region) = unsafe {
            let bind = bind.as_ref().ok_or(Errno::INVALID)?;
            let region = match NonNull::new(bind.bind_info.mr) {
                Some(mr) => Some(MrHandle::lend(mr.as_ptr())?),
                None => None,
            };
            (qp::lend(qp)?, MwHandle::lend(mw)?, bind, region)
        };
        let range = MwRange {
            mr: region.map(|region| &*region.core.mr),
            address: bind.bind_info.addr,
            length: bind.bind_info.length,
            access: window_access(bind.bind_info.mw_access_flags)?,
        };
        let rkey = qp
            .core
            .qp
            .bind_mw(&window.core.mw, bind.wr_id, bind.send_flags, &range)?;
        // SAFETY: alive; a single member.
        unsafe { (*mw).rkey = rkey };
        Ok(())
    });
    code.0
}
