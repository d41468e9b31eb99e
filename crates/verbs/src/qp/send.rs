//! The send queue: to the ring, or into the interception buffer.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use verbatim_device::control::{QpCap, QpState};
use verbatim_device::layout::{self, SendWqe, WR_BIND_MW, WR_LOCAL_INV};
use verbatim_device::ring::Body;

use super::intercept::Intercepted;
use super::shadow::CompletionSide;
use super::with_local_keys;
use crate::backend::{Refused, SendRing, Sends};
use crate::cq::Cq;
use crate::error::PostError;
use crate::tables::{KeyTable, Keys as _, RecentKey};
use crate::work::{self, SendOpcode, SendWr, WC_LOC_QP_OP_ERR, Wc};

/// How often a full ring is looked at again before a request is put aside. An RNIC may write the completion first and
/// free the slot after it, so a program that is quick can see the one without the other for a moment.
const ROOM_LOOKS: u32 = 200;

/// A send queue.
#[derive(Debug)]
pub struct SendQueue {
    ring: Option<Sends>,
    /// The RNIC is gone: what is posted completes at once, with an error.
    dead: bool,
    side: Arc<CompletionSide>,
    cq: Weak<Cq>,
    /// Told to the completion queue: someone has a backlog.
    cq_backlog: Arc<AtomicBool>,
    state: QpState,
    cap: QpCap,
    signal_all: bool,
    /// The ring takes requests as they come; derived from `ring`, `holds` and `intercepted`.
    direct: bool,
    /// Something was pushed and is not visible yet.
    unpublished: bool,
    /// Keys must be translated; derived from the tables.
    translates: bool,
    /// The position of the next request.
    posted: u64,
    /// Two-sided messages given to the ring since creation or RESET (`n_sent`).
    messages: u64,
    /// How many sessions suspend this queue pair.
    holds: u32,
    intercepted: Intercepted,
    lkeys: Option<RecentKey>,
    rkeys: Option<RecentKey>,
}

/// Where a batch started.
#[derive(Debug, Clone, Copy)]
pub struct Mark {
    posted: u64,
    messages: u64,
    intercepted: usize,
}

impl SendQueue {
    pub fn new(
        side: Arc<CompletionSide>,
        cq: &Arc<Cq>,
        cap: QpCap,
        signal_all: bool,
        lkeys: Option<Arc<KeyTable>>,
    ) -> Self {
        Self {
            ring: None,
            dead: false,
            side,
            cq: Arc::downgrade(cq),
            cq_backlog: cq.backlog.clone(),
            state: QpState::Reset,
            cap,
            signal_all,
            direct: false,
            unpublished: false,
            translates: lkeys.is_some(),
            posted: 0,
            messages: 0,
            holds: 0,
            intercepted: Intercepted::default(),
            lkeys: lkeys.map(RecentKey::new),
            rkeys: None,
        }
    }

    fn derive(&mut self) {
        self.direct = self.ring.is_some() && self.holds == 0 && self.intercepted.is_empty();
        self.translates = self.lkeys.is_some() || self.rkeys.is_some();
    }

    /// Takes one request; visible to the RNIC after [`Self::publish`].
    #[inline]
    pub fn push(&mut self, wr: &SendWr<'_>) -> Result<(), PostError> {
        if !matches!(
            self.state,
            QpState::Rts | QpState::Sqd | QpState::Sqe | QpState::Err
        ) {
            return Err(PostError::State(self.state));
        }
        let inline_bytes = match wr.body {
            Body::Sges(sges) if sges.len() > self.cap.max_send_sge as usize => {
                return Err(PostError::TooManyEntries);
            }
            Body::Sges(_) => 0,
            Body::Inline(pieces) => {
                let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
                if bytes > self.cap.max_inline_data as usize {
                    return Err(PostError::InlineTooLong);
                }
                bytes as u32
            }
        };
        let outstanding = self.posted - self.side.send.retired() + self.intercepted.len() as u64;
        if outstanding >= u64::from(self.cap.max_send_wr) {
            return Err(PostError::Full);
        }
        if !(self.direct && self.push_direct(wr, inline_bytes)) {
            let virtual_wqe = self.wqe(wr, wr.wr_id, RemoteKeys::of(wr), inline_bytes);
            self.retry_or_put_aside(&virtual_wqe, wr.body);
        }
        Ok(())
    }

