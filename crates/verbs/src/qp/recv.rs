//! The receive queue: to the ring, and always into the shadow.
//!
//! RECVs that no message has consumed must be posted again on another RNIC, so the shadow keeps each whole until its
//! completion is taken.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use verbatim_device::control::{QpCap, QpState};
use verbatim_device::layout::Sge;

use super::shadow::CompletionSide;
use super::with_local_keys;
use crate::backend::{RecvRing, Recvs, Refused};
use crate::cq::Cq;
use crate::error::PostError;
use crate::tables::{KeyTable, RecentKey};
use crate::work::RECV_BIT;
use crate::work::{RecvWr, Wc};

/// A receive queue.
#[derive(Debug)]
pub struct RecvQueue {
    ring: Option<Recvs>,
    /// The RNIC is gone: what is posted completes at once, with an error.
    dead: bool,
    side: Arc<CompletionSide>,
    cq: Weak<Cq>,
    state: QpState,
    cap: QpCap,
    /// The position of the next RECV.
    posted: u64,
    /// All before this position were given to the ring.
    given: u64,
    /// How many sessions have drained this queue pair: RECVs go to the shadow only.
    holds: u32,
    lkeys: Option<RecentKey>,
    /// Scatter entries by slot, `max_recv_sge` each, virtual keys.
    sges: Box<[Sge]>,
    /// How many of them count.
    counts: Box<[u16]>,
}

impl RecvQueue {
    pub fn new(side: Arc<CompletionSide>, cq: &Arc<Cq>, cap: QpCap, lkeys: Option<Arc<KeyTable>>) -> Self {
        let slots = cap.max_recv_wr.max(1).next_power_of_two() as usize;
        Self {
            ring: None,
            dead: false,
            side,
            cq: Arc::downgrade(cq),
            state: QpState::Reset,
            cap,
            posted: 0,
            given: 0,
            holds: 0,
            lkeys: lkeys.map(RecentKey::new),
            sges: vec![Sge::default(); slots * cap.max_recv_sge as usize].into(),
            counts: vec![0; slots].into(),
        }
    }

