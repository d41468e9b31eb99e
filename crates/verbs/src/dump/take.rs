//! Taking a dump: every object of a context that stands still, as values.

use std::sync::Arc;

use verbatim_device::control::{MwBound, MwState, QpAttr, SrqAttr};
use verbatim_device::image::QpImage;
use verbatim_device::ring::Armed;

use super::bodies::{
    AhBody, ChannelBody, CqBody, MrBody, MwBody, QpBody, RecvBody, SendBody, SendRequestBody, SrqBody,
    SrqRecvBody, sges_to_body,
};
use super::record::ObjectBody;
use super::{DumpError, Record, format, stand};
use crate::async_events::{AsyncEvent, AsyncObject};
use crate::backend::Device;
use crate::context::Context;
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::mw::Mw;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::work::RECV_BIT;

/// What only the C side knows of a queue pair.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QpUser {
    /// `qp_context`.
    pub context: u64,
    /// It was made with `send_ops_flags`.
    pub extended: bool,
}

/// Who made the objects, and knows what of them is not known here.
pub trait Owner {
    /// `cq_context`.
    fn cq(&self, cq: &Cq) -> u64;
    /// `srq_context`.
    fn srq(&self, srq: &Srq) -> u64;
    /// Of a queue pair.
    fn qp(&self, qp: &Qp) -> QpUser;
}

/// A dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    /// How many objects are in it.
    pub count: u32,
    /// What [`super::check`] reads. It may hold secrets of connections.
    pub bytes: Vec<u8>,
}

impl Context {
    /// Makes the context stand still, if it does not, and writes down all its objects. After a success it stands until
    /// [`Context::go_on`], or its end; after a failure it goes on, if it went before. No other thread uses it meanwhile.
    pub fn dump(&self, owner: &dyn Owner) -> Result<Dump, VerbsError> {
        let alone = self.process().control.alone();
        let stood = self.stands();
        self.stand()?;
        let taken = self.take(owner);
        drop(alone);
        if taken.is_err() && !stood {
            self.go_on()?;
        }
        taken
    }

    fn take(&self, owner: &dyn Owner) -> Result<Dump, VerbsError> {
        let records = self.records(owner)?;
        let records: Vec<_> = records.iter().map(Record::encode).collect::<Result<_, _>>()?;
        Ok(Dump {
            count: u32::try_from(records.len()).map_err(|_| DumpError::TooLong)?,
            bytes: format::dump(&records)?,
        })
    }

    fn records(&self, owner: &dyn Owner) -> Result<Vec<Record>, VerbsError> {
        let device = self.device()?;
        let objects = self.objects.lock();
        let pds: Vec<u32> = objects.pds.keys().copied().collect();
        let channels: Vec<_> = objects.channels.values().cloned().collect();
        let cqs: Vec<_> = objects.cqs.values().cloned().collect();
        let srqs: Vec<_> = objects.srqs.values().cloned().collect();
        let mrs: Vec<_> = objects.mrs.values().cloned().collect();
        let ahs: Vec<_> = objects.ahs.values().cloned().collect();
        let qps: Vec<_> = objects.qps.values().cloned().collect();
        let mws: Vec<_> = objects.mws.values().cloned().collect();
        drop(objects);

        // What the RNIC had to say is said when it has answered, and it answers here. Completions tell which requests are done,
        // and may make events: so images first, then completions, then the rest.
        let mut images = Vec::with_capacity(qps.len());
        for qp in &qps {
            let paused = self.standing.lock().as_ref().is_some_and(|all| all.is_paused(qp));
            let attr = qp.current_attr()?;
            let image = paused.then(|| stand::image(&*device, qp)).transpose()?;
            images.push((attr, image));
        }
        let looked: Vec<_> = cqs.iter().map(|cq| cq.look()).collect();
        self.take_events(&*device);
        let events = self.async_queue.unread();

        let mut records = Vec::new();
        let mut add = |handle, body| records.push(Record { handle, body });
        for pd in pds {
            add(pd, ObjectBody::Pd);
        }
        for channel in &channels {
            let events = channel.unread()?;
            add(channel.number(), ObjectBody::Channel(ChannelBody { events }));
        }
        for (cq, (completions, armed)) in cqs.iter().zip(looked) {
            let body = CqBody {
                entries: cq.entries(),
                channel: cq.channel().map(|channel| channel.number()),
                user: owner.cq(cq),
                armed: armed.map(|armed| armed == Armed::Solicited),
                completions: completions.iter().map(Into::into).collect(),
                events: events_of(
                    &events,
                    |object| matches!(object, AsyncObject::Cq(of) if Arc::ptr_eq(of, cq)),
                ),
            };
            add(cq.number(), ObjectBody::Cq(body));
        }
        for srq in &srqs {
            let of_it = |qp: &Qp| qp.srq().is_some_and(|other| Arc::ptr_eq(other, srq));
            let taken = qps.iter().zip(&images).filter(|(qp, _)| of_it(qp));
            let taken = taken.filter_map(|(_, (_, image))| image.as_ref()?.receive);
            let taken: Vec<u64> = taken.map(|wr_id| wr_id & !RECV_BIT).collect();
            let body = srq_body(srq, &taken, owner, &events)?;
            add(srq.number(), ObjectBody::Srq(body));
        }
        for mr in &mrs {
            add(mr.lkey(), ObjectBody::Mr(mr_body(mr)?));
        }
        for ah in &ahs {
            let body = AhBody {
                pd: ah.pd().number(),
                av: *ah.attr(),
            };
            add(ah.number(), ObjectBody::Ah(body));
        }
        for (qp, (attr, image)) in qps.iter().zip(images) {
            let body = qp_body(qp, attr, image, owner, &events)?;
            add(qp.number(), ObjectBody::Qp(Box::new(body)));
        }
        for mw in &mws {
            let state = window_state(mw, &*device, &mrs, &qps)?;
            let body = MwBody {
                pd: mw.pd().number(),
                mw_type: mw.mw_type(),
                state,
            };
            add(mw.rkey(), ObjectBody::Mw(body));
        }
        Ok(records)
    }
}

