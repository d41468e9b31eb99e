//! The control path: one request in, one answer out, one kind of object per file.
//!
//! Whoever sent it may: `crate::authority` has said so. Every field of a request is the program's word and is checked. A request that is refused has changed nothing.

mod ah;
mod cm;
mod context;
mod cq;
mod mcast;
mod modify;
mod mr;
mod mw;
mod path;
mod pause;
mod pd;
mod qp;
mod srq;
mod stop;

use std::os::fd::OwnedFd;
use std::time::Duration;

use verbatim_device::control::{Reply, Request};
use verbatim_roce::Time;
use verbatim_seqpacket::{Credentials, Process};

pub use self::context::MAX_NAME_BYTES;
pub use self::path::address as address_of;
use crate::context::Context;
use crate::device::Device;
use crate::error::Refused;
use crate::memory::Registration;
use crate::objects::Objects;
use crate::poller::Poller;
use crate::qp::Effects;
use crate::tenant::Payer;

/// Whatever an answer depends on.
pub struct Desk<'a> {
    pub device: &'a Device,
    pub objects: &'a mut Objects,
    pub effects: &'a mut Effects,
    /// Queue pairs whose state an answer has changed: their timers and their turn are to be looked at.
    pub changed_qps: &'a mut Vec<u32>,
    pub poller: &'a Poller,
    pub now: Time,
}

/// Who asks.
#[derive(Debug)]
pub struct Asker<'a> {
    /// The number of the connection, and of its context.
    pub id: u32,
    pub context: &'a mut Option<Context>,
    /// The kernel's word on the process that sent the request.
    pub credentials: Credentials,
    /// The process that made the connection, if it has no context yet.
    pub connected_by: &'a mut Option<Process>,
    /// Who pays for its context.
    pub payer: &'a Payer,
    /// The descriptors that came with it.
    pub fds: Vec<OwnedFd>,
    /// The descriptor that goes with the answer.
    pub attached: &'a mut Option<OwnedFd>,
}

impl Asker<'_> {
    /// The process that sent the request. Who sent it over a connection of its own may have ended since, and its number may
    /// be another's; that cannot be told of a connection that was handed over, unless the number has nobody now.
    pub fn process(&mut self) -> Process {
        match self.connected_by.take() {
            Some(process) if process.number() == self.credentials.pid => process,
            _ => Process::open(self.credentials),
        }
    }
}

