//! Asynchronous events (`ibv_get_async_event`(3)).

use std::ffi::c_uint;

use verbatim_verbs::{AsyncEventType, AsyncObject};

use super::{cq, qp};
use crate::abi::*;
use crate::ffi::{Errno, MinusOne, Nothing, read, verb, write};
use crate::handles::SrqHandle;
use crate::verbs::ContextHandle;

/// `ibv_get_async_event`(3): waits, unless the program made `async_fd` non-blocking.
///
/// # Safety
/// `context` is NULL or open, `to` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    to: *mut ibv_async_event,
) -> MinusOne {
    verb("ibv_get_async_event", || {
        if to.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        let event = unsafe { ContextHandle::lend(context) }?
            .core()
            .get_async_event()?;
        // The objects are not destroyed before their events are acknowledged, so the pointers that they keep are good.
        let mut element = ibv_async_element {
            qp: std::ptr::null_mut(),
        };
        match &event.object {
            AsyncObject::Cq(cq) => element.cq = cq.cookie() as *mut ibv_cq,
            AsyncObject::Qp(qp) => element.qp = qp.cookie() as *mut ibv_qp,
            AsyncObject::Srq(srq) => element.srq = srq.cookie() as *mut ibv_srq,
            AsyncObject::Port(port) => element.port_num = (*port).into(),
            AsyncObject::Device => {}
        }
        let event_type = event.event as c_uint;
        // SAFETY: the caller's contract.
        unsafe { write(to, ibv_async_event { element, event_type }) }?;
        Ok(0)
    })
}

/// `ibv_ack_async_event`(3)
///
/// # Safety
/// `event` is NULL or as [`ibv_get_async_event`] gave it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) -> Nothing {
    use AsyncEventType::*;
    verb("ibv_ack_async_event", || {
        // SAFETY: the caller's contract.
        let event = unsafe { read(event) }?;
        let is = |event_type: AsyncEventType| event.event_type == event_type as c_uint;
        let of_qp = [
            QpFatal,
            QpReqErr,
            QpAccessErr,
            CommEst,
            SqDrained,
            QpLastWqeReached,
        ];
        // SAFETY: the caller's contract: the type tells which member counts, and the object is alive until now.
        unsafe {
            if is(CqErr) {
                cq::lend(event.element.cq)?.core.cq.ack_async_event();
            } else if of_qp.into_iter().any(is) {
                qp::lend(event.element.qp)?.core.qp.ack_async_event();
            } else if is(SrqErr) || is(SrqLimitReached) {
                SrqHandle::lend(event.element.srq)?.core.srq.ack_async_event();
            }
        }
        Ok(())
    })
}
