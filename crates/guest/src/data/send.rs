//! Send requests as linked lists.

use std::ffi::c_int;

use verbatim_verbs::{Body, SendBatch, SendOpcode, SendWr, Sge, UdAddress};

use super::bind::bind;
use super::{MAX_PIECES, address, pieces, posted, sges};
use crate::abi::*;
use crate::ffi::{Errno, data_path};
use crate::handles::QpHandle;

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
        let mut pushed = 0;
        // SAFETY: the caller's contract.
        while let Some(request) = unsafe { next.as_ref() } {
            let push = |request: SendWr<'_>| Ok(batch.push(&request)?);
            // SAFETY: the caller's contract.
            let outcome = unsafe { with_send(request, handle.core.datagram, push) };
            if let Err(errno) = outcome {
                // SAFETY: the caller's contract: so many were looked at.
                unsafe { complete(batch, wr, pushed) }?;
                return Err((next, errno));
            }
            next = request.next;
            pushed += 1;
        }
        // SAFETY: as above.
        unsafe { complete(batch, wr, pushed) }
    };
    // SAFETY: the caller's contract.
    unsafe { posted(data_path(post, || Err((wr, Errno::BROKEN))), bad_wr) }
}

/// Posts the first `pushed` requests of a list, or tells which one the RNIC's library refuses.
///
/// # Safety
/// The list that starts with `first` has so many.
#[inline]
unsafe fn complete(
    batch: SendBatch<'_>,
    first: *mut ibv_send_wr,
    pushed: u32,
) -> Result<(), (*mut ibv_send_wr, Errno)> {
    batch.complete().map_err(|(refused, error)| {
        // SAFETY: the caller's contract.
        let bad = (refused..pushed).fold(first, |wr, _| unsafe { (*wr).next });
        (bad, error.into())
    })
}

/// Shows a send request of the program's to the core.
///
/// # Safety
/// What the request points to is valid.
#[inline]
pub(crate) unsafe fn with_send(
    request: &ibv_send_wr,
    datagram: bool,
    post: impl FnOnce(SendWr<'_>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let count = usize::try_from(request.num_sge).map_err(|_| Errno::INVALID)?;
    let opcode = SendOpcode::from_raw(request.opcode).ok_or(Errno::NOT_SUPPORTED)?;
    // SAFETY: the caller's contract. Any bytes are numbers; a SEND does not use them.
    let (list, target) = unsafe { (sges(request.sg_list, count)?, request.wr.rdma) };
    let wr = SendWr {
        wr_id: request.wr_id,
        opcode,
        flags: request.send_flags,
        imm: request.imm_data,
        remote_address: target.remote_addr,
        rkey: target.rkey,
        compare_add: 0,
        swap: 0,
        ud: UdAddress::default(),
        body: Body::Sges(list),
    };
    // Apart, so that the usual requests are never laid out in memory.
    let is_inline = request.send_flags & IBV_SEND_INLINE != 0;
    if !datagram && is_plain(opcode) && !is_inline {
        return post(wr);
    }
    // SAFETY: the caller's contract.
    unsafe { post_unusual(request, datagram, wr, list, post) }
}

/// What has more to it than `wr.rdma`, or data to be copied.
///
/// # Safety
/// What the request points to is valid.
unsafe fn post_unusual(
    request: &ibv_send_wr,
    datagram: bool,
    mut wr: SendWr<'_>,
    list: &[Sge],
    post: impl FnOnce(SendWr<'_>) -> Result<(), Errno>,
) -> Result<(), Errno> {
    if datagram || !is_plain(wr.opcode) {
        // SAFETY: the caller's contract.
        unsafe { special(request, datagram, &mut wr) }?;
    }
    if request.send_flags & IBV_SEND_INLINE == 0 {
        return post(wr);
    }
    if !carries_data(wr.opcode) {
        return Err(Errno::INVALID);
    }
    let mut space = [&[][..]; MAX_PIECES];
    let buffers = list
        .iter()
        .map(|sge| (sge.address as *const u8, sge.length as usize));
    // SAFETY: the caller's contract: inline data are read at once, from addresses of the program's.
    let body = Body::Inline(unsafe { pieces(buffers, &mut space) }?);
    post(SendWr { body, ..wr })
}

/// Its request is all in `wr.rdma` and `imm_data`.
#[inline]
fn is_plain(opcode: SendOpcode) -> bool {
    use SendOpcode::*;
    matches!(
        opcode,
        Write | WriteWithImm | Send | SendWithImm | Read | SendWithInvalidate | AtomicWrite
    )
}

/// It takes data along, which may be inline.
#[inline]
fn carries_data(opcode: SendOpcode) -> bool {
    use SendOpcode::*;
    matches!(
        opcode,
        Write | WriteWithImm | Send | SendWithImm | SendWithInvalidate | AtomicWrite
    )
}

/// Takes what other members of the union and behind it say.
///
/// # Safety
/// What the request points to is valid.
unsafe fn special(request: &ibv_send_wr, datagram: bool, wr: &mut SendWr<'_>) -> Result<(), Errno> {
    use SendOpcode::*;
    // SAFETY: the caller's contract; which member of the union counts is told by the queue pair's type and the opcode.
    unsafe {
        match wr.opcode {
            Send | SendWithImm if datagram => {
                let ud = request.wr.ud;
                wr.ud = address(ud.ah, ud.remote_qpn, ud.remote_qkey)?;
            }
            _ if datagram => return Err(Errno::INVALID),
            CompareSwap | FetchAdd => {
                let atomic = request.wr.atomic;
                wr.remote_address = atomic.remote_addr;
                wr.rkey = atomic.rkey;
                wr.compare_add = atomic.compare_add;
                wr.swap = atomic.swap;
            }
            LocalInvalidate => {
                *wr = SendWr::local_invalidate(request.wr_id, request.send_flags, request.imm_data);
            }
            BindMw => {
                let asked = &request.bind_mw;
                let bind = bind(asked.mw, asked.rkey, &asked.bind_info)?;
                *wr = SendWr::bind(request.wr_id, request.send_flags, &bind);
            }
            _ => {}
        }
    }
    Ok(())
}