impl Desk<'_> {
    /// Answers a request.
    pub fn answer(&mut self, request: Request, asker: &mut Asker<'_>) -> Result<Reply, Refused> {
        match request {
            Request::OpenContext { version, name } => return self.open_context(version, name, asker),
            Request::AttachContext { version } => return self.attach_context(version, asker),
            _ => {}
        }
        let id = asker.id;
        let context = asker
            .context
            .as_mut()
            .ok_or_else(|| Refused::invalid("there is no context yet: open one first"))?;
        if context.mappings.truncated() && creates(&request) {
            return Err(Refused::new(
                libc::EIO,
                "a file of registered memory was truncated: the context is dead",
            ));
        }
        match request {
            Request::ParkContext => Ok(self.park_context(id, context)),
            Request::ServeHost => {
                context.serves_host = true;
                Ok(Reply::Done)
            }
            Request::AllocPd => self.alloc_pd(id, context),
            Request::DeallocPd { pd } => self.dealloc_pd(pd, context),
            Request::RegMr {
                pd,
                address,
                length,
                iova,
                access,
                segments,
                key,
            } => {
                let wanted = Registration {
                    context: id,
                    pd,
                    address,
                    length,
                    iova,
                    access,
                    segments: &segments,
                    fds: &asker.fds,
                };
                self.reg_mr(&wanted, key, context)
            }
            Request::ReregMr {
                lkey,
                pd,
                access,
                translation,
            } => self.rereg_mr(id, lkey, pd, access, translation.as_ref(), &asker.fds, context),
            Request::DeregMr { lkey } => self.dereg_mr(lkey, context),
            Request::AllocMw { pd, mw_type, rkey } => self.alloc_mw(id, pd, mw_type, rkey, context),
            Request::DeallocMw { rkey } => self.dealloc_mw(rkey, context),
            Request::QueryMw { rkey } => self.query_mw(rkey, context),
            Request::RestoreMw { state } => self.restore_mw(id, &state, context),
            Request::CreateCompChannel => self.create_channel(&mut asker.fds, context),
            Request::AttachCompChannel { channel } => self.attach_channel(channel, &mut asker.fds, context),
            Request::DestroyCompChannel { channel } => self.destroy_channel(channel, context),
            Request::CreateCq {
                entries,
                channel,
                event,
            } => self.create_cq(id, entries, channel, event, context),
            Request::ResizeCq { cq, entries } => self.resize_cq(id, cq, entries, context),
            Request::DestroyCq { cq } => self.destroy_cq(cq, context),
            Request::CreateQp {
                pd,
                send_cq,
                recv_cq,
                qp_type,
                cap,
                srq,
                qpn,
            } => {
                let wanted = qp::Wanted {
                    pd,
                    send_cq,
                    recv_cq,
                    qp_type,
                    cap,
                    srq,
                    qpn,
                };
                self.create_qp(id, wanted, context)
            }
            Request::ModifyQp { qpn, mask, attr } => self.modify_qp(id, qpn, mask, &attr),
            Request::QueryQp { qpn } => self.query_qp(id, qpn),
            Request::QueryQps { qpns } => self.query_qps(id, &qpns),
            Request::StopQp { qpn } => self.stop_qp(id, qpn),
            Request::RestartQp { qpn } => self.restart_qp(id, qpn),
            Request::SetQpSecret { qpn, secret } => self.set_qp_secret(id, qpn, secret),
            Request::SetQpClass { qpn, class } => self.set_qp_class(id, qpn, class),
            Request::PauseQps { qpns, limit_s } => {
                let limit = limit_s.map(|seconds| Duration::from_secs(seconds.into()));
                self.each_done(&qpns, |desk, qpn| desk.pause_qp(id, qpn, limit))
            }
            Request::DumpQps { qpns } => self.dump_qps(id, &qpns, asker.attached),
            Request::RestoreQps { qps, images } => self.restore_qps(id, &qps, images, &mut asker.fds),
            Request::ResumeQps { qpns } => self.each_done(&qpns, |desk, qpn| desk.resume_qp(id, qpn)),
            Request::ForwardQps { qps, seconds } => {
                let time = Duration::from_secs(seconds.into());
                self.each_done(&qps, |desk, qp| desk.forward_qp(id, &qp, time))
            }
            Request::DestroyQp { qpn } => self.destroy_qp(id, qpn, context),
            Request::CreateSrq { pd, attr } => self.create_srq(id, pd, &attr, context),
            Request::ModifySrq { srq, limit } => self.modify_srq(id, srq, limit),
            Request::QuerySrq { srq } => self.query_srq(id, srq),
            Request::DestroySrq { srq } => self.destroy_srq(id, srq, context),
            Request::CreateAh { pd, av } => self.create_ah(id, pd, &av, context),
            Request::DestroyAh { ah } => self.destroy_ah(ah, context),
            Request::AttachMcast { qpn, gid } => self.attach_mcast(id, qpn, gid, context),
            Request::DetachMcast { qpn, gid } => self.detach_mcast(id, qpn, gid),
            Request::Cm(request) => self.cm(id, request, &mut asker.fds, asker.attached, context),
            Request::OpenContext { .. } | Request::AttachContext { .. } => unreachable!("answered above"),
            Request::QueryStatistics { .. }
            | Request::AddListener { .. }
            | Request::RemoveListener { .. }
            | Request::QueryListeners { .. }
            | Request::StartCapture { .. }
            | Request::QueryOwners { .. }
            | Request::TakePeerQuestions
            | Request::AnswerPeerQuestions { .. }
            | Request::MeetPeers { .. }
            | Request::PeersGone { .. }
            | Request::PeersHeard { .. } => unreachable!("answered by the engine"),
        }
    }
}

/// Whether a context with `have` objects of a kind may have one more.
fn within(have: usize, most: u32, what: &str) -> Result<(), Refused> {
    if have < most as usize {
        return Ok(());
    }
    Err(Refused::new(
        libc::ENOMEM,
        format!("this program has {have} {what}, and may have no more"),
    ))
}

fn creates(request: &Request) -> bool {
    matches!(
        request,
        Request::RegMr { .. } | Request::ReregMr { .. } | Request::CreateQp { .. } | Request::ModifyQp { .. }
    )
}
