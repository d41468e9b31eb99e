//! Queue pairs.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use verbatim_verbs::{Qp, QpAttrMask, QpInit, QpType};

use super::cq;
use super::users::User;
use crate::abi::*;
use crate::convert;
use crate::data::{self, Builder};
use crate::ffi::{CObject, Code, Errno, Pointer, unsupported, verb, write};
use crate::handles::{PdHandle, QpHandle, SrqHandle};

/// What follows a queue pair's C part.
#[derive(Debug)]
pub struct QpCore {
    pub qp: Arc<Qp>,
    /// Its requests have addresses of their own.
    pub datagram: bool,
    /// Made with `send_ops_flags`: it has the functions of [`ibv_qp_ex`].
    pub extended: bool,
    /// The batch between `ibv_wr_start` and `ibv_wr_complete`.
    pub builder: Builder,
    _pd: User,
}

impl CObject for ibv_qp_ex {
    type Core = QpCore;
}

/// # Safety
/// As for [`Handle::lend`].
#[inline]
pub unsafe fn lend<'a>(qp: *mut ibv_qp) -> Result<&'a QpHandle, Errno> {
    // SAFETY: an `ibv_qp_ex` starts with its `ibv_qp`; the caller's contract.
    unsafe { QpHandle::lend(qp.cast()) }
}

/// The requests that the functions of [`ibv_qp_ex`] can make: what the transport has by the table of `ibv_post_send`(3),
/// but for SEND with invalidate, which is for reliable connections only (IBA Vol 1 §9.2).
fn send_ops(qp_type: QpType) -> u64 {
    let datagram = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let unreliable = datagram
        | IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW;
    match qp_type {
        QpType::Ud => datagram,
        QpType::Uc => unreliable,
        QpType::Rc => {
            unreliable
                | IBV_QP_EX_WITH_SEND_WITH_INV
                | IBV_QP_EX_WITH_RDMA_READ
                | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
                | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
                | IBV_QP_EX_WITH_ATOMIC_WRITE
        }
    }
}

/// # Safety
/// `pd` and the objects that `init` names are alive; `init` is the start of whichever structure the program gave.
unsafe fn create(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    wanted_ops: Option<u64>,
) -> Result<NonNull<ibv_qp>, Errno> {
    let qp_type = convert::qp_type(init.qp_type)?;
    if wanted_ops.unwrap_or(0) & !send_ops(qp_type) != 0 {
        return Err(unsupported("send_ops_flags beyond those of the transport"));
    }
    // SAFETY: the caller's contract.
    let (domain, send_cq, recv_cq, srq) = unsafe {
        let srq = match NonNull::new(init.srq) {
            Some(srq) => Some(SrqHandle::lend(srq.as_ptr())?.core.srq.clone()),
            None => None,
        };
        (
            PdHandle::lend(pd)?,
            cq::lend(init.send_cq)?,
            cq::lend(init.recv_cq)?,
            srq,
        )
    };
    let qp = domain.core.pd.create_qp(&QpInit {
        send_cq: send_cq.core.cq.clone(),
        recv_cq: recv_cq.core.cq.clone(),
        srq,
        qp_type,
        cap: convert::cap_from_c(&init.cap),
        signal_all: init.sq_sig_all != 0,
    })?;
    init.cap = convert::cap_to_c(qp.cap());
    let user = QpPointers {
        qp_context: init.qp_context,
        send_cq: init.send_cq,
        recv_cq: init.recv_cq,
        srq: init.srq,
        extended: wanted_ops.is_some(),
    };
    // SAFETY: the caller's contract.
    unsafe { give(pd, qp, &user) }
}

/// What a program has said of a queue pair.
pub(super) struct QpPointers {
    pub qp_context: *mut c_void,
    pub send_cq: *mut ibv_cq,
    pub recv_cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub extended: bool,
}

/// Gives a queue pair to the program, which is found by it.
///
/// # Safety
/// `pd` is NULL or alive.
pub(super) unsafe fn give(pd: *mut ibv_pd, qp: Arc<Qp>, user: &QpPointers) -> Result<NonNull<ibv_qp>, Errno> {
    // SAFETY: the caller's contract.
    let domain = unsafe { PdHandle::lend(pd) }?;
    let c = data::extended_qp(ibv_qp {
        // SAFETY: alive.
        context: unsafe { (*domain.c()).context },
        qp_context: user.qp_context,
        pd,
        send_cq: user.send_cq,
        recv_cq: user.recv_cq,
        srq: user.srq,
        handle: qp.number(),
        qp_num: qp.number(),
        state: qp.state() as c_uint,
        qp_type: qp.qp_type() as c_uint,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    });
    let core = QpCore {
        qp: qp.clone(),
        datagram: qp.qp_type() == QpType::Ud,
        extended: user.extended,
        builder: Builder::default(),
        _pd: domain.core.users.add(),
    };
    let pointer = QpHandle::give(c, core).cast::<ibv_qp>();
    qp.set_cookie(pointer.as_ptr() as usize);
    Ok(pointer)
}

/// `ibv_create_qp`(3)
///
/// # Safety
/// `pd` is NULL or alive, `init` NULL or valid, and so are the objects that it names.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> Pointer<ibv_qp> {
    verb("ibv_create_qp", || {
        // SAFETY: the caller's contract.
        unsafe { create(pd, init.as_mut().ok_or(Errno::INVALID)?, None) }
    })
}

