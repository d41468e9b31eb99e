//! What happens while the instance runs undisturbed, beside the pre-copy: session, pre-setup.

use std::collections::HashMap;

use anyhow::{Context, bail};
use futures_util::future::try_join_all;
use verbatim_channel::Endpoint;
use verbatim_container::{Checkpoint, CheckpointConfig};

use super::connections::{OtherEnd, connections, describe, memory_bytes};
use super::{Failure, PartnerHost, Process, Source, told};
use crate::journal::{Event, Role, Told};
use crate::keeper::Keeper;
use crate::memory::private;
use crate::proto;
use crate::session::{decode, encode};

impl Source {
    /// Learns what is to be moved and opens the session at the destination.
    pub(super) async fn open(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        if to == self.agent.name() {
            bail!("{} is on {to} already", self.instance.name());
        }
        self.instance.settled().await;
        let mut destination = self.agent.peers.connect(&to).await?;
        let parties = Told::parties(self.instance.name(), self.agent.name(), &to);
        self.agent
            .journal
            .write(self.session, Role::Source, Event::Opened, parties)
            .context("the journal cannot be written")?;
        self.describe().await?;
        let registered_bytes: u64 = self
            .processes
            .iter()
            .map(|process| memory_bytes(&process.road_map))
            .sum();
        // CRIU's images lie in memory on both hosts.
        let private_bytes = private::bytes_of_tree(self.instance.init_pid());
        if let Some(lack) = private::lack_of_room(&self.agent.config.runtime_dir, private_bytes) {
            bail!("{lack}");
        }
        let memory_bytes = registered_bytes + private_bytes;
        let request = proto::OpenRequest {
            session: self.session,
            source: self.agent.name().to_owned(),
            instance: serde_json::to_string(self.record())?,
            memory_bytes,
        };
        // Before it is asked for anything, so that it undoes whatever it has begun when this agent is gone.
        self.destination = Some(destination.clone());
        self.watch(&to, destination.clone()).await?;
        told(&to, "take the instance", destination.open(request).await)?;
        Ok(())
    }

    async fn describe(&mut self) -> anyhow::Result<()> {
        let described = describe(&self.agent, self.instance.name()).await?;
        self.processes = described
            .into_iter()
            .map(|(guest, road_map)| Process { guest, road_map })
            .collect();
        let road_maps: Vec<_> = self.processes.iter().map(|process| &process.road_map).collect();
        let (connections, mut blockers) = connections(self.agent.peers.directory(), &road_maps);
        blockers.extend(road_maps.iter().flat_map(|road_map| road_map.blockers.clone()));
        blockers.extend(self.agent.guests.refused(self.instance.name()));
        if let Some(blocker) = blockers.first() {
            bail!("{blocker}");
        }
        self.connections = connections;
        Ok(())
    }

