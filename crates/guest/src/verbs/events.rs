//! Asynchronous events: there are none yet, which a program learns by waiting for them.

use crate::abi::{ibv_async_event, ibv_context};
use crate::ffi::{Errno, MinusOne, Nothing, verb};
use crate::verbs::ContextHandle;

/// `ibv_get_async_event`(3): waits, as long as it may; `EAGAIN` if the program made `async_fd` non-blocking.
///
/// # Safety
/// `context` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    _event: *mut ibv_async_event,
) -> MinusOne {
    verb("ibv_get_async_event", || {
        // SAFETY: the caller's contract.
        let context = unsafe { ContextHandle::lend(context) }?;
        loop {
            // Nobody but the program itself can have written to it; that is no event.
            rustix::io::read(context.async_fd(), &mut [0; 8])
                .map_err(|errno| Errno::new(errno.raw_os_error()))?;
        }
    })
}

/// `ibv_ack_async_event`(3)
#[unsafe(no_mangle)]
pub extern "C" fn ibv_ack_async_event(_event: *mut ibv_async_event) -> Nothing {}
