//! Connections by rdma_cm: their context is in no road map, and moves beside the others.

use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, bail};
use futures_util::future::try_join_all;
use verbatim_channel::{Answer, CM_VERSION, Order};
use verbatim_device::control::{CmReply, CmRequest, Reply, Request};
use verbatim_seqpacket::Socket;

use super::{Process, Source};
use crate::guests::{Guest, unexpected};
use crate::proto;
use crate::protocol::CM;
use crate::session::in_time;

/// What a process's ids need elsewhere; none if it has no context for them. Of earlier guest libraries the road map says that they
/// have one.
pub async fn describe(guest: &Guest) -> anyhow::Result<Option<Vec<u8>>> {
    if guest.version < CM_VERSION {
        return Ok(None);
    }
    let described = guest.order(Order::DescribeCm, Vec::new());
    match in_time("describing connections by rdma_cm", described).await?.0 {
        Answer::CmDescribed(needs) => Ok(needs),
        other => Err(unexpected(&other, "CmDescribed")),
    }
}

impl Source {
    /// Learns what the ids of all processes need.
    pub(super) async fn describe_cm(&mut self) -> anyhow::Result<()> {
        let described = try_join_all(self.processes.iter().map(|process| describe(&process.guest)));
        let described = described.await?;
        for (process, needs) in self.processes.iter_mut().zip(described) {
            process.cm = needs;
        }
        let to = &self.request.destination;
        let has_some = self.processes.iter().find(|process| process.cm.is_some());
        match has_some {
            Some(Process { guest, .. }) if !self.agent.peers.can(to, CM) => bail!(
                "process {} ({}) has connections by rdma_cm, which the agent of {to} cannot take: upgrade it",
                guest.pid,
                guest.program
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn cm_needs(&self) -> Vec<proto::CmNeeds> {
        let from = self.agent.gid();
        let needs = self.processes.iter().filter_map(|process| {
            Some(proto::CmNeeds {
                pid: process.guest.pid,
                needs: process.cm.clone()?,
                from: from.to_vec(),
            })
        });
        needs.collect()
    }

    /// What comes here for ids that have gone is passed on to the destination, as soon as their old contexts are gone.
    pub(super) async fn send_messages_on(&self) -> anyhow::Result<()> {
        let of_cm = self.processes.iter().filter(|process| process.cm.is_some());
        let lines = of_cm.filter_map(|process| {
            let (_, fds) = self.quiesced.iter().find(|(pid, _)| *pid == process.guest.pid)?;
            Some(fds.last()?.as_fd().try_clone_to_owned())
        });
        let lines: Vec<OwnedFd> = lines.collect::<Result<_, _>>()?;
        if lines.is_empty() {
            return Ok(());
        }
        let destination = self.agent.peers.directory().host(&self.request.destination);
        let to = destination.context("the destination is unknown")?.gid();
        let sent = tokio::task::spawn_blocking(move || {
            lines.into_iter().try_for_each(|fd| {
                let request = Request::Cm(CmRequest::SendOn { to });
                // The connection is the program's: no answer is left on it.
                match Socket::from_fd(fd).call::<_, Reply>(&request, &[])?.message {
                    Reply::Cm(CmReply::Done) => Ok(()),
                    other => bail!("the RNIC does not pass messages on: {other:?}"),
                }
            })
        });
        sent.await.context("passing messages on panicked")?
    }
}