    /// The request as an RNIC reads it.
    #[inline(always)]
    fn wqe(&self, wr: &SendWr<'_>, wr_id: u64, keys: RemoteKeys, inline_bytes: u32) -> SendWqe {
        SendWqe {
            wr_id,
            opcode: wr.opcode as u8,
            flags: self.device_flags(wr),
            num_sge: match wr.body {
                Body::Sges(sges) => sges.len() as u16,
                Body::Inline(_) => 0,
            },
            imm: keys.imm,
            remote_address: wr.remote_address,
            rkey: keys.rkey,
            inline_bytes,
            compare_add: wr.compare_add,
            swap: keys.swap,
            remote_qpn: wr.ud.remote_qpn,
            remote_qkey: wr.ud.remote_qkey,
            ah: wr.ud.ah,
            reserved: 0,
        }
    }

    /// Gives a request to the ring as it comes; false if that has no room. As [`Self::give`], but the request is never laid
    /// out anywhere else: what is written in small parts and soon read in larger ones stalls the processor.
    #[inline(always)]
    fn push_direct(&mut self, wr: &SendWr<'_>, inline_bytes: u32) -> bool {
        let mut keys = RemoteKeys::of(wr);
        let lkeys = match self.translates {
            true => {
                keys = keys.physical(wr.opcode as u8, self.lkeys.as_ref(), self.rkeys.as_ref());
                self.lkeys.as_ref()
            }
            false => None,
        };
        let wqe = self.wqe(wr, self.posted, keys, inline_bytes);
        let Some(ring) = self.ring.as_mut() else {
            return false;
        };
        let given = match (wr.body, lkeys) {
            (Body::Sges(sges), Some(lkeys)) => {
                with_local_keys(Some(lkeys), sges, |sges| ring.try_push(&wqe, Body::Sges(sges)))
            }
            (body, _) => ring.try_push(&wqe, body),
        };
        if given {
            self.note_given(wr.wr_id, wr.opcode as u8);
        }
        given
    }

    /// The ring has got the request at the current position, and shows it to the RNIC later, when it is published.
    #[inline]
    fn note_given(&mut self, wr_id: u64, opcode: u8) {
        self.side.send.note(self.posted, wr_id);
        self.unpublished = true;
        self.posted += 1;
        self.messages += counts(opcode);
    }

    #[inline]
    fn device_flags(&self, wr: &SendWr<'_>) -> u8 {
        let bit = |set: bool, flag: u8| if set { flag } else { 0 };
        bit(
            wr.flags & work::SEND_SIGNALED != 0 || self.signal_all,
            layout::SEND_SIGNALED,
        ) | bit(wr.flags & work::SEND_SOLICITED != 0, layout::SEND_SOLICITED)
            | bit(wr.flags & work::SEND_FENCE != 0, layout::SEND_FENCE)
            | bit(matches!(wr.body, Body::Inline(_)), layout::SEND_INLINE)
    }

    fn has_room(&self) -> bool {
        let Some(ring) = &self.ring else { return false };
        ring.room() > 0 || self.look_again()
    }

    #[cold]
    fn look_again(&self) -> bool {
        let ring = self.ring.as_ref().expect("the caller has looked");
        (0..ROOM_LOOKS).any(|_| {
            crate::sys::yield_now();
            ring.room() > 0
        })
    }

    /// The ring had no room, or does not take requests as they come.
    #[cold]
    fn retry_or_put_aside(&mut self, wqe: &SendWqe, body: Body<'_>) {
        if self.direct && self.look_again() && self.give(wqe, body) {
            return;
        }
        self.intercepted.push(wqe, body);
        if self.ring.is_some() && self.holds == 0 {
            self.side.backlog.store(true, Relaxed);
            self.cq_backlog.store(true, Relaxed);
        }
        self.derive();
    }

