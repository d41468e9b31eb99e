//! Requests, from the names of ids that a program knows to the ids.

use std::os::fd::OwnedFd;

use verbatim_device::control::{CmReply, CmRequest};
use verbatim_roce::Time;

use super::Manager;
use super::programs::Kind;
use super::ways::Ways;
use crate::device::Device;
use crate::error::Refused;

/// Who asks, and where.
pub struct Asking<'a> {
    pub context: u32,
    pub device: &'a Device,
    pub now: Time,
}

impl Manager {
    /// The ways of the program that asks.
    pub(super) fn ways<'a>(&'a self, asking: &Asking<'a>) -> Ways<'a> {
        let program = self.programs.get(asking.context);
        Ways {
            device: asking.device,
            known: program.and_then(|program| program.known.as_ref()),
        }
    }

    /// Answers a request.
    pub fn answer(
        &mut self,
        request: CmRequest,
        fds: &mut Vec<OwnedFd>,
        attached: &mut Option<OwnedFd>,
        asking: &Asking<'_>,
    ) -> Result<CmReply, Refused> {
        let gids = asking.device.port.gid_table();
        let answer = match request {
            CmRequest::Know { .. }
            | CmRequest::Describe
            | CmRequest::Reserve { .. }
            | CmRequest::Dump
            | CmRequest::Adopt { .. }
            | CmRequest::AttachChannel { .. }
            | CmRequest::SendOn { .. } => self.move_program(request, fds, attached, asking),
            request => {
                let request = self.with_numbers(request, asking.context)?;
                self.carry_out(request, fds, asking)
            }
        };
        // What the machine has to tell of it belongs before whatever comes next.
        self.take_notices(asking.now, &gids);
        answer
    }

    /// The request with the table's numbers in the place of the program's names.
    fn with_numbers(&self, mut request: CmRequest, context: u32) -> Result<CmRequest, Refused> {
        use CmRequest as R;
        let find = |kind, name| {
            // The kernel's errno for numbers that are no ids.
            let missing = || Refused::new(libc::ENOENT, format!("this context has no rdma_cm id {name}"));
            self.programs.find(context, kind, name).ok_or_else(missing)
        };
        match &mut request {
            R::DestroyId { id }
            | R::Bind { id, .. }
            | R::ResolveAddress { id, .. }
            | R::ResolveRoute { id, .. }
            | R::Query { id }
            | R::Listen { id, .. }
            | R::Connect { id, .. }
            | R::Accept { id, .. }
            | R::Reject { id, .. }
            | R::Disconnect { id }
            | R::InitQpAttr { id, .. }
            | R::SetOption { id, .. }
            | R::Notify { id, .. }
            | R::JoinMulticast { id, .. }
            | R::MigrateId { id, .. } => *id = find(Kind::Id, *id)?,
            R::LeaveMulticast { membership } => *membership = find(Kind::Membership, *membership)?,
            R::CreateChannel
            | R::DestroyChannel { .. }
            | R::GetEvent { .. }
            | R::CreateId { .. }
            | R::Know { .. }
            | R::Describe
            | R::Reserve { .. }
            | R::Dump
            | R::Adopt { .. }
            | R::AttachChannel { .. }
            | R::SendOn { .. } => {}
        }
        Ok(request)
    }
}
