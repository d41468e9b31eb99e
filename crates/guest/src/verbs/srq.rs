//! Shared receive queues. Those of extended connections (XRC) and with tag matching are refused by their absence from the
//! context's table.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_verbs::{Srq, SrqAttr};

use super::users::User;
use crate::abi::*;
use crate::ffi::{CObject, Code, Errno, Handle, Pointer, unsupported, verb, write};
use crate::handles::{PdHandle, SrqHandle};

/// What follows a shared receive queue's C part.
#[derive(Debug)]
pub struct SrqCore {
    pub srq: Arc<Srq>,
    _pd: User,
}

impl CObject for ibv_srq {
    type Core = SrqCore;
}

fn attr_to_c(attr: &SrqAttr) -> ibv_srq_attr {
    ibv_srq_attr {
        max_wr: attr.max_wr,
        max_sge: attr.max_sge,
        srq_limit: attr.limit,
    }
}

/// `ibv_create_srq`(3)
///
/// # Safety
/// `pd` is NULL or alive, `init` NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> Pointer<ibv_srq> {
    verb("ibv_create_srq", || {
        // SAFETY: the caller's contract.
        let (handle, init) = unsafe { (PdHandle::lend(pd)?, init.as_mut().ok_or(Errno::INVALID)?) };
        let srq = handle.core.pd.create_srq(&SrqAttr {
            max_wr: init.attr.max_wr,
            max_sge: init.attr.max_sge,
            limit: init.attr.srq_limit,
        })?;
        // What is told is what was given; a limit is not part of it (`ibv_create_srq`(3)).
        init.attr = ibv_srq_attr {
            srq_limit: init.attr.srq_limit,
            ..attr_to_c(srq.attr())
        };
        // SAFETY: the caller's contract.
        unsafe { give(pd, srq, init.srq_context) }
    })
}

/// Gives a shared receive queue to the program, which is found by it.
///
/// # Safety
/// `pd` is NULL or alive.
pub(super) unsafe fn give(
    pd: *mut ibv_pd,
    srq: Arc<Srq>,
    srq_context: *mut c_void,
) -> Result<NonNull<ibv_srq>, Errno> {
    // SAFETY: the caller's contract.
    let handle = unsafe { PdHandle::lend(pd) }?;
    let c = ibv_srq {
        // SAFETY: alive.
        context: unsafe { (*handle.c()).context },
        srq_context,
        pd,
        handle: srq.number(),
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    };
    let core = SrqCore {
        srq: srq.clone(),
        _pd: handle.core.users.add(),
    };
    let pointer = Handle::give(c, core);
    srq.set_cookie(pointer.as_ptr() as usize);
    Ok(pointer)
}

/// `ibv_modify_srq`(3): arms the limit. The queue's size stays as it is, as `device_cap_flags` tells.
///
/// # Safety
/// `srq` is NULL or alive, `attr` NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> Code {
    verb("ibv_modify_srq", || {
        // SAFETY: the caller's contract.
        let (handle, attr) = unsafe { (SrqHandle::lend(srq)?, attr.as_ref().ok_or(Errno::INVALID)?) };
        if mask & IBV_SRQ_MAX_WR != 0 {
            return Err(unsupported("a shared receive queue that changes its size"));
        }
        if mask & !IBV_SRQ_LIMIT != 0 {
            return Err(Errno::INVALID);
        }
        if mask & IBV_SRQ_LIMIT != 0 {
            handle.core.srq.modify_limit(attr.srq_limit)?;
        }
        Ok(())
    })
}

/// `ibv_query_srq`(3)
///
/// # Safety
/// `srq` is NULL or alive, `to` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_srq(srq: *mut ibv_srq, to: *mut ibv_srq_attr) -> Code {
    verb("ibv_query_srq", || {
        // SAFETY: the caller's contract.
        unsafe { write(to, attr_to_c(&SrqHandle::lend(srq)?.core.srq.query()?)) }
    })
}

/// `ibv_destroy_srq`(3)
///
/// # Safety
/// `srq` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_srq(srq: *mut ibv_srq) -> Code {
    verb("ibv_destroy_srq", || {
        let srq = NonNull::new(srq).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            SrqHandle::lend(srq.as_ptr())?.core.srq.destroy()?;
            drop(Handle::take(srq));
        }
        Ok(())
    })
}
