//! Work requests built call by call: `ibv_wr_start`, `ibv_wr_rdma_write`, `ibv_wr_set_sge`, …, `ibv_wr_complete`
//! (`ibv_wr_post`(3)).
//!
//! A request is complete when its data are set; what comes next, another request or the end of the batch, finds out if
//! they never were, and then it has none. The queue is locked from `start` to `complete` or `abort`, as the manual
//! page says ("ibv_wr_start … any thread locking").

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};

use verbatim_verbs::{Body, OwnedSendBatch, SendOpcode, SendWr};

use super::{MAX_PIECES, pieces, sges};
use crate::abi::*;
use crate::ffi::{Errno, data_path, slice};
use crate::verbs::QpHandle;

/// The batch of a queue pair that is being built, if any.
#[derive(Default)]
pub struct Builder(UnsafeCell<Option<Building>>);

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Builder")
    }
}

struct Building {
    batch: OwnedSendBatch,
    /// A request whose data are not set yet.
    head: Option<SendWr<'static>>,
    /// The first thing that went wrong; then nothing is posted.
    error: Option<Errno>,
}

impl Building {
    fn note(&mut self, outcome: Result<(), Errno>) {
        if let Err(errno) = outcome {
            self.error.get_or_insert(errno);
        }
    }

    /// Starts a request; the one before it, if it has no data, is complete.
    fn begin(&mut self, request: SendWr<'static>) {
        self.flush();
        self.head = Some(request);
    }

    fn flush(&mut self) {
        if self.head.is_some() {
            self.finish(Body::Sges(&[]));
        }
    }

    /// Gives the request its data.
    fn finish(&mut self, body: Body<'_>) {
        let outcome = match self.head.take() {
            Some(head) => self.batch.push(&SendWr { body, ..head }).map_err(Errno::from),
            None => Err(Errno::INVALID),
        };
        self.note(outcome);
    }
}

/// Runs `f` on the batch of `qp`.
///
/// # Safety
/// `qp` is alive and `ibv_wr_start` was called on it by this thread: its lock keeps the others out.
#[inline]
unsafe fn building<T>(qp: *mut ibv_qp_ex, f: impl FnOnce(&mut Building) -> T) -> Option<T> {
    let run = || {
        // SAFETY: the caller's contract.
        let handle = unsafe { QpHandle::lend(qp) }.ok()?;
        // SAFETY: as above: nobody else looks into the cell.
        unsafe { &mut *handle.core.builder.0.get() }.as_mut().map(f)
    };
    data_path(run, || None)
}

/// # Safety
/// As for [`building`].
#[inline]
unsafe fn begin(qp: *mut ibv_qp_ex, opcode: SendOpcode, rkey: u32, remote_address: u64, imm: u32) {
    // SAFETY: the caller's contract; single members that the program has set for this request.
    unsafe {
        building(qp, |building| {
            building.begin(SendWr {
                wr_id: (*qp).wr_id,
                opcode,
                flags: (*qp).wr_flags,
                imm,
                remote_address,
                rkey,
                compare_add: 0,
                swap: 0,
                body: Body::Sges(&[]),
            });
        });
    }
}

unsafe extern "C" fn start(qp: *mut ibv_qp_ex) {
    let run = || {
        // SAFETY: the contract of `ibv_wr_start`: alive.
        let Ok(handle) = (unsafe { QpHandle::lend(qp) }) else {
            return;
        };
        let batch = handle.core.qp.owned_batch();
        // SAFETY: the queue is locked now, by us: nobody else looks into the cell.
        unsafe {
            *handle.core.builder.0.get() = Some(Building {
                batch,
                head: None,
                error: None,
            })
        };
    };
    data_path(run, || ());
}

/// Ends the batch of `qp`.
///
/// # Safety
/// As for [`building`].
unsafe fn end(qp: *mut ibv_qp_ex) -> Option<Building> {
    // SAFETY: the caller's contract. It is taken out of the cell before its lock goes.
    let handle = unsafe { QpHandle::lend(qp) }.ok()?;
    // SAFETY: as above.
    unsafe { &mut *handle.core.builder.0.get() }.take()
}

unsafe extern "C" fn complete(qp: *mut ibv_qp_ex) -> c_int {
    let run = || {
        // SAFETY: the contract of `ibv_wr_complete`: between start and end, on one thread.
        let Some(mut building) = (unsafe { end(qp) }) else {
            return libc::EINVAL;
        };
        building.flush();
        match building.error {
            Some(errno) => {
                building.batch.abort();
                errno.raw()
            }
            None => {
                building.batch.complete();
                0
            }
        }
    };
    data_path(run, || libc::EIO)
}

