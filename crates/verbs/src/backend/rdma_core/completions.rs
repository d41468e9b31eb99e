//! Completions, straight from the library.
//!
//! They are taken one by one: what was taken ahead of the program would be behind the point from which a library that
//! arms by consumer index (mlx5) makes events, and a program that arms, and then waits, would wait for ever.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::Acquire;

use verbatim_device::layout::Cqe;
use verbatim_device::ring::Armed;

use super::ffi::ibv_cq;
use super::live::Pin;
use super::markers::is_mark;
use super::objects::{Cq, Objects};
use super::progress::QpProgress;
use crate::backend::CompletionRing;
use crate::error::VerbsError;
use crate::work::{WC_IP_CSUM_OK, WC_WITH_INV, Wc};

/// The end of a completion queue.
#[derive(Debug)]
pub struct Completions {
    /// The first, since what is dropped while it is pinned is not destroyed.
    pin: Pin<ibv_cq>,
    cq: Arc<Cq>,
    objects: Arc<Objects>,
    /// What was taken when the device was parked.
    left: VecDeque<Wc>,
    /// Whose the last completion was: the next is mostly the same one's.
    last: Option<LastOwner>,
}

#[derive(Debug)]
struct LastOwner {
    qp_num: u32,
    /// As they were before it was looked up.
    changes: u32,
    progress: Arc<QpProgress>,
}

impl Completions {
    pub fn new(cq: Arc<Cq>, objects: Arc<Objects>) -> Result<Self, VerbsError> {
        let pin = cq.live.pin("poll_cq")?;
        let left = std::mem::take(&mut *cq.left.lock());
        Ok(Self {
            pin,
            cq,
            objects,
            left,
            last: None,
        })
    }

    /// Takes a completion into account.
    #[inline]
    fn note(&mut self, wc: &Wc) {
        let changes = self.cq.owner_changes.load(Acquire);
        match &self.last {
            Some(last) if last.qp_num == wc.qp_num && last.changes == changes => last.progress.note(wc),
            _ => self.note_another(wc, changes),
        }
    }

    /// As [`Self::note`], of another queue pair than the one before, or where one was made or destroyed meanwhile.
    #[inline(never)]
    fn note_another(&mut self, wc: &Wc, changes: u32) {
        let owner = self.cq.owners.read().get(wc.qp_num).cloned().flatten();
        self.last = owner.map(|progress| {
            progress.note(wc);
            LastOwner {
                qp_num: wc.qp_num,
                changes,
                progress,
            }
        });
    }
}

impl Cq {
    /// Takes the next completion that is the program's, into account as well.
    pub fn next(&self) -> Option<Wc> {
        let held = self.live.hold()?;
        // SAFETY: it is held.
        let wc = unsafe { self.take(*held) }?;
        if let Some(Some(owner)) = self.owners.read().get(wc.qp_num) {
            owner.note(&wc);
        }
        Some(wc)
    }

    /// Takes it.
    ///
    /// # Safety
    /// `cq` is the library's queue, and stays alive until the call returns.
    #[inline]
    unsafe fn take(&self, cq: NonNull<ibv_cq>) -> Option<Wc> {
        let mut wc = Wc::default();
        loop {
            // SAFETY: the caller's contract: it and its device are alive; the library fills at most the one entry that it is
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
            return Some(wc);
        }
    }
}

impl CompletionRing for Completions {
    #[inline]
    fn pop(&mut self) -> Option<Cqe> {
        let wc = match self.left.is_empty() {
            true => {
                // SAFETY: it is pinned.
                let wc = unsafe { self.cq.take(*self.pin) }?;
                self.note(&wc);
                wc
            }
            false => self.left.pop_front()?,
        };
        let wc_flags = match wc.wc_flags & (WC_WITH_INV | WC_IP_CSUM_OK) {
            0 => wc.wc_flags,
            _ => self.objects.invalidated_by(&wc),
        };
        Some(Cqe {
            wr_id: wc.wr_id,
            // Libraries tell the RNIC's clock only, in its own unit: whoever asks for the time looks at ours.
            timestamp_ns: 0,
            status: wc.status,
            opcode: wc.opcode,
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            imm: wc.imm,
            qpn: wc.qp_num,
            src_qpn: wc.src_qp,
            wc_flags,
            sl: wc.sl.into(),
            solicited: 0,
        })
    }

    /// Never true: completions that were there before make no event on hardware either, and programs know
    /// (ibv_req_notify_cq(3)).
    fn arm(&mut self, solicited_only: bool) -> bool {
        let cq = self.pin.as_ptr();
        self.cq.armed.note(solicited_only);
        // SAFETY: the queue is pinned, so it and its device are alive.
        unsafe {
            if let Some(arm) = (*(*cq).context).ops.req_notify_cq {
                // Fails only where the device is gone, and then no event comes.
                arm(cq, solicited_only.into());
            }
        }
        false
    }

    /// Hardware cannot be told to forget it: an event may still come, and one too many does no harm.
    fn disarm(&mut self) -> Option<Armed> {
        self.cq.armed.take()
    }
}
