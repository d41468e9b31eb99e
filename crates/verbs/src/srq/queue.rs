//! What is posted to a shared receive queue: to the ring, and always into the shadow.
//!
//! RECVs that no message has consumed must be posted again on another RNIC, so the shadow keeps each whole until its
//! completion is taken ([`crate::qp::RecvQueue`] does so for a queue pair's own).

use std::collections::VecDeque;
use std::sync::Arc;

use verbatim_device::layout::Sge;

use super::slots::{NONE, Slots};
use crate::backend::RecvRing;
use crate::error::PostError;
use crate::qp::with_local_keys;
use crate::tables::KeyTable;
use crate::work::RECV_BIT;
use crate::work::RecvWr;

/// A RECV that no message has consumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlottedRecv {
    /// Where it is in the table of slots.
    pub slot: u32,
    /// The program's.
    pub wr_id: u64,
    /// Where the message goes.
    pub sges: Vec<Sge>,
    /// It is in the image of a queue pair, so that the ring does not get it.
    pub taken: bool,
}

/// What the queue's lock protects.
#[derive(Debug)]
pub struct SrqQueue {
    ring: Option<Box<dyn RecvRing>>,
    /// Destroyed, or the RNIC is gone: nothing is taken any more.
    closed: bool,
    slots: Arc<Slots>,
    max_sge: usize,
    /// Free slots that were taken from the table's list.
    free: u32,
    /// RECVs taken so far.
    posted: u64,
    /// Slots of RECVs that the ring has not got yet, oldest first.
    waiting: VecDeque<u32>,
    /// Slots of RECVs that were pushed and are not visible yet; empty between calls.
    unpublished: Vec<u32>,
    /// How many sessions have drained the process: RECVs go to the shadow only.
    holds: u32,
    lkeys: Option<Arc<KeyTable>>,
    /// Scatter entries by slot, `max_sge` each, virtual keys.
    sges: Box<[Sge]>,
    /// How many of them count.
    counts: Box<[u16]>,
}

impl SrqQueue {
    pub fn new(
        slots: Arc<Slots>,
        max_wr: u32,
        max_sge: u32,
        ring: Box<dyn RecvRing>,
        lkeys: Option<Arc<KeyTable>>,
    ) -> Self {
        let (max_wr, max_sge) = (max_wr as usize, max_sge as usize);
        Self {
            ring: Some(ring),
            closed: false,
            slots,
            max_sge,
            free: NONE,
            posted: 0,
            waiting: VecDeque::new(),
            unpublished: Vec::new(),
            holds: 0,
            lkeys,
            sges: vec![Sge::default(); max_wr * max_sge].into(),
            counts: vec![0; max_wr].into(),
        }
    }

