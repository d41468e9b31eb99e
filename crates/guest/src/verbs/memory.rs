//! Protection domains and memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_verbs::{Mr, Pd};

use super::convert::access_from_c;
use crate::abi::*;
use crate::ffi::{CObject, Code, Errno, Handle, Pointer, verb};
use crate::verbs::ContextHandle;

impl CObject for ibv_pd {
    type Core = Arc<Pd>;
}

impl CObject for ibv_mr {
    type Core = Arc<Mr>;
}

/// `ibv_alloc_pd`(3)
///
/// # Safety
/// `context` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ibv_context) -> Pointer<ibv_pd> {
    verb("ibv_alloc_pd", || {
        // SAFETY: the caller's contract.
        let pd = unsafe { ContextHandle::lend(context) }?.core().alloc_pd()?;
        Ok(Handle::give(
            ibv_pd {
                context,
                handle: pd.number(),
            },
            pd,
        ))
    })
}

/// `ibv_dealloc_pd`(3)
///
/// # Safety
/// `pd` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Code {
    verb("ibv_dealloc_pd", || {
        let pd = NonNull::new(pd).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            Handle::lend(pd.as_ptr())?.core.dealloc()?;
            drop(Handle::take(pd));
        }
        Ok(())
    })
}

/// # Safety
/// `pd` is NULL or alive. That the memory is the program's own to register is for the kernel to check.
unsafe fn register(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Result<NonNull<ibv_mr>, Errno> {
    // SAFETY: the caller's contract.
    let (context, core) = unsafe {
        let handle = Handle::lend(pd)?;
        ((*handle.c()).context, &handle.core)
    };
    let mr = core.reg_mr(address as u64, length as u64, iova, access_from_c(access)?)?;
    let c = ibv_mr {
        context,
        pd,
        addr: address,
        length,
        handle: mr.lkey(),
        lkey: mr.lkey(),
        rkey: mr.rkey(),
    };
    Ok(Handle::give(c, mr))
}

/// `ibv_reg_mr`(3)
///
/// # Safety
/// `pd` is NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> Pointer<ibv_mr> {
    // SAFETY: the caller's contract.
    verb("ibv_reg_mr", || unsafe {
        register(pd, address, length, address as u64, access as c_uint)
    })
}

/// `ibv_reg_mr_iova`(3)
///
/// # Safety
/// `pd` is NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_int,
) -> Pointer<ibv_mr> {
    // SAFETY: the caller's contract.
    verb("ibv_reg_mr_iova", || unsafe {
        register(pd, address, length, iova, access as c_uint)
    })
}

/// What the header makes of `ibv_reg_mr` when the access flags may hold hints.
///
/// # Safety
/// `pd` is NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: c_uint,
) -> Pointer<ibv_mr> {
    // SAFETY: the caller's contract.
    verb("ibv_reg_mr_iova2", || unsafe {
        register(pd, address, length, iova, access)
    })
}

/// `ibv_dereg_mr`(3)
///
/// # Safety
/// `mr` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> Code {
    verb("ibv_dereg_mr", || {
        let mr = NonNull::new(mr).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            Handle::lend(mr.as_ptr())?.core.dereg()?;
            drop(Handle::take(mr));
        }
        Ok(())
    })
}
