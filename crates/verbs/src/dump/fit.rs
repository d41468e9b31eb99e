//! Whether what a record says can be: it may be of anybody, and its checksum proves nothing.

use std::sync::atomic::Ordering::SeqCst;

use verbatim_device::control::{AsyncEventType, QpState, QpType};
use verbatim_device::layout::Sge;

use super::DumpError;
use super::bodies::{QpBody, SendRequestBody, SgeBody, SrqBody, sges_from_body};
use super::record::ObjectBody;
use crate::error::VerbsError;
use crate::qp::{Copied, Qp};

/// Positions are counters that only rise; the upper bits say of what.
const LAST_POSITION: u64 = 1 << 62;

/// Whether a shared receive queue can have these RECVs: each in a slot of its own.
pub fn check_srq(body: &SrqBody) -> Result<(), DumpError> {
    let mut slots: Vec<u32> = body.recvs.iter().map(|recv| recv.slot).collect();
    slots.sort_unstable();
    slots.dedup();
    let fits = slots.len() == body.recvs.len()
        && slots.last().is_none_or(|last| *last < body.attr.max_wr)
        && body
            .recvs
            .iter()
            .all(|recv| recv.sges.len() <= body.attr.max_sge as usize);
    match fits {
        true => Ok(()),
        false => Err(DumpError::Content("RECVs that no shared receive queue can have")),
    }
}

/// Events of objects of another kind would be taken for theirs.
pub fn check_events(body: &ObjectBody) -> Result<(), DumpError> {
    use AsyncEventType::*;
    let of_qp: &[_] = &[
        QpFatal,
        QpReqErr,
        QpAccessErr,
        CommEst,
        SqDrained,
        QpLastWqeReached,
    ];
    let (events, known): (&[AsyncEventType], _) = match body {
        ObjectBody::Cq(body) => (&body.events, &[CqErr][..]),
        ObjectBody::Srq(body) => (&body.events, &[SrqErr, SrqLimitReached][..]),
        ObjectBody::Qp(body) => (&body.events, of_qp),
        _ => return Ok(()),
    };
    match events.iter().all(|event| known.contains(event)) {
        true => Ok(()),
        false => Err(DumpError::Content("events of another kind of object")),
    }
}

/// Whether the queue pair is the one that was made of this.
pub fn check_same(qp: &Qp, body: &QpBody) -> Result<(), VerbsError> {
    let same = qp.pd().number() == body.pd
        && qp.send_cq().number() == body.send_cq
        && qp.recv_cq().number() == body.recv_cq
        && qp.srq().map(|srq| srq.number()) == body.srq
        && qp.qp_type() == body.qp_type
        && qp.cap().max_send_wr == body.cap.max_send_wr
        && qp.cap().max_send_sge == body.cap.max_send_sge
        && qp.cap().max_inline_data == body.cap.max_inline_data
        && qp.context().moves.load(SeqCst) == 0;
    match same {
        true => Ok(()),
        false => Err(VerbsError::Invalid(format!(
            "queue pair {:#x} is another than the record's",
            qp.number()
        ))),
    }
}

/// What is to be in the queues of a queue pair; it fits its limits.
pub struct Requests {
    unfinished: Vec<Copied>,
    waiting: Vec<Copied>,
    recvs: Vec<(u64, Vec<Sge>)>,
}

impl Requests {
    pub fn of(body: &QpBody) -> Result<Self, DumpError> {
        let (send, recv, cap) = (&body.send, &body.recv, &body.cap);
        let requests = |list: &[SendRequestBody]| -> Result<Vec<_>, DumpError> {
            list.iter().map(|request| request.request(cap)).collect()
        };
        let live = matches!(body.attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        let has_image = body.qp_type == QpType::Rc && live;
        if body.image.is_some() != has_image || body.qp_type == QpType::Uc && live {
            return Err(DumpError::Content("a queue pair with the image of another kind"));
        }
        let sends = send.unfinished.len() + send.waiting.len();
        let (max_recvs, max_sges) = match body.srq {
            Some(_) => (0, 0),
            None => (cap.max_recv_wr as usize, cap.max_recv_sge as usize),
        };
        let entries_fit = |(_, sges): &(u64, Vec<SgeBody>)| sges.len() <= max_sges;
        let fits = sends <= cap.max_send_wr as usize
            && send.unfinished.len() as u64 <= send.posted
            && send.posted < LAST_POSITION
            && (has_image || send.unfinished.is_empty())
            && recv.first < LAST_POSITION
            && recv.recvs.len() <= max_recvs
            && recv.recvs.iter().all(entries_fit);
        if !fits {
            return Err(DumpError::Content("requests that its queue pair cannot have"));
        }
        Ok(Self {
            unfinished: requests(&send.unfinished)?,
            waiting: requests(&send.waiting)?,
            recvs: recv
                .recvs
                .iter()
                .map(|(wr_id, sges)| (*wr_id, sges_from_body(sges)))
                .collect(),
        })
    }

    /// False if the rings have not room for them.
    pub fn put_into(self, qp: &Qp, body: &QpBody) -> bool {
        let (posted, messages) = (body.send.posted, body.send.messages);
        let mut send = qp.send.lock();
        let sent = send.refill(posted, messages, &self.unfinished, self.waiting);
        drop(send);
        let received = qp.srq().is_some() || qp.recv.lock().refill(body.recv.first, &self.recvs);
        sent && received
    }
}
