//! What an RNIC says between requests: its asynchronous events, and its end.
//!
//! An RNIC that is gone (a software RNIC that was killed) will complete nothing any more. So that no program waits for
//! ever, all that is outstanding completes here with `WR_FLUSH_ERR`, in the order of the requests, as IBA Vol 1 §10.3.1.5
//! has it for a queue pair in ERR; so does what is posted later. The program gets `IBV_EVENT_DEVICE_FATAL`. RECVs of a shared
//! receive queue belong to no queue pair, and do not complete.
//!
//! All of this is done by the helper thread. A queue pair's queue is locked while what it had goes to its completion
//! queue, so that what another thread posts meanwhile comes after it.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use verbatim_device::control::{AsyncEvent as PhysicalEvent, AsyncEventType};

use crate::async_events::{AsyncEvent, AsyncObject};
use crate::context::Context;
use crate::qp::Qp;
use crate::watch::{HungUp, Watch};

impl Context {
    /// Takes what the RNIC has said.
    pub(crate) fn look_after(&self, watch: &Watch, hung_up: HungUp) {
        let Ok(device) = self.device() else { return };
        self.take_events(&*device);
        if device.is_gone() {
            watch.remove_device(&*device);
            drop(device);
            self.die();
        } else if hung_up {
            // An RNIC that wants to send no events, or the beginning of its end.
            watch.remove_events(&*device);
        }
    }

    /// Puts an event where the program finds it, if it concerns an object that the program has.
    pub(crate) fn deliver(&self, physical: PhysicalEvent) {
        let event = physical.event;
        let object = match event {
            AsyncEventType::CqErr => {
                let objects = self.objects.lock();
                let found = objects.cqs.values().find(|cq| cq.physical() == physical.object);
                found.cloned().map(AsyncObject::Cq)
            }
            AsyncEventType::QpFatal
            | AsyncEventType::QpReqErr
            | AsyncEventType::QpAccessErr
            | AsyncEventType::CommEst
            | AsyncEventType::SqDrained
            | AsyncEventType::QpLastWqeReached => {
                let found = self.qp_with(physical.object);
                // A connection that was made anew beneath the program's was established long ago.
                let anew = |qp: &Arc<Qp>| event == AsyncEventType::CommEst && qp.number() != physical.object;
                found.filter(|qp| !anew(qp)).map(AsyncObject::Qp)
            }
            AsyncEventType::SrqErr | AsyncEventType::SrqLimitReached => {
                let objects = self.objects.lock();
                let found = objects
                    .srqs
                    .values()
                    .find(|srq| srq.physical() == physical.object);
                found.cloned().map(AsyncObject::Srq)
            }
            AsyncEventType::PortActive | AsyncEventType::PortErr | AsyncEventType::GidChange => {
                Some(AsyncObject::Port(physical.object as u8))
            }
            AsyncEventType::DeviceFatal => Some(AsyncObject::Device),
        };
        if let Some(object) = object {
            self.async_queue.push(AsyncEvent { event, object });
        }
    }

    /// The queue pair in use of that physical number.
    fn qp_with(&self, physical_qpn: u32) -> Option<Arc<Qp>> {
        let has = |qp: &&Arc<Qp>| qp.control.lock().physical_qpn() == physical_qpn;
        let likely = self.objects.lock().qps.get(&physical_qpn).cloned();
        if let Some(qp) = likely.filter(|qp| has(&qp)) {
            return Some(qp);
        }
        // A queue pair's control comes before the objects.
        let all: Vec<_> = self.objects.lock().qps.values().cloned().collect();
        all.iter().find(has).cloned()
    }

    /// The RNIC is gone.
    pub(crate) fn die(&self) {
        if self.dead.swap(true, SeqCst) {
            return;
        }
        let objects = self.objects.lock();
        let cqs: Vec<_> = objects.cqs.values().cloned().collect();
        let qps: Vec<_> = objects.qps.values().cloned().collect();
        let srqs: Vec<_> = objects.srqs.values().cloned().collect();
        drop(objects);
        // What the RNIC has completed comes before what it has not.
        for cq in cqs {
            cq.lose_ring();
        }
        for qp in qps {
            qp.send.lock().lose_ring();
            qp.recv.lock().lose_ring();
        }
        for srq in srqs {
            srq.close();
        }
        self.process().changed();
        self.async_queue.push(AsyncEvent {
            event: AsyncEventType::DeviceFatal,
            object: AsyncObject::Device,
        });
    }
}
