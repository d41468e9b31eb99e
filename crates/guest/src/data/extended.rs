//! The functions of [`ibv_qp_ex`]: `ibv_wr_start`, `ibv_wr_rdma_write`, `ibv_wr_set_sge`, …, `ibv_wr_complete`
//! (`ibv_wr_post`(3)).

use std::ffi::{c_int, c_void};

use verbatim_verbs::{Body, SendOpcode, SendWr, Sge, UdAddress};

use super::bind::bind;
use super::build::{self, with};
use super::{MAX_PIECES, address, pieces, sges};
use crate::abi::*;
use crate::ffi::{data_path, slice};

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    // SAFETY: the contract of `ibv_wr_start`.
    unsafe { build::start(qp) };
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the contract of `ibv_wr_complete`: between start and end, on one thread.
    let run = || match unsafe { build::end(qp) } {
        Some(building) => building.complete().map_or_else(|errno| errno.raw(), |()| 0),
        None => libc::EINVAL,
    };
    data_path(run, || libc::EIO)
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the contract of `ibv_wr_abort`.
    data_path(|| drop(unsafe { build::end(qp) }), || ());
}

/// What most requests are made of.
#[derive(Default)]
struct Request {
    imm: u32,
    rkey: u32,
    remote_address: u64,
    compare_add: u64,
    swap: u64,
}

/// Starts a request that data follow.
///
/// # Safety
/// As for [`with`].
#[inline]
unsafe fn begin(qp: *mut ibv_qp_ex, opcode: SendOpcode, request: Request) {
    // SAFETY: the caller's contract; single members that the program has set for this request.
    unsafe {
        with(qp, |building| {
            building.begin(SendWr {
                wr_id: (*qp).wr_id,
                opcode,
                flags: (*qp).wr_flags,
                imm: request.imm,
                remote_address: request.remote_address,
                rkey: request.rkey,
                compare_add: request.compare_add,
                swap: request.swap,
                ud: UdAddress::default(),
                body: Body::Sges(&[]),
            });
        });
    }
}

/// The functions that start a request: opcode and the parameters of the header's functions.
macro_rules! starters {
    ($($name:ident($($parameter:ident: $type:ty),*) = $opcode:ident { $($field:ident: $value:expr),* };)*) => {$(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $parameter: $type)*) {
            let request = Request { $($field: $value,)* ..Request::default() };
            // SAFETY: the contract of the `ibv_wr_*` functions: between start and end, on one thread.
            unsafe { begin(qp, SendOpcode::$opcode, request) };
        }
    )*};
}

starters! {
    rdma_read(rkey: u32, remote: u64) = Read { rkey: rkey, remote_address: remote };
    rdma_write(rkey: u32, remote: u64) = Write { rkey: rkey, remote_address: remote };
    rdma_write_imm(rkey: u32, remote: u64, imm: u32) =
        WriteWithImm { rkey: rkey, remote_address: remote, imm: imm };
    send() = Send {};
    send_imm(imm: u32) = SendWithImm { imm: imm };
    send_inv(rkey: u32) = SendWithInvalidate { imm: rkey };
    atomic_cmp_swp(rkey: u32, remote: u64, compare: u64, swap: u64) =
        CompareSwap { rkey: rkey, remote_address: remote, compare_add: compare, swap: swap };
    atomic_fetch_add(rkey: u32, remote: u64, add: u64) =
        FetchAdd { rkey: rkey, remote_address: remote, compare_add: add };
}

unsafe extern "C" fn local_inv(qp: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: the contract of the `ibv_wr_*` functions: between start and end, on one thread.
    unsafe {
        with(qp, |building| {
            building.whole(Ok(SendWr::local_invalidate((*qp).wr_id, (*qp).wr_flags, rkey)));
        });
    }
}