    /// Takes one RECV; visible to the RNIC after [`Self::publish`].
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.state == QpState::Reset {
            return Err(PostError::State(self.state));
        }
        if wr.sges.len() > self.cap.max_recv_sge as usize {
            return Err(PostError::TooManyEntries);
        }
        if self.posted - self.side.recv.retired() >= u64::from(self.cap.max_recv_wr) {
            return Err(PostError::Full);
        }
        self.note(wr);
        self.give();
        Ok(())
    }

    /// Puts one into the shadow, which has room for it.
    #[inline(always)]
    fn note(&mut self, wr: &RecvWr<'_>) {
        let slot = self.slot(self.posted);
        let first = slot * self.cap.max_recv_sge as usize;
        match wr.sges {
            // The most common, without the call that copies any number.
            [sge] => self.sges[first] = *sge,
            sges => self.sges[first..first + sges.len()].copy_from_slice(sges),
        }
        self.counts[slot] = wr.sges.len() as u16;
        self.side.recv.note(self.posted, wr.wr_id);
        self.side.recv.note_front(self.posted, wr.sges);
        self.posted += 1;
    }

    #[inline]
    fn slot(&self, position: u64) -> usize {
        position as usize & (self.counts.len() - 1)
    }

    /// Gives the ring what it has not got yet. How many.
    #[inline]
    fn give(&mut self) -> u64 {
        let before = self.given;
        let Some(ring) = self.ring.as_mut().filter(|_| self.holds == 0) else {
            return 0;
        };
        while self.given < self.posted && ring.room() > 0 {
            let slot = self.given as usize & (self.counts.len() - 1);
            let first = slot * self.cap.max_recv_sge as usize;
            let sges = &self.sges[first..first + usize::from(self.counts[slot])];
            let wr_id = self.given | RECV_BIT;
            with_local_keys(self.lkeys.as_ref(), sges, |sges| ring.push(wr_id, sges));
            self.given += 1;
        }
        self.given - before
    }

    /// Makes what was pushed visible to the RNIC.
    #[inline]
    pub fn publish(&mut self) -> Result<(), Refused> {
        if let Some(ring) = &mut self.ring {
            if let Err(refused) = ring.publish() {
                self.posted -= u64::from(refused.count);
                self.given -= u64::from(refused.count);
                return Err(refused);
            }
        } else if self.dead {
            self.flush();
        }
        Ok(())
    }

    /// The RNIC is gone, and with it the ring.
    pub fn lose_ring(&mut self) {
        self.ring = None;
        self.dead = true;
        self.flush();
    }

    #[cold]
    fn flush(&mut self) {
        let outstanding = self.side.recv.retired()..self.posted;
        let flushed = outstanding.map(|position| Wc::flushed(self.side.recv.wr_id(position), self.side.qpn));
        if let Some(cq) = self.cq.upgrade() {
            cq.add_flushed(flushed);
        }
        self.side.failed.store(true, Relaxed);
        self.side.recv.settle(self.posted);
        self.given = self.posted;
    }

    /// Gives the ring what has come while there was none. How many.
    pub fn catch_up(&mut self) -> u64 {
        let given = self.give();
        if given > 0 {
            // Only RNICs below which nothing moves refuse, and nothing is late there.
            let _ = self.publish();
        }
        given
    }

    /// A session has drained this queue pair: nothing more goes to the ring.
    pub fn hold(&mut self) {
        self.holds += 1;
    }

    /// The session is over, or the queue pair has got its new ring; RECVs posted meanwhile go to the ring. How many.
    pub fn release(&mut self) -> u64 {
        self.holds = self.holds.saturating_sub(1);
        self.catch_up()
    }

    /// Goes on with a ring that has none of the RECVs: all that no message has consumed are posted.
    pub fn attach_new(&mut self, ring: Box<dyn RecvRing>) {
        self.given = self.side.recv.retired();
        self.ring = Some(ring.into());
    }

    /// The position of the oldest RECV that no message has consumed, and all of them: `wr_id` and entries.
    pub fn outstanding(&self) -> (u64, Vec<(u64, &[Sge])>) {
        let first = self.side.recv.retired();
        let recvs =
            (first..self.posted).map(|position| (self.side.recv.wr_id(position), self.entries(position)));
        (first, recvs.collect())
    }

    fn entries(&self, position: u64) -> &[Sge] {
        let slot = self.slot(position);
        let first = slot * self.cap.max_recv_sge as usize;
        &self.sges[first..first + usize::from(self.counts[slot])]
    }

    /// Becomes, of a new queue pair, what another one's was: with these RECVs, of which the first had that position. None has
    /// more entries, nor are there more, than the queue was made for. False if the ring has not room for them.
    pub fn refill(&mut self, first: u64, recvs: &[(u64, Vec<Sge>)]) -> bool {
        (self.posted, self.given) = (first, first);
        self.side.recv.settle(first);
        for (wr_id, sges) in recvs {
            self.note(&RecvWr { wr_id: *wr_id, sges });
        }
        self.catch_up();
        self.given == self.posted
    }

    /// Goes on with the ring that was detached.
    pub fn attach_again(&mut self, ring: Box<dyn RecvRing>) {
        self.ring = Some(ring.into());
    }

    /// Lets go of the ring.
    pub fn detach(&mut self) {
        self.ring = None;
    }

    /// From now on keys are translated.
    pub fn set_local_keys(&mut self, lkeys: Arc<KeyTable>) {
        self.lkeys = Some(RecentKey::new(lkeys));
    }

    /// The program has taken the queue pair to `state`.
    pub fn set_state(&mut self, state: QpState) {
        self.state = state;
        if state != QpState::Reset {
            return;
        }
        self.given = self.posted;
        self.side.recv.reset(self.posted);
        self.side.received.store(0, Relaxed);
        if let Some(ring) = &mut self.ring {
            ring.reset();
        }
    }
}
