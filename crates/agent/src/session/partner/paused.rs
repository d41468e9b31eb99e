//! Connections that pause within the protocol, at a partner's host: its RNIC learns a secret before, and its programs' guest
//! libraries learn afterwards where the other ends are.

use std::collections::HashMap;

use anyhow::Context;
use futures_util::future::join_all;
use verbatim_channel::{Answer, Order, Relocated, SharedSecret};
use verbatim_device::control::QpSecret;

use super::Partner;
use crate::guests::unexpected;
use crate::proto::PartnerPrepareRequest;

/// By connection; the other end has made them.
pub(super) type Secrets = HashMap<u32, QpSecret>;

/// The secrets in a request; none if its connections do not pause.
pub(super) fn secrets(request: &PartnerPrepareRequest) -> anyhow::Result<Secrets> {
    if !request.pauses {
        return Ok(Secrets::new());
    }
    let secrets = request.connections.iter().map(|connection| {
        let key = connection.secret.as_slice().try_into();
        let key = key.context("a connection that is to pause without its secret")?;
        Ok((connection.connection, QpSecret { key, first: false }))
    });
    secrets.collect()
}

impl Partner {
    /// Gives the RNIC the secrets of all connections. Why that cannot be; empty if it was done.
    pub(super) async fn share_secrets(&self, secrets: &Secrets) -> anyhow::Result<String> {
        let shared = self.members.iter().map(|member| async move {
            let ends = member.kept.connections.iter();
            let secrets = ends.filter_map(|(connection, qpn)| {
                Some(SharedSecret {
                    qpn: *qpn,
                    secret: *secrets.get(connection)?,
                })
            });
            let order = Order::ShareSecrets {
                secrets: secrets.collect(),
            };
            let guest = member.guest(&self.agent).await.context("a process has ended")?;
            let answer = super::in_time("sharing secrets", guest.order(order, Vec::new()));
            match answer.await {
                Ok((Answer::Done, _)) => Ok(String::new()),
                Ok((other, _)) => Err(unexpected(&other, "Done")),
                // By its own word: it has another RNIC, for one.
                Err(error) => Ok(format!("process {} on {}: {error:#}", member.kept.pid, self.agent.name())),
            }
        });
        let shared: anyhow::Result<Vec<String>> = join_all(shared).await.into_iter().collect();
        Ok(shared?.into_iter().find(|why| !why.is_empty()).unwrap_or_default())
    }

    /// Tells the programs' guest libraries where the other ends are; the RNIC has found that out by itself.
    pub(super) async fn relocate(&self) -> anyhow::Result<u64> {
        let relocated = self.members.iter().map(|member| async move {
            let ends = member.kept.connections.iter();
            let peers = ends.filter_map(|(connection, qpn)| {
                Some(Relocated {
                    qpn: *qpn,
                    remote: *self.moved_to.get(connection)?,
                })
            });
            let order = Order::Relocate {
                peers: peers.collect(),
            };
            match member.order_if_alive(&self.agent, "noting where the other ends are", order).await? {
                Some(Answer::Done) | None => Ok(0),
                Some(other) => Err(unexpected(&other, "Done")),
            }
        });
        join_all(relocated).await.into_iter().sum()
    }
}
