//! Completion queues, plain and extended. Each has room for the extended functions, whether it was made with them or
//! not, so that either pointer reaches it.

use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use verbatim_verbs::Cq;

use super::channel;
use super::users::User;
use crate::abi::*;
use crate::data::{self, Poller};
use crate::ffi::{CObject, Code, Errno, Pointer, unsupported, verb};
use crate::handles::{ChannelHandle, CqHandle, PdHandle};
use crate::verbs::ContextHandle;

/// What completions of an extended queue can be asked for. There are no VLANs, flow tags and matched tags.
const WC_FLAGS: u64 = IBV_WC_EX_WITH_BYTE_LEN
    | IBV_WC_EX_WITH_IMM
    | IBV_WC_EX_WITH_QP_NUM
    | IBV_WC_EX_WITH_SRC_QP
    | IBV_WC_EX_WITH_SLID
    | IBV_WC_EX_WITH_SL
    | IBV_WC_EX_WITH_DLID_PATH_BITS
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
    | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;

/// What follows a completion queue's C part.
#[derive(Debug)]
pub struct CqCore {
    pub cq: Arc<Cq>,
    /// Of the extended functions.
    pub poller: Poller,
    /// The parent domain that it was made on.
    _domain: Option<User>,
}

impl CObject for ibv_cq_ex {
    type Core = CqCore;
}

/// # Safety
/// As for [`Handle::lend`].
#[inline]
pub unsafe fn lend<'a>(cq: *mut ibv_cq) -> Result<&'a CqHandle, Errno> {
    // SAFETY: an `ibv_cq_ex` starts as an `ibv_cq` does; the caller's contract.
    unsafe { CqHandle::lend(cq.cast()) }
}

/// What a queue is made of.
struct Init {
    entries: u32,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: u32,
    single_threaded: bool,
    domain: Option<User>,
}

/// # Safety
/// `context` is NULL or open, `init.channel` NULL or alive.
unsafe fn create(context: *mut ibv_context, init: Init) -> Result<NonNull<ibv_cq_ex>, Errno> {
    if init.entries == 0 || init.comp_vector != 0 {
        return Err(Errno::INVALID);
    }
    // SAFETY: the caller's contract.
    let (context_core, channel) = unsafe {
        let channel = match NonNull::new(init.channel) {
            Some(channel) => Some(&ChannelHandle::lend(channel.as_ptr())?.core),
            None => None,
        };
        (ContextHandle::lend(context)?.core(), channel)
    };
    let cq = context_core.create_cq(init.entries, channel)?;
    // SAFETY: the caller's contract.
    Ok(unsafe { give(context, cq, &init.user(), init.domain) })
}

/// What a program has said of a queue.
pub(super) struct CqUser {
    pub cq_context: *mut c_void,
    pub channel: *mut ibv_comp_channel,
    pub single_threaded: bool,
}

impl Init {
    fn user(&self) -> CqUser {
        CqUser {
            cq_context: self.cq_context,
            channel: self.channel,
            single_threaded: self.single_threaded,
        }
    }
}

/// Gives a completion queue to the program, which is found by it.
///
/// # Safety
/// `user.channel` is NULL or alive.
pub(super) unsafe fn give(
    context: *mut ibv_context,
    cq: Arc<Cq>,
    user: &CqUser,
    domain: Option<User>,
) -> NonNull<ibv_cq_ex> {
    let c = data::extended_cq(ibv_cq {
        context,
        channel: user.channel,
        cq_context: user.cq_context,
        handle: cq.number(),
        cqe: entries(&cq),
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        comp_events_completed: 0,
        async_events_completed: 0,
    });
    let core = CqCore {
        cq: cq.clone(),
        poller: Poller::new(user.single_threaded),
        _domain: domain,
    };
    let pointer = CqHandle::give(c, core);
    cq.set_cookie(pointer.as_ptr() as usize);
    // SAFETY: the caller's contract.
    unsafe { channel::count(user.channel, 1) };
    pointer
}

fn entries(cq: &Cq) -> c_int {
    c_int::try_from(cq.entries()).unwrap_or(c_int::MAX)
}