    /// Makes the new contexts and connections while the old ones still work, and lets runc and CRIU get ready.
    pub(super) async fn pre_setup(&mut self) -> Result<(), Failure> {
        // What was made during the pre-copy is part of it, too, and its memory must be there before it is registered.
        self.describe().await?;
        self.round().await?;
        self.find_partners().await?;
        let to = self.request.destination.clone();
        let road_maps: Vec<_> = self
            .processes
            .iter()
            .map(|process| process.road_map.clone())
            .collect();
        let request = proto::PreSetupRequest {
            session: self.session,
            road_maps: encode(&road_maps),
        };
        let mut destination = self.destination();
        let prepared = told(
            &to,
            "prepare the connections",
            destination.pre_setup(request).await,
        )?;
        self.new_qps = prepared.qps;
        self.keys = decode(&prepared.keys)?;
        let standbys = self.prepare_partners().await?;
        self.connect(&standbys).await?;

        let (config, session) = (self.agent.config.clone(), self.session);
        let keeper = tokio::task::spawn_blocking(move || Keeper::start(&config, session));
        self.keeper = Some(keeper.await.context("starting a keeper panicked")??);
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
        let partners = Told {
            partners: Some(by_host.keys().cloned().collect()),
            ..Told::default()
        };
        self.agent.journal.note(self.session, Role::Source, partners);
        for (host, connections) in by_host {
            let client = self
                .agent
                .peers
                .connect(&host)
                .await
                .context("a partner cannot be reached")?;
            self.watch(&host, client.clone()).await?;
            self.partners.push(PartnerHost {
                host,
                client,
                connections,
            });
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
                destination: self.request.destination.clone(),
                connections: connections.collect(),
            };
            async move {
                let reply = client.partner_prepare(request).await;
                anyhow::Ok(told(&partner.host, "prepare its connections", reply)?.standbys)
            }
        });
        let standbys = try_join_all(prepared).await?;
        Ok(standbys
            .into_iter()
            .flatten()
            .map(|standby| (standby.connection as usize, standby))
            .collect())
    }

    /// Connects the new ends with each other.
    async fn connect(&mut self, standbys: &HashMap<usize, proto::Standby>) -> anyhow::Result<()> {
        let gone = "a connection's new end is missing";
        let destination_gid = self
            .agent
            .peers
            .directory()
            .host(&self.request.destination)
            .context("the destination is unknown")?
            .gid();
        let mut at_destination = Vec::new();
        let mut at_partners: HashMap<usize, proto::PartnerPeer> = HashMap::new();
        for (index, connection) in self.connections.iter().enumerate() {
            let own = self.new_qp(connection.pid, connection.qpn).context(gone)?;
            let (remote, rq_psn) = match &connection.other_end {
                OtherEnd::Own(other) => {
                    let other = &self.connections[*other];
                    let other = self.new_qp(other.pid, other.qpn).context(gone)?;
                    (
                        Endpoint {
                            gid: destination_gid,
                            qpn: other.physical_qpn,
                        },
                        other.sq_psn,
                    )
                }
                OtherEnd::Host(_) => {
                    let standby = standbys.get(&index).context(gone)?;
                    let remote = Endpoint {
                        gid: destination_gid,
                        qpn: own.physical_qpn,
                    };
                    let peer = proto::PartnerPeer {
                        connection: index as u32,
                        remote: Some(remote.into()),
                        rq_psn: own.sq_psn,
                    };
                    at_partners.insert(index, peer);
                    (
                        Endpoint {
                            gid: connection.partner.gid,
                            qpn: standby.physical_qpn,
                        },
                        standby.sq_psn,
                    )
                }
            };
            at_destination.push(proto::DestinationPeer {
                physical_qpn: own.physical_qpn,
                remote: Some(remote.into()),
                rq_psn,
            });
        }
        let request = proto::ConnectRequest {
            session: self.session,
            peers: at_destination,
            partners: self.partners.iter().map(|partner| partner.host.clone()).collect(),
        };
        let to = self.request.destination.clone();
        told(
            &to,
            "connect the new queue pairs",
            self.destination().connect_standby(request).await,
        )?;
        let tables: HashMap<u32, u32> = self
            .keys
            .iter()
            .enumerate()
            .map(|(index, (pid, _))| (*pid, index as u32))
            .collect();
        let keys = encode(&self.keys.iter().map(|(_, keys)| keys).collect::<Vec<_>>());
        let connected = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let peers = partner
                .connections
                .iter()
                .filter_map(|index| at_partners.get(index).cloned())
                .collect();
            let tables = partner.connections.iter().filter_map(|index| {
                let table = *tables.get(&self.connections[*index].pid)?;
                Some(proto::PartnerTable {
                    connection: *index as u32,
                    table,
                })
            });
            let request = proto::PartnerConnectRequest {
                session: self.session,
                peers,
                keys: keys.clone(),
                tables: tables.collect(),
            };
            async move {
                told(
                    &partner.host,
                    "connect its new queue pairs",
                    client.partner_connect(request).await,
                )?;
                anyhow::Ok(())
            }
        });
        try_join_all(connected).await?;
        Ok(())
    }

    /// What is made for one of the instance's queue pairs.
    pub(super) fn new_qp(&self, pid: u32, qpn: u32) -> Option<&proto::NewQp> {
        self.new_qps.iter().find(|qp| qp.pid == pid && qp.qpn == qpn)
    }
}
