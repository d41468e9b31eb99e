//! Shared receive queues.
//!
//! Queue pairs take RECVs out of one queue and complete them in any order, so that a position says nothing about the
//! others' ([`crate::qp`] counts on order). Here each outstanding RECV has a slot of a table; the RNIC sees the slot's number.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use parking_lot::Mutex;
use verbatim_device::control::SrqAttr;

use crate::backend::{RecvRing, SrqPlace};
use crate::context::{Context, busy};
use crate::error::{PostError, VerbsError};
use crate::pd::Pd;
use crate::qp::{RECV_BIT, with_local_keys};
use crate::tables::KeyTable;
use crate::unacked::Unacked;
use crate::work::RecvWr;

/// No slot.
const NONE: u32 = u32::MAX;

/// The `wr_id`s of outstanding RECVs, by slot.
///
/// Whoever posts takes slots, under the queue's lock; whoever polls gives them back, each under its completion queue's.
/// So there is one taker, and a list of free slots that many push to and one takes as a whole.
#[derive(Debug)]
pub struct Slots {
    wr_ids: Box<[AtomicU64]>,
    /// The next free slot, of one that is free.
    next: Box<[AtomicU32]>,
    /// The slot that was given back last.
    given_back: AtomicU32,
}

impl Slots {
    fn new(capacity: u32) -> Self {
        Self {
            wr_ids: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            next: (1..capacity).chain([NONE]).map(AtomicU32::new).collect(),
            given_back: AtomicU32::new(if capacity == 0 { NONE } else { 0 }),
        }
    }

    /// The RECV in `slot` has completed: its `wr_id`. `None` if there is no such slot.
    #[inline]
    pub fn retire(&self, slot: u64) -> Option<u64> {
        let index = usize::try_from(slot).ok()?;
        let wr_id = self.wr_ids.get(index)?.load(Relaxed);
        self.give_back(slot as u32);
        Some(wr_id)
    }

    fn give_back(&self, slot: u32) {
        let mut head = self.given_back.load(Relaxed);
        loop {
            self.next[slot as usize].store(head, Relaxed);
            match self
                .given_back
                .compare_exchange_weak(head, slot, Release, Relaxed)
            {
                Ok(_) => return,
                Err(other) => head = other,
            }
        }
    }

    /// Takes a free slot; `local` is the taker's own list.
    #[inline]
    fn take(&self, local: &mut u32) -> Option<u32> {
        if *local == NONE {
            *local = self.given_back.swap(NONE, Acquire);
        }
        let slot = *local;
        *local = self.next.get(slot as usize)?.load(Relaxed);
        Some(slot)
    }
}

/// What the queue's lock protects.
#[derive(Debug)]
struct SrqQueue {
    ring: Option<Box<dyn RecvRing>>,
    /// Free slots that were taken from the table's list.
    free: u32,
    /// Slots of RECVs that were pushed and are not visible yet; empty between calls.
    unpublished: Vec<u32>,
    lkeys: Option<Arc<KeyTable>>,
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pd: Arc<Pd>,
    /// Its number within the context.
    number: u32,
    place: SrqPlace,
    pub(crate) slots: Arc<Slots>,
    queue: Mutex<SrqQueue>,
    /// Queue pairs that use it; changed under the context's lock.
    pub(crate) users: AtomicUsize,
    pub(crate) async_events: Unacked,
    cookie: AtomicUsize,
}

impl Srq {
    pub(crate) fn create(pd: &Arc<Pd>, attr: &SrqAttr) -> Result<Arc<Self>, VerbsError> {
        let context = &pd.context;
        let process = context.process();
        let _pass = process.control.enter();
        let device = context.device()?;
        let place = device.create_srq(pd.physical.load(SeqCst), attr)?;
        let ring = device.srq_end(&place)?;
        let lkeys = context.moved_keys();
        let mut objects = context.objects.lock();
        objects.next_srq += 1;
        let srq = Arc::new(Self {
            pd: pd.clone(),
            number: objects.next_srq,
            place,
            slots: Arc::new(Slots::new(place.attr.max_wr)),
            queue: Mutex::new(SrqQueue {
                ring: Some(ring),
                free: NONE,
                unpublished: Vec::new(),
                lkeys,
            }),
            users: AtomicUsize::new(0),
            async_events: Unacked::default(),
            cookie: AtomicUsize::new(0),
        });
        objects.srqs.insert(srq.number, srq.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        process.changed();
        Ok(srq)
    }

    /// Its number within the context.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.pd.context
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Its limits as they were given.
    pub fn attr(&self) -> &SrqAttr {
        &self.place.attr
    }

    /// The RNIC's number.
    pub(crate) fn physical(&self) -> u32 {
        self.place.srq
    }

    /// For the caller's own use.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Relaxed);
    }

