//! On-chip memory (`ibv_alloc_dm`(3)), all through the context's table and the object's own functions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use verbatim_verbs::Dm;

use super::users::Users;
use crate::abi::*;
use crate::convert::region_access;
use crate::ffi::{CObject, Code, Errno, Handle, Pointer, slice, slice_mut, unsupported, verb};
use crate::handles::{DmHandle, PdHandle};
use crate::verbs::ContextHandle;

/// Offsets and lengths of copies are multiples of it, as hardware wants it too.
const COPY_UNIT_BYTES: usize = 4;

/// What follows the C part of on-chip memory.
#[derive(Debug)]
pub struct DmCore {
    dm: Arc<Dm>,
    /// Regions of it.
    users: Users,
}

impl CObject for ibv_dm {
    type Core = DmCore;
}

/// `ibv_alloc_dm`(3)
///
/// # Safety
/// `context` is NULL or open, `attr` NULL or valid.
pub unsafe extern "C" fn alloc_dm(context: *mut ibv_context, attr: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    let dm = verb::<Pointer<ibv_dm>>("ibv_alloc_dm", || {
        // SAFETY: the caller's contract.
        let (handle, attr) = unsafe { (ContextHandle::lend(context)?, crate::ffi::read(attr)?) };
        if attr.comp_mask != 0 {
            return Err(unsupported("on-chip memory with a comp_mask"));
        }
        let dm = handle.core().alloc_dm(attr.length as u64, attr.log_align_req)?;
        let c = ibv_dm {
            context,
            memcpy_to_dm: Some(copy_to),
            memcpy_from_dm: Some(copy_from),
            comp_mask: 0,
            handle: 0,
        };
        let users = Users::default();
        Ok(Handle::give(c, DmCore { dm, users }))
    });
    dm.raw()
}

/// `ibv_free_dm`(3)
///
/// # Safety
/// `dm` is NULL or alive, and not used afterwards if this succeeds.
pub unsafe extern "C" fn free_dm(dm: *mut ibv_dm) -> c_int {
    let code: Code = verb("ibv_free_dm", || {
        let dm = NonNull::new(dm).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            let core = &DmHandle::lend(dm.as_ptr())?.core;
            core.users.none()?;
            core.dm.free()?;
            drop(Handle::take(dm));
        }
        Ok(())
    });
    code.0
}

/// `ibv_reg_dm_mr`(3): its addresses are offsets from its start.
///
/// # Safety
/// `pd` and `dm` are NULL or alive.
pub unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    length: usize,
    access: c_uint,
) -> *mut ibv_mr {
    let mr = verb::<Pointer<ibv_mr>>("ibv_reg_dm_mr", || {
        if access & IBV_ACCESS_ZERO_BASED == 0 {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        let (domain, memory) = unsafe { (PdHandle::lend(pd)?, DmHandle::lend(dm)?) };
        let mr = domain
            .core
            .pd
            .reg_dm_mr(&memory.core.dm, offset, length as u64, region_access(access)?)?;
        // SAFETY: the caller's contract.
        unsafe { super::mr::give(pd, null_mut(), length, mr, Some(memory.core.users.add())) }
    });
    mr.raw()
}

fn check_unit(offset: u64, length: usize) -> Result<(), Errno> {
    let unit = COPY_UNIT_BYTES;
    if offset.is_multiple_of(unit as u64) && length.is_multiple_of(unit) {
        Ok(())
    } else {
        Err(Errno::INVALID)
    }
}

/// `ibv_memcpy_to_dm`(3)
///
/// # Safety
/// `dm` is NULL or alive, `from` valid for reads of `length` bytes.
unsafe extern "C" fn copy_to(dm: *mut ibv_dm, offset: u64, from: *const c_void, length: usize) -> c_int {
    let code: Code = verb("ibv_memcpy_to_dm", || {
        check_unit(offset, length)?;
        // SAFETY: the caller's contract.
        let (memory, bytes) = unsafe { (DmHandle::lend(dm)?, slice(from.cast(), length)?) };
        Ok(memory.core.dm.copy_to(offset, bytes)?)
    });
    code.0
}

/// `ibv_memcpy_from_dm`(3)
///
/// # Safety
/// `dm` is NULL or alive, `to` valid for writes of `length` bytes.
unsafe extern "C" fn copy_from(to: *mut c_void, dm: *mut ibv_dm, offset: u64, length: usize) -> c_int {
    let code: Code = verb("ibv_memcpy_from_dm", || {
        check_unit(offset, length)?;
        // SAFETY: the caller's contract.
        let (memory, bytes) = unsafe { (DmHandle::lend(dm)?, slice_mut(to.cast(), length)?) };
        Ok(memory.core.dm.copy_from(offset, bytes)?)
    });
    code.0
}