fn events_of(
    events: &[AsyncEvent],
    of_it: impl Fn(&AsyncObject) -> bool,
) -> Vec<verbatim_device::control::AsyncEventType> {
    let found = events.iter().filter(|event| of_it(&event.object));
    found.map(|event| event.event).collect()
}

fn srq_body(
    srq: &Arc<Srq>,
    taken: &[u64],
    owner: &dyn Owner,
    events: &[AsyncEvent],
) -> Result<SrqBody, VerbsError> {
    let attr = SrqAttr {
        limit: srq.armed_limit()?,
        ..*srq.attr()
    };
    let recvs = srq
        .queue
        .lock()
        .outstanding(|slot| taken.contains(&u64::from(slot)));
    let recvs = recvs.into_iter().map(|recv| SrqRecvBody {
        slot: recv.slot,
        wr_id: recv.wr_id,
        taken: recv.taken,
        sges: sges_to_body(&recv.sges),
    });
    Ok(SrqBody {
        pd: srq.pd().number(),
        attr,
        user: owner.srq(srq),
        recvs: recvs.collect(),
        events: events_of(
            events,
            |object| matches!(object, AsyncObject::Srq(of) if Arc::ptr_eq(of, srq)),
        ),
    })
}

fn mr_body(mr: &Mr) -> Result<MrBody, VerbsError> {
    let record = mr.describe();
    let keys = [record.rkey, record.physical_lkey, record.physical_rkey];
    if keys.iter().any(|key| *key != record.lkey) {
        return Err(VerbsError::Unsupported(format!(
            "memory region {:#x} has keys that differ",
            record.lkey
        )));
    }
    Ok(MrBody {
        pd: record.pd,
        address: record.address,
        length: record.length,
        iova: record.iova,
        access: record.access,
    })
}

fn qp_body(
    qp: &Arc<Qp>,
    attr: QpAttr,
    image: Option<QpImage>,
    owner: &dyn Owner,
    events: &[AsyncEvent],
) -> Result<QpBody, VerbsError> {
    let user = owner.qp(qp);
    let control = qp.control.lock();
    let (remote, groups) = (control.remote, control.mcast.clone());
    drop(control);
    let send = send_body(qp, image.as_ref())?;
    let (first, recvs) = {
        let queue = qp.recv.lock();
        let (first, recvs) = queue.outstanding();
        let recvs = recvs.into_iter().map(|(wr_id, sges)| (wr_id, sges_to_body(sges)));
        (first, recvs.collect())
    };
    Ok(QpBody {
        pd: qp.pd().number(),
        send_cq: qp.send_cq().number(),
        recv_cq: qp.recv_cq().number(),
        srq: qp.srq().map(|srq| srq.number()),
        qp_type: qp.qp_type(),
        cap: *qp.cap(),
        signal_all: qp.signal_all(),
        user: user.context,
        extended: user.extended,
        attr,
        remote,
        groups,
        send,
        recv: RecvBody { first, recvs },
        received: qp.side.received.load(std::sync::atomic::Ordering::Relaxed),
        events: events_of(
            events,
            |object| matches!(object, AsyncObject::Qp(of) if Arc::ptr_eq(of, qp)),
        ),
        image: image.map(|image| image.image),
    })
}

/// The ring must begin with what the image has.
fn send_body(qp: &Qp, image: Option<&QpImage>) -> Result<SendBody, VerbsError> {
    let confused = || {
        VerbsError::Invalid(format!(
            "the ring of queue pair {:#x} has not the requests that it was given",
            qp.number()
        ))
    };
    let queue = qp.send.lock();
    let unfinished = match image {
        None => Vec::new(),
        Some(image) => {
            let first = queue.first_unfinished().ok_or_else(confused)?;
            let named = first..first + image.requests.len() as u64;
            let unfinished = queue.unfinished().ok_or_else(confused)?;
            if !image.requests.iter().copied().eq(named) || unfinished.len() < image.requests.len() {
                return Err(confused());
            }
            unfinished
        }
    };
    let (posted, messages) = queue.counted();
    Ok(SendBody {
        posted,
        messages,
        unfinished: unfinished.iter().map(SendRequestBody::from).collect(),
        waiting: queue.waiting().map(SendRequestBody::from).collect(),
    })
}

/// As the RNIC has it; what it was bound to may be gone, and with it what it opened.
fn window_state(
    mw: &Mw,
    device: &dyn Device,
    mrs: &[Arc<Mr>],
    qps: &[Arc<Qp>],
) -> Result<MwState, VerbsError> {
    let state = device.query_mw(mw.rkey())?;
    let is_there = |bound: &MwBound| {
        mrs.iter().any(|mr| mr.lkey() == bound.lkey)
            && bound
                .qpn
                .is_none_or(|qpn| qps.iter().any(|qp| qp.number() == qpn))
    };
    Ok(MwState {
        bound: state.bound.filter(is_there),
        ..state
    })
}
