//! Completion channels (`ibv_get_cq_event`(3)).

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;
use std::sync::atomic::Ordering::Relaxed;

use verbatim_verbs::CompChannel;

use super::cq;
use crate::abi::*;
use crate::ffi::{CObject, Code, Errno, Handle, MinusOne, Nothing, Pointer, verb, write};
use crate::handles::ChannelHandle;
use crate::verbs::ContextHandle;

impl CObject for ibv_comp_channel {
    type Core = Arc<CompChannel>;
}

/// Keeps `refcnt`, which is there for the program to read: the core counts for itself.
///
/// # Safety
/// `channel` is NULL or alive.
pub(super) unsafe fn count(channel: *mut ibv_comp_channel, change: c_int) {
    if !channel.is_null() {
        // SAFETY: the caller's contract; an aligned member that nobody else writes to but in this way.
        unsafe { AtomicI32::from_ptr(&raw mut (*channel).refcnt) }.fetch_add(change, Relaxed);
    }
}

/// `ibv_create_comp_channel`(3)
///
/// # Safety
/// `context` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(context: *mut ibv_context) -> Pointer<ibv_comp_channel> {
    verb("ibv_create_comp_channel", || {
        // SAFETY: the caller's contract.
        let channel = unsafe { ContextHandle::lend(context) }?
            .core()
            .create_comp_channel()?;
        Ok(give(context, channel))
    })
}

/// Gives a channel to the program, which is found by it.
pub(super) fn give(context: *mut ibv_context, channel: Arc<CompChannel>) -> NonNull<ibv_comp_channel> {
    let c = ibv_comp_channel {
        context,
        fd: channel.fd().as_raw_fd(),
        refcnt: 0,
    };
    let pointer = Handle::give(c, channel.clone());
    channel.set_cookie(pointer.as_ptr() as usize);
    pointer
}

/// `ibv_destroy_comp_channel`(3)
///
/// # Safety
/// `channel` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> Code {
    verb("ibv_destroy_comp_channel", || {
        let channel = NonNull::new(channel).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            ChannelHandle::lend(channel.as_ptr())?.core.destroy()?;
            drop(Handle::take(channel));
        }
        Ok(())
    })
}

/// `ibv_get_cq_event`(3): waits, unless the program made the channel's descriptor non-blocking.
///
/// # Safety
/// `channel` is NULL or alive, `to` and `context` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    to: *mut *mut ibv_cq,
    context: *mut *mut c_void,
) -> MinusOne {
    verb("ibv_get_cq_event", || {
        if to.is_null() || context.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract. The queue is not destroyed before its event is acknowledged, so the pointer that
        // it keeps is good.
        unsafe {
            let cq = ChannelHandle::lend(channel)?.core.get_event()?;
            let cq = cq.cookie() as *mut ibv_cq;
            write(to, cq)?;
            write(context, (*cq).cq_context)?;
        }
        Ok(0)
    })
}

/// `ibv_ack_cq_events`(3)
///
/// # Safety
/// `cq` is NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, events: c_uint) -> Nothing {
    verb("ibv_ack_cq_events", || {
        // SAFETY: the caller's contract.
        unsafe { cq::lend(cq) }?.core.cq.ack_events(events);
        Ok(())
    })
}
