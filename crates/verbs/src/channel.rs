//! Completion channels (ibv_create_comp_channel(3)).
//!
//! The RNIC writes its events to the channel by itself; no thread of ours is in between. What is done here: finding the
//! queue that an event names, and counting.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicUsize};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::backend::{Device, EventChannel};
use crate::context::Context;
use crate::cq::Cq;
use crate::error::VerbsError;

/// A completion channel.
#[derive(Debug)]
pub struct CompChannel {
    context: Arc<Context>,
    /// Its number within the context.
    number: u32,
    /// The RNIC's.
    physical: AtomicU32,
    end: Arc<dyn EventChannel>,
    /// Completion queues that use it, by number: what their events say, on every RNIC.
    cqs: Mutex<HashMap<u32, Weak<Cq>>>,
    cookie: AtomicUsize,
}

impl CompChannel {
    pub(crate) fn create(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        let process = context.process().clone();
        let _pass = process.control.enter();
        let end = context.device()?.create_comp_channel()?;
        let mut objects = context.objects.lock();
        objects.next_channel += 1;
        let channel = Arc::new(Self::new(context, objects.next_channel, end));
        objects.channels.insert(channel.number, channel.clone());
        drop(objects);
        process.changed();
        Ok(channel)
    }

    pub(crate) fn new(context: &Arc<Context>, number: u32, end: Arc<dyn EventChannel>) -> Self {
        Self {
            context: context.clone(),
            number,
            physical: AtomicU32::new(end.number()),
            end,
            cqs: Mutex::default(),
            cookie: AtomicUsize::new(0),
        }
    }

    /// Completion queues of the events that nobody has read, oldest first; the events stay.
    pub(crate) fn unread(&self) -> Result<Vec<u32>, VerbsError> {
        self.end.unread()
    }

    /// Its number within the context.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The RNIC's number.
    pub(crate) fn physical(&self) -> u32 {
        self.physical.load(SeqCst)
    }

    /// Goes on with what an agent has made at another RNIC: the program's descriptor, and the events in it, stay.
    pub(crate) fn attach(&self, device: &dyn Device, physical: u32) -> Result<(), VerbsError> {
        device.attach_comp_channel(physical, &*self.end)?;
        self.physical.store(physical, SeqCst);
        Ok(())
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// What `ibv_comp_channel.fd` is: readable when there is an event. The program may make it non-blocking.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.end.fd()
    }

    /// For the caller's own use.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Relaxed);
    }

    /// What was set last, or 0.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Relaxed)
    }

    /// Waits for an event (ibv_get_cq_event(3)): the queue that has new completions. It must be acknowledged
    /// ([`Cq::ack_events`]). `EAGAIN` if the descriptor is non-blocking and there is none; `EINTR` after a signal.
    pub fn get_event(&self) -> Result<Arc<Cq>, VerbsError> {
        loop {
            let number = self.end.next()?;
            // An event of a queue that was destroyed is nobody's.
            let cq = self.cqs.lock().get(&number).and_then(Weak::upgrade);
            if let Some(cq) = cq.filter(|cq| cq.completion_events.note()) {
                return Ok(cq);
            }
        }
    }

    pub(crate) fn add(&self, cq: &Arc<Cq>) {
        self.cqs.lock().insert(cq.number(), Arc::downgrade(cq));
    }

    pub(crate) fn remove(&self, cq: &Cq) {
        self.cqs.lock().remove(&cq.number());
    }

    /// Makes an event of a queue as if the RNIC had.
    pub(crate) fn inject(&self, cq: &Cq) {
        self.inject_event(cq.number());
    }

    /// Makes an event of the queue of that number.
    pub(crate) fn inject_event(&self, cq: u32) {
        self.end.inject(cq);
    }

    /// Destroys it; `EBUSY` while a completion queue uses it.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        let process = self.context.process();
        let _pass = process.control.enter();
        let object = || format!("completion channel {}", self.number());
        let users = self.cqs.lock().len();
        if users > 0 {
            return Err(VerbsError::Busy {
                object: object(),
                users,
            });
        }
        let removed = self.context.objects.lock().channels.remove(&self.number());
        let removed = removed.ok_or_else(|| VerbsError::Gone { object: object() })?;
        let outcome = self
            .context
            .destroy_physically(|device| device.destroy_comp_channel(self.physical()));
        if outcome.is_err() {
            self.context
                .objects
                .lock()
                .channels
                .insert(self.number(), removed);
        }
        process.changed();
        outcome
    }
}
