//! Completion queues.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_verbs::Cq;

use crate::abi::*;
use crate::ffi::{CObject, Code, Errno, Handle, Nothing, Pointer, unsupported, verb};
use crate::verbs::ContextHandle;

impl CObject for ibv_cq {
    type Core = Arc<Cq>;
}

/// A completion queue of a program's.
pub type CqHandle = Handle<ibv_cq>;

/// `ibv_create_cq`(3)
///
/// # Safety
/// `context` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> Pointer<ibv_cq> {
    verb("ibv_create_cq", || {
        if !channel.is_null() {
            return Err(unsupported("a completion channel"));
        }
        let entries = u32::try_from(entries)
            .ok()
            .filter(|entries| *entries > 0)
            .ok_or(Errno::INVALID)?;
        if comp_vector != 0 {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        let cq = unsafe { ContextHandle::lend(context) }?
            .core()
            .create_cq(entries)?;
        let c = ibv_cq {
            context,
            channel,
            cq_context,
            handle: cq.number(),
            cqe: c_int::try_from(cq.entries()).unwrap_or(c_int::MAX),
            mutex: libc::PTHREAD_MUTEX_INITIALIZER,
            cond: libc::PTHREAD_COND_INITIALIZER,
            comp_events_completed: 0,
            async_events_completed: 0,
        };
        Ok(Handle::give(c, cq))
    })
}

/// `ibv_destroy_cq`(3)
///
/// # Safety
/// `cq` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> Code {
    verb("ibv_destroy_cq", || {
        let cq = NonNull::new(cq).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            CqHandle::lend(cq.as_ptr())?.core.destroy()?;
            drop(CqHandle::take(cq));
        }
        Ok(())
    })
}

/// `ibv_ack_cq_events`(3): none was ever given, so there is none to wait for. Programs acknowledge 0 events at their end.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_ack_cq_events(_cq: *mut ibv_cq, _events: c_uint) -> Nothing {}
