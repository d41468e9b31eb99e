//! Receive requests as linked lists.

use std::ffi::c_int;

use verbatim_verbs::{PostError, RecvWr};

use super::{posted, sges};
use crate::abi::*;
use crate::ffi::{Errno, data_path};
use crate::handles::{QpHandle, SrqHandle};

/// `ibv_post_recv`(3): 0, or an errno, and then `bad_wr` tells which request; those before it are posted.
///
/// # Safety
/// `qp` is alive; `wr` is a list that ends with NULL, and what its entries point to is valid.
pub unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = || {
        // SAFETY: the caller's contract: an `ibv_qp_ex` starts with its `ibv_qp`.
        match unsafe { QpHandle::lend(qp.cast()) } {
            // SAFETY: the caller's contract.
            Ok(handle) => unsafe { each(wr, |requests| handle.core.qp.post_recv(requests)) },
            Err(errno) => Err((wr, errno)),
        }
    };
    // SAFETY: the caller's contract.
    unsafe { posted(data_path(post, || Err((wr, Errno::BROKEN))), bad_wr) }
}

/// `ibv_post_srq_recv`(3), as [`post_recv`].
///
/// # Safety
/// As for [`post_recv`].
pub unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = || {
        // SAFETY: the caller's contract.
        match unsafe { SrqHandle::lend(srq) } {
            // SAFETY: the caller's contract.
            Ok(handle) => unsafe { each(wr, |requests| handle.core.srq.post_recv(requests)) },
            Err(errno) => Err((wr, errno)),
        }
    };
    // SAFETY: the caller's contract.
    unsafe { posted(data_path(post, || Err((wr, Errno::BROKEN))), bad_wr) }
}

/// A list of the program's as the core takes it.
pub(crate) struct List {
    next: *mut ibv_recv_wr,
    /// Where it stopped, and why.
    malformed: Option<Errno>,
}

impl Iterator for &mut List {
    type Item = RecvWr<'static>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        // SAFETY: the contract of `each`: valid, until the core has looked at it.
        let request = unsafe { self.next.as_ref() }?;
        let count = usize::try_from(request.num_sge).map_err(|_| Errno::INVALID);
        // SAFETY: as above.
        match count.and_then(|count| unsafe { sges(request.sg_list, count) }) {
            Ok(sges) => {
                self.next = request.next;
                Some(RecvWr {
                    wr_id: request.wr_id,
                    sges,
                })
            }
            Err(errno) => {
                self.malformed = Some(errno);
                None
            }
        }
    }
}

/// Gives all requests of a list to `post`, or tells which one stopped it.
///
/// # Safety
/// As for [`post_recv`]; `post` keeps nothing of what it is shown.
#[inline]
pub(crate) unsafe fn each(
    first: *mut ibv_recv_wr,
    post: impl FnOnce(&mut List) -> Result<(), (usize, PostError)>,
) -> Result<(), (*mut ibv_recv_wr, Errno)> {
    let mut list = List {
        next: first,
        malformed: None,
    };
    if let Err((index, error)) = post(&mut list) {
        // SAFETY: the caller's contract: the core has seen that many.
        let bad = (0..index).fold(first, |wr, _| unsafe { (*wr).next });
        return Err((bad, error.into()));
    }
    list.malformed.map_or(Ok(()), |errno| Err((list.next, errno)))
}
