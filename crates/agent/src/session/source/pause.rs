//! Pause and resume in the place of wait-before-stop (MigrOS §3.2): what the source does otherwise for that.
//!
//! The destination's standby contexts have the same keys as the old ones, since what is under way names them, and their
//! queue pairs wait in RESET for the images. The partners make nothing: their RNICs get a secret, and find out by it where the
//! other end is.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use anyhow::{Context, bail};
use futures_util::future::try_join_all;
use verbatim_channel::{Answer, Endpoint, Order, SharedSecret};
use verbatim_device::control::{QpSecret, QpType, Reply, Request};
use verbatim_seqpacket::Socket;

use super::connections::{Connected, Connection, OtherEnd};
use super::{Failure, Source, told};
use crate::faults::Point;
use crate::guests::unexpected;
use crate::method::Method;
use crate::proto;
use crate::report::Phase;
use crate::session::in_time;
use crate::standby::is_connected;

/// For so long the old place passes RESUMEs on, in seconds.
const FORWARD_SECONDS: u32 = 60;

/// The secrets of connections that will pause, by connection.
pub(super) type Secrets = HashMap<usize, QpSecret>;

/// New secrets for connections. Of one within the instance, both ends are connections of it.
fn secrets(connections: &[Connection]) -> Secrets {
    let mut secrets = Secrets::new();
    for (index, connection) in connections.iter().enumerate() {
        let secret = match &connection.other_end {
            OtherEnd::Own(other) => secrets.get(other).map(|other: &QpSecret| QpSecret {
                first: false,
                ..*other
            }),
            OtherEnd::Host(_) | OtherEnd::OwnUnconnected { .. } => None,
        };
        let new = || QpSecret {
            key: rand::random(),
            first: true,
        };
        secrets.insert(index, secret.unwrap_or_else(new));
    }
    secrets
}

impl Source {
    pub(super) fn pauses(&self) -> bool {
        self.choice.method == Method::PauseResume
    }

    /// Makes the secrets, if the instance's ends can pause.
    pub(super) fn make_secrets(&mut self) -> Result<(), Failure> {
        let contexts = self.processes.iter().flat_map(|process| &process.road_map.contexts);
        let unreliable = contexts
            .flat_map(|context| &context.qps)
            .find(|qp| qp.qp_type == QpType::Uc);
        if let Some(qp) = unreliable {
            return Err(Failure::CannotPause(format!(
                "queue pair {:#x} is an unreliable connection",
                qp.qpn
            )));
        }
        self.secrets = secrets(&self.connections);
        Ok(())
    }

    /// Connects nothing, but says who will be where; the instance's RNIC learns the secrets.
    pub(super) async fn agree_to_pause(&mut self) -> Result<(), Failure> {
        let half = self
            .connections
            .iter()
            .find(|connection| connection.connected != Connected::Both);
        if let Some(half) = half {
            return Err(Failure::CannotPause(format!(
                "queue pair {:#x} is connected at one end only",
                half.qpn
            )));
        }
        let gone = "a connection's new end is missing";
        let gid = self.destination_gid()?;
        let mut at_destination = Vec::new();
        let mut at_partners: HashMap<usize, proto::PartnerPeer> = HashMap::new();
        for (index, connection) in self.connections.iter().enumerate() {
            let own = self.new_qp(connection.pid, connection.qpn).context(gone)?;
            let there = |qp: &proto::NewQp| Endpoint {
                gid,
                qpn: qp.physical_qpn,
            };
            let remote = match &connection.other_end {
                OtherEnd::Own(other) => {
                    let other = &self.connections[*other];
                    there(self.new_qp(other.pid, other.qpn).context(gone)?)
                }
                OtherEnd::Host(_) | OtherEnd::OwnUnconnected { .. } => connection.partner,
            };
            let peer = proto::PartnerPeer {
                connection: index as u32,
                remote: Some(there(own).into()),
                rq_psn: None,
            };
            at_partners.insert(index, peer);
            at_destination.push(proto::DestinationPeer {
                physical_qpn: own.physical_qpn,
                remote: Some(remote.into()),
                rq_psn: None,
                paused: true,
            });
        }
        self.connect_destination(at_destination).await?;
        // Keys stay what they are, everywhere.
        self.connect_partners(&at_partners, &[]).await?;
        let secrets = self.processes.iter().map(|process| {
            let of_process = self.connections.iter().enumerate();
            let secrets = of_process.filter(|(_, connection)| connection.pid == process.guest.pid);
            let secrets: Vec<_> = secrets
                .filter_map(|(index, connection)| {
                    Some(SharedSecret {
                        qpn: connection.qpn,
                        secret: *self.secrets.get(&index)?,
                    })
                })
                .collect();
            async move {
                let order = process.guest.order(Order::ShareSecrets { secrets }, Vec::new());
                match in_time("sharing secrets", order).await?.0 {
                    Answer::Done => Ok(()),
                    other => Err(unexpected(&other, "Done")),
                }
            }
        });
        try_join_all(secrets).await?;
        Ok(())
    }

