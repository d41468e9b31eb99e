//! Asynchronous events.
//!
//! The helper thread sleeps on the kernel's descriptor and takes events without waiting. As with completion events, each is
//! acknowledged to the library at once.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use rustix::fs::OFlags;
use verbatim_device::control::{AsyncEvent, AsyncEventType};

use super::convert;
use super::ffi;
use super::live::Opened;
use crate::error::VerbsError;

/// What is readable when there is an event.
pub fn descriptor(opened: &Opened) -> BorrowedFd<'_> {
    // SAFETY: the library closes it with the device, which is open as long as `opened`.
    unsafe { BorrowedFd::borrow_raw((*opened.context()).async_fd) }
}

pub fn make_non_blocking(opened: &Opened) -> Result<(), VerbsError> {
    let fd = descriptor(opened);
    let set =
        rustix::fs::fcntl_getfl(fd).and_then(|flags| rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK));
    set.map_err(|errno| VerbsError::os("fcntl", errno))
}

/// The next event that concerns an object here. The end of the RNIC is told by `gone`.
pub fn next(opened: &Opened, gone: &AtomicBool) -> Option<AsyncEvent> {
    let functions = opened.library().functions();
    loop {
        let mut event = ffi::ibv_async_event {
            element: std::ptr::null_mut(),
            event_type: 0,
        };
        // SAFETY: the device is open; the structure is as the header has it.
        if unsafe { (functions.ibv_get_async_event)(opened.context(), &mut event) } != 0 {
            let errno = opened.library().errno();
            if errno == libc::EINTR {
                continue;
            }
            // The kernel closes the descriptor of a device that was taken away.
            if errno != libc::EAGAIN {
                gone.store(true, SeqCst);
            }
            return None;
        }
        let kind = convert::async_event_type(event.event_type);
        // SAFETY: the library's event, not acknowledged yet.
        let object = kind.map(|kind| unsafe { object_of(kind, &event) });
        // SAFETY: an event that was just taken, once.
        unsafe { (functions.ibv_ack_async_event)(&mut event) };
        match (kind, object) {
            (Some(AsyncEventType::DeviceFatal), _) => gone.store(true, SeqCst),
            (Some(event), Some(object)) => return Some(AsyncEvent { event, object }),
            // Of a kind that no transport here has.
            _ => {}
        }
    }
}

/// The number of the object that an event concerns.
///
/// # Safety
/// The event came from the library and was not acknowledged, so that its object is alive.
unsafe fn object_of(kind: AsyncEventType, event: &ffi::ibv_async_event) -> u32 {
    use AsyncEventType::*;
    // SAFETY: the kind tells which member of the union it is (ibv_get_async_event(3)), and the object is alive.
    unsafe {
        match kind {
            CqErr => (*event.element.cast::<ffi::ibv_cq>()).cq_context as usize as u32,
            QpFatal | QpReqErr | QpAccessErr | CommEst | SqDrained | QpLastWqeReached => {
                (*event.element.cast::<ffi::ibv_qp>()).qp_num
            }
            SrqErr | SrqLimitReached => (*event.element.cast::<ffi::ibv_srq>()).srq_context as usize as u32,
            // An `int` in a union of pointers.
            PortActive | PortErr | GidChange => *std::ptr::from_ref(&event.element).cast::<u32>(),
            DeviceFatal => 0,
        }
    }
}
