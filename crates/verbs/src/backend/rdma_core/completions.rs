//! Completions, straight from the library.
//!
//! They are taken one by one: what was taken ahead of the program would be behind the point from which a library that
//! arms by consumer index (mlx5) makes events, and a program that arms, and then waits, would wait for ever.

use std::collections::VecDeque;
use std::sync::Arc;

use verbatim_device::layout::Cqe;
use verbatim_device::ring::Armed;

use super::markers::is_mark;
use super::objects::Cq;
use crate::backend::CompletionRing;
use crate::sys::monotonic_ns;
use crate::work::Wc;

/// The end of a completion queue.
#[derive(Debug)]
pub struct Completions {
    cq: Arc<Cq>,
    /// What was taken when the device was parked.
    left: VecDeque<Wc>,
}

impl Completions {
    pub fn new(cq: Arc<Cq>) -> Self {
        let left = std::mem::take(&mut *cq.left.lock());
        Self { cq, left }
    }
}

impl Cq {
    /// Takes the next completion that is the program's.
    #[inline]
    pub fn next(&self) -> Option<Wc> {
        let mut wc = Wc::default();
        let cq = self.live.hold()?;
        loop {
            // SAFETY: the queue is held, so it and its device are alive; the library fills at most the one entry that it is
            // told of. Every library has `poll_cq`.
            let found = unsafe {
                let poll = (*(*cq.as_ptr()).context).ops.poll_cq?;
                poll(cq.as_ptr(), 1, &mut wc)
            };
            // A queue that has failed gives a negative number; its asynchronous event tells.
            if found <= 0 {
                return None;
            }
            if is_mark(wc.wr_id) {
                self.take_mark(&wc);
                continue;
            }
            if let Some(Some(owner)) = self.owners.read().get(wc.qp_num) {
                owner.note(&wc);
            }
            return Some(wc);
        }
    }
}

impl CompletionRing for Completions {
    fn pop(&mut self) -> Option<Cqe> {
        let wc = match self.left.pop_front() {
            Some(wc) => wc,
            None => self.cq.next()?,
        };
        Some(Cqe {
            wr_id: wc.wr_id,
            // Libraries tell the RNIC's clock only, in its own unit.
            timestamp_ns: monotonic_ns(),
            status: wc.status,
            opcode: wc.opcode,
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            imm: wc.imm,
            qpn: wc.qp_num,
            src_qpn: wc.src_qp,
            wc_flags: wc.wc_flags,
            sl: wc.sl.into(),
            solicited: 0,
        })
    }

    /// Never true: completions that were there before make no event on hardware either, and programs know
    /// (ibv_req_notify_cq(3)).
    fn arm(&mut self, solicited_only: bool) -> bool {
        let Some(cq) = self.cq.live.hold() else {
            return false;
        };
        self.cq.armed.note(solicited_only);
        // SAFETY: the queue is held, so it and its device are alive.
        unsafe {
            if let Some(arm) = (*(*cq.as_ptr()).context).ops.req_notify_cq {
                // Fails only where the device is gone, and then no event comes.
                arm(cq.as_ptr(), solicited_only.into());
            }
        }
        false
    }

    /// Hardware cannot be told to forget it: an event may still come, and one too many does no harm.
    fn disarm(&mut self) -> Option<Armed> {
        self.cq.armed.take()
    }
}
