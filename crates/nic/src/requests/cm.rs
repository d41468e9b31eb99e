//! Connections by address and port.

use std::os::fd::OwnedFd;

use verbatim_device::control::{CmReply, CmRequest, Reply};

use super::Desk;
use crate::cm::Asking;
use crate::context::Context;
use crate::error::Refused;

impl Desk<'_> {
    pub(super) fn cm(
        &mut self,
        id: u32,
        request: CmRequest,
        fds: &mut Vec<OwnedFd>,
        attached: &mut Option<OwnedFd>,
        context: &mut Context,
    ) -> Result<Reply, Refused> {
        let destroyed = match request {
            CmRequest::DestroyChannel { channel } if context.cm_channels.contains(&channel) => Some(channel),
            _ => None,
        };
        if let Some(outbox) = destroyed.and_then(|channel| self.objects.cm.outbox(channel)) {
            // The program may have this end too, so that closing it here does not end the watch.
            self.poller.remove(outbox);
        }
        let asking = Asking {
            context: id,
            device: self.device,
            now: self.now,
        };
        let reply = self.objects.cm.answer(request, fds, attached, &asking)?;
        match &reply {
            CmReply::Channel { channel } => _ = context.cm_channels.insert(*channel),
            CmReply::Adopted { channels } => {
                context
                    .cm_channels
                    .extend(channels.iter().map(|(_, channel)| *channel));
            }
            _ => {}
        }
        if let Some(channel) = destroyed {
            context.cm_channels.remove(&channel);
        }
        Ok(Reply::Cm(reply))
    }
}
