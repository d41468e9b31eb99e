//! What happens while the instance's connections are suspended: wait-before-stop, quiesce, freeze, stop-and-copy, restore.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, bail};
use futures_util::future::{join_all, try_join_all};
use verbatim_channel::{Answer, Order, QpCount, Scope};
use verbatim_device::control::QpType;

use super::connections::{Connected, Connection, OtherEnd};
use super::pre_dump::PRE_DUMPS;
use super::settle::Undrained;
use super::{Failure, Source, told};
use crate::faults::Point;
use crate::guests::unexpected;
use crate::memory::send::Sender;
use crate::proto;
use crate::proto::file_part::Folder;
use crate::report::Phase;
use crate::session::in_time;

impl Source {
    /// The last round before the connections stop.
    pub(super) async fn before_the_stop(&mut self) -> Result<(), Failure> {
        // What the program wrote since the last round would otherwise have to be sent while it is frozen.
        self.round().await?;
        self.keeps_the_limit()?;
        // Somebody may have added one meanwhile.
        self.takes_all().await?;
        Ok(())
    }

    /// Intercepts the instance's requests: how many messages each queue pair has sent, by process.
    pub(super) async fn suspend_own(&self) -> Result<Vec<(u32, Vec<QpCount>)>, Failure> {
        let session = self.session;
        let own = self.processes.iter().map(|process| async move {
            let order = Order::Suspend {
                session,
                scope: Scope::All,
            };
            match in_time("suspending", process.guest.order(order, Vec::new()))
                .await?
                .0
            {
                Answer::Suspended {
                    sent,
                    road_map_version,
                } if road_map_version == process.road_map.version => Ok((process.guest.pid, sent)),
                Answer::Suspended { .. } => Err(Failure::Changed),
                other => Err(unexpected(&other, "Suspended").into()),
            }
        });
        try_join_all(own).await
    }

    /// Intercepts requests on both sides and waits until nothing is in flight (MigrRDMA §3.4).
    pub(super) async fn wait_before_stop(&mut self) -> Result<(), Failure> {
        self.before_the_stop().await?;
        self.enter(Phase::WaitBeforeStop);
        self.pass(Point::SourceSuspend).await?;
        self.timeline.suspended();
        self.suspended = true;
        let partners = self.partners.iter().map(|partner| {
            let (mut client, id) = (partner.client.clone(), self.id());
            async move {
                match client.partner_suspend(id).await {
                    Err(status) if status.code() == tonic::Code::Aborted => Err(Failure::Changed),
                    reply => Ok(told(&partner.host, "suspend its connections", reply)?.counts),
                }
            }
        });
        let (own, partners) = tokio::join!(self.suspend_own(), try_join_all(partners));
        let (own, partners) = (own?, partners?);
        if self.has_new_partners().await {
            return Err(Failure::Changed);
        }
        // n_sent of every end, by process and queue pair, and by connection.
        let own_sent: HashMap<(u32, u32), u64> = own
            .iter()
            .flat_map(|(pid, sent)| sent.iter().map(|count| ((*pid, count.qpn), count.messages)))
            .collect();
        let partner_sent: HashMap<usize, u64> = partners
            .into_iter()
            .flatten()
            .map(|count| (count.connection as usize, count.messages))
            .collect();
        let unreliable = self.processes.iter().any(|process| {
            let qps = process.road_map.contexts.iter().flat_map(|context| &context.qps);
            qps.into_iter().any(|qp| qp.qp_type == QpType::Uc)
        });
        self.pass(Point::SourceDrain).await?;
        if unreliable {
            // What is not drained now is found again below.
            self.drain(&own_sent, &partner_sent, true).await?;
        }
        let undrained = self.drain(&own_sent, &partner_sent, false).await?;
        if !undrained.is_empty() {
            self.settle(undrained).await?;
        }
        Ok(())
    }

