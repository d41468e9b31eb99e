//! What happens while the instance's connections are suspended: wait-before-stop, quiesce, freeze, stop-and-copy, restore.

use std::collections::HashMap;

use anyhow::{Context, bail};
use futures_util::future::{join_all, try_join_all};
use verbatim_channel::{Answer, Order, QpCount, Scope};
use verbatim_device::control::QpType;

use super::connections::{Connection, OtherEnd};
use super::{Failure, Source, told};
use crate::guests::unexpected;
use crate::memory::send::Sender;
use crate::proto;
use crate::proto::file_part::Folder;
use crate::report::Phase;
use crate::session::in_time;

impl Source {
    /// Intercepts requests on both sides and waits until nothing is in flight (MigrRDMA §3.4).
    pub(super) async fn wait_before_stop(&mut self) -> Result<(), Failure> {
        // What the program wrote since the last round would otherwise have to be sent while it is frozen.
        let bytes = self.files.round(&mut self.destination()).await?;
        self.bytes.pre_copy += bytes;

        self.enter(Phase::WaitBeforeStop);
        self.timeline.suspended();
        self.suspended = true;
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
                } => {
                    let unchanged = road_map_version == process.road_map.version;
                    Ok((process.guest.pid, sent, unchanged))
                }
                other => Err(unexpected(&other, "Suspended")),
            }
        });
        let partners = self.partners.iter().map(|partner| {
            let (mut client, id) = (partner.client.clone(), self.id());
            async move {
                let reply = client.partner_suspend(id).await;
                anyhow::Ok(told(&partner.host, "suspend its connections", reply)?.counts)
            }
        });
        let (own, partners) = tokio::join!(try_join_all(own), try_join_all(partners));
        let (own, partners) = (own?, partners?);
        if own.iter().any(|(_, _, unchanged)| !unchanged) {
            return Err(Failure::Changed);
        }
        // n_sent of every end, by process and queue pair, and by connection.
        let own_sent: HashMap<(u32, u32), u64> = own
            .iter()
            .flat_map(|(pid, sent, _)| sent.iter().map(|count| ((*pid, count.qpn), count.messages)))
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
        if unreliable {
            self.drain(&own_sent, &partner_sent, true).await?;
        }
        self.drain(&own_sent, &partner_sent, false).await?;
        Ok(())
    }

    async fn drain(
        &self,
        own_sent: &HashMap<(u32, u32), u64>,
        partner_sent: &HashMap<usize, u64>,
        sends_only: bool,
    ) -> anyhow::Result<()> {
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
                    Answer::Drained => Ok(()),
                    other => Err(unexpected(&other, "Drained")),
                }
            }
        });
        let own = try_join_all(own.collect::<Vec<_>>());
        let mut requests = Vec::new();
        for partner in &self.partners {
            let mut counts = Vec::new();
            for index in &partner.connections {
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
                told(&partner.host, "finish what is in flight", reply)?;
                anyhow::Ok(())
            }
        }));
        let limit = self.request.drain_timeout + std::time::Duration::from_secs(5);
        tokio::time::timeout(limit, async { tokio::try_join!(own, partners) })
            .await
            .context("waiting for what is in flight took too long")??;
        Ok(())
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
                Ok(quiesced) => self.quiesced.push(quiesced),
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Freezes the instance and writes its images.
    pub(super) async fn freeze(&mut self) -> anyhow::Result<()> {
        let checkpoint = self
            .checkpoint
            .take()
            .context("the checkpoint was not prepared")?;
        self.timeline.frozen();
        self.detached = true;
        let home = &self.instance.home;
        self.dumped = Some(checkpoint.freeze_and_dump_with(|| home.detach()).await?);
        Ok(())
    }

    /// Sends the last changes and the images.
    pub(super) async fn stop_and_copy(&mut self) -> anyhow::Result<()> {
        let images = self.instance.home.paths.images.clone();
        let mut images = Sender::new(self.session, Folder::Images, images, None);
        let (mut to_files, mut to_images) = (self.destination(), self.destination());
        let (files, images) = tokio::join!(self.files.round(&mut to_files), images.round(&mut to_images));
        self.bytes.stop_and_copy += files? + images?;
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
