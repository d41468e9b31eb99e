//! The data verbs: no system call that can block, no allocation, no log.
//!
//! They are called through tables that lie in objects of ours ([`ibv_context_ops`](crate::abi::ibv_context_ops),
//! [`ibv_qp_ex`](crate::abi::ibv_qp_ex)), so a pointer that reaches them is one of ours.

mod extended;
mod poll;
mod post;

pub use extended::{Builder, extended_functions};
pub use poll::{poll_cq, req_notify_cq};
pub use post::{post_recv, post_send};

use verbatim_verbs::Sge;

use crate::abi::ibv_sge;
use crate::ffi::{Errno, slice};

const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<ibv_sge>() == size_of::<Sge>() && align_of::<ibv_sge>() == align_of::<Sge>());
    assert!(offset_of!(ibv_sge, addr) == offset_of!(Sge, address));
    assert!(offset_of!(ibv_sge, length) == offset_of!(Sge, length));
    assert!(offset_of!(ibv_sge, lkey) == offset_of!(Sge, lkey));
};

/// The most pieces of inline data in one request.
const MAX_PIECES: usize = 32;

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
