//! Protection domains, parent domains and thread domains.
//!
//! A parent domain is its protection domain under another pointer, with a thread domain's promise that only one thread
//! uses what is made on it. Locks that nobody contends for cost next to nothing here, so the promise changes nothing.

use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_verbs::Pd;

use super::users::{User, Users};
use crate::abi::*;
use crate::ffi::{CObject, Code, Errno, Handle, Pointer, unsupported, verb};
use crate::handles::PdHandle;
use crate::verbs::ContextHandle;

/// What follows a domain's C part.
#[derive(Debug)]
pub struct PdCore {
    pub pd: Arc<Pd>,
    /// Objects made with this very pointer.
    pub users: Users,
    /// A parent domain is a user of what it was made of.
    parents: Option<(User, Option<User>)>,
}

impl CObject for ibv_pd {
    type Core = PdCore;
}

impl CObject for ibv_td {
    type Core = Users;
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
        Ok(give_own(context, pd))
    })
}

/// Gives a protection domain to the program, which is found by it.
pub(super) fn give_own(context: *mut ibv_context, pd: Arc<Pd>) -> NonNull<ibv_pd> {
    let pointer = give(context, pd.clone(), None);
    pd.set_cookie(pointer.as_ptr() as usize);
    pointer
}

fn give(context: *mut ibv_context, pd: Arc<Pd>, parents: Option<(User, Option<User>)>) -> NonNull<ibv_pd> {
    let c = ibv_pd {
        context,
        handle: pd.number(),
    };
    let users = Users::default();
    Handle::give(c, PdCore { pd, users, parents })
}

/// `ibv_dealloc_pd`(3), of a parent domain too.
///
/// # Safety
/// `pd` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Code {
    verb("ibv_dealloc_pd", || {
        let pd = NonNull::new(pd).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            let core = &PdHandle::lend(pd.as_ptr())?.core;
            core.users.none()?;
            if core.parents.is_none() {
                core.pd.dealloc()?;
            }
            drop(Handle::take(pd));
        }
        Ok(())
    })
}

/// `ibv_alloc_td`(3), through the context's table.
///
/// # Safety
/// `context` is NULL or open, `init` NULL or valid.
pub unsafe extern "C" fn alloc_td(context: *mut ibv_context, init: *mut ibv_td_init_attr) -> *mut ibv_td {
    let td = verb::<Pointer<ibv_td>>("ibv_alloc_td", || {
        // SAFETY: the caller's contract.
        let mask = unsafe {
            ContextHandle::lend(context)?;
            crate::ffi::read(init)?.comp_mask
        };
        if mask != 0 {
            return Err(unsupported("a thread domain with a comp_mask"));
        }
        Ok(Handle::give(ibv_td { context }, Users::default()))
    });
    td.raw()
}

/// `ibv_dealloc_td`(3), through the context's table.
///
/// # Safety
/// `td` is NULL or alive, and not used afterwards if this succeeds.
pub unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> std::ffi::c_int {
    let code: Code = verb("ibv_dealloc_td", || {
        let td = NonNull::new(td).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only if no parent domain uses it.
        unsafe {
            Handle::lend(td.as_ptr())?.core.none()?;
            drop(Handle::take(td));
        }
        Ok(())
    });
    code.0
}

/// `ibv_alloc_parent_domain`(3), through the context's table. The program may offer allocators for the memory of queues;
/// ours lie in the RNIC's memory, so there is nothing to allocate and they are not called.
///
/// # Safety
/// `context` is NULL or open, `attr` NULL or valid, and so are the objects that it names.
pub unsafe extern "C" fn alloc_parent_domain(
    context: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let pd = verb::<Pointer<ibv_pd>>("ibv_alloc_parent_domain", || {
        const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
        // SAFETY: the caller's contract: the first members are always there, those behind `comp_mask` are not looked at.
        let (base, td, mask) = unsafe {
            ContextHandle::lend(context)?;
            let attr = attr.as_ref().ok_or(Errno::INVALID)?;
            let td = match NonNull::new(attr.td) {
                Some(td) => Some(Handle::<ibv_td>::lend(td.as_ptr())?),
                None => None,
            };
            (PdHandle::lend(attr.pd)?, td, attr.comp_mask)
        };
        if mask & !KNOWN != 0 {
            return Err(unsupported(
                "a parent domain's comp_mask beyond ALLOCATORS and PD_CONTEXT",
            ));
        }
        let parents = (base.core.users.add(), td.map(|td| td.core.add()));
        Ok(give(context, base.core.pd.clone(), Some(parents)))
    });
    pd.raw()
}
