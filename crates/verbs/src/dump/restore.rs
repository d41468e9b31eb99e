//! Making the objects of a dump again, one by one, each under its old number and keys.
//!
//! A queue pair is made empty, in RESET. What was in its queues, and where its connection was, comes with [`Context::refill`], when
//! all that it names is there (MigrOS §3.5: CREATE and REFILL).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use verbatim_device::control::{AsyncEventType, QpAttr, QpAttrMask, QpState};
use verbatim_device::ring::Armed;
use verbatim_device::transitions::steps;

use super::bodies::{MwBody, QpBody, SrqBody, sges_from_body};
use super::fit::{Requests, check_events, check_same, check_srq};
use super::record::ObjectBody;
use super::{DumpError, QpUser, Record, stand};
use crate::ah::Ah;
use crate::async_events::{AsyncEvent, AsyncObject};
use crate::channel::CompChannel;
use crate::context::{Context, Objects};
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::mw::Mw;
use crate::pd::Pd;
use crate::qp::{Qp, QpInit};
use crate::srq::{SlottedRecv, Srq};
use crate::tables::key_slot;
use crate::work::Completion;

/// What [`Context::restore`] has made, with what the C side had said of it.
#[derive(Debug)]
pub enum Restored {
    /// A protection domain.
    Pd(Arc<Pd>),
    /// A completion channel.
    Channel(Arc<CompChannel>),
    /// A completion queue and its `cq_context`.
    Cq(Arc<Cq>, u64),
    /// A shared receive queue and its `srq_context`.
    Srq(Arc<Srq>, u64),
    /// A memory region.
    Mr(Arc<Mr>),
    /// An address handle.
    Ah(Arc<Ah>),
    /// A queue pair, in RESET.
    Qp(Arc<Qp>, QpUser),
    /// A memory window.
    Mw(Arc<Mw>),
}

fn taken(what: &str, number: u32) -> VerbsError {
    VerbsError::Refused {
        verb: "restore_object",
        errno: libc::EEXIST,
        message: format!("there is a {what} {number:#x} already"),
    }
}

/// An object that a record names.
fn named<T: Clone>(objects: &BTreeMap<u32, T>, number: u32, what: &str) -> Result<T, VerbsError> {
    let found = objects.get(&number).cloned();
    found.ok_or_else(|| VerbsError::Invalid(format!("there is no {what} {number:#x}: restore that first")))
}

impl Context {
    /// Makes the object of a record again. `EEXIST` if its number or key is another object's, here or anywhere at the RNIC.
    pub fn restore(self: &Arc<Self>, record: &Record) -> Result<Restored, VerbsError> {
        let _pass = self.process().control.enter();
        if self.stands() {
            return Err(VerbsError::Refused {
                verb: "restore_object",
                errno: libc::EBUSY,
                message: "the context stands still since its own dump".to_owned(),
            });
        }
        let handle = record.handle;
        check_events(&record.body)?;
        let restored = match &record.body {
            ObjectBody::Pd => Restored::Pd(self.restore_pd(handle)?),
            ObjectBody::Channel(body) => Restored::Channel(self.restore_channel(handle, &body.events)?),
            ObjectBody::Cq(body) => {
                let cq = self.restore_cq(handle, body.entries, body.channel)?;
                let armed = body.armed.map(|solicited| match solicited {
                    true => Armed::Solicited,
                    false => Armed::Any,
                });
                let completions = body.completions.iter().map(Completion::from);
                cq.queue.lock().refill(completions, armed);
                self.restore_events(&body.events, &AsyncObject::Cq(cq.clone()));
                Restored::Cq(cq, body.user)
            }
            ObjectBody::Srq(body) => {
                let srq = self.restore_srq(handle, body)?;
                self.restore_events(&body.events, &AsyncObject::Srq(srq.clone()));
                Restored::Srq(srq, body.user)
            }
            ObjectBody::Mr(body) => {
                let pd = self.numbered(|objects| named(&objects.pds, body.pd, "protection domain"))?;
                let memory = (body.address, body.length, body.iova);
                Restored::Mr(Mr::register_as(&pd, memory, body.access, handle)?)
            }
            ObjectBody::Ah(body) => {
                let pd = self.numbered(|objects| match objects.ahs.contains_key(&handle) {
                    true => Err(taken("address handle", handle)),
                    false => named(&objects.pds, body.pd, "protection domain"),
                })?;
                Restored::Ah(Ah::create_as(&pd, &body.av, handle)?)
            }
            ObjectBody::Qp(body) => {
                let user = QpUser {
                    context: body.user,
                    extended: body.extended,
                };
                Restored::Qp(self.restore_qp(handle, body)?, user)
            }
            ObjectBody::Mw(body) => Restored::Mw(self.restore_mw(handle, body)?),
        };
        self.process().changed();
        Ok(restored)
    }