    /// Gives a request that was put aside to the ring; false if that has no room.
    fn give(&mut self, wqe: &SendWqe, body: Body<'_>) -> bool {
        let Some(ring) = self.ring.as_mut() else {
            return false;
        };
        let (lkeys, rkeys) = (self.lkeys.as_ref(), self.rkeys.as_ref());
        let RemoteKeys { rkey, imm, swap } = RemoteKeys {
            rkey: wqe.rkey,
            imm: wqe.imm,
            swap: wqe.swap,
        }
        .physical(wqe.opcode, lkeys, rkeys);
        let physical = SendWqe {
            wr_id: self.posted,
            rkey,
            imm,
            swap,
            ..*wqe
        };
        let given = match body {
            Body::Sges(sges) => {
                with_local_keys(lkeys, sges, |sges| ring.try_push(&physical, Body::Sges(sges)))
            }
            inline => ring.try_push(&physical, inline),
        };
        if given {
            self.note_given(wqe.wr_id, wqe.opcode);
        }
        given
    }

    /// Makes what was pushed visible to the RNIC. What its library refuses was never posted.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Refused> {
        if let Some(ring) = self.ring.as_mut().filter(|_| self.unpublished) {
            self.unpublished = false;
            if let Err(refused) = ring.publish() {
                self.posted -= u64::from(refused.count);
                self.messages -= u64::from(refused.messages);
                return Err(refused);
            }
        } else if self.dead {
            self.flush();
        }
        Ok(())
    }

    /// As [`Self::publish`], for requests that were taken long ago: what is refused now completes with an error.
    fn publish_late(&mut self) {
        let Err(refused) = self.publish() else { return };
        let lost = self.posted..self.posted + u64::from(refused.count);
        let lost: Vec<_> = lost.map(|position| self.side.send.wr_id(position)).collect();
        if let Some(cq) = self.cq.upgrade() {
            cq.add_flushed(lost.into_iter().map(|wr_id| Wc {
                status: WC_LOC_QP_OP_ERR,
                ..Wc::flushed(wr_id, self.side.qpn)
            }));
        }
    }

    /// The RNIC is gone, and with it the ring.
    pub fn lose_ring(&mut self) {
        self.ring = None;
        self.unpublished = false;
        self.dead = true;
        self.derive();
        self.flush();
    }

    #[cold]
    fn flush(&mut self) {
        let outstanding = self.side.send.retired()..self.posted;
        let mut wr_ids: Vec<_> = outstanding
            .map(|position| self.side.send.wr_id(position))
            .collect();
        while !self.intercepted.is_empty() {
            self.intercepted.pop(|wqe, _| wr_ids.push(wqe.wr_id));
        }
        if let Some(cq) = self.cq.upgrade() {
            cq.add_flushed(wr_ids.into_iter().map(|wr_id| Wc::flushed(wr_id, self.side.qpn)));
        }
        self.side.failed.store(true, Relaxed);
        self.side.send.settle(self.posted);
    }

    /// Before a batch.
    pub fn mark(&self) -> Mark {
        Mark {
            posted: self.posted,
            messages: self.messages,
            intercepted: self.intercepted.len(),
        }
    }

    /// Takes back everything pushed since `mark`, none of which was published.
    pub fn rewind(&mut self, mark: Mark) {
        let taken = (self.posted - mark.posted) as u32;
        if let Some(ring) = self.ring.as_mut().filter(|_| taken > 0) {
            ring.unpush(taken);
        }
        self.unpublished = false;
        self.posted = mark.posted;
        self.messages = mark.messages;
        self.intercepted.truncate(mark.intercepted);
        self.derive();
    }

    /// Gives intercepted requests to the ring, in order, as far as there is room and no session holds them. How many.
    pub fn pump(&mut self) -> u64 {
        let mut given = 0;
        while self.holds == 0 && !self.intercepted.is_empty() && self.has_room() {
            let mut intercepted = std::mem::take(&mut self.intercepted);
            intercepted.pop(|wqe, body| {
                let given = self.give(wqe, body);
                assert!(
                    given,
                    "there was room a moment ago, and who takes room holds the lock"
                );
            });
            self.intercepted = intercepted;
            given += 1;
        }
        if given > 0 {
            self.publish_late();
        }
        let backlog = self.ring.is_some() && self.holds == 0 && !self.intercepted.is_empty();
        self.side.backlog.store(backlog, Relaxed);
        self.cq_backlog.fetch_or(backlog, Relaxed);
        self.derive();
        given
    }

    /// One more session suspends this queue pair.
    pub fn hold(&mut self) {
        self.holds += 1;
        self.derive();
    }

    /// One session fewer; the last one to go lets the intercepted requests out. How many.
    pub fn release(&mut self) -> u64 {
        self.holds = self.holds.saturating_sub(1);
        self.pump()
    }

    /// Whether the RNIC has finished all that it was given.
    pub fn is_idle(&self) -> bool {
        self.ring.as_ref().is_none_or(|ring| ring.unfinished() == 0)
    }

    /// Two-sided messages given to the ring.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Goes on with another ring, or the same again. Nothing is in flight: what was not signaled is done.
    pub fn attach(&mut self, ring: Box<dyn SendRing>) {
        self.side.send.settle(self.posted);
        self.ring = Some(ring.into());
        self.derive();
    }

    /// Lets go of the ring.
    pub fn detach(&mut self) {
        self.ring = None;
        self.derive();
    }

    /// From now on keys are translated.
    pub fn set_local_keys(&mut self, lkeys: Arc<KeyTable>) {
        self.lkeys = Some(RecentKey::new(lkeys));
        self.derive();
    }

    /// From now on remote keys are translated by this table; those that it does not know are as they are.
    pub fn set_remote_keys(&mut self, rkeys: Option<Arc<KeyTable>>) {
        self.rkeys = rkeys.map(RecentKey::new);
        self.derive();
    }

    /// The program has taken the queue pair to `state`.
    pub fn set_state(&mut self, state: QpState) {
        self.state = state;
        if state != QpState::Reset {
            return;
        }
        self.intercepted.truncate(0);
        self.side.send.reset(self.posted);
        self.messages = 0;
        self.rkeys = None;
        if let Some(ring) = &mut self.ring {
            ring.reset();
        }
        self.derive();
    }
}