unsafe extern "C" fn abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the contract of `ibv_wr_abort`.
    data_path(|| drop(unsafe { end(qp) }), || ());
}

unsafe extern "C" fn rdma_read(qp: *mut ibv_qp_ex, rkey: u32, remote: u64) {
    // SAFETY: the contract of the `ibv_wr_*` functions: between start and end, on one thread.
    unsafe { begin(qp, SendOpcode::Read, rkey, remote, 0) };
}

unsafe extern "C" fn rdma_write(qp: *mut ibv_qp_ex, rkey: u32, remote: u64) {
    // SAFETY: as in `rdma_read`.
    unsafe { begin(qp, SendOpcode::Write, rkey, remote, 0) };
}

unsafe extern "C" fn rdma_write_imm(qp: *mut ibv_qp_ex, rkey: u32, remote: u64, imm: u32) {
    // SAFETY: as in `rdma_read`.
    unsafe { begin(qp, SendOpcode::WriteWithImm, rkey, remote, imm) };
}

unsafe extern "C" fn send(qp: *mut ibv_qp_ex) {
    // SAFETY: as in `rdma_read`.
    unsafe { begin(qp, SendOpcode::Send, 0, 0, 0) };
}

unsafe extern "C" fn send_imm(qp: *mut ibv_qp_ex, imm: u32) {
    // SAFETY: as in `rdma_read`.
    unsafe { begin(qp, SendOpcode::SendWithImm, 0, 0, imm) };
}

unsafe extern "C" fn set_sge(qp: *mut ibv_qp_ex, lkey: u32, address: u64, length: u32) {
    let sge = [verbatim_verbs::Sge {
        address,
        length,
        lkey,
    }];
    // SAFETY: as in `rdma_read`.
    unsafe { building(qp, |building| building.finish(Body::Sges(&sge))) };
}

unsafe extern "C" fn set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: as in `rdma_read`; the list is valid for the call.
    unsafe {
        building(qp, |building| match sges(list, count) {
            Ok(sges) => building.finish(Body::Sges(sges)),
            Err(errno) => building.note(Err(errno)),
        });
    }
}

unsafe extern "C" fn set_inline_data(qp: *mut ibv_qp_ex, address: *mut c_void, length: usize) {
    // SAFETY: as in `rdma_read`; the data are valid for the call.
    unsafe {
        building(qp, |building| match slice(address.cast_const().cast(), length) {
            Ok(bytes) => building.finish(Body::Inline(&[bytes])),
            Err(errno) => building.note(Err(errno)),
        });
    }
}

unsafe extern "C" fn set_inline_data_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_data_buf) {
    let mut space = [&[][..]; MAX_PIECES];
    // SAFETY: as in `rdma_read`; the list and the data are valid for the call.
    unsafe {
        building(qp, |building| {
            let data = slice(list, count).and_then(|list| {
                let buffers = list
                    .iter()
                    .map(|buffer| (buffer.addr.cast_const().cast(), buffer.length));
                pieces(buffers, &mut space)
            });
            match data {
                Ok(pieces) => building.finish(Body::Inline(pieces)),
                Err(errno) => building.note(Err(errno)),
            }
        });
    }
}

/// A queue pair with the functions that we have; programs learn at its creation that there are no others.
pub fn extended_functions(qp_base: ibv_qp) -> ibv_qp_ex {
    ibv_qp_ex {
        qp_base,
        comp_mask: 0,
        wr_id: 0,
        wr_flags: 0,
        wr_atomic_cmp_swp: None,
        wr_atomic_fetch_add: None,
        wr_bind_mw: None,
        wr_local_inv: None,
        wr_rdma_read: Some(rdma_read),
        wr_rdma_write: Some(rdma_write),
        wr_rdma_write_imm: Some(rdma_write_imm),
        wr_send: Some(send),
        wr_send_imm: Some(send_imm),
        wr_send_inv: None,
        wr_send_tso: None,
        wr_set_ud_addr: None,
        wr_set_xrc_srqn: None,
        wr_set_inline_data: Some(set_inline_data),
        wr_set_inline_data_list: Some(set_inline_data_list),
        wr_set_sge: Some(set_sge),
        wr_set_sge_list: Some(set_sge_list),
        wr_start: Some(start),
        wr_complete: Some(complete),
        wr_abort: Some(abort),
        wr_atomic_write: None,
    }
}