    /// What is not drained when the limit has come.
    async fn drain(
        &self,
        own_sent: &HashMap<(u32, u32), u64>,
        partner_sent: &HashMap<usize, u64>,
        sends_only: bool,
    ) -> anyhow::Result<Undrained> {
        let session = self.session;
        let timeout_ms = self
            .request
            .drain_timeout
            .as_millis()
            .try_into()
            .unwrap_or(u32::MAX);
        let sent_by = |connection: &Connection| {
            let count = own_sent.get(&(connection.pid, connection.qpn)).copied();
            count.context("a connection was closed meanwhile; try again")
        };
        let mut expected: HashMap<u32, Vec<QpCount>> = HashMap::new();
        for (index, connection) in self.connections.iter().enumerate() {
            let messages = match &connection.other_end {
                OtherEnd::Own(other) => sent_by(&self.connections[*other])?,
                // From an end that is not connected nothing comes, and to one that is not nothing has come.
                _ if connection.connected != Connected::Both => continue,
                OtherEnd::OwnUnconnected { .. } => continue,
                OtherEnd::Host(host) => *partner_sent
                    .get(&index)
                    .with_context(|| format!("{host} did not tell what it sent on a connection"))?,
            };
            expected.entry(connection.pid).or_default().push(QpCount {
                qpn: connection.qpn,
                messages,
            });
        }
        let own = self.processes.iter().map(|process| {
            let expected = expected.remove(&process.guest.pid).unwrap_or_default();
            async move {
                let order = Order::Drain {
                    session,
                    expected,
                    timeout_ms,
                    sends_only,
                };
                match process.guest.order(order, Vec::new()).await?.0 {
                    Answer::Drained => Ok(Undrained::default()),
                    Answer::Undrained { qpns, left } => self.undrained(process.guest.pid, &qpns, left),
                    other => Err(unexpected(&other, "Drained")),
                }
            }
        });
        let own = try_join_all(own.collect::<Vec<_>>());
        let mut requests = Vec::new();
        for partner in &self.partners {
            let mut counts = Vec::new();
            for index in &partner.connections {
                if self.connections[*index].connected != Connected::Both {
                    continue;
                }
                let messages = sent_by(&self.connections[*index])?;
                counts.push(proto::Count {
                    connection: *index as u32,
                    messages,
                });
            }
            requests.push((
                partner,
                proto::DrainRequest {
                    session,
                    expected: counts,
                    timeout_ms,
                    sends_only,
                },
            ));
        }
        let partners = try_join_all(requests.into_iter().map(|(partner, request)| {
            let mut client = partner.client.clone();
            async move {
                let reply = client.partner_drain(request).await;
                let reply = told(&partner.host, "finish what is in flight", reply)?;
                let at = |left| format!("on {}, {left}", partner.host);
                anyhow::Ok(Undrained {
                    connections: reply.undrained.iter().map(|index| *index as usize).collect(),
                    left: reply.left.into_iter().map(at).collect(),
                })
            }
        }));
        let limit = self.request.drain_timeout + std::time::Duration::from_secs(5);
        let (own, partners) = tokio::time::timeout(limit, async { tokio::try_join!(own, partners) })
            .await
            .context("waiting for what is in flight took too long")??;
        Ok(own.into_iter().chain(partners).collect())
    }

    /// The processes let go of their RNIC and wait at the gate.
    pub(super) async fn quiesce(&mut self) -> anyhow::Result<()> {
        self.gate_closed = true;
        let (guests, session) = (&self.agent.guests, self.session);
        let orders = self.processes.iter().map(|process| async move {
            let order = Order::Quiesce { session };
            let (answer, fds) = in_time("quiescing", process.guest.order(order, Vec::new())).await?;
            // Nothing that leads out of the process may be open when it is frozen.
            let closed = async {
                guests.gone(&process.guest).await;
                Ok(())
            };
            if let Err(error) = in_time("closing a process's channel", closed).await {
                tracing::warn!(
                    pid = process.guest.pid,
                    error = format!("{error:#}"),
                    "CRIU may refuse the process"
                );
            }
            match answer {
                Answer::Quiesced if fds.len() == process.road_map.contexts.len() => {
                    Ok((process.guest.pid, fds))
                }
                Answer::Quiesced => bail!(
                    "a process gave {} connections to its RNIC away, not all",
                    fds.len()
                ),
                other => Err(unexpected(&other, "Quiesced")),
            }
        });
        let mut failed = None;
        for result in join_all(orders).await {
            match result {
                Ok((pid, fds)) => {
                    // From here on they do not depend on this agent's life.
                    let copies: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    let keeper = self.keeper.as_ref().context("the keeper was not started");
                    let kept = keeper.and_then(|keeper| keeper.keep(&pid, &copies));
                    failed = kept.err().or(failed);
                    self.quiesced.push((pid, fds));
                }
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Freezes the instance and writes its images; meanwhile the last changes of its files are sent.
    pub(super) async fn freeze(&mut self) -> anyhow::Result<()> {
        let checkpoint = self
            .checkpoint
            .take()
            .context("the checkpoint was not prepared")?;
        self.timeline.frozen();
        self.detached = true;
        let home = &self.instance.home;
        let (frozen, when_frozen) = tokio::sync::oneshot::channel();
        let dump = checkpoint.freeze_and_dump_with(|| {
            let detached = home.detach();
            // The tasks do not run, and the RNIC's contexts are parked: nothing writes to the files any more.
            let _ = frozen.send(());
            detached
        });
        let (files, mut destination) = (&mut self.files, self.destination.clone());
        let last_round = async {
            match (when_frozen.await, &mut destination) {
                (Ok(()), Some(destination)) => {
                    files.hurry();
                    files.round(destination).await
                }
                // The dump has failed, and says why.
                _ => Ok(0),
            }
        };
        let (dumped, sent) = tokio::join!(dump, last_round);
        // Kept before the other's error is looked at, so that it is undone in order.
        let judged = self.ahead.judge(&dumped);
        self.dumped = Some(dumped?);
        judged?;
        self.bytes.stop_and_copy += sent?;
        Ok(())
    }

    /// Sends the images.
    pub(super) async fn stop_and_copy(&mut self) -> anyhow::Result<()> {
        let images = self.instance.home.paths.images.clone();
        // Pre-dumps are there already.
        let mut images =
            Sender::new(self.session, Folder::Images, images, None).without(Path::new(PRE_DUMPS));
        images.hurry();
        self.bytes.stop_and_copy += images.round(&mut self.destination()).await?;
        Ok(())
    }

    /// Restores the tasks at the destination; they do not run yet.
    pub(super) async fn restore(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        told(
            &to,
            "restore the instance",
            self.destination().restore(self.id()).await,
        )?;
        Ok(())
    }
}