    /// The instance's connections stand still in the middle of what is under way.
    pub(super) async fn pause(&mut self) -> Result<(), Failure> {
        self.before_the_stop().await?;
        self.enter(Phase::Pause);
        self.pass(Point::SourcePause).await?;
        self.timeline.suspended();
        self.suspended = true;
        let (own, partners) = tokio::join!(self.suspend_own(), self.suspend_partners());
        let (_, _) = (own?, partners?);
        if self.has_new_partners().await {
            return Err(Failure::Changed);
        }
        let limit = self.request.drain_timeout;
        let timeout_ms = limit.as_millis().try_into().unwrap_or(u32::MAX);
        let session = self.session;
        let paused = self.processes.iter().map(|process| async move {
            let order = process
                .guest
                .order(Order::Pause { session, timeout_ms }, Vec::new());
            let answer = tokio::time::timeout(limit + std::time::Duration::from_secs(5), order);
            match answer.await.context("pausing took too long")??.0 {
                Answer::Paused { requests, bytes, .. } => Ok((requests, bytes)),
                Answer::Undrained { left, .. } => bail!("not drained after {limit:?}: {left}"),
                other => Err(unexpected(&other, "Paused")),
            }
        });
        for (requests, bytes) in try_join_all(paused).await? {
            self.paused.requests += requests;
            self.paused.image_bytes += bytes;
        }
        Ok(())
    }

    /// The old place passes on what the other ends say of new places of their own: those that move at the same time, or before
    /// they have heard of this one, look for the instance's ends there.
    pub(super) async fn forward_resumes(&self) -> anyhow::Result<()> {
        let gid = self.destination_gid()?;
        let mut forwards: Vec<(OwnedFd, Vec<Request>)> = Vec::new();
        for process in &self.processes {
            let pid = process.guest.pid;
            let fds = self.quiesced.iter().find(|(owner, _)| *owner == pid);
            let Some((_, fds)) = fds else { continue };
            for (context, fd) in process.road_map.contexts.iter().zip(fds) {
                let requests = context.qps.iter().filter(|qp| is_connected(qp)).filter_map(|qp| {
                    Some(Request::ForwardQp {
                        qpn: qp.physical_qpn,
                        to_gid: gid,
                        to_qpn: self.new_qp(pid, qp.qpn)?.physical_qpn,
                        seconds: FORWARD_SECONDS,
                    })
                });
                forwards.push((fd.as_fd().try_clone_to_owned()?, requests.collect()));
            }
        }
        let forwarded = tokio::task::spawn_blocking(move || {
            for (fd, requests) in forwards {
                let socket = Socket::from_fd(fd);
                for request in requests {
                    match socket.call::<_, Reply>(&request, &[])?.message {
                        Reply::Done => {}
                        other => bail!("the RNIC does not forward: {other:?}"),
                    }
                }
            }
            Ok(())
        });
        forwarded.await.context("forwarding panicked")?
    }

    fn destination_gid(&self) -> anyhow::Result<[u8; 16]> {
        let host = self.agent.peers.directory().host(&self.request.destination);
        Ok(host.context("the destination is unknown")?.gid())
    }

    /// The partners' hosts know that only the decision ends the session from here on.
    async fn suspend_partners(&self) -> anyhow::Result<()> {
        let told_all = self.partners.iter().map(|partner| {
            let (mut client, id) = (partner.client.clone(), self.id());
            async move {
                told(
                    &partner.host,
                    "wait for the decision",
                    client.partner_suspend(id).await,
                )
            }
        });
        try_join_all(told_all).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection(qpn: u32, other_end: OtherEnd) -> Connection {
        let end = Endpoint { gid: [0; 16], qpn };
        Connection {
            pid: 1,
            qpn,
            moving: end,
            partner: end,
            other_end,
            connected: Connected::Both,
            sends: true,
        }
    }

    #[test]
    fn the_two_ends_of_a_connection_within_the_instance_share_a_secret() {
        let host = || OtherEnd::Host("b".into());
        let connections = [
            connection(1, host()),
            connection(2, OtherEnd::Own(3)),
            connection(3, host()),
            connection(4, OtherEnd::Own(1)),
        ];
        let secrets = secrets(&connections);
        assert_eq!(secrets[&1].key, secrets[&3].key);
        assert_eq!([1, 3].map(|index| secrets[&index].first), [true, false]);
        assert_ne!(secrets[&0].key, secrets[&2].key);
        assert!(secrets[&0].first && secrets[&2].first);
    }
}