    fn numbered<T>(&self, take: impl FnOnce(&mut Objects) -> Result<T, VerbsError>) -> Result<T, VerbsError> {
        take(&mut self.objects.lock())
    }

    fn restore_pd(self: &Arc<Self>, number: u32) -> Result<Arc<Pd>, VerbsError> {
        let device = self.device()?;
        let physical = device.alloc_pd()?;
        let made = self.numbered(|objects| {
            if objects.pds.contains_key(&number) {
                return Err(taken("protection domain", number));
            }
            let pd = Arc::new(Pd::new(self.clone(), number, physical));
            objects.pds.insert(number, pd.clone());
            objects.next_pd = objects.next_pd.max(number);
            Ok(pd)
        });
        made.inspect_err(|_| _ = device.dealloc_pd(physical))
    }

    fn restore_channel(
        self: &Arc<Self>,
        number: u32,
        events: &[u32],
    ) -> Result<Arc<CompChannel>, VerbsError> {
        let device = self.device()?;
        let end = device.create_comp_channel()?;
        let physical = end.number();
        let made = self.numbered(|objects| {
            if objects.channels.contains_key(&number) {
                return Err(taken("completion channel", number));
            }
            let channel = Arc::new(CompChannel::new(self, number, end));
            objects.channels.insert(number, channel.clone());
            objects.next_channel = objects.next_channel.max(number);
            Ok(channel)
        });
        let channel = made.inspect_err(|_| _ = device.destroy_comp_channel(physical))?;
        events.iter().for_each(|cq| channel.inject_event(*cq));
        Ok(channel)
    }

    fn restore_cq(
        self: &Arc<Self>,
        number: u32,
        entries: u32,
        channel: Option<u32>,
    ) -> Result<Arc<Cq>, VerbsError> {
        let channel = self.numbered(|objects| {
            if objects.cqs.contains_key(&number) {
                return Err(taken("completion queue", number));
            }
            let channel = channel.map(|channel| named(&objects.channels, channel, "completion channel"));
            objects.next_cq = objects.next_cq.max(number);
            channel.transpose()
        })?;
        let device = self.device()?;
        let told = channel.as_ref().map(|channel| (channel.physical(), number));
        let place = device.create_cq(entries, told)?;
        self.add_cq(&*device, number, place, channel.as_ref())
    }

    fn restore_srq(self: &Arc<Self>, number: u32, body: &SrqBody) -> Result<Arc<Srq>, VerbsError> {
        check_srq(body)?;
        let pd = self.numbered(|objects| {
            if objects.srqs.contains_key(&number) {
                return Err(taken("shared receive queue", number));
            }
            objects.next_srq = objects.next_srq.max(number);
            named(&objects.pds, body.pd, "protection domain")
        })?;
        let recvs = body.recvs.iter().map(|recv| SlottedRecv {
            slot: recv.slot,
            wr_id: recv.wr_id,
            sges: sges_from_body(&recv.sges),
            taken: recv.taken,
        });
        Srq::create_as(&pd, &body.attr, number, &recvs.collect::<Vec<_>>())
    }

