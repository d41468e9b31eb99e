//! Pause and resume in the place of wait-before-stop (MigrOS §3.2): what the source does otherwise for that.
//!
//! The destination's standby contexts have the same keys as the old ones, since what is under way names them, and their
//! queue pairs wait in RESET for the images. The partners make nothing: their RNICs get a secret, and find out by it where the
//! other end is.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::future::try_join_all;
use verbatim_channel::{Answer, Endpoint, Order};
use verbatim_device::control::{ForwardedQp, MOST_QPS, QpType, Reply, Request};
use verbatim_seqpacket::Socket;

use super::connections::{Connected, Connection, OtherEnd};
use super::{Failure, Source};
use crate::faults::Point;
use crate::gids::Gid;
use crate::guests::unexpected;
use crate::method::{Choice, Method, Wanted};
use crate::proto;
use crate::report::Phase;
use crate::secrets::{self, Link};
use crate::session::members::{in_milliseconds, longest};
use crate::standby::is_connected;

/// For so long the old place passes RESUMEs on, in seconds.
const FORWARD_SECONDS: u32 = 60;

/// Each connection once, by the connection that stands for it: of one within the instance, both ends are connections.
fn links(connections: &[Connection]) -> impl Iterator<Item = &Connection> {
    let indexed = connections.iter().enumerate();
    indexed.filter_map(|(index, connection)| match connection.other_end {
        OtherEnd::Own(other) if other < index => None,
        _ => Some(connection),
    })
}

impl Source {
    pub(super) fn pauses(&self) -> bool {
        self.choice.method == Method::PauseResume
    }

    /// Whether the instance's ends can pause.
    pub(super) fn can_pause(&self) -> Result<(), Failure> {
        let contexts = self
            .processes
            .iter()
            .flat_map(|process| &process.road_map.contexts);
        let unreliable = contexts
            .flat_map(|context| &context.qps)
            .find(|qp| qp.qp_type == QpType::Uc);
        if let Some(device) = self.makes_again() {
            return Err(Failure::CannotPause(format!(
                "{device} is an RNIC that cannot pause connections"
            )));
        }
        match unreliable {
            None => Ok(()),
            Some(qp) => Err(Failure::CannotPause(format!(
                "queue pair {:#x} is an unreliable connection",
                qp.qpn
            ))),
        }
    }

    /// Takes the method that is expected to be the shorter, if that is what was asked for.
    pub(super) async fn choose(&mut self) -> anyhow::Result<()> {
        if self.request.method != Wanted::Auto {
            return Ok(());
        }
        let connections = self.connections.len();
        let limit_ms = in_milliseconds(Choice::of_interest(connections));
        let measured = self
            .participants()
            .into_iter()
            .map(|participant| participant.measure_drain(limit_ms, |partner| self.partner_request(partner)));
        let longest = longest(try_join_all(measured).await?);
        self.choice = Choice::expected(longest.map(Duration::from_micros), connections);
        Ok(())
    }

