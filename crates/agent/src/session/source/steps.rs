//! The steps of an attempt, in their order.

use std::collections::HashMap;

use anyhow::{Context, bail};
use futures_util::future::{join_all, try_join_all};
use verbatim_channel::{Answer, Endpoint, Order, QpCount, RoadMap, Scope};
use verbatim_container::{Checkpoint, CheckpointConfig};

use super::{Connection, Decision, Failure, OtherEnd, PartnerHost, Process, Source};
use crate::agent::{Agent, Shared};
use crate::directory::Directory;
use crate::guests::{Guest, unexpected};
use crate::journal::Event;
use crate::memory::send::Sender;
use crate::peers::reason;
use crate::proto::file_part::Folder;
use crate::proto::{self, SessionId};
use crate::session::{decode, encode, in_time};
use crate::standby::is_connected;

/// A round of pre-copy that sends less than this is the last one.
const SMALL_ROUND_BYTES: u64 = 1 << 20;

/// The most rounds of pre-copy.
const MAX_ROUNDS: u32 = 5;

/// How long the destination may be out of reach at the commit before the decision is left open.
const COMMIT_PATIENCE: std::time::Duration = std::time::Duration::from_secs(20);

/// A call's failure in words, with whom it concerned.
fn told<T>(who: &str, what: &str, result: Result<tonic::Response<T>, tonic::Status>) -> anyhow::Result<T> {
    match result {
        Ok(response) => Ok(response.into_inner()),
        Err(status) => bail!("{who} could not {what}: {}", reason(&status)),
    }
}

/// The road maps of an instance's processes.
pub async fn describe(agent: &Agent, instance: &str) -> anyhow::Result<Vec<(Guest, RoadMap)>> {
    let guests = agent.guests.of_instance(instance);
    let described = guests.into_iter().map(|guest| async move {
        let road_map = in_time("describing a process", guest.describe()).await?;
        anyhow::Ok((guest, road_map))
    });
    try_join_all(described).await
}

/// The connections in road maps, and where their other ends are.
fn connections(
    directory: &Directory,
    road_maps: &[&RoadMap],
) -> (Vec<Connection>, Vec<String>) {
    let gid = directory.own().gid();
    let mut found: Vec<Connection> = Vec::new();
    let mut blockers = Vec::new();
    for road_map in road_maps {
        let qps = road_map.contexts.iter().flat_map(|context| &context.qps).filter(|qp| is_connected(qp));
        for qp in qps {
            let Some(partner) = qp.remote else { continue };
            let Some(host) = directory.by_gid(&partner.gid) else {
                blockers.push(format!(
                    "queue pair {:#x} is connected to {}, which is no known host: known are {}",
                    qp.qpn,
                    std::net::Ipv6Addr::from(partner.gid),
                    directory.names()
                ));
                continue;
            };
            found.push(Connection {
                pid: road_map.pid,
                qpn: qp.qpn,
                moving: Endpoint { gid, qpn: qp.physical_qpn },
                partner,
                other_end: OtherEnd::Host(host.name.clone()),
            });
        }
    }
    let by_end: HashMap<Endpoint, usize> =
        found.iter().enumerate().map(|(index, connection)| (connection.moving, index)).collect();
    for connection in &mut found {
        if let Some(own) = by_end.get(&connection.partner) {
            connection.other_end = OtherEnd::Own(*own);
        }
    }
    (found, blockers)
}

/// The hosts of an instance's partners, and what speaks against moving it.
pub async fn partners_of(agent: &Shared, instance: &str) -> anyhow::Result<(Vec<String>, Vec<String>)> {
    let described = describe(agent, instance).await?;
    let road_maps: Vec<_> = described.iter().map(|(_, road_map)| road_map).collect();
    let (connections, mut blockers) = connections(agent.peers.directory(), &road_maps);
    blockers.extend(road_maps.iter().flat_map(|road_map| road_map.blockers.clone()));
    let mut hosts: Vec<String> = connections
        .into_iter()
        .filter_map(|connection| match connection.other_end {
            OtherEnd::Host(host) => Some(host),
            OtherEnd::Own(_) => None,
        })
        .collect();
    hosts.sort();
    hosts.dedup();
    Ok((hosts, blockers))
}

impl Source {
    fn id(&self) -> SessionId {
        SessionId { session: self.session }
    }

