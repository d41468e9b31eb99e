//! Work requests as linked lists.

use std::ffi::c_int;

use verbatim_verbs::{Body, PostError, Qp, RecvWr, SendOpcode, SendWr};

use super::{MAX_PIECES, pieces, sges};
use crate::abi::*;
use crate::ffi::{Errno, data_path};
use crate::verbs::QpHandle;

impl From<PostError> for Errno {
    #[inline]
    fn from(error: PostError) -> Self {
        Self::new(error.errno())
    }
}

/// The opcodes that queue pairs here take from a program.
#[inline]
fn opcode(raw: u32) -> Result<SendOpcode, Errno> {
    match raw {
        IBV_WR_RDMA_WRITE
        | IBV_WR_RDMA_WRITE_WITH_IMM
        | IBV_WR_SEND
        | IBV_WR_SEND_WITH_IMM
        | IBV_WR_RDMA_READ => SendOpcode::from_raw(raw).ok_or(Errno::INVALID),
        _ => Err(Errno::NOT_SUPPORTED),
    }
}

/// `ibv_post_send`(3): 0, or an errno, and then `bad_wr` tells which request; those before it are posted.
///
/// # Safety
/// `qp` is alive; `wr` is a list that ends with NULL, and what its entries point to is valid.
pub unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    let post = || {
        // SAFETY: the caller's contract: an `ibv_qp_ex` starts with its `ibv_qp`.
        let handle = match unsafe { QpHandle::lend(qp.cast()) } {
            Ok(handle) => handle,
            Err(errno) => return Err((wr, errno)),
        };
        let mut batch = handle.core.qp.batch();
        let mut next = wr;
        // SAFETY: the caller's contract.
        while let Some(request) = unsafe { next.as_ref() } {
            // SAFETY: the caller's contract.
            let outcome = unsafe { with_send(request, |request| Ok(batch.push(&request)?)) };
            if let Err(errno) = outcome {
                batch.complete();
                return Err((next, errno));
            }
            next = request.next;
        }
        batch.complete();
        Ok(())
    };
    // SAFETY: the caller's contract.
    unsafe { outcome(data_path(post, || Err((wr, Errno::BROKEN))), bad_wr) }
}

/// Shows a send request of the program's to the core.
///
/// # Safety
/// What the request points to is valid.
#[inline]
unsafe fn with_send(
    request: &ibv_send_wr,
    post: impl FnOnce(SendWr<'_>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let count = usize::try_from(request.num_sge).map_err(|_| Errno::INVALID)?;
    let opcode = opcode(request.opcode)?;
    // SAFETY: the caller's contract. Any bytes are numbers; a SEND does not use them.
    let (list, target) = unsafe { (sges(request.sg_list, count)?, request.wr.rdma) };
    let plain = SendWr {
        wr_id: request.wr_id,
        opcode,
        flags: request.send_flags,
        imm: request.imm_data,
        remote_address: target.remote_addr,
        rkey: target.rkey,
        compare_add: 0,
        swap: 0,
        body: Body::Sges(list),
    };
    if request.send_flags & IBV_SEND_INLINE == 0 {
        return post(plain);
    }
    if opcode == SendOpcode::Read {
        return Err(Errno::INVALID);
    }
    let mut space = [&[][..]; MAX_PIECES];
    let buffers = list
        .iter()
        .map(|sge| (sge.address as *const u8, sge.length as usize));
    // SAFETY: the caller's contract: inline data are read at once, from addresses of the program's.
    let body = Body::Inline(unsafe { pieces(buffers, &mut space) }?);
    post(SendWr { body, ..plain })
}

/// `ibv_post_recv`(3), as [`post_send`].
///
/// # Safety
/// As for [`post_send`].
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = || {
        // SAFETY: the caller's contract: an `ibv_qp_ex` starts with its `ibv_qp`.
        match unsafe { QpHandle::lend(qp.cast()) } {
            // SAFETY: the caller's contract.
            Ok(handle) => unsafe { post_recvs(&handle.core.qp, wr) },
            Err(errno) => Err((wr, errno)),
        }
    };
    // SAFETY: the caller's contract.
    unsafe { outcome(data_path(post, || Err((wr, Errno::BROKEN))), bad_wr) }
}

/// # Safety
/// As for [`post_recv`].
#[inline]
unsafe fn post_recvs(qp: &Qp, first: *mut ibv_recv_wr) -> Result<(), (*mut ibv_recv_wr, Errno)> {
    let mut next = first;
    let mut malformed = None;
    let requests = std::iter::from_fn(|| {
        // SAFETY: the caller's contract.
        let request = unsafe { next.as_ref() }?;
        let count = usize::try_from(request.num_sge).map_err(|_| Errno::INVALID);
        // SAFETY: the caller's contract.
        match count.and_then(|count| unsafe { sges(request.sg_list, count) }) {
            Ok(sges) => {
                next = request.next;
                Some(RecvWr {
                    wr_id: request.wr_id,
                    sges,
                })
            }
            Err(errno) => {
                malformed = Some((next, errno));
                None
            }
        }
    });
    let outcome = qp.post_recv(requests);
    if let Err((index, error)) = outcome {
        // SAFETY: the caller's contract: the core has seen that many.
        let bad = (0..index).fold(first, |wr, _| unsafe { (*wr).next });
        return Err((bad, error.into()));
    }
    malformed.map_or(Ok(()), Err)
}

/// As C is told.
///
/// # Safety
/// `bad_wr` is NULL or valid for writes.
#[inline]
unsafe fn outcome<T>(outcome: Result<(), (*mut T, Errno)>, bad_wr: *mut *mut T) -> c_int {
    let Err((bad, errno)) = outcome else { return 0 };
    if !bad_wr.is_null() {
        // SAFETY: the caller's contract.
        unsafe { bad_wr.write(bad) };
    }
    errno.raw()
}
