//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use verbatim_verbs::{Mr, MrChange};

use super::users::User;
use crate::abi::*;
use crate::convert::region_access;
use crate::ffi::{CObject, Code, Errno, Handle, MinusOne, Pointer, unsupported, verb};
use crate::handles::{MrHandle, PdHandle};

/// What follows a region's C part.
#[derive(Debug)]
pub struct MrCore {
    pub mr: Arc<Mr>,
    /// Of the domain that the C part names; [`ibv_rereg_mr`] may change it.
    pd: Mutex<User>,
    /// Of on-chip memory, which stays where it is.
    dm: Option<User>,
}

impl CObject for ibv_mr {
    type Core = MrCore;
}

/// Gives a new region to the program.
///
/// # Safety
/// `pd` is alive.
pub(super) unsafe fn give(
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    mr: Arc<Mr>,
    dm: Option<User>,
) -> Result<NonNull<ibv_mr>, Errno> {
    // SAFETY: the caller's contract.
    let (context, user) = unsafe {
        let handle = PdHandle::lend(pd)?;
        ((*handle.c()).context, handle.core.users.add())
    };
    let c = ibv_mr {
        context,
        pd,
        addr: address,
        length,
        handle: mr.lkey(),
        lkey: mr.lkey(),
        rkey: mr.rkey(),
    };
    let core = MrCore {
        mr,
        pd: Mutex::new(user),
        dm,
    };
    Ok(Handle::give(c, core))
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
    unsafe {
        let core = &PdHandle::lend(pd)?.core;
        let mr = core
            .pd
            .reg_mr(address as u64, length as u64, iova, region_access(access)?)?;
        give(pd, address, length, mr, None)
    }
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

/// `ibv_rereg_mr`(3). What fails leaves the region as it was, so the answer is `IBV_REREG_MR_ERR_INPUT` (-1), with
/// `errno`.
///
/// # Safety
/// `mr` and, if it is to be used, `pd` are NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_rereg_mr(
    mr: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> MinusOne {
    verb("ibv_rereg_mr", || {
        const KNOWN: c_int =
            IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
        let asked = |flag| flags & flag != 0;
        let moves = asked(IBV_REREG_MR_CHANGE_TRANSLATION);
        if flags & !KNOWN != 0 || (moves && (address.is_null() || length == 0)) {
            return Err(Errno::INVALID);
        }
        if access != 0 && !asked(IBV_REREG_MR_CHANGE_ACCESS) {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        let (handle, new_pd) = unsafe {
            let new_pd = if asked(IBV_REREG_MR_CHANGE_PD) {
                Some(PdHandle::lend(pd)?)
            } else {
                None
            };
            (MrHandle::lend(mr)?, new_pd)
        };
        if handle.core.dm.is_some() {
            return Err(unsupported("a region of on-chip memory that changes"));
        }
        let access = match asked(IBV_REREG_MR_CHANGE_ACCESS) {
            true => Some(region_access(access as c_uint)?),
            false => None,
        };
        handle.core.mr.rereg(&MrChange {
            pd: new_pd.map(|handle| &handle.core.pd),
            memory: moves.then_some((address as u64, length as u64)),
            access,
        })?;
        // SAFETY: alive; single members.
        unsafe {
            if moves {
                (*mr).addr = address;
                (*mr).length = length;
            }
            if let Some(new_pd) = new_pd {
                (*mr).pd = pd;
                *handle.core.pd.lock().unwrap_or_else(PoisonError::into_inner) = new_pd.core.users.add();
            }
            (*mr).lkey = handle.core.mr.lkey();
            (*mr).rkey = handle.core.mr.rkey();
        }
        Ok(0)
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
            MrHandle::lend(mr.as_ptr())?.core.mr.dereg()?;
            drop(Handle::take(mr));
        }
        Ok(())
    })
}
