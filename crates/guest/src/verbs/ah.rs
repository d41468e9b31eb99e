//! Address handles, and multicast groups.

use std::ptr::NonNull;
use std::sync::Arc;

use verbatim_verbs::Ah;

use super::grh::Sender;
use super::qp;
use super::users::User;
use crate::abi::*;
use crate::convert::address_from_c;
use crate::ffi::{CObject, Code, Errno, Handle, MinusOne, Pointer, read, verb, write};
use crate::handles::{AhHandle, PdHandle};
use crate::verbs::ContextHandle;

/// What follows an address handle's C part.
#[derive(Debug)]
pub struct AhCore {
    pub ah: Arc<Ah>,
    _pd: User,
}

impl CObject for ibv_ah {
    type Core = AhCore;
}

/// # Safety
/// `pd` is NULL or alive.
unsafe fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<NonNull<ibv_ah>, Errno> {
    // SAFETY: the caller's contract.
    let handle = unsafe { PdHandle::lend(pd) }?;
    let ah = handle.core.pd.create_ah(&address_from_c(attr)?)?;
    // SAFETY: the caller's contract.
    unsafe { give(pd, ah) }
}

/// Gives an address handle to the program.
///
/// # Safety
/// `pd` is NULL or alive.
pub(super) unsafe fn give(pd: *mut ibv_pd, ah: Arc<Ah>) -> Result<NonNull<ibv_ah>, Errno> {
    // SAFETY: the caller's contract.
    let handle = unsafe { PdHandle::lend(pd) }?;
    let c = ibv_ah {
        // SAFETY: alive.
        context: unsafe { (*handle.c()).context },
        pd,
        handle: ah.number(),
    };
    let core = AhCore {
        ah,
        _pd: handle.core.users.add(),
    };
    Ok(Handle::give(c, core))
}

/// `ibv_create_ah`(3)
///
/// # Safety
/// `pd` is NULL or alive, `attr` NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> Pointer<ibv_ah> {
    // SAFETY: the caller's contract.
    verb("ibv_create_ah", || unsafe {
        create(pd, attr.as_ref().ok_or(Errno::INVALID)?)
    })
}

/// `ibv_destroy_ah`(3)
///
/// # Safety
/// `ah` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> Code {
    verb("ibv_destroy_ah", || {
        let ah = NonNull::new(ah).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            AhHandle::lend(ah.as_ptr())?.core.ah.destroy()?;
            drop(Handle::take(ah));
        }
        Ok(())
    })
}

/// The way back to the sender of a datagram.
///
/// # Safety
/// `context` is NULL or open, `wc` NULL or valid, `grh` as well if the completion says that there is one.
unsafe fn reply_address(
    context: *mut ibv_context,
    port: u8,
    wc: *const ibv_wc,
    grh: *const ibv_grh,
) -> Result<ibv_ah_attr, Errno> {
    // SAFETY: the caller's contract; a GRH is 40 bytes.
    let (gids, wc) = unsafe { (&ContextHandle::lend(context)?.core().port_attr().gids, read(wc)?) };
    if port != 1 || wc.wc_flags & IBV_WC_GRH == 0 {
        return Err(Errno::INVALID);
    }
    // SAFETY: the completion says that it is there.
    let sender = Sender::parse(&unsafe { read(grh.cast::<[u8; 40]>()) }?)?;
    let sgid_index = gids
        .iter()
        .position(|entry| entry.gid == sender.dgid)
        .and_then(|index| u8::try_from(index).ok())
        .ok_or(Errno::NO_DATA)?;
    Ok(ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: sender.sgid },
            flow_label: sender.flow_label,
            sgid_index,
            hop_limit: sender.hop_limit,
            traffic_class: sender.traffic_class,
        },
        dlid: wc.slid,
        sl: wc.sl,
        src_path_bits: wc.dlid_path_bits,
        static_rate: 0,
        is_global: 1,
        port_num: port,
    })
}

/// `ibv_init_ah_from_wc`(3)
///
/// # Safety
/// `context` is NULL or open, `wc` and `to` NULL or valid, `grh` as well if the completion says that there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    to: *mut ibv_ah_attr,
) -> MinusOne {
    verb("ibv_init_ah_from_wc", || {
        // SAFETY: the caller's contract.
        unsafe { write(to, reply_address(context, port, wc, grh)?) }?;
        Ok(0)
    })
}

/// `ibv_create_ah_from_wc`(3)
///
/// # Safety
/// `pd` is NULL or alive, `wc` NULL or valid, `grh` as well if the completion says that there is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> Pointer<ibv_ah> {
    verb("ibv_create_ah_from_wc", || {
        // SAFETY: the caller's contract.
        unsafe {
            let context = (*PdHandle::lend(pd)?.c()).context;
            create(pd, &reply_address(context, port, wc, grh)?)
        }
    })
}

/// `ibv_attach_mcast`(3). RoCE has no LIDs.
///
/// # Safety
/// `qp` is NULL or alive, `gid` NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> Code {
    verb("ibv_attach_mcast", || {
        // SAFETY: the caller's contract.
        let (handle, gid) = unsafe { (qp::lend(qp)?, read(gid)?) };
        Ok(handle.core.qp.attach_mcast(gid.raw)?)
    })
}

/// `ibv_detach_mcast`(3)
///
/// # Safety
/// As for [`ibv_attach_mcast`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, _lid: u16) -> Code {
    verb("ibv_detach_mcast", || {
        // SAFETY: the caller's contract.
        let (handle, gid) = unsafe { (qp::lend(qp)?, read(gid)?) };
        Ok(handle.core.qp.detach_mcast(gid.raw)?)
    })
}