/// `ibv_create_cq`(3)
///
/// # Safety
/// `context` is NULL or open, `channel` NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    entries: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    comp_vector: c_int,
) -> Pointer<ibv_cq> {
    verb("ibv_create_cq", || {
        let number = |raw| u32::try_from(raw).map_err(|_| Errno::INVALID);
        let init = Init {
            entries: number(entries)?,
            cq_context,
            channel,
            comp_vector: number(comp_vector)?,
            single_threaded: false,
            domain: None,
        };
        // SAFETY: the caller's contract.
        Ok(unsafe { create(context, init) }?.cast())
    })
}

/// `ibv_create_cq_ex`(3), through the context's table.
///
/// # Safety
/// `context` is NULL or open, `attr` NULL or valid, and so are the objects that it names.
pub unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    let cq = verb::<Pointer<ibv_cq_ex>>("ibv_create_cq_ex", || {
        if attr.is_null() {
            return Err(Errno::INVALID);
        }
        // A program built against an older header has a shorter structure: what is behind `comp_mask` is read only if
        // it is named there.
        // SAFETY: the caller's contract.
        let (mask, wc_flags) = unsafe { ((*attr).comp_mask, (*attr).wc_flags) };
        if mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
            return Err(unsupported("a completion queue's comp_mask beyond FLAGS and PD"));
        }
        if wc_flags & !WC_FLAGS != 0 {
            return Err(unsupported("completions with VLANs, flow tags or matched tags"));
        }
        // SAFETY: the caller's contract, and `comp_mask` names them.
        let init = unsafe {
            let named = |flag| mask & flag != 0;
            let flags = if named(IBV_CQ_INIT_ATTR_MASK_FLAGS) {
                (*attr).flags
            } else {
                0
            };
            if flags & !IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0 {
                return Err(unsupported("a completion queue that ignores overruns"));
            }
            let domain = if named(IBV_CQ_INIT_ATTR_MASK_PD) {
                (*attr).parent_domain
            } else {
                null_mut()
            };
            Init {
                entries: (*attr).cqe,
                cq_context: (*attr).cq_context,
                channel: (*attr).channel,
                comp_vector: (*attr).comp_vector,
                single_threaded: flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0,
                domain: match NonNull::new(domain) {
                    Some(domain) => Some(PdHandle::lend(domain.as_ptr())?.core.users.add()),
                    None => None,
                },
            }
        };
        // SAFETY: the caller's contract.
        unsafe { create(context, init) }
    });
    cq.raw()
}

/// `ibv_resize_cq`(3)
///
/// # Safety
/// `cq` is NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_resize_cq(cq: *mut ibv_cq, to: c_int) -> Code {
    verb("ibv_resize_cq", || {
        let to = u32::try_from(to)
            .ok()
            .filter(|to| *to > 0)
            .ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract.
        let handle = unsafe { lend(cq) }?;
        handle.core.cq.resize(to)?;
        // SAFETY: alive; a single member.
        unsafe { (*cq).cqe = entries(&handle.core.cq) };
        Ok(())
    })
}

/// `ibv_destroy_cq`(3): waits until the program has acknowledged the queue's events.
///
/// # Safety
/// `cq` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> Code {
    verb("ibv_destroy_cq", || {
        let cq = NonNull::new(cq).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone. Its channel outlives it.
        unsafe {
            let channel = (*cq.as_ptr()).channel;
            lend(cq.as_ptr())?.core.cq.destroy()?;
            channel::count(channel, -1);
            drop(CqHandle::take(cq.cast()));
        }
        Ok(())
    })
}

/// A C object of a completion queue that no program made.
#[cfg(feature = "measure")]
pub(crate) fn handle_of(cq: Arc<Cq>) -> NonNull<ibv_cq> {
    let c = data::extended_cq(ibv_cq {
        context: null_mut(),
        channel: null_mut(),
        cq_context: null_mut(),
        handle: cq.number(),
        cqe: entries(&cq),
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        comp_events_completed: 0,
        async_events_completed: 0,
    });
    let core = CqCore {
        cq,
        poller: Poller::new(false),
        _domain: None,
    };
    CqHandle::give(c, core).cast()
}