    /// Connects nothing, but says who will be where; the RNICs learn the secrets.
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
        let mut at_destination = Vec::new();
        let mut at_partners: HashMap<u32, proto::PartnerPeer> = HashMap::new();
        for (index, connection) in (0u32..).zip(&self.connections) {
            let own = self.new_qp(connection.pid, connection.qpn).context(gone)?;
            let gid = self.there(connection.moving.gid)?;
            let there = |gid, qp: &proto::NewQp| Endpoint {
                gid,
                qpn: qp.physical_qpn,
            };
            let remote = match &connection.other_end {
                OtherEnd::Own(other) => {
                    let other = &self.connections[*other];
                    there(
                        self.there(other.moving.gid)?,
                        self.new_qp(other.pid, other.qpn).context(gone)?,
                    )
                }
                OtherEnd::Host(_) | OtherEnd::OwnUnconnected { .. } => connection.partner,
            };
            let peer = proto::PartnerPeer {
                connection: index,
                remote: Some(there(gid, own).into()),
                rq_psn: None,
            };
            at_partners.insert(index, peer);
            at_destination.push(proto::DestinationPeer {
                physical_qpn: own.physical_qpn,
                remote: Some(remote.into()),
                rq_psn: None,
                paused: true,
                gid: gid.to_vec(),
            });
        }
        self.connect_destination(at_destination, Vec::new()).await?;
        // Keys stay what they are, everywhere.
        self.connect_partners(&at_partners, &[]).await?;
        let shared = self.share_secrets().await;
        shared.map_err(|error| Failure::CannotPause(format!("{error:#}")))
    }

    async fn share_secrets(&self) -> anyhow::Result<()> {
        let links = links(&self.connections).map(|connection| {
            let mut processes = self.processes.iter();
            let process = processes.find(|process| process.guest.pid == connection.pid);
            let host = match &connection.other_end {
                OtherEnd::Host(host) => host.clone(),
                OtherEnd::Own(_) | OtherEnd::OwnUnconnected { .. } => self.agent.name().to_owned(),
            };
            Ok(Link {
                guest: process.context("a connection without its process")?.guest.clone(),
                qpn: connection.qpn,
                own: connection.moving,
                partner: connection.partner,
                host,
            })
        });
        let links: Vec<Link> = links.collect::<anyhow::Result<_>>()?;
        secrets::share(&self.agent, self.instance.name(), &links).await
    }

    /// The instance's connections stand still in the middle of what is under way.
    pub(super) async fn pause(&mut self) -> Result<(), Failure> {
        self.suspend(Phase::Pause, Point::SourcePause).await?;
        let limit = self.request.drain_timeout;
        let timeout_ms = in_milliseconds(limit);
        let session = self.session;
        let paused = self.processes.iter().map(|process| async move {
            let order = process
                .guest
                .order(Order::StopAndDump { session, timeout_ms }, Vec::new());
            let answer = tokio::time::timeout(limit + Duration::from_secs(5), order);
            match answer.await.context("pausing took too long")? {
                Ok((Answer::Dumped { requests, bytes, .. }, _)) => Ok((requests, bytes)),
                Ok((Answer::Undrained { left, .. }, _)) => {
                    Err(anyhow::anyhow!("not drained after {limit:?}: {left}").into())
                }
                Ok((other, _)) => Err(unexpected(&other, "Dumped").into()),
                // By its own word, and all goes on where it is: an image is too large, for one.
                Err(error) => Err(Failure::CannotPause(format!("{error:#}"))),
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
        let new_gids: HashMap<u32, Gid> = self
            .connections
            .iter()
            .map(|connection| Ok((connection.moving.qpn, self.there(connection.moving.gid)?)))
            .collect::<anyhow::Result<_>>()?;
        let mut forwards: Vec<(OwnedFd, Vec<ForwardedQp>)> = Vec::new();
        for process in &self.processes {
            let pid = process.guest.pid;
            let fds = self.quiesced.iter().find(|(owner, _)| *owner == pid);
            let Some((_, fds)) = fds else { continue };
            for (context, fd) in process.road_map.contexts.iter().zip(fds) {
                let qps = context.qps.iter().filter(|qp| is_connected(qp)).filter_map(|qp| {
                    Some(ForwardedQp {
                        qpn: qp.physical_qpn,
                        to_gid: *new_gids.get(&qp.physical_qpn)?,
                        to_qpn: self.new_qp(pid, qp.qpn)?.physical_qpn,
                    })
                });
                forwards.push((fd.as_fd().try_clone_to_owned()?, qps.collect()));
            }
        }
        let forwarded = tokio::task::spawn_blocking(move || {
            let mut forwards = forwards.into_iter();
            forwards.try_for_each(|(fd, qps)| forward(&Socket::from_fd(fd), &qps))
        });
        forwarded.await.context("forwarding panicked")?
    }
}

/// The connection is the program's: no answer is left on it.
fn forward(socket: &Socket, qps: &[ForwardedQp]) -> anyhow::Result<()> {
    for qps in qps.chunks(MOST_QPS) {
        let request = Request::ForwardQps {
            qps: qps.to_vec(),
            seconds: FORWARD_SECONDS,
        };
        match socket.call::<_, Reply>(&request, &[])?.message {
            Reply::Done => {}
            other => bail!("the RNIC does not forward: {other:?}"),
        }
    }
    Ok(())
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
    fn a_connection_within_the_instance_is_one_link() {
        let host = || OtherEnd::Host("b".into());
        let connections = [
            connection(1, host()),
            connection(2, OtherEnd::Own(3)),
            connection(3, host()),
            connection(4, OtherEnd::Own(1)),
        ];
        let qpns: Vec<u32> = links(&connections).map(|connection| connection.qpn).collect();
        assert_eq!(qpns, [1, 2, 3]);
    }
}