    fn restore_qp(self: &Arc<Self>, number: u32, body: &QpBody) -> Result<Arc<Qp>, VerbsError> {
        Requests::of(body)?;
        let (pd, init) = self.numbered(|objects| {
            let srq = body
                .srq
                .map(|srq| named(&objects.srqs, srq, "shared receive queue"));
            let init = QpInit {
                send_cq: named(&objects.cqs, body.send_cq, "completion queue")?,
                recv_cq: named(&objects.cqs, body.recv_cq, "completion queue")?,
                qp_type: body.qp_type,
                cap: body.cap,
                signal_all: body.signal_all,
                srq: srq.transpose()?,
            };
            Ok((named(&objects.pds, body.pd, "protection domain")?, init))
        })?;
        if self.process().qp(number).is_some() {
            return Err(taken("queue pair", number));
        }
        Qp::create_as(&pd, &init, number)
    }

    fn restore_mw(self: &Arc<Self>, rkey: u32, body: &MwBody) -> Result<Arc<Mw>, VerbsError> {
        if key_slot(body.state.rkey) != key_slot(rkey) {
            return Err(DumpError::Content("a memory window with two keys").into());
        }
        let pd = self.numbered(|objects| named(&objects.pds, body.pd, "protection domain"))?;
        Mw::alloc_as(&pd, body.mw_type, rkey, &body.state)
    }

    fn restore_events(&self, events: &[AsyncEventType], object: &AsyncObject) {
        for event in events {
            self.async_queue.push(AsyncEvent {
                event: *event,
                object: object.clone(),
            });
        }
    }

    /// Gives a queue pair that [`Self::restore`] has made what was in its queues, and its connection, and lets it go on: the
    /// partner's RNIC is told where (MigrOS §3.5). Once: after a failure the queue pair can only be destroyed, and made again.
    pub fn refill(&self, record: &Record) -> Result<Arc<Qp>, VerbsError> {
        let _pass = self.process().control.enter_qp(record.handle);
        let ObjectBody::Qp(body) = &record.body else {
            return Err(VerbsError::Invalid("only a queue pair is refilled".to_owned()));
        };
        let qp = self.numbered(|objects| named(&objects.qps, record.handle, "queue pair"))?;
        check_events(&record.body)?;
        let requests = Requests::of(body)?;
        check_same(&qp, body)?;
        let mut control = qp.control.lock();
        if !std::mem::take(&mut control.awaits_refill) {
            return Err(VerbsError::Invalid(format!(
                "queue pair {:#x} was not just restored, or was refilled already",
                record.handle
            )));
        }
        let device = self.device()?;
        let (qpn, attr) = (control.physical_qpn(), body.attr);
        let modify = |state, mask| device.modify_qp(qpn, mask, &QpAttr { state, ..attr });
        let fill = || match requests.put_into(&qp, body) {
            true => Ok(()),
            false => Err(VerbsError::from(DumpError::Content(
                "more requests than its rings have room for",
            ))),
        };
        let way = steps(body.qp_type, attr.state);
        let way = way.ok_or(DumpError::Content(
            "a queue pair in a state to which there is no way",
        ))?;
        match &body.image {
            Some(image) => {
                fill()?;
                stand::go_on_from(&*device, qpn, image, attr.av.sgid_index)?;
            }
            None if attr.state == QpState::Err => {
                fill()?;
                modify(QpState::Err, QpAttrMask::STATE)?;
            }
            None => {
                for (state, mask) in way {
                    modify(state, mask)?;
                }
                for group in &body.groups {
                    device.attach_mcast(qpn, *group)?;
                    control.mcast.push(*group);
                }
                fill()?;
            }
        }
        (control.attr, control.remote) = (attr, body.remote);
        control.sgid_index = attr.av.sgid_index;
        qp.side.received.store(body.received, Relaxed);
        qp.recv.lock().set_state(attr.state);
        // What had waited goes to the ring now.
        qp.send.lock().set_state(attr.state);
        drop(control);
        self.restore_events(&body.events, &AsyncObject::Qp(qp.clone()));
        self.process().changed();
        Ok(qp)
    }
}
