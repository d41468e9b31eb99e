//! Shared receive queues.
//!
//! Queue pairs take RECVs out of one queue and complete them in any order, so that a position says nothing about the
//! others' ([`crate::qp`] counts on order). Here each outstanding RECV has a slot of a table; the RNIC sees the slot's number.

mod queue;
mod slots;

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use parking_lot::Mutex;
use verbatim_device::control::SrqAttr;

pub(crate) use self::queue::SlottedRecv;
use self::queue::SrqQueue;
pub use self::slots::Slots;
use crate::backend::{Device, SrqPlace};
use crate::context::{Context, busy};
use crate::error::{PostError, VerbsError};
use crate::pd::Pd;
use crate::unacked::Unacked;
use crate::work::RecvWr;

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    pd: Arc<Pd>,
    /// Its number within the context.
    number: u32,
    /// What was given when it was made.
    attr: SrqAttr,
    pub(crate) place: Mutex<SrqPlace>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) queue: Mutex<SrqQueue>,
    /// While it is between two RNICs: the limit that was armed, as [`Self::query`] tells it.
    pub(crate) limit: Mutex<u32>,
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
        let slots = Arc::new(Slots::new(place.attr.max_wr));
        let mut objects = context.objects.lock();
        objects.next_srq += 1;
        let number = objects.next_srq;
        drop(objects);
        Self::assemble(pd, &*device, number, place, place.attr, slots)
    }

    /// As [`Self::create`], with that number and limits that are exactly these, and what another one had: RECVs that no message
    /// has consumed, by slot, in their order. None has more entries, nor a slot beyond, what the queue is made for; no slot comes
    /// twice. The caller is alone with the context, or has entered its gate.
    pub(crate) fn create_as(
        pd: &Arc<Pd>,
        attr: &SrqAttr,
        number: u32,
        recvs: &[SlottedRecv],
    ) -> Result<Arc<Self>, VerbsError> {
        let device = pd.context.device()?;
        let unlimited = SrqAttr { limit: 0, ..*attr };
        let place = device.create_srq(pd.physical.load(SeqCst), &unlimited)?;
        if place.attr.max_wr < attr.max_wr || place.attr.max_sge < attr.max_sge {
            let _ = device.destroy_srq(place.srq);
            return Err(VerbsError::Invalid(format!(
                "the RNIC gave another queue than with {attr:?}"
            )));
        }
        let taken = |slot: u32| recvs.iter().any(|recv| recv.slot == slot);
        let slots = Arc::new(Slots::without(attr.max_wr, taken));
        let srq = Self::assemble(pd, &*device, number, place, unlimited, slots)?;
        srq.queue.lock().refill(recvs);
        // After its RECVs, of which there may have been fewer than the limit for a moment.
        device.modify_srq(place.srq, attr.limit)?;
        Ok(srq)
    }

    /// The object of a queue that the RNIC has made.
    fn assemble(
        pd: &Arc<Pd>,
        device: &dyn Device,
        number: u32,
        place: SrqPlace,
        attr: SrqAttr,
        slots: Arc<Slots>,
    ) -> Result<Arc<Self>, VerbsError> {
        let context = &pd.context;
        let ring = device.srq_end(&place)?;
        let lkeys = context.moved_keys();
        let queue = SrqQueue::new(slots.clone(), attr.max_wr, attr.max_sge, ring, lkeys);
        let srq = Arc::new(Self {
            pd: pd.clone(),
            number,
            attr,
            place: Mutex::new(place),
            queue: Mutex::new(queue),
            slots,
            limit: Mutex::default(),
            users: AtomicUsize::new(0),
            async_events: Unacked::default(),
            cookie: AtomicUsize::new(0),
        });
        let mut objects = context.objects.lock();
        objects.srqs.insert(number, srq.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        context.process().changed();
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
        &self.attr
    }

    /// The RNIC's number.
    pub(crate) fn physical(&self) -> u32 {
        self.place.lock().srq
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
            if let Err(error) = queue.push(&request) {
                outcome = Err((index, error));
                break;
            }
        }
        queue.publish()?;
        outcome
    }

    /// Arms the limit: when fewer requests are left, the event comes, once (ibv_modify_srq(3)). 0 disarms.
    pub fn modify_limit(&self, limit: u32) -> Result<(), VerbsError> {
        let _pass = self.context().process().control.enter();
        if limit > self.attr.max_wr {
            return Err(VerbsError::Invalid(format!(
                "a limit of {limit} in a queue of {}",
                self.attr.max_wr
            )));
        }
        self.context().device()?.modify_srq(self.physical(), limit)
    }

    /// Its limits, the armed one as it is now.
    pub fn query(&self) -> Result<SrqAttr, VerbsError> {
        let _pass = self.context().process().control.enter();
        Ok(SrqAttr {
            limit: self.armed_limit()?,
            ..self.attr
        })
    }

    /// The armed limit, without waiting for a session.
    pub(crate) fn armed_limit(&self) -> Result<u32, VerbsError> {
        Ok(self.context().device()?.query_srq(self.physical())?.limit)
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
        self.close();
        self.pd.users.fetch_sub(1, SeqCst);
        process.changed();
        drop(pass);
        self.async_events.close();
        Ok(())
    }

    /// Lets go of everything that lies in the RNIC's memory, for ever.
    pub(crate) fn close(&self) {
        self.queue.lock().close();
    }
}