/// 1 if it consumes a RECV of the other end, else 0.
#[inline]
fn counts(opcode: u8) -> u64 {
    use SendOpcode::*;
    const TWO_SIDED: u64 =
        1 << Send as u8 | 1 << SendWithImm as u8 | 1 << SendWithInvalidate as u8 | 1 << WriteWithImm as u8;
    TWO_SIDED >> (opcode & 63) & 1
}

/// The words of a request that may hold keys besides those of its entries.
#[derive(Debug, Clone, Copy)]
struct RemoteKeys {
    rkey: u32,
    imm: u32,
    swap: u64,
}

impl RemoteKeys {
    /// As the program knows them.
    #[inline]
    fn of(wr: &SendWr<'_>) -> Self {
        Self {
            rkey: wr.rkey,
            imm: wr.imm,
            swap: wr.swap,
        }
    }

    /// As the RNICs know them. Remote keys are the other end's, but for binds and local invalidation, which name this
    /// process's own.
    #[inline]
    fn physical(mut self, opcode: u8, lkeys: Option<&RecentKey>, rkeys: Option<&RecentKey>) -> Self {
        const LOW: u64 = 0xffff_ffff;
        const SEND: u8 = SendOpcode::Send as u8;
        const SEND_WITH_IMM: u8 = SendOpcode::SendWithImm as u8;
        const SEND_WITH_INVALIDATE: u8 = SendOpcode::SendWithInvalidate as u8;
        match (opcode, lkeys, rkeys) {
            (WR_LOCAL_INV, ..) => {}
            (WR_BIND_MW, Some(table), _) => {
                let lkey = table.physical(self.swap as u32).unwrap_or(0);
                self.swap = self.swap & !LOW | u64::from(lkey);
            }
            (WR_BIND_MW, None, _) => {}
            // They name no remote memory.
            (SEND | SEND_WITH_IMM, ..) => {}
            (SEND_WITH_INVALIDATE, _, Some(table)) => self.imm = table.physical(self.imm).unwrap_or(self.imm),
            (_, _, Some(table)) => self.rkey = table.physical(self.rkey).unwrap_or(self.rkey),
            (_, _, None) => {}
        }
        self
    }
}