    /// Takes one RECV; visible to the RNIC after [`Self::publish`].
    #[inline]
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        if self.closed {
            return Err(PostError::Gone);
        }
        if wr.sges.len() > self.max_sge {
            return Err(PostError::TooManyEntries);
        }
        let slot = self.slots.take(&mut self.free).ok_or(PostError::Full)?;
        self.note(slot, wr);
        self.waiting.push_back(slot);
        self.give();
        Ok(())
    }

    /// Puts one into the shadow, into a slot that is free.
    #[inline]
    fn note(&mut self, slot: u32, wr: &RecvWr<'_>) {
        let first = slot as usize * self.max_sge;
        self.sges[first..first + wr.sges.len()].copy_from_slice(wr.sges);
        self.counts[slot as usize] = wr.sges.len() as u16;
        self.posted += 1;
        self.slots.note(slot, wr, self.posted);
    }

    /// What no message has consumed, in the order of posting. `taken`: slots that are in images of queue pairs.
    pub fn outstanding(&self, taken: impl Fn(u32) -> bool) -> Vec<SlottedRecv> {
        let recv = |slot: u32| {
            let first = slot as usize * self.max_sge;
            SlottedRecv {
                slot,
                wr_id: self.slots.wr_id(slot),
                sges: self.sges[first..first + usize::from(self.counts[slot as usize])].to_vec(),
                taken: taken(slot),
            }
        };
        self.slots.outstanding().into_iter().map(recv).collect()
    }

    /// Becomes, of a new queue, what another one's was; the slots are not free.
    pub fn refill(&mut self, recvs: &[SlottedRecv]) {
        for SlottedRecv {
            slot,
            wr_id,
            sges,
            taken,
        } in recvs
        {
            self.note(*slot, &RecvWr { wr_id: *wr_id, sges });
            if !taken {
                self.waiting.push_back(*slot);
            }
        }
        self.give();
        // As in `release`.
        let _ = self.publish();
    }

    /// Gives the ring what it has not got yet. How many.
    #[inline]
    fn give(&mut self) -> u64 {
        let mut given = 0;
        let Some(ring) = self.ring.as_mut().filter(|_| self.holds == 0) else {
            return 0;
        };
        while ring.room() > 0
            && let Some(slot) = self.waiting.pop_front()
        {
            let first = slot as usize * self.max_sge;
            let sges = &self.sges[first..first + usize::from(self.counts[slot as usize])];
            let wr_id = u64::from(slot) | RECV_BIT;
            with_local_keys(self.lkeys.as_deref(), sges, |sges| ring.push(wr_id, sges));
            self.unpublished.push(slot);
            given += 1;
        }
        given
    }

    /// Makes what was pushed visible. What is refused was never posted: how many, and why.
    #[inline]
    pub fn publish(&mut self) -> Result<(), (usize, PostError)> {
        let published = self.ring.as_mut().map_or(Ok(()), |ring| ring.publish());
        let pushed = std::mem::take(&mut self.unpublished);
        let Err(refused) = published else {
            self.unpublished = pushed;
            self.unpublished.clear();
            return Ok(());
        };
        let first = pushed.len() - refused.count as usize;
        pushed[first..]
            .iter()
            .for_each(|slot| self.slots.give_back(*slot));
        Err((first, PostError::Refused(refused.errno)))
    }

    /// A session has drained the process: nothing more goes to the ring.
    pub fn hold(&mut self) {
        self.holds += 1;
    }

    /// The session is over, or the queue has got its new ring; RECVs posted meanwhile go to the ring. How many.
    pub fn release(&mut self) -> u64 {
        self.holds = self.holds.saturating_sub(1);
        let given = self.give();
        // Only RNICs below which nothing moves refuse, and nothing is late there.
        let _ = self.publish();
        given
    }

    /// The RNIC has taken this RECV out of the ring, and no message will consume it there: it is posted again.
    pub fn post_again(&mut self, wr_id: u64) {
        self.waiting.push_back((wr_id & !RECV_BIT) as u32);
        self.give();
        // As in `release`.
        let _ = self.publish();
    }

    /// The RNIC has this RECV already, in the image of a queue pair that goes on there: it is not posted to the new ring.
    pub fn is_taken(&mut self, wr_id: u64) {
        let taken = (wr_id & !RECV_BIT) as u32;
        self.waiting.retain(|slot| *slot != taken);
    }

    /// Goes on with a ring that has none of the RECVs: all that no message has consumed are posted, in order.
    pub fn attach_new(&mut self, ring: Box<dyn RecvRing>) {
        self.waiting = self.slots.outstanding().into();
        self.ring = Some(ring);
    }

    /// Goes on with the ring that was detached.
    pub fn attach_again(&mut self, ring: Box<dyn RecvRing>) {
        self.ring = Some(ring);
    }

    /// Lets go of the ring, to go on with another.
    pub fn detach(&mut self) {
        self.ring = None;
    }

    /// Lets go of the ring for ever.
    pub fn close(&mut self) {
        self.ring = None;
        self.closed = true;
    }

    /// From now on keys are translated.
    pub fn set_local_keys(&mut self, lkeys: Arc<KeyTable>) {
        self.lkeys = Some(lkeys);
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;
    use crate::backend::Refused;

    /// What was pushed.
    #[derive(Debug, Default, Clone)]
    struct Ring(Arc<Mutex<Vec<u64>>>);

    impl RecvRing for Ring {
        fn room(&self) -> u32 {
            8
        }

        fn push(&mut self, wr_id: u64, _: &[Sge]) {
            self.0.lock().push(wr_id);
        }

        fn publish(&mut self) -> Result<(), Refused> {
            Ok(())
        }

        fn reset(&mut self) {}
    }

    #[test]
    fn a_recv_that_half_a_message_has_taken_is_posted_again() {
        let slots = Arc::new(Slots::new(4));
        let ring = Ring::default();
        let mut queue = SrqQueue::new(slots.clone(), 4, 1, Box::new(ring.clone()), None);
        for wr_id in [10, 11] {
            queue.push(&RecvWr { wr_id, sges: &[] }).unwrap();
            queue.publish().unwrap();
        }
        let pushed = ring.0.lock().clone();
        queue.post_again(pushed[0]);
        assert_eq!(*ring.0.lock(), [pushed[0], pushed[1], pushed[0]]);
        let retire = |wr_id: u64| slots.retire(wr_id & !RECV_BIT);
        assert_eq!([retire(pushed[1]), retire(pushed[0])], [Some(11), Some(10)]);
    }
}