unsafe extern "C" fn atomic_write(qp: *mut ibv_qp_ex, rkey: u32, remote: u64, data: *const c_void) {
    // SAFETY: as in `local_inv`; eight bytes are valid for the call, aligned or not.
    unsafe {
        with(qp, |building| {
            let bytes = slice(data.cast::<u8>(), size_of::<u64>());
            let bytes = bytes.map(|bytes| bytes.try_into().map_or(0, u64::from_ne_bytes));
            building.whole(bytes.map(|bytes| SendWr {
                wr_id: (*qp).wr_id,
                opcode: SendOpcode::AtomicWrite,
                flags: (*qp).wr_flags,
                imm: 0,
                remote_address: remote,
                rkey,
                compare_add: bytes,
                swap: 0,
                ud: UdAddress::default(),
                body: Body::Sges(&[]),
            }));
        });
    }
}

unsafe extern "C" fn bind_mw(qp: *mut ibv_qp_ex, mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info) {
    // SAFETY: as in `local_inv`; window, region and description are valid for the call.
    unsafe {
        with(qp, |building| {
            let bind = crate::ffi::read(info).and_then(|info| bind(mw, rkey, &info));
            building.whole(bind.map(|bind| SendWr::bind((*qp).wr_id, (*qp).wr_flags, &bind)));
        });
    }
}

unsafe extern "C" fn set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, remote_qpn: u32, remote_qkey: u32) {
    // SAFETY: as in `local_inv`; the address handle is alive.
    unsafe {
        with(qp, |building| {
            building.address(address(ah, remote_qpn, remote_qkey))
        })
    };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, address: u64, length: u32) {
    let sge = [Sge {
        address,
        length,
        lkey,
    }];
    // SAFETY: as in `local_inv`.
    unsafe { with(qp, |building| building.data(Ok(Body::Sges(&sge)))) };
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: as in `local_inv`; the list is valid for the call.
    unsafe { with(qp, |building| building.data(sges(list, count).map(Body::Sges))) };
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, address: *mut c_void, length: usize) {
    // SAFETY: as in `local_inv`; the data are valid for the call.
    unsafe {
        with(qp, |building| match slice(address.cast_const().cast(), length) {
            Ok(bytes) => building.data(Ok(Body::Inline(&[bytes]))),
            Err(errno) => building.data(Err(errno)),
        });
    }
}

unsafe extern "C" fn set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    let mut space = [&[][..]; MAX_PIECES];
    // SAFETY: as in `local_inv`; the list and the data are valid for the call.
    unsafe {
        with(qp, |building| {
            let data = slice(list, count).and_then(|list| {
                let buffers = list
                    .iter()
                    .map(|buffer| (buffer.addr.cast_const().cast(), buffer.length));
                pieces(buffers, &mut space)
            });
            building.data(data.map(Body::Inline));
        });
    }
}

/// A queue pair with the functions that we have; programs learn at its creation that there are no others.
pub fn extended_qp(qp_base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp: Some(atomic_cmp_swp),
        wr_atomic_fetch_add: Some(atomic_fetch_add),
        wr_bind_mw: Some(bind_mw),
        wr_local_inv: Some(local_inv),
        wr_rdma_read: Some(rdma_read),
        wr_rdma_write: Some(rdma_write),
        wr_rdma_write_imm: Some(rdma_write_imm),
        wr_send: Some(send),
        wr_send_imm: Some(send_imm),
        wr_send_inv: Some(send_inv),
        wr_send_tso: None,
        wr_set_ud_addr: Some(set_ud_addr),
        wr_set_xrc_srqn: None,
        wr_set_inline_data: Some(set_inline_data),
        wr_set_inline_data_list: Some(set_inline_data_list),
        wr_set_sge: Some(set_sge),
        wr_set_sge_list: Some(set_sge_list),
        wr_start: Some(start),
        wr_complete: Some(complete),
        wr_abort: Some(abort),
        wr_atomic_write: Some(atomic_write),
    }
}
