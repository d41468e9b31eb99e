//! Asynchronous events (ibv_get_async_event(3)).
//!
//! They are rare, so the helper thread takes them from the RNIC, finds the object that each concerns and puts it here.
//! What the program waits on is an eventfd: events that it has not taken are part of its memory, and move with it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::EventfdFlags;
use verbatim_device::control::AsyncEventType;

use crate::cq::Cq;
use crate::error::VerbsError;
use crate::qp::Qp;
use crate::srq::Srq;

/// An event. If it concerns a queue, it must be acknowledged there.
#[derive(Debug, Clone)]
pub struct AsyncEvent {
    /// What happened.
    pub event: AsyncEventType,
    /// To what.
    pub object: AsyncObject,
}

/// What an event concerns.
#[derive(Debug, Clone)]
pub enum AsyncObject {
    /// See [`Cq::ack_async_event`].
    Cq(Arc<Cq>),
    /// See [`Qp::ack_async_event`].
    Qp(Arc<Qp>),
    /// See [`Srq::ack_async_event`].
    Srq(Arc<Srq>),
    /// A port.
    Port(u8),
    /// The device.
    Device,
}

impl AsyncObject {
    /// Counts the event; false if the object was destroyed.
    fn note(&self) -> bool {
        match self {
            Self::Cq(cq) => cq.async_events.note(),
            Self::Qp(qp) => qp.async_events.note(),
            Self::Srq(srq) => srq.async_events.note(),
            Self::Port(_) | Self::Device => true,
        }
    }
}

/// The events of one context that the program has not taken.
#[derive(Debug)]
pub struct AsyncQueue {
    /// As many as `events`.
    ready: OwnedFd,
    events: Mutex<VecDeque<AsyncEvent>>,
}

impl AsyncQueue {
    pub fn new() -> Result<Self, VerbsError> {
        // No semaphore: CRIU restores none.
        let ready = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| VerbsError::os("eventfd", errno))?;
        Ok(Self {
            ready,
            events: Mutex::default(),
        })
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    pub fn push(&self, event: AsyncEvent) {
        self.events.lock().push_back(event);
        // Fails only when the counter is about to overflow.
        let _ = rustix::io::write(&self.ready, &1u64.to_ne_bytes());
    }

    /// What the program has not taken, oldest first.
    pub fn unread(&self) -> Vec<AsyncEvent> {
        self.events.lock().iter().cloned().collect()
    }

    /// Waits for the next, unless the descriptor is non-blocking.
    pub fn next(&self) -> Result<AsyncEvent, VerbsError> {
        loop {
            let mut count = [0; 8];
            rustix::io::read(&self.ready, &mut count).map_err(|errno| VerbsError::os("read", errno))?;
            // One at a time.
            let more = u64::from_ne_bytes(count).saturating_sub(1);
            if more > 0 {
                let _ = rustix::io::write(&self.ready, &more.to_ne_bytes());
            }
            let event = self.events.lock().pop_front();
            // What was destroyed meanwhile has no events.
            if let Some(event) = event.filter(|event| event.object.note()) {
                return Ok(event);
            }
        }
    }
}
