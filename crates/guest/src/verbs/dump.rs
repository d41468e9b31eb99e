//! Checkpoint and restore by the program itself (MigrOS §3.5): `include/verbatim.h`.

use std::ffi::{c_int, c_void};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use verbatim_verbs::dump::{ObjectType, Owner, QpUser, Record, Restored, check};
use verbatim_verbs::{Cq, Pd, Qp, QpSecret, Srq};

use super::cq::CqUser;
use super::qp::QpPointers;
use super::{ah, channel, cq, mr, mw, pd, qp, srq};
use crate::abi::*;
use crate::ffi::{Code, Errno, read, slice, slice_mut, verb, write};
use crate::verbs::ContextHandle;

const IBV_OBJECT_CONTEXT: c_int = 0;

const IBV_RESTORE_CREATE: c_int = 1;
const IBV_RESTORE_REFILL: c_int = 2;
const IBV_RESTORE_RESUME: c_int = 3;

/// The program's own words, in the C objects that the cookies lead to.
struct Program;

impl Owner for Program {
    fn cq(&self, cq: &Cq) -> u64 {
        let pointer = cq.cookie() as *const ibv_cq;
        // SAFETY: given to the program, and alive as long as the context has the queue; a single member.
        unsafe { pointer.as_ref() }.map_or(0, |cq| cq.cq_context as u64)
    }

    fn srq(&self, srq: &Srq) -> u64 {
        let pointer = srq.cookie() as *const ibv_srq;
        // SAFETY: as above.
        unsafe { pointer.as_ref() }.map_or(0, |srq| srq.srq_context as u64)
    }

    fn qp(&self, qp: &Qp) -> QpUser {
        let pointer = qp.cookie() as *mut ibv_qp;
        // SAFETY: as above.
        match unsafe { qp::lend(pointer) } {
            Ok(handle) => QpUser {
                // SAFETY: alive; a single member.
                context: unsafe { (*pointer).qp_context } as u64,
                extended: handle.core.extended,
            },
            Err(_) => QpUser::default(),
        }
    }
}

/// `ibv_dump_context`
///
/// # Safety
/// `context` is NULL or open, `count` NULL or valid for writes, `dump` valid for writes of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dump_context(
    context: *mut ibv_context,
    count: *mut c_int,
    dump: *mut c_void,
    length: usize,
) -> Code {
    verb("ibv_dump_context", || {
        // SAFETY: the caller's contract.
        let (handle, room) = unsafe {
            (
                ContextHandle::lend(context)?,
                slice_mut::<u8>(dump.cast(), length)?,
            )
        };
        let core = handle.core();
        let stood = core.stands();
        let taken = core.dump(&Program)?;
        handle.set_dump_bytes(taken.bytes.len());
        if !count.is_null() {
            // SAFETY: the caller's contract.
            unsafe { write(count, c_int::try_from(taken.count).unwrap_or(c_int::MAX)) }?;
        }
        if dump.is_null() && length == 0 {
            return Ok(());
        }
        let Some(room) = room.get_mut(..taken.bytes.len()) else {
            if !stood {
                core.go_on()?;
            }
            return Err(Errno::NO_SPACE);
        };
        room.copy_from_slice(&taken.bytes);
        Ok(())
    })
}

/// `verbatim_dump_bytes`
///
/// # Safety
/// `context` is NULL or open.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn verbatim_dump_bytes(context: *mut ibv_context) -> usize {
    // SAFETY: the caller's contract.
    unsafe { ContextHandle::lend(context) }.map_or(0, ContextHandle::dump_bytes)
}

/// `verbatim_check_dump`
///
/// # Safety
/// `dump` is valid for reads of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn verbatim_check_dump(dump: *const c_void, length: usize) -> Code {
    verb("verbatim_check_dump", || {
        // SAFETY: the caller's contract.
        let bytes = unsafe { slice::<u8>(dump.cast(), length) }?;
        check(bytes).map_err(verbatim_verbs::VerbsError::from)?;
        Ok(())
    })
}

