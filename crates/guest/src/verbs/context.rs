//! Opening and closing a device.

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use verbatim_verbs::Context;

use super::device::Device;
use crate::abi::*;
use crate::data;
use crate::ffi::{Code, Errno, MinusOne, Pointer, verb};
use crate::process;

/// `IBV_FORK_UNNEEDED`: `fork` is safe without the program's doing, see [`process`].
const IBV_FORK_UNNEEDED: c_int = 2;

/// An open device. The program has a pointer to the `context` at the end of `verbs`.
#[repr(C)]
pub struct ContextHandle {
    /// Shared with the program, which may write to it.
    verbs: UnsafeCell<verbs_context>,
    core: Arc<Context>,
    /// What programs take for the kernel's: they may duplicate it, and learn that it knows no command.
    _cmd_fd: OwnedFd,
    /// Length of the latest dump.
    dump_bytes: AtomicUsize,
}

impl ContextHandle {
    fn give(device: *mut ibv_device, core: Arc<Context>) -> Result<NonNull<ibv_context>, Errno> {
        let cmd_fd = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)
            .map_err(|errno| Errno::new(errno.raw_os_error()))?;
        let verbs = UnsafeCell::new(tables(device, cmd_fd.as_raw_fd(), core.async_fd().as_raw_fd()));
        let handle = Box::leak(Box::new(Self {
            verbs,
            core,
            _cmd_fd: cmd_fd,
            dump_bytes: AtomicUsize::new(0),
        }));
        let start = NonNull::from(handle).cast::<u8>();
        // SAFETY: inside of the handle, which starts with `verbs`.
        Ok(unsafe { start.add(offset_of!(verbs_context, context)) }.cast())
    }

    fn whole(pointer: *mut ibv_context) -> *mut Self {
        pointer
            .cast::<u8>()
            .wrapping_sub(offset_of!(verbs_context, context))
            .cast()
    }

    /// # Safety
    /// NULL, or a context that is open and stays so for `'a`.
    #[inline]
    pub unsafe fn lend<'a>(pointer: *mut ibv_context) -> Result<&'a Self, Errno> {
        if pointer.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: what programs have as a context is inside of a handle; the caller's contract.
        Ok(unsafe { &*Self::whole(pointer) })
    }

    /// How long the latest dump of it is; 0 if there was none.
    pub fn dump_bytes(&self) -> usize {
        self.dump_bytes.load(Relaxed)
    }

    /// Notes that.
    pub fn set_dump_bytes(&self, bytes: usize) {
        self.dump_bytes.store(bytes, Relaxed);
    }

    /// The object itself.
    pub fn core(&self) -> &Arc<Context> {
        &self.core
    }
}

/// The tables of a context: what is not in them is NULL, which the header's inline functions report as not supported.
fn tables(device: *mut ibv_device, cmd_fd: c_int, async_fd: c_int) -> verbs_context {
    // SAFETY: integers, pointers and optional functions, for all of which zero is a value.
    let mut verbs: verbs_context = unsafe { std::mem::zeroed() };
    verbs.sz = size_of::<verbs_context>();
    verbs.query_port = Some(super::port::query_port);
    verbs.query_device_ex = Some(super::port::query_device_ex);
    verbs.query_rt_values = Some(super::clock::query_rt_values);
    verbs.create_cq_ex = Some(super::cq::create_cq_ex);
    verbs.create_qp_ex = Some(super::qp::create_qp_ex);
    verbs.alloc_td = Some(super::pd::alloc_td);
    verbs.dealloc_td = Some(super::pd::dealloc_td);
    verbs.alloc_parent_domain = Some(super::pd::alloc_parent_domain);
    verbs.alloc_dm = Some(super::dm::alloc_dm);
    verbs.free_dm = Some(super::dm::free_dm);
    verbs.reg_dm_mr = Some(super::dm::reg_dm_mr);
    let context = &mut verbs.context;
    context.device = device;
    context.cmd_fd = cmd_fd;
    context.async_fd = async_fd;
    context.num_comp_vectors = 1;
    context.mutex = libc::PTHREAD_MUTEX_INITIALIZER;
    context.abi_compat = VERBS_ABI_IS_EXTENDED;
    context.ops.poll_cq = Some(data::poll_cq);
    context.ops.req_notify_cq = Some(data::req_notify_cq);
    context.ops.post_send = Some(data::post_send);
    context.ops.post_recv = Some(data::post_recv);
    context.ops.post_srq_recv = Some(data::post_srq_recv);
    context.ops.alloc_mw = Some(super::mw::alloc_mw);
    context.ops.dealloc_mw = Some(super::mw::dealloc_mw);
    context.ops.bind_mw = Some(super::mw::bind_mw);
    verbs
}

/// `ibv_open_device`(3)
///
/// # Safety
/// `device` is NULL or from `ibv_get_device_list`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> Pointer<ibv_context> {
    verb("ibv_open_device", || {
        // SAFETY: the caller's contract.
        let device = unsafe { Device::lend(device) }?;
        process::register();
        let core = Context::open(device.name())?;
        ContextHandle::give(device.as_c(), core)
    })
}

/// `ibv_close_device`(3)
///
/// # Safety
/// `context` is NULL or open; neither it nor anything made on it is used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> MinusOne {
    verb("ibv_close_device", || {
        // SAFETY: the caller's contract.
        unsafe { ContextHandle::lend(context) }?.core.close()?;
        // SAFETY: made by `give` from a box, and closed once.
        drop(unsafe { Box::from_raw(ContextHandle::whole(context)) });
        Ok(0)
    })
}

/// `ibv_fork_init`(3): nothing is needed.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> Code {
    Code(0)
}

/// `ibv_is_fork_initialized`(3)
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> c_int {
    IBV_FORK_UNNEEDED
}

/// `ibv_dontfork_range`, which libraries call for memory of their own: nothing is needed.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_start: *mut c_void, _length: usize) -> Code {
    Code(0)
}

/// `ibv_dofork_range`, the way back.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_start: *mut c_void, _length: usize) -> Code {
    Code(0)
}