    /// What was set last, or 0.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Relaxed)
    }

    /// Posts receive requests, in order, up to the first that is refused: its index and why.
    pub fn post_recv<'a>(
        &self,
        requests: impl IntoIterator<Item = RecvWr<'a>>,
    ) -> Result<(), (usize, PostError)> {
        let mut queue = self.queue.lock();
        let mut outcome = Ok(());
        for (index, request) in requests.into_iter().enumerate() {
            if let Err(error) = self.push(&mut queue, &request) {
                outcome = Err((index, error));
                break;
            }
        }
        let published = queue.ring.as_mut().map_or(Ok(()), |ring| ring.publish());
        if let Err(refused) = published {
            let first = queue.unpublished.len() - refused.count as usize;
            queue.unpublished[first..]
                .iter()
                .for_each(|slot| self.slots.give_back(*slot));
            outcome = Err((first, PostError::Refused(refused.errno)));
        }
        queue.unpublished.clear();
        outcome
    }

    #[inline]
    fn push(&self, queue: &mut SrqQueue, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let SrqQueue {
            ring,
            free,
            unpublished,
            lkeys,
        } = queue;
        let ring = ring.as_mut().ok_or(PostError::Gone)?;
        if wr.sges.len() > self.place.attr.max_sge as usize {
            return Err(PostError::TooManyEntries);
        }
        if ring.room() == 0 {
            return Err(PostError::Full);
        }
        let slot = self.slots.take(free).ok_or(PostError::Full)?;
        self.slots.wr_ids[slot as usize].store(wr.wr_id, Relaxed);
        let wr_id = u64::from(slot) | RECV_BIT;
        with_local_keys(lkeys.as_deref(), wr.sges, |sges| ring.push(wr_id, sges));
        unpublished.push(slot);
        Ok(())
    }

    /// Arms the limit: when fewer requests are left, the event comes, once (ibv_modify_srq(3)). 0 disarms.
    pub fn modify_limit(&self, limit: u32) -> Result<(), VerbsError> {
        let _pass = self.context().process().control.enter();
        if limit > self.place.attr.max_wr {
            return Err(VerbsError::Invalid(format!(
                "a limit of {limit} in a queue of {}",
                self.place.attr.max_wr
            )));
        }
        self.context().device()?.modify_srq(self.physical(), limit)
    }

    /// Its limits, the armed one as it is now.
    pub fn query(&self) -> Result<SrqAttr, VerbsError> {
        let _pass = self.context().process().control.enter();
        let now = self.context().device()?.query_srq(self.physical())?;
        Ok(SrqAttr {
            limit: now.limit,
            ..self.place.attr
        })
    }

    /// The program has acknowledged an asynchronous event of it.
    pub fn ack_async_event(&self) {
        self.async_events.ack(1);
    }

    /// Destroys it; `EBUSY` while a queue pair uses it. Waits until its events are acknowledged.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        let context = self.context();
        let process = context.process();
        let pass = process.control.enter();
        let object = || format!("shared receive queue {}", self.number);
        let mut objects = context.objects.lock();
        busy(&self.users, object)?;
        let removed = objects.srqs.remove(&self.number);
        let removed = removed.ok_or_else(|| VerbsError::Gone { object: object() })?;
        drop(objects);
        if let Err(error) = context.destroy_physically(|device| device.destroy_srq(self.physical())) {
            context.objects.lock().srqs.insert(self.number, removed);
            return Err(error);
        }
        self.detach();
        self.pd.users.fetch_sub(1, SeqCst);
        process.changed();
        drop(pass);
        self.async_events.close();
        Ok(())
    }

    /// Lets go of everything that lies in the RNIC's memory.
    pub(crate) fn detach(&self) {
        self.queue.lock().ring = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_come_back_in_any_order_and_are_never_given_twice() {
        let slots = Slots::new(4);
        let mut free = NONE;
        let taken: Vec<_> = (0..4).map(|_| slots.take(&mut free).unwrap()).collect();
        assert_eq!(taken, [0, 1, 2, 3]);
        assert_eq!(slots.take(&mut free), None);
        for slot in [2, 0] {
            slots.wr_ids[slot].store(70 + slot as u64, Relaxed);
            assert_eq!(slots.retire(slot as u64), Some(70 + slot as u64));
        }
        assert_eq!(slots.retire(4), None);
        let mut again: Vec<_> = std::iter::from_fn(|| slots.take(&mut free)).collect();
        again.sort_unstable();
        assert_eq!(again, [0, 2]);
    }

    #[test]
    fn many_pollers_give_back_what_one_poster_takes() {
        const ROUNDS: usize = 20_000;
        let slots = Slots::new(8);
        let held = [const { AtomicU32::new(0) }; 8];
        let (send, recv) = std::sync::mpsc::channel::<u32>();
        let recv = Mutex::new(recv);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    loop {
                        let Ok(slot) = recv.lock().recv() else { return };
                        assert_eq!(held[slot as usize].swap(0, SeqCst), 1);
                        slots.retire(slot.into()).unwrap();
                    }
                });
            }
            let mut free = NONE;
            let mut rounds = 0;
            while rounds < ROUNDS {
                match slots.take(&mut free) {
                    Some(slot) => {
                        assert_eq!(held[slot as usize].swap(1, SeqCst), 0, "given to one only");
                        send.send(slot).unwrap();
                        rounds += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
            drop(send);
        });
    }
}
