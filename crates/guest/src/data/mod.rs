//! The data verbs: no system call that can block, no allocation where a request is as manuals show it, no log.
//!
//! They are called through tables that lie in objects of ours ([`ibv_context_ops`](crate::abi::ibv_context_ops),
//! [`ibv_qp_ex`](crate::abi::ibv_qp_ex), [`ibv_cq_ex`](crate::abi::ibv_cq_ex)), so a pointer that reaches them is one of
//! ours.

mod bind;
mod build;
mod extended;
mod poll;
mod poll_ex;
mod recv;
mod send;

pub use build::Builder;
pub use extended::extended_qp;
pub use poll::{poll_cq, req_notify_cq};
pub use poll_ex::{Poller, extended_cq};
pub use recv::{post_recv, post_srq_recv};
pub use send::post_send;
#[cfg(feature = "measure")]
pub(crate) use {recv::each, send::with_send};

use std::ffi::c_int;

use verbatim_verbs::{PostError, Sge, UdAddress};

use crate::abi::{ibv_ah, ibv_sge};
use crate::ffi::{Errno, slice};
use crate::handles::AhHandle;

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ibv_sge>() == size_of::<Sge>() && align_of::<ibv_sge>() == align_of::<Sge>());
    assert!(offset_of!(ibv_sge, addr) == offset_of!(Sge, address));
    assert!(offset_of!(ibv_sge, length) == offset_of!(Sge, length));
    assert!(offset_of!(ibv_sge, lkey) == offset_of!(Sge, lkey));
};

/// The most pieces of inline data in one request.
const MAX_PIECES: usize = 32;

impl From<PostError> for Errno {
    #[inline]
    fn from(error: PostError) -> Self {
        Self::new(error.errno())
    }
}

/// The program's scatter/gather list, as it lies there.
///
/// # Safety
/// `list` is valid for `count` entries for `'a`, unless `count` is 0.
#[inline]
unsafe fn sges<'a>(list: *const ibv_sge, count: usize) -> Result<&'a [Sge], Errno> {
    // SAFETY: the layouts are equal (above); the caller's contract.
    unsafe { slice(list.cast(), count) }
}

/// The bytes of pieces of inline data; what their lists look like differs.
///
/// # Safety
/// Each address is valid for its length for `'a`, unless that is 0.
#[inline]
unsafe fn pieces<'a, 's>(
    list: impl ExactSizeIterator<Item = (*const u8, usize)>,
    space: &'s mut [&'a [u8]; MAX_PIECES],
) -> Result<&'s [&'a [u8]], Errno> {
    let count = list.len();
    let used = space.get_mut(..count).ok_or(Errno::INVALID)?;
    for (piece, (address, length)) in used.iter_mut().zip(list) {
        // SAFETY: the caller's contract.
        *piece = unsafe { slice(address, length) }?;
    }
    Ok(used)
}

/// To whom a datagram goes.
///
/// # Safety
/// `ah` is NULL or alive.
#[inline]
unsafe fn address(ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) -> Result<UdAddress, Errno> {
    // SAFETY: the caller's contract.
    let handle = unsafe { AhHandle::lend(ah) }?;
    Ok(UdAddress {
        ah: handle.core.ah.number(),
        remote_qpn,
        remote_qkey,
    })
}

/// The outcome of posting a list, as C is told.
///
/// # Safety
/// `bad_wr` is NULL or valid for writes.
#[inline]
unsafe fn posted<T>(outcome: Result<(), (*mut T, Errno)>, bad_wr: *mut *mut T) -> c_int {
    let Err((bad, errno)) = outcome else { return 0 };
    if !bad_wr.is_null() {
        // SAFETY: the caller's contract.
        unsafe { bad_wr.write(bad) };
    }
    errno.raw()
}
