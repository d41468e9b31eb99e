//! Opening a context, and taking over one that was handed over.

use std::rc::Rc;

use verbatim_device::control::{AsyncEvent, Reply, VERSIONS};
use verbatim_versions::{Side, Versions, agree};

use super::{Asker, Desk};
use crate::account::Account;
use crate::context::Context;
use crate::error::Refused;
use crate::memory::Mappings;
use crate::outbox::Outbox;

/// Longest name of a context in bytes.
pub const MAX_NAME_BYTES: usize = 128;

fn check_version(version: u32) -> Result<(), Refused> {
    let asker = Side::new("the asking side", Versions::only(version))
        .with_remedy("start the program again, with the guest library of this release");
    let agreed = agree("device", Side::new("this RNIC", VERSIONS), asker);
    agreed
        .map(drop)
        .map_err(|mismatch| Refused::new(libc::EPROTO, mismatch.to_string()))
}

/// Where asynchronous events go, if the asker wants them.
fn events(asker: &mut Asker<'_>) -> Result<Option<Outbox<AsyncEvent>>, Refused> {
    match asker.fds.is_empty() {
        true => Ok(None),
        false => Outbox::new(&mut asker.fds).map(Some),
    }
}

impl Desk<'_> {
    pub(super) fn open_context(
        &mut self,
        version: u32,
        name: String,
        asker: &mut Asker<'_>,
    ) -> Result<Reply, Refused> {
        check_version(version)?;
        if asker.context.is_some() {
            return Err(Refused::invalid("this connection has a context already"));
        }
        if name.len() > MAX_NAME_BYTES {
            return Err(Refused::invalid(format!(
                "a name has at most {MAX_NAME_BYTES} bytes"
            )));
        }
        let arena_bytes = self.device.limits.arena_bytes;
        let events = events(asker)?;
        let most = &self.device.limits.per_program;
        let account = Account::new("this program", most.max_mappings, most.max_mapped_bytes);
        let mappings = Mappings::new(Rc::new(account), asker.payer.clone()).locked(self.device.locked);
        let mut context = Context::new(
            name,
            version,
            arena_bytes,
            mappings,
            asker.payer,
            asker.credentials,
            asker.process(),
        )?;
        context.events = events;
        tracing::debug!(
            id = asker.id,
            version,
            name = context.name,
            pid = asker.credentials.pid,
            "context opened"
        );
        *asker.context = Some(context);
        Ok(self.context_reply(arena_bytes))
    }

    pub(super) fn attach_context(&mut self, version: u32, asker: &mut Asker<'_>) -> Result<Reply, Refused> {
        check_version(version)?;
        if asker.context.is_none() {
            return Err(Refused::invalid(
                "this connection has no context to attach to: open one",
            ));
        }
        let events = events(asker)?;
        let process = asker.process();
        let context = asker.context.as_mut().expect("it was just there");
        context.set_owner(asker.credentials, process);
        context.version = version;
        if let Some(earlier) = std::mem::replace(&mut context.events, events) {
            self.poller.remove(&earlier);
        }
        self.set_parked(asker.id, context, false);
        tracing::debug!(
            id = asker.id,
            version,
            name = context.name,
            pid = asker.credentials.pid,
            "context attached"
        );
        Ok(self.context_reply(context.arena.bytes()))
    }

    pub(super) fn park_context(&mut self, id: u32, context: &mut Context) -> Reply {
        self.set_parked(id, context, true);
        Reply::Done
    }

    fn set_parked(&mut self, id: u32, context: &mut Context, parked: bool) {
        context.parked = parked;
        match parked {
            true => self.objects.cm.park(self.now, id),
            false => self
                .objects
                .cm
                .unpark(self.now, id, &self.device.port.gid_table()),
        }
        for qpn in context.qps() {
            if let Some(qp) = self.objects.qps.get_mut(qpn) {
                qp.parked = parked;
            }
        }
    }

    fn context_reply(&self, arena_bytes: u64) -> Reply {
        Reply::Context {
            device: self.device.attr.clone(),
            port: self.device.port.clone(),
            arena_bytes,
        }
    }
}