    /// The other side undoes the session when this call ends; it ends with this agent or with `watches`.
    async fn watch(&mut self, host: &str, mut client: super::PeerClient<super::Channel>) -> anyhow::Result<()> {
        let mut alive = told(host, "watch the session", client.watch(self.id()).await)?;
        self.watches.push(tokio::spawn(async move { while let Ok(Some(_)) = alive.message().await {} }));
        Ok(())
    }

    /// Learns what is to be moved and opens the session at the destination.
    pub(super) async fn open(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        if to == self.agent.name() {
            bail!("{} is on {to} already", self.instance.name());
        }
        let mut destination = self.agent.peers.connect(&to).await?;
        self.journal(Event::Opened);
        self.describe().await?;
        let memory_bytes = self.processes.iter().map(|process| memory_bytes(&process.road_map)).sum();
        let request = proto::OpenRequest {
            session: self.session,
            source: self.agent.name().to_owned(),
            instance: serde_json::to_string(self.record())?,
            memory_bytes,
        };
        told(&to, "take the instance", destination.open(request).await)?;
        self.destination = Some(destination.clone());
        self.watch(&to, destination).await
    }

    async fn describe(&mut self) -> anyhow::Result<()> {
        let described = describe(&self.agent, self.instance.name()).await?;
        self.processes = described.into_iter().map(|(guest, road_map)| Process { guest, road_map }).collect();
        let road_maps: Vec<_> = self.processes.iter().map(|process| &process.road_map).collect();
        let (connections, mut blockers) = connections(self.agent.peers.directory(), &road_maps);
        blockers.extend(road_maps.iter().flat_map(|road_map| road_map.blockers.clone()));
        if let Some(blocker) = blockers.first() {
            bail!("{blocker}");
        }
        self.connections = connections;
        Ok(())
    }

    /// Sends the runtime folder ahead, adopted memory included, in rounds until little is left.
    pub(super) async fn pre_copy(&mut self) -> anyhow::Result<()> {
        let mut destination = self.destination();
        let mut last = u64::MAX;
        for round in 1..=MAX_ROUNDS {
            let bytes = self.files.round(&mut destination).await?;
            self.bytes.pre_copy += bytes;
            self.note(&format!("round {round}: {} KiB sent ahead", bytes / 1024));
            // A program that writes faster than we send gains nothing from more rounds.
            if bytes < SMALL_ROUND_BYTES || bytes > last / 2 {
                break;
            }
            last = bytes;
        }
        Ok(())
    }

    /// Makes the new contexts and connections while the old ones still work, and lets runc and CRIU get ready.
    pub(super) async fn pre_setup(&mut self) -> Result<(), Failure> {
        // What was made during the pre-copy is part of it, too.
        self.describe().await?;
        self.find_partners().await?;
        let to = self.request.destination.clone();
        let road_maps: Vec<_> = self.processes.iter().map(|process| process.road_map.clone()).collect();
        let request = proto::PreSetupRequest { session: self.session, road_maps: encode(&road_maps) };
        let mut destination = self.destination();
        let prepared = told(&to, "prepare the connections", destination.pre_setup(request).await)?;
        self.new_qps = prepared.qps;
        self.keys = decode(&prepared.keys)?;
        let standbys = self.prepare_partners().await?;
        self.connect(&standbys).await?;

        let images = self.instance.home.paths.images.clone();
        let checkpoint = CheckpointConfig {
            name: self.record().name.clone(),
            images,
            work: self.instance.home.paths.work.clone(),
        };
        let (dump, restore) = tokio::join!(
            Checkpoint::prepare(&self.agent.tools, checkpoint),
            destination.prepare_restore(self.id())
        );
        // Kept before the other's error is looked at, so that it is cancelled in order.
        self.checkpoint = Some(dump?);
        told(&to, "prepare the restore", restore)?;
        Ok(())
    }

    /// Which hosts the other ends are on.
    async fn find_partners(&mut self) -> anyhow::Result<()> {
        let mut by_host: HashMap<String, Vec<usize>> = HashMap::new();
        for (index, connection) in self.connections.iter().enumerate() {
            if let OtherEnd::Host(host) = &connection.other_end {
                by_host.entry(host.clone()).or_default().push(index);
            }
        }
        for (host, connections) in by_host {
            let client = self.agent.peers.connect(&host).await.context("a partner cannot be reached")?;
            self.watch(&host, client.clone()).await?;
            self.partners.push(PartnerHost { host, client, connections });
        }
        Ok(())
    }

