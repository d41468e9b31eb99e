//! The send queue: to the ring, or into the interception buffer.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use verbatim_device::control::{QpCap, QpState};
use verbatim_device::layout::{self, SendWqe};
use verbatim_device::ring::Body;

use super::intercept::{Copied, Intercepted};
use super::keys::{VirtualKeys, translate_head};
use super::shadow::CompletionSide;
use super::with_local_keys;
use crate::backend::{Refused, SendRing, Sends};
use crate::cq::Cq;
use crate::datagrams::Datagrams;
use crate::error::PostError;
use crate::mw::Windows;
use crate::tables::{KeyTable, RecentKey};
use crate::work::{self, SendOpcode, SendWr, UdAddress, WC_LOC_QP_OP_ERR, Wc};

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
    /// Keys must be translated, or addresses may have to be; derived from the tables.
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
    /// Of a datagram queue pair.
    datagrams: Option<Arc<Datagrams>>,
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
        let datagrams = side.datagrams.clone();
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
            translates: lkeys.is_some() || datagrams.is_some(),
            posted: 0,
            messages: 0,
            holds: 0,
            intercepted: Intercepted::default(),
            lkeys: lkeys.map(RecentKey::new),
            rkeys: None,
            datagrams,
        }
    }

    /// Whether the ring may get requests. In SQD it takes none off the ring, and from there none could be moved.
    fn flows(&self) -> bool {
        self.holds == 0 && self.state != QpState::Sqd
    }

    fn derive(&mut self) {
        self.direct = self.ring.is_some() && self.flows() && self.intercepted.is_empty();
        self.translates = self.lkeys.is_some() || self.rkeys.is_some() || self.datagrams.is_some();
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
        let wqe = SendWqe {
            wr_id: wr.wr_id,
            opcode: wr.opcode as u8,
            flags: self.device_flags(wr),
            num_sge: match wr.body {
                Body::Sges(sges) => sges.len() as u16,
                Body::Inline(_) => 0,
            },
            imm: wr.imm,
            remote_address: wr.remote_address,
            rkey: wr.rkey,
            inline_bytes,
            compare_add: wr.compare_add,
            swap: wr.swap,
            remote_qpn: wr.ud.remote_qpn,
            remote_qkey: wr.ud.remote_qkey,
            ah: wr.ud.ah,
            reserved: 0,
        };
        if !(self.direct && self.give(&wqe, wr.body)) {
            self.retry_or_put_aside(wqe, wr.body);
        }
        Ok(())
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
    fn retry_or_put_aside(&mut self, wqe: SendWqe, body: Body<'_>) {
        if self.direct && self.look_again() && self.give(&wqe, body) {
            return;
        }
        self.intercepted.push(&wqe, body);
        if self.ring.is_some() && self.flows() {
            self.side.backlog.store(true, Relaxed);
            self.cq_backlog.store(true, Relaxed);
        }
        self.derive();
    }

    /// Gives a request to the ring; false if that has no room.
    #[inline(always)]
    fn give(&mut self, wqe: &SendWqe, body: Body<'_>) -> bool {
        let Some(ring) = self.ring.as_mut() else {
            return false;
        };
        let given = if self.translates {
            let physical = Physical {
                ways: self.datagrams.as_deref().filter(|ways| ways.translates()),
                windows: &self.side.windows,
                lkeys: self.lkeys.as_ref(),
                rkeys: self.rkeys.as_ref(),
            };
            physical.push(ring, self.posted, wqe, body)
        } else {
            let wqe = SendWqe {
                wr_id: self.posted,
                ..*wqe
            };
            ring.try_push(&wqe, body)
        };
        if given {
            // The RNIC sees the request later, when it is published.
            self.side.send.note(self.posted, wqe.wr_id);
            self.unpublished = true;
            self.posted += 1;
            self.messages += counts(wqe.opcode);
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
        while self.flows() && !self.intercepted.is_empty() && self.has_room() {
            let mut intercepted = std::mem::take(&mut self.intercepted);
            intercepted.pop(|wqe, body| {
                let given = self.give(wqe, body);
                assert!(
                    given,
                    "there was room a moment ago, and who takes room holds the lock"
                );
                if is_executed(wqe) {
                    // It was counted when it was sent.
                    self.messages -= counts(wqe.opcode);
                }
            });
            self.intercepted = intercepted;
            given += 1;
        }
        if given > 0 {
            self.publish_late();
        }
        let backlog = self.ring.is_some() && self.flows() && !self.intercepted.is_empty();
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

    /// Sees to it that all that the RNIC was given is finished before long ([`SendRing::mark`]); false if it has failed.
    pub fn mark_end(&mut self) -> bool {
        self.ring.as_mut().is_none_or(|ring| ring.mark())
    }

    /// Two-sided messages given to the ring.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Goes on with another ring. Of what the old one had, these are to be posted again, before all others; the rest is
    /// done, signaled or not.
    pub fn attach_new(&mut self, ring: Box<dyn SendRing>, again: Vec<Copied>) {
        self.posted -= again.len() as u64;
        let unsent = again.iter().filter(|request| !is_executed(&request.wqe));
        self.messages -= unsent.map(|request| counts(request.wqe.opcode)).sum::<u64>();
        self.side.send.settle(self.posted);
        self.intercepted.put_first(again);
        self.ring = Some(ring.into());
        self.derive();
    }

    /// Goes on with the ring that was detached.
    pub fn attach_again(&mut self, ring: Box<dyn SendRing>) {
        self.ring = Some(ring.into());
        self.derive();
    }

    /// Becomes, of a new queue pair, what another one's was: `posted` and `messages` were counted there, `unfinished` are the
    /// last of those that its ring was given, `waiting` those behind them. False if the ring has not room for them.
    pub fn refill(
        &mut self,
        posted: u64,
        messages: u64,
        unfinished: &[Copied],
        waiting: Vec<Copied>,
    ) -> bool {
        let first = posted.saturating_sub(unfinished.len() as u64);
        let again = unfinished.iter().filter(|request| !is_executed(&request.wqe));
        let again: u64 = again.map(|request| counts(request.wqe.opcode)).sum();
        self.posted = first;
        self.messages = messages.saturating_sub(again);
        self.side.send.settle(first);
        let given = unfinished.iter().all(|request| {
            let given = request.with_body(|wqe, body| self.give(wqe, body));
            if given && is_executed(&request.wqe) {
                self.messages -= counts(request.wqe.opcode);
            }
            given
        });
        let published = self.publish().is_ok();
        self.intercepted.put_first(waiting);
        self.derive();
        given && published
    }

    /// How many were given to the ring, and how many messages of them.
    pub fn counted(&self) -> (u64, u64) {
        (self.posted, self.messages)
    }

    /// Those that the ring has not been given, oldest first.
    pub fn waiting(&self) -> impl Iterator<Item = &Copied> {
        self.intercepted.iter()
    }

    /// Whether the other end knows its remote keys by the numbers that the program knows.
    pub fn has_own_keys(&self) -> bool {
        let keys = self.rkeys.as_ref().map(RecentKey::reversed).unwrap_or_default();
        keys.iter().all(|(physical, virtual_key)| physical == virtual_key)
    }

    /// The position of the next request.
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// The position of the oldest request that the RNIC has not finished; of the next one if it has finished all.
    pub fn first_unfinished(&self) -> Option<u64> {
        let unfinished = self.ring.as_ref()?.unfinished();
        self.posted.checked_sub(unfinished.into())
    }

    /// What the RNIC has not finished, oldest first, as the program posted it. Of a queue pair that is stopped, or paused.
    ///
    /// `None` if the ring does not hold what was given to it.
    pub fn unfinished(&self) -> Option<Vec<Copied>> {
        let ring = self.ring.as_ref()?;
        let mut requests = Vec::new();
        ring.for_each_unfinished(&mut |wqe, body| requests.push(Copied::new(wqe, body)));
        if requests.len() as u64 != u64::from(ring.unfinished()) {
            return None;
        }
        let first = self.posted.checked_sub(requests.len() as u64)?;
        let keys = VirtualKeys::new(&self.side.windows, self.lkeys.as_ref(), self.rkeys.as_ref());
        for (position, request) in (first..).zip(&mut requests) {
            if request.wqe.wr_id != position {
                return None;
            }
            request.wqe.wr_id = self.side.send.wr_id(position);
            keys.put_into(request);
        }
        Some(requests)
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
            self.pump();
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

/// Whether an earlier queue pair has executed it, and it is only to be completed.
fn is_executed(wqe: &SendWqe) -> bool {
    wqe.flags & layout::SEND_EXECUTED != 0
}

/// 1 if it consumes a RECV of the other end, else 0.
#[inline]
fn counts(opcode: u8) -> u64 {
    use SendOpcode::*;
    const TWO_SIDED: u64 =
        1 << Send as u8 | 1 << SendWithImm as u8 | 1 << SendWithInvalidate as u8 | 1 << WriteWithImm as u8;
    TWO_SIDED >> (opcode & 63) & 1
}

/// The addresses and the keys that the RNICs know.
struct Physical<'a> {
    ways: Option<&'a Datagrams>,
    windows: &'a Windows,
    lkeys: Option<&'a RecentKey>,
    rkeys: Option<&'a RecentKey>,
}

impl Physical<'_> {
    /// Gives a request with them to the ring.
    #[inline(always)]
    fn push(&self, ring: &mut Sends, position: u64, wqe: &SendWqe, body: Body<'_>) -> bool {
        let mut wqe = SendWqe {
            wr_id: position,
            ..*wqe
        };
        if let Some(ways) = self.ways {
            let there = ways.to_physical(UdAddress {
                ah: wqe.ah,
                remote_qpn: wqe.remote_qpn,
                remote_qkey: wqe.remote_qkey,
            });
            (wqe.ah, wqe.remote_qpn) = (there.ah, there.remote_qpn);
        }
        translate_head(&mut wqe, self.windows, self.lkeys, self.rkeys);
        match body {
            Body::Sges(sges) => {
                with_local_keys(self.lkeys, sges, |sges| ring.try_push(&wqe, Body::Sges(sges)))
            }
            inline => ring.try_push(&wqe, inline),
        }
    }
}