/// `ibv_restore_object`
///
/// # Safety
/// `context` is NULL or open, `object` NULL or valid for writes, `args` valid for reads of `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_restore_object(
    context: *mut ibv_context,
    object: *mut *mut c_void,
    object_type: c_int,
    cmd: c_int,
    args: *mut c_void,
    length: usize,
) -> Code {
    verb("ibv_restore_object", || {
        // SAFETY: the caller's contract.
        let (handle, bytes) = unsafe {
            (
                ContextHandle::lend(context)?,
                slice::<u8>(args.cast_const().cast(), length)?,
            )
        };
        let core = handle.core();
        if (object_type, cmd) == (IBV_OBJECT_CONTEXT, IBV_RESTORE_RESUME) {
            return Ok(core.go_on()?);
        }
        if object.is_null() || !matches!(cmd, IBV_RESTORE_CREATE | IBV_RESTORE_REFILL) {
            return Err(Errno::INVALID);
        }
        let record = Record::parse(bytes).map_err(verbatim_verbs::VerbsError::from)?;
        if record.object() as c_int != object_type {
            return Err(Errno::INVALID);
        }
        let pointer = if cmd == IBV_RESTORE_CREATE {
            // SAFETY: the context is open, and what it has is alive.
            unsafe { give(context, core.restore(&record)?) }?
        } else if record.object() == ObjectType::Qp {
            let qp = core.refill(&record)?;
            let pointer = NonNull::new(qp.cookie() as *mut ibv_qp).ok_or(Errno::BROKEN)?;
            // SAFETY: alive; a single member.
            unsafe { (*pointer.as_ptr()).state = qp.state() as u32 };
            pointer.cast()
        } else {
            return Err(Errno::INVALID);
        };
        // SAFETY: the caller's contract.
        unsafe { write(object, pointer.as_ptr()) }
    })
}

/// Gives a restored object to the program.
///
/// # Safety
/// `context` is open, and all that is named by the object is alive.
unsafe fn give(context: *mut ibv_context, restored: Restored) -> Result<NonNull<c_void>, Errno> {
    fn domain(pd: &Arc<Pd>) -> *mut ibv_pd {
        pd.cookie() as *mut ibv_pd
    }
    // SAFETY: the caller's contract: cookies lead to what the program has.
    unsafe {
        Ok(match restored {
            Restored::Pd(pd) => pd::give_own(context, pd).cast(),
            Restored::Channel(channel) => channel::give(context, channel).cast(),
            Restored::Cq(cq, user) => {
                let channel = cq.channel().map_or(0, |channel| channel.cookie());
                let user = CqUser {
                    cq_context: user as *mut c_void,
                    channel: channel as *mut ibv_comp_channel,
                    single_threaded: false,
                };
                cq::give(context, cq, &user, None).cast()
            }
            Restored::Srq(srq, user) => srq::give(domain(srq.pd()), srq.clone(), user as *mut c_void)?.cast(),
            Restored::Mr(mr) => {
                let (address, length) = (mr.address() as *mut c_void, mr.length() as usize);
                mr::give(domain(&mr.pd()), address, length, mr, None)?.cast()
            }
            Restored::Ah(ah) => ah::give(domain(ah.pd()), ah.clone())?.cast(),
            Restored::Qp(qp, user) => {
                let pointers = QpPointers {
                    qp_context: user.context as *mut c_void,
                    send_cq: qp.send_cq().cookie() as *mut ibv_cq,
                    recv_cq: qp.recv_cq().cookie() as *mut ibv_cq,
                    srq: qp.srq().map_or(null_mut(), |srq| srq.cookie() as *mut ibv_srq),
                    extended: user.extended,
                };
                qp::give(domain(qp.pd()), qp.clone(), &pointers)?.cast()
            }
            Restored::Mw(mw) => mw::give(domain(mw.pd()), mw.clone())?.cast(),
        })
    }
}

/// `verbatim_set_qp_secret`
///
/// # Safety
/// `qp` is NULL or alive, `key` NULL or valid for reads of 32 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn verbatim_set_qp_secret(qp: *mut ibv_qp, key: *const u8, first: c_int) -> Code {
    verb("verbatim_set_qp_secret", || {
        // SAFETY: the caller's contract.
        let handle = unsafe { qp::lend(qp) }?;
        let secret = match key.is_null() {
            true => None,
            false => Some(QpSecret {
                // SAFETY: the caller's contract.
                key: unsafe { read(key.cast::<[u8; 32]>()) }?,
                first: first != 0,
            }),
        };
        Ok(handle.core.qp.set_secret(secret)?)
    })
}