    /// The partners' standby queue pairs, by connection.
    async fn prepare_partners(&self) -> anyhow::Result<HashMap<usize, proto::Standby>> {
        let prepared = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let connections = partner.connections.iter().map(|index| {
                let connection = &self.connections[*index];
                proto::PartnerConnection {
                    connection: *index as u32,
                    moving: Some(connection.moving.into()),
                    partner: Some(connection.partner.into()),
                }
            });
            let request = proto::PartnerPrepareRequest {
                session: self.session,
                source: self.agent.name().to_owned(),
                instance: self.instance.name().to_owned(),
                connections: connections.collect(),
            };
            async move {
                let reply = client.partner_prepare(request).await;
                anyhow::Ok(told(&partner.host, "prepare its connections", reply)?.standbys)
            }
        });
        let standbys = try_join_all(prepared).await?;
        Ok(standbys.into_iter().flatten().map(|standby| (standby.connection as usize, standby)).collect())
    }

    /// Connects the new ends with each other.
    async fn connect(&mut self, standbys: &HashMap<usize, proto::Standby>) -> anyhow::Result<()> {
        let gone = "a connection's new end is missing";
        let destination_gid =
            self.agent.peers.directory().host(&self.request.destination).context("the destination is unknown")?.gid();
        let mut at_destination = Vec::new();
        let mut at_partners: HashMap<usize, proto::PartnerPeer> = HashMap::new();
        for (index, connection) in self.connections.iter().enumerate() {
            let own = self.new_qp(connection.pid, connection.qpn).context(gone)?;
            let (remote, rq_psn) = match &connection.other_end {
                OtherEnd::Own(other) => {
                    let other = &self.connections[*other];
                    let other = self.new_qp(other.pid, other.qpn).context(gone)?;
                    (Endpoint { gid: destination_gid, qpn: other.physical_qpn }, other.sq_psn)
                }
                OtherEnd::Host(_) => {
                    let standby = standbys.get(&index).context(gone)?;
                    let remote = Endpoint { gid: destination_gid, qpn: own.physical_qpn };
                    let peer = proto::PartnerPeer {
                        connection: index as u32,
                        remote: Some(remote.into()),
                        rq_psn: own.sq_psn,
                    };
                    at_partners.insert(index, peer);
                    (Endpoint { gid: connection.partner.gid, qpn: standby.physical_qpn }, standby.sq_psn)
                }
            };
            at_destination.push(proto::DestinationPeer {
                physical_qpn: own.physical_qpn,
                remote: Some(remote.into()),
                rq_psn,
            });
        }
        let request = proto::ConnectRequest { session: self.session, peers: at_destination };
        let to = self.request.destination.clone();
        told(&to, "connect the new queue pairs", self.destination().connect_standby(request).await)?;
        let connected = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let peers = partner.connections.iter().filter_map(|index| at_partners.get(index).cloned()).collect();
            let request = proto::PartnerConnectRequest { session: self.session, peers };
            async move {
                told(&partner.host, "connect its new queue pairs", client.partner_connect(request).await)?;
                anyhow::Ok(())
            }
        });
        try_join_all(connected).await?;
        Ok(())
    }

    fn new_qp(&self, pid: u32, qpn: u32) -> Option<&proto::NewQp> {
        self.new_qps.iter().find(|qp| qp.pid == pid && qp.qpn == qpn)
    }

    /// Intercepts requests on both sides and waits until nothing is in flight (MigrRDMA §3.4).
    pub(super) async fn wait_before_stop(&mut self) -> Result<(), Failure> {
        // What the program wrote since the last round would otherwise have to be sent while it is frozen.
        let bytes = self.files.round(&mut self.destination()).await?;
        self.bytes.pre_copy += bytes;

        self.timeline.suspended();
        self.suspended = true;
        let session = self.session;
        let own = self.processes.iter().map(|process| async move {
            let order = Order::Suspend { session, scope: Scope::All };
            match in_time("suspending", process.guest.order(order, Vec::new())).await?.0 {
                Answer::Suspended { sent, road_map_version } => {
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
        let partner_sent: HashMap<usize, u64> =
            partners.into_iter().flatten().map(|count| (count.connection as usize, count.messages)).collect();
        self.drain(&own_sent, &partner_sent).await?;
        Ok(())
    }

    async fn drain(
        &self,
        own_sent: &HashMap<(u32, u32), u64>,
        partner_sent: &HashMap<usize, u64>,
    ) -> anyhow::Result<()> {
        let session = self.session;
        let timeout_ms = self.request.drain_timeout.as_millis().try_into().unwrap_or(u32::MAX);
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
            expected.entry(connection.pid).or_default().push(QpCount { qpn: connection.qpn, messages });
        }
        let own = self.processes.iter().map(|process| {
            let expected = expected.remove(&process.guest.pid).unwrap_or_default();
            async move {
                let order = Order::Drain { session, expected, timeout_ms };
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
                counts.push(proto::Count { connection: *index as u32, messages });
            }
            requests.push((partner, proto::DrainRequest { session, expected: counts, timeout_ms }));
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
            let closed = async { anyhow::Ok(guests.gone(&process.guest).await) };
            if let Err(error) = in_time("closing a process's channel", closed).await {
                tracing::warn!(pid = process.guest.pid, error = format!("{error:#}"), "CRIU may refuse the process");
            }
            match answer {
                Answer::Quiesced if fds.len() == process.road_map.contexts.len() => Ok((process.guest.pid, fds)),
                Answer::Quiesced => bail!("a process gave {} connections to its RNIC away, not all", fds.len()),
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
        let checkpoint = self.checkpoint.take().context("the checkpoint was not prepared")?;
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
        told(&to, "restore the instance", self.destination().restore(self.id()).await)?;
        Ok(())
    }

    /// The decision.
    pub(super) async fn commit(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        self.agent.journal.write(
            self.session,
            crate::journal::Role::Source,
            Event::Committed,
            self.record().name.as_str(),
            &to,
        )?;
        self.decision = Decision::Open;
        let deadline = tokio::time::Instant::now() + COMMIT_PATIENCE;
        loop {
            match self.destination().commit(self.id()).await {
                Ok(_) => break,
                Err(status) if status.code() == tonic::Code::FailedPrecondition => {
                    // The destination's own word that the tasks have not run.
                    self.decision = Decision::Source;
                    bail!("{to} could not let the instance run: {}", reason(&status));
                }
                Err(status) if tokio::time::Instant::now() > deadline => bail!(
                    "{to} was lost at the commit ({}): the instance stays frozen here until it is known whether it \
                     runs there",
                    reason(&status)
                ),
                // The same question again gets the same answer.
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(200)).await,
            }
        }
        self.decision = Decision::Destination;
        self.timeline.running();
        self.instance.moved(&to);
        Ok(())
    }

    /// Both sides take the new queues; RECVs that nothing has consumed are posted.
    pub(super) async fn claim_and_switch(&mut self) -> anyhow::Result<()> {
        self.forward();
        let tables: HashMap<u32, u32> =
            self.keys.iter().enumerate().map(|(index, (pid, _))| (*pid, index as u32)).collect();
        let keys = encode(&self.keys.iter().map(|(_, keys)| keys).collect::<Vec<_>>());
        let switched = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let tables = partner.connections.iter().filter_map(|index| {
                let table = *tables.get(&self.connections[*index].pid)?;
                Some(proto::PartnerTable { connection: *index as u32, table })
            });
            let request = proto::PartnerSwitchRequest {
                session: self.session,
                keys: keys.clone(),
                tables: tables.collect(),
            };
            async move {
                let reply = client.partner_switch(request).await;
                anyhow::Ok(told(&partner.host, "switch to the new connections", reply)?.count)
            }
        });
        let mut destination = self.destination();
        let claimed = destination.claim(self.id());
        let (switched, claimed) = tokio::join!(join_all(switched), claimed);
        let claimed = told(&self.request.destination, "give the processes their queues", claimed);
        for count in switched.into_iter().chain([claimed.map(|reply| reply.count)]) {
            self.replayed += count?;
        }
        Ok(())
    }

    /// Connections that ask for the instance here are sent on.
    fn forward(&self) {
        let Some(destination) = self.agent.peers.directory().host(&self.request.destination) else { return };
        let gid = destination.gid();
        for process in &self.processes {
            let pid = process.guest.pid;
            let keys = self.keys.iter().find(|(owner, _)| *owner == pid).map(|(_, keys)| keys.clone());
            for qp in process.road_map.contexts.iter().flat_map(|context| &context.qps) {
                if let Some(new) = self.new_qp(pid, qp.qpn) {
                    let endpoint = Endpoint { gid, qpn: new.physical_qpn };
                    let keys = keys.clone().unwrap_or_default();
                    self.agent
                        .forwarding
                        .insert(qp.physical_qpn, crate::forwarding::Forward { endpoint, keys });
                }
            }
        }
    }

    /// Lets the requests of both sides reach their RNICs.
    pub(super) async fn resume(&mut self) -> anyhow::Result<()> {
        let resumed = self.partners.iter().map(|partner| {
            let (mut client, id) = (partner.client.clone(), self.id());
            async move {
                let reply = client.partner_resume(id).await;
                anyhow::Ok(told(&partner.host, "resume its connections", reply)?.count)
            }
        });
        let mut destination = self.destination();
        let own = destination.resume(self.id());
        let (resumed, own) = tokio::join!(join_all(resumed), own);
        let own = told(&self.request.destination, "resume the instance's connections", own);
        self.timeline.resumed();
        for count in resumed.into_iter().chain([own.map(|reply| reply.count)]) {
            let count = count?;
            self.intercepted += count;
            self.replayed += count;
        }
        Ok(())
    }

    /// Removes what is left here: the frozen tasks, the old contexts, the place.
    pub(super) async fn reclaim(&mut self) {
        // Closing the connections destroys the contexts.
        self.quiesced.clear();
        if let Some(dumped) = self.dumped.take()
            && let Err(error) = dumped.commit().await
        {
            tracing::warn!(error = format!("{:#}", anyhow::Error::from(error)), "removing the moved container");
        }
        let instance = std::sync::Arc::clone(&self.instance);
        let _ = tokio::task::spawn_blocking(move || instance.home.remove()).await;
    }
}

/// Bytes of adopted memory in a road map.
pub fn memory_bytes(road_map: &RoadMap) -> u64 {
    let segments = road_map.contexts.iter().flat_map(|context| &context.mrs).flat_map(|mr| &mr.segments);
    segments.filter(|segment| segment.offset.is_some()).map(|segment| segment.length).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_channel::{ContextRecord, QpRecord};
    use verbatim_device::control::{QpAttr, QpCap, QpState, QpType};

    fn directory() -> Directory {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts.json");
        std::fs::write(&path, r#"[{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2"}]"#).unwrap();
        Directory::load(&path, "a").unwrap()
    }

    fn gid(last: u8) -> [u8; 16] {
        std::net::Ipv4Addr::new(10, 0, 0, last).to_ipv6_mapped().octets()
    }

    fn qp(qpn: u32, state: QpState, remote: Option<Endpoint>) -> QpRecord {
        QpRecord {
            qpn,
            pd: 1,
            send_cq: 1,
            recv_cq: 1,
            qp_type: QpType::Rc,
            cap: QpCap::default(),
            attr: QpAttr { state, ..QpAttr::default() },
            // It has moved before: what the program knows and what the RNIC knows differ.
            physical_qpn: qpn + 100,
            remote,
        }
    }

    fn road_map(pid: u32, qps: Vec<QpRecord>) -> RoadMap {
        let context = ContextRecord { id: 1, qps, ..ContextRecord::default() };
        RoadMap { pid, contexts: vec![context], ..RoadMap::default() }
    }

    #[test]
    fn connections_are_found_with_their_other_ends() {
        let to = |last, qpn| Some(Endpoint { gid: gid(last), qpn });
        let first = road_map(
            1,
            vec![
                qp(1, QpState::Rts, to(2, 77)),
                qp(2, QpState::Init, None),
                // To the other process of the same instance, and one whose connection has failed.
                qp(3, QpState::Rtr, to(1, 104)),
                qp(5, QpState::Err, to(2, 78)),
            ],
        );
        let second = road_map(2, vec![qp(4, QpState::Rts, to(1, 103)), qp(6, QpState::Rts, to(1, 999))]);
        let (found, blockers) = connections(&directory(), &[&first, &second]);
        assert!(blockers.is_empty(), "{blockers:?}");
        let ends: Vec<_> = found.iter().map(|c| (c.pid, c.qpn, c.moving.qpn, c.other_end.clone())).collect();
        assert_eq!(
            ends,
            [
                (1, 1, 101, OtherEnd::Host("b".into())),
                (1, 3, 103, OtherEnd::Own(2)),
                (2, 4, 104, OtherEnd::Own(1)),
                // Another program of this host.
                (2, 6, 106, OtherEnd::Host("a".into())),
            ]
        );
    }

    #[test]
    fn a_partner_on_an_unknown_host_is_a_blocker() {
        let remote = Some(Endpoint { gid: gid(9), qpn: 1 });
        let (found, blockers) = connections(&directory(), &[&road_map(1, vec![qp(1, QpState::Rts, remote)])]);
        assert!(found.is_empty());
        assert!(blockers[0].contains("no known host: known are a, b"), "{blockers:?}");
    }
}