/// `ibv_create_qp_ex`(3), through the context's table.
///
/// # Safety
/// As for [`ibv_create_qp`].
pub unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    let qp = verb::<Pointer<ibv_qp>>("ibv_create_qp_ex", || {
        // A program built against an older header has a shorter structure: only what `comp_mask` names is read.
        if context.is_null() || init.is_null() {
            return Err(Errno::INVALID);
        }
        // SAFETY: the caller's contract.
        let mask = unsafe { (*init).comp_mask };
        if mask & IBV_QP_INIT_ATTR_PD == 0 {
            return Err(Errno::INVALID);
        }
        const KNOWN: u32 =
            IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        if mask & !KNOWN != 0 {
            return Err(unsupported(
                "a queue pair's comp_mask beyond PD, CREATE_FLAGS and SEND_OPS_FLAGS",
            ));
        }
        // SAFETY: the caller's contract, and `comp_mask` names it.
        if mask & IBV_QP_INIT_ATTR_CREATE_FLAGS != 0 && unsafe { (*init).create_flags } != 0 {
            return Err(unsupported("create_flags of a queue pair"));
        }
        // SAFETY: `comp_mask` names them; the structure starts as `ibv_qp_init_attr` does.
        unsafe {
            let send_ops = (mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS != 0).then(|| (*init).send_ops_flags);
            create((*init).pd, &mut *init.cast::<ibv_qp_init_attr>(), send_ops)
        }
    });
    qp.raw()
}

/// `ibv_qp_to_qp_ex`(3): NULL for a queue pair that was made without `send_ops_flags`.
///
/// # Safety
/// `qp` is NULL or alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: the caller's contract.
    match unsafe { lend(qp) } {
        Ok(handle) if handle.core.extended => qp.cast(),
        _ => null_mut(),
    }
}

/// `ibv_modify_qp`(3)
///
/// # Safety
/// `qp` is NULL or alive, `attr` NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> Code {
    verb("ibv_modify_qp", || {
        // SAFETY: the caller's contract.
        let (handle, attr) = unsafe { (lend(qp)?, attr.as_ref().ok_or(Errno::INVALID)?) };
        let (mask, attr) = convert::modification(attr, mask)?;
        handle.core.qp.modify(mask, &attr)?;
        if mask.contains(QpAttrMask::STATE) {
            // SAFETY: alive; a single member.
            unsafe { (*qp).state = attr.state as c_uint };
        }
        Ok(())
    })
}

/// `ibv_query_qp`(3). Everything is told, whatever is asked for.
///
/// # Safety
/// `qp` is NULL or alive, `attr` and `init` NULL or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> Code {
    verb("ibv_query_qp", || {
        // SAFETY: the caller's contract.
        let handle = unsafe { lend(qp) }?;
        let (now, cap) = handle.core.qp.query()?;
        // SAFETY: the caller's contract; single members of a live object.
        unsafe {
            (*qp).state = now.state as c_uint;
            write(attr, convert::qp_attr(&now, &cap))?;
            let told = ibv_qp_init_attr {
                qp_context: (*qp).qp_context,
                send_cq: (*qp).send_cq,
                recv_cq: (*qp).recv_cq,
                srq: (*qp).srq,
                cap: convert::cap_to_c(&cap),
                qp_type: (*qp).qp_type,
                sq_sig_all: handle.core.qp.signal_all().into(),
            };
            write(init, told)
        }
    })
}

/// `ibv_destroy_qp`(3): waits until the program has acknowledged the queue pair's events.
///
/// # Safety
/// `qp` is NULL or alive, and not used afterwards if this succeeds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> Code {
    verb("ibv_destroy_qp", || {
        let pointer = NonNull::new(qp).ok_or(Errno::INVALID)?;
        // SAFETY: the caller's contract; taken back only when it is gone.
        unsafe {
            lend(qp)?.core.qp.destroy()?;
            drop(QpHandle::take(pointer.cast()));
        }
        Ok(())
    })
}

/// `ibv_query_qp_data_in_order`(3): nothing is promised.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_qp_data_in_order(_qp: *mut ibv_qp, _opcode: c_uint, _flags: u32) -> c_int {
    0
}

/// `ibv_query_ece`(3): `EOPNOTSUPP`, as by rdma-core where an RNIC has no enhanced connection establishment. librdmacm, which takes
/// that for no vendor, reads the answer all the same.
///
/// # Safety
/// `qp` is NULL or alive, `ece` NULL or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> Code {
    verb("ibv_query_ece", || {
        // SAFETY: the caller's contract.
        unsafe {
            lend(qp)?;
            write(
                ece,
                ibv_ece {
                    vendor_id: 0,
                    options: 0,
                    comp_mask: 0,
                },
            )?;
        }
        Err(unsupported("enhanced connection establishment (ECE)"))
    })
}

/// A C object of a queue pair that no program made.
#[cfg(feature = "measure")]
pub(crate) fn handle_of(qp: Arc<Qp>) -> NonNull<ibv_qp> {
    let c = data::extended_qp(ibv_qp {
        context: null_mut(),
        qp_context: null_mut(),
        pd: null_mut(),
        send_cq: null_mut(),
        recv_cq: null_mut(),
        srq: null_mut(),
        handle: qp.number(),
        qp_num: qp.number(),
        state: qp.state() as c_uint,
        qp_type: 0,
        mutex: libc::PTHREAD_MUTEX_INITIALIZER,
        cond: libc::PTHREAD_COND_INITIALIZER,
        events_completed: 0,
    });
    let core = QpCore {
        qp,
        datagram: false,
        extended: false,
        builder: Builder::default(),
        _pd: super::users::Users::default().add(),
    };
    QpHandle::give(c, core).cast()
}
