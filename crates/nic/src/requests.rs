//! The control path: one request in, one answer out, one kind of object per file.
//!
//! Every field of a request is the program's word and is checked. A request that is refused has changed nothing.

mod context;
mod cq;
mod modify;
mod mr;
mod pd;
mod qp;

use std::os::fd::OwnedFd;

use verbatim_device::control::{Reply, Request};
use verbatim_roce::Time;
use verbatim_seqpacket::Credentials;

use crate::context::Context;
use crate::device::Device;
use crate::error::Refused;
use crate::objects::Objects;
use crate::qp::Effects;

/// Whatever an answer depends on.
pub struct Desk<'a> {
    pub device: &'a Device,
    pub objects: &'a mut Objects,
    pub effects: &'a mut Effects,
    /// Queue pairs whose state an answer has changed: their timers and their turn are to be looked at.
    pub changed_qps: &'a mut Vec<u32>,
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
    /// The descriptors that came with it.
    pub fds: Vec<OwnedFd>,
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
            Request::ParkContext => Ok(self.park_context(context)),
            Request::AllocPd => self.alloc_pd(id, context),
            Request::DeallocPd { pd } => self.dealloc_pd(pd, context),
            Request::RegMr {
                pd,
                address,
                length,
                iova,
                access,
                segments,
            } => {
                let wanted = crate::memory::Registration {
                    context: id,
                    pd,
                    address,
                    length,
                    iova,
                    access,
                    segments: &segments,
                    fds: &asker.fds,
                };
                self.reg_mr(&wanted, context)
            }
            Request::DeregMr { lkey } => self.dereg_mr(lkey, context),
            Request::CreateCq { entries, .. } => self.create_cq(id, entries, context),
            Request::DestroyCq { cq } => self.destroy_cq(cq, context),
            Request::CreateQp {
                pd,
                send_cq,
                recv_cq,
                qp_type,
                cap,
                ..
            } => self.create_qp(
                id,
                qp::Wanted {
                    pd,
                    send_cq,
                    recv_cq,
                    qp_type,
                    cap,
                },
                context,
            ),
            Request::ModifyQp { qpn, mask, attr } => self.modify_qp(id, qpn, mask, &attr),
            Request::QueryQp { qpn } => self.query_qp(id, qpn),
            Request::DestroyQp { qpn } => self.destroy_qp(id, qpn, context),
            Request::OpenContext { .. } | Request::AttachContext { .. } => unreachable!("answered above"),
            Request::ReregMr { .. }
            | Request::AllocMw { .. }
            | Request::DeallocMw { .. }
            | Request::CreateCompChannel
            | Request::DestroyCompChannel { .. }
            | Request::ResizeCq { .. }
            | Request::CreateSrq { .. }
            | Request::ModifySrq { .. }
            | Request::QuerySrq { .. }
            | Request::DestroySrq { .. }
            | Request::CreateAh { .. }
            | Request::DestroyAh { .. }
            | Request::AttachMcast { .. }
            | Request::DetachMcast { .. }
            | Request::QueryStatistics { .. }
            | Request::StartCapture { .. } => Err(Refused::new(libc::EOPNOTSUPP, "not supported")),
            Request::AddListener => Err(Refused::invalid(
                "add listener is the only request of its connection",
            )),
        }
    }
}

fn creates(request: &Request) -> bool {
    matches!(
        request,
        Request::RegMr { .. } | Request::CreateQp { .. } | Request::ModifyQp { .. }
    )
}
