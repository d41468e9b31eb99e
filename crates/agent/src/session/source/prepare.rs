//! What happens while the instance runs undisturbed, beside the pre-copy: session, pre-setup.

use std::collections::HashMap;

use anyhow::{Context, bail};
use futures_util::future::{join_all, try_join_all};
use verbatim_channel::{Answer, Endpoint, KeyPair, Order};
use verbatim_container::{Checkpoint, CheckpointConfig};
use verbatim_device::gids::counterpart;
use verbatim_session::Role;
use verbatim_session::record::{Parties, What};

use super::connections::{Connected, OtherEnd, connections, describe_own, lacking, memory_bytes};
use super::{Failure, Process, Source, made_again, told};
use crate::gids::Gid;
use crate::guests::unexpected;
use crate::instances::storage::{Witnesses, devices, images};
use crate::instances::{machine, network, volumes};
use crate::keeper::Keeper;
use crate::memory::{private, shared};
use crate::mtu;
use crate::proto;
use crate::protocol::{
    IMAGES, MACHINE_SWAP, MACHINE_VOLUMES, MADE_AGAIN, NETWORK, NETWORK_STATE, TERMINALS, VOLUMES_MOVE,
};
use crate::session::open_files;
use crate::session::rnics;
use crate::session::{decode, encode, in_time};

impl Source {
    /// Learns what is to be moved and opens the session at the destination.
    pub(super) async fn open(&mut self) -> anyhow::Result<()> {
        let to = self.request.destination.clone();
        if to == self.agent.name() {
            bail!("{} is on {to} already", self.instance.name());
        }
        self.instance.settled().await;
        if !self.instance.is_whole() {
            self.note("waiting until the instance has the memory that it left at its last place");
            self.instance.whole().await;
        }
        let mut destination = self.agent.peers.connect(&to).await?;
        self.may_leave_behind()?;
        let parties = Parties {
            instance: self.instance.name().to_owned(),
            source: self.agent.name().to_owned(),
            destination: to.clone(),
        };
        self.agent
            .journal
            .write(self.session, Role::Source, What::Opened(parties))
            .context("the journal cannot be written")?;
        let (agent, record) = (self.agent.clone(), self.record().clone());
        tokio::task::spawn_blocking(move || agent.instances.away.leaves(&record)).await??;
        self.takes_all().await?;
        self.can_be_written_down().await?;
        if let Some(blocker) = rnics::blockers(&self.agent, self.record(), &to).first() {
            bail!("{blocker}");
        }
        if let Some(blocker) = volumes::blockers_of(&self.instance).await?.first() {
            bail!("{blocker}");
        }
        if !self.record().volumes.is_empty() && !self.agent.peers.can(&to, VOLUMES_MOVE) {
            bail!("the agent of {to} does not know volumes that move along; upgrade it");
        }
        if self.is_machine()
            && !self.record().volumes.is_empty()
            && !self.agent.peers.can(&to, MACHINE_VOLUMES)
        {
            bail!("the agent of {to} does not know volumes of virtual machines; upgrade it");
        }
        if !self.record().swap.is_empty() && !self.agent.peers.can(&to, MACHINE_SWAP) {
            bail!("the agent of {to} does not know swap disks of virtual machines; upgrade it");
        }
        self.describe().await?;
        let guests: Vec<_> = self
            .processes
            .iter()
            .map(|process| process.guest.clone())
            .collect();
        self.agent.peers.must_know(&to, &guests)?;
        let registered_bytes: u64 = self
            .processes
            .iter()
            .map(|process| memory_bytes(&process.road_map))
            .sum();
        let own_bytes = match &self.record().machine {
            Some(guest) => guest.ram(),
            // CRIU's images lie in memory on both hosts.
            None => private::bytes_of_tree(self.instance.init_pid()),
        };
        let mut private_bytes = 0;
        let mut shared_bytes = 0;
        if self.record().machine.is_some() {
            self.meet_machine().await?;
        } else {
            if self.goes_beside_images(&to).await? {
                private_bytes = own_bytes;
            }
            shared_bytes = shared::bytes_of_tree(self.instance.init_pid());
            let in_images = own_bytes - private_bytes + shared_bytes;
            if let Some(lack) = private::lack_of_room(&self.agent.config.runtime_dir, in_images) {
                bail!("{lack}");
            }
        }
        let memory_bytes = registered_bytes + own_bytes + shared_bytes;
        let (mut record, files) = match &self.machine {
            Some(leaving) => {
                let carried = &leaving.carried;
                (machine::as_carried(self.record(), carried), carried.files.clone())
            }
            None => (self.record().clone(), Vec::new()),
        };
        record.visited.insert(self.agent.name().to_owned());
        if !record.swap.is_empty() {
            let (swaps, disks) = (self.instance.home.paths.swaps.clone(), record.swap);
            record.swap = tokio::task::spawn_blocking(move || swaps.as_they_are(&disks)).await?;
        }
        let witnesses = Witnesses::make(&record, &files);
        if let Some(untried) = witnesses.untried().first() {
            bail!("{untried}");
        }
        let link_mtu = self.look_at_network(&to).await?;
        let can_compare = self.agent.peers.can(&to, IMAGES);
        let mut request = proto::OpenRequest {
            session: self.session,
            source: self.agent.name().to_owned(),
            instance: serde_json::to_string(&record)?,
            memory_bytes,
            protocol: self.agent.peers.spoken(&to),
            witnesses: witnesses.paths(),
            private_bytes,
            devices: devices::of(&record)?,
            post_copy: self.request.post_copy,
            files_bytes: registered_bytes,
            machine: self.machine_needs().await?,
            images: if can_compare {
                images::of(&files, &witnesses)
            } else {
                Vec::new()
            },
            link_mtu,
            path_mtu: match self.record().rnics.is_empty() {
                true => mtu::of_queue_pairs(self.processes.iter().map(|process| &process.road_map)),
                false => 0,
            },
            huge_pages: super::huge_pages(&self.instance).await?,
            open_files: open_files::write(&self.needed_files, self.record()),
        };
        super::look_into_images(&mut destination, &mut request).await?;
        // Before it is asked for anything, so that it undoes whatever it has begun when this agent is gone.
        self.destination = Some(destination.clone());
        self.watch(&to, destination.clone()).await?;
        told(&to, "take the instance", destination.open(request).await)?;
        Ok(())
    }

    /// What its programs have made of its network namespace must move; says the MTU of its link.
    async fn look_at_network(&mut self, to: &str) -> anyhow::Result<u32> {
        if self.is_machine() {
            return Ok(0);
        }
        let reader = self.network.insert(network::reader().await?);
        let found = network::look(&self.instance, reader).await?;
        if let Some(found) = &found {
            reader.knows(found);
            let can = self.agent.peers.can(to, NETWORK_STATE);
            let unknown = network::unknown(&self.instance, found, to, can);
            if let Some(obstacle) = found.obstacles.iter().chain(&unknown).next() {
                bail!("{obstacle}");
            }
        }
        Ok(network::link_mtu(found.as_ref()))
    }

    /// An error if the instance has processes that would be left behind.
    pub(super) async fn takes_all(&self) -> anyhow::Result<()> {
        let init = self.instance.init_pid();
        let added = tokio::task::spawn_blocking(move || verbatim_container::added(init)).await?;
        match added
            .context("the container's processes cannot be looked at")?
            .first()
        {
            Some(added) => bail!("{added}"),
            None => self.knows_who_has_rnics(),
        }
    }

    /// An error if a process has an RNIC of the kernel's open and nobody could make what it has there again.
    fn knows_who_has_rnics(&self) -> anyhow::Result<()> {
        if self.record().rnics.is_empty() {
            return Ok(());
        }
        let strangers = rnics::strangers(&self.agent, self.instance.name(), self.instance.init_pid());
        match strangers
            .context("the container's processes cannot be looked at")?
            .first()
        {
            Some(stranger) => bail!("{stranger}"),
            None => Ok(()),
        }
    }

    pub(super) async fn describe(&mut self) -> anyhow::Result<()> {
        let described = describe_own(&self.agent, self.instance.name()).await?;
        self.processes = described
            .into_iter()
            .map(|(guest, road_map)| Process {
                made_again: guest.made_again(),
                guest,
                road_map,
                cm: None,
            })
            .collect();
        let road_maps: Vec<_> = self.processes.iter().map(|process| &process.road_map).collect();
        let places = self.agent.places(&road_maps).await?;
        let (connections, mut blockers) = connections(&places, &road_maps);
        let to = &self.request.destination;
        let there = self.agent.gids_of(to).await?;
        blockers.extend(lacking(&places, &connections, &road_maps, (to, &there)));
        blockers.extend(road_maps.iter().flat_map(|road_map| road_map.blockers.clone()));
        blockers.extend(self.agent.guests.refused(self.instance.name()));
        let all = self.processes.iter().flat_map(|process| &process.made_again);
        blockers.extend(made_again::blockers(&self.agent, self.record(), all, to));
        let guests = self.processes.iter().map(|process| &process.guest);
        blockers.extend(made_again::handed_over(&self.agent, guests, to));
        if let Some(blocker) = blockers.first() {
            bail!("{blocker}");
        }
        self.connections = connections;
        self.gids = (places.own, there);
        self.describe_cm().await
    }

    /// The destination's GID that takes the place of one of this host's.
    pub(super) fn there(&self, gid: Gid) -> anyhow::Result<Gid> {
        let (here, there) = &self.gids;
        let index = counterpart(here, gid, there);
        let index = index.context("the destination's RNIC has no GID of a connection's kind (any more)")?;
        Ok(there[index])
    }

    /// Makes the new contexts and connections while the old ones still work, and lets runc and CRIU get ready.
    pub(super) async fn pre_setup(&mut self) -> Result<(), Failure> {
        self.take_turn().await?;
        if self.holds {
            self.hold().await?;
            // They were not held while others were waited for: what was changed meanwhile is part of it, too.
            self.take_turn().await?;
        }
        // What was made during the pre-copy is part of it, too, and its memory must be there before it is registered.
        self.round().await?;
        if self.pauses() {
            self.can_pause()?;
            self.choose().await?;
        }
        let to = self.request.destination.clone();
        let road_maps: Vec<_> = self
            .processes
            .iter()
            .map(|process| process.road_map.clone())
            .collect();
        let request = proto::PreSetupRequest {
            session: self.session,
            road_maps: encode(&road_maps),
            keep_numbers: self.pauses(),
            fill: self.ahead.fills(),
            made_again: encode(&self.all_made_again()),
            made_ahead: true,
            limits: self.limits()?,
            cm: self.cm_needs(),
        };
        let mut destination = self.destination();
        let prepared = told(
            &to,
            "prepare the connections",
            destination.pre_setup(request).await,
        )?;
        if !prepared.taken.is_empty() {
            return Err(Failure::CannotPause(prepared.taken));
        }
        let new_qps = prepared.qps.into_iter();
        self.new_qps = new_qps.map(|new| ((new.pid, new.qpn), new)).collect();
        self.keys = decode(&prepared.keys)?;
        let standbys = self.prepare_partners().await?;
        match self.pauses() {
            true => self.agree_to_pause().await?,
            false => self.connect(&standbys).await?,
        }

        if !self.is_machine() {
            self.private_round_again().await?;
        }
        let (config, session) = (self.agent.config.clone(), self.session);
        let keeper = tokio::task::spawn_blocking(move || Keeper::start(&config, session));
        self.keeper = Some(keeper.await.context("starting a keeper panicked")??);
        if self.is_machine() {
            // QEMU waits at the destination already.
            return Ok(());
        }
        let paths = &self.instance.home.paths;
        let checkpoint = CheckpointConfig {
            name: self.record().name.clone(),
            images: paths.images.clone(),
            work: paths.work.clone(),
            parent: self.ahead.parent(),
            lazy: self.ahead.fills(),
            network: self.agent.peers.can(&to, NETWORK).then(|| paths.network.clone()),
            rnics: !self.record().rnics.is_empty(),
            terminals: self.agent.peers.can(&to, TERMINALS),
            stop_limit: None,
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

    /// From now on the program's control verbs wait.
    pub(super) async fn hold(&mut self) -> anyhow::Result<()> {
        // Whatever becomes of it is taken back as a suspension is.
        self.suspended = true;
        let session = self.session;
        let held = self.processes.iter().map(|process| async move {
            let order = process.guest.order(Order::Hold { session }, Vec::new());
            match in_time("holding the control verbs", order).await?.0 {
                Answer::Done => Ok(()),
                other => Err(unexpected(&other, "Done")),
            }
        });
        try_join_all(held).await.map(drop)
    }

    /// Whether the program has changed its objects since they were described.
    pub(super) async fn has_changed(&self) -> bool {
        let versions = self.processes.iter().map(|process| async move {
            let now = in_time("describing a process", process.guest.describe()).await;
            now.is_ok_and(|now| now.version != process.road_map.version)
        });
        join_all(versions).await.contains(&true)
    }

    /// The partners' standby queue pairs, by connection.
    pub(super) async fn prepare_partners(&mut self) -> anyhow::Result<HashMap<u32, proto::Standby>> {
        let prepared = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let request = self.partner_request(partner);
            async move {
                let reply = client.partner_prepare(request).await;
                told(&partner.host, "prepare its connections", reply)
            }
        });
        let prepared = try_join_all(prepared).await?;
        self.marks = self.makes_again().is_some() || prepared.iter().any(|reply| reply.marks);
        for index in prepared.iter().flat_map(|reply| &reply.unconnected) {
            let connection = self.connections.get_mut(*index as usize);
            let connection = connection.context("no such connection")?;
            // One of which neither end is connected any more stays as it is: nothing is done for it.
            if connection.connected == Connected::Both {
                connection.connected = Connected::Moving;
            }
        }
        Ok(prepared
            .into_iter()
            .flat_map(|reply| reply.standbys)
            .map(|standby| (standby.connection, standby))
            .collect())
    }

    /// Connects the new ends with each other.
    async fn connect(&mut self, standbys: &HashMap<u32, proto::Standby>) -> anyhow::Result<()> {
        let gone = "a connection's new end is missing";
        let mut at_destination = Vec::new();
        let mut at_partners: HashMap<u32, proto::PartnerPeer> = HashMap::new();
        let mut made = Vec::new();
        for (index, connection) in (0u32..).zip(&self.connections) {
            if self.is_made_again(connection.pid, connection.qpn) {
                made.extend(self.made_connection(index, connection, standbys.get(&index))?);
                continue;
            }
            let own = self.new_qp(connection.pid, connection.qpn).context(gone)?;
            let gid = self.there(connection.moving.gid)?;
            let there = |gid, qp: &proto::NewQp| Endpoint {
                gid,
                qpn: qp.physical_qpn,
            };
            // New PSNs show stray packets; but who cannot have sent yet may still name its own, as the programs have agreed.
            let (remote, rq_psn) = match &connection.other_end {
                OtherEnd::Own(other) => {
                    let sends = connection.sends && self.connections[*other].sends;
                    let other = &self.connections[*other];
                    let gid = self.there(other.moving.gid)?;
                    let other = self.new_qp(other.pid, other.qpn).context(gone)?;
                    (there(gid, other), sends.then_some(other.sq_psn))
                }
                OtherEnd::OwnUnconnected { pid, qpn } => {
                    let gid = self.there(connection.partner.gid)?;
                    (there(gid, self.new_qp(*pid, *qpn).context(gone)?), None)
                }
                OtherEnd::Host(_) if connection.connected == Connected::Moving => (connection.partner, None),
                OtherEnd::Host(_)
                    if connection.connected == Connected::Partner && !standbys.contains_key(&index) =>
                {
                    continue;
                }
                OtherEnd::Host(_) => {
                    let standby = standbys.get(&index).context(gone)?;
                    let sends = connection.sends && standby.sends;
                    let peer = proto::PartnerPeer {
                        connection: index,
                        remote: Some(there(gid, own).into()),
                        rq_psn: sends.then_some(own.sq_psn),
                    };
                    at_partners.insert(index, peer);
                    if connection.connected == Connected::Partner {
                        continue;
                    }
                    let remote = Endpoint {
                        gid: connection.partner.gid,
                        qpn: standby.physical_qpn,
                    };
                    (remote, sends.then_some(standby.sq_psn))
                }
            };
            at_destination.push(proto::DestinationPeer {
                physical_qpn: own.physical_qpn,
                remote: Some(remote.into()),
                rq_psn,
                paused: false,
                gid: gid.to_vec(),
            });
        }
        self.connect_destination(at_destination, made).await?;
        self.connect_partners(&at_partners, &self.keys).await
    }

    /// What the destination's standby queue pairs are to be connected with.
    pub(super) async fn connect_destination(
        &self,
        peers: Vec<proto::DestinationPeer>,
        made: Vec<proto::MadeConnection>,
    ) -> anyhow::Result<()> {
        let request = proto::ConnectRequest {
            session: self.session,
            peers,
            made,
            partners: self.partners.iter().map(|partner| partner.host.clone()).collect(),
        };
        let to = self.request.destination.clone();
        told(
            &to,
            "connect the new queue pairs",
            self.destination().connect_standby(request).await,
        )?;
        Ok(())
    }

    /// The same for the partners', and the remote keys that they will meet there.
    pub(super) async fn connect_partners(
        &self,
        at_partners: &HashMap<u32, proto::PartnerPeer>,
        keys: &[(u32, Vec<KeyPair>)],
    ) -> anyhow::Result<()> {
        let tables: HashMap<u32, u32> = keys
            .iter()
            .enumerate()
            .map(|(index, (pid, _))| (*pid, index as u32))
            .collect();
        let keys = encode(&keys.iter().map(|(_, keys)| keys).collect::<Vec<_>>());
        let connected = self.partners.iter().map(|partner| {
            let mut client = partner.client.clone();
            let peers = partner
                .connections
                .iter()
                .filter_map(|index| at_partners.get(index).cloned())
                .collect();
            let tables = partner.connections.iter().filter_map(|index| {
                let table = *tables.get(&self.connections[*index as usize].pid)?;
                Some(proto::PartnerTable {
                    connection: *index,
                    table,
                })
            });
            let later = partner.connections.iter().filter(|index| {
                let connection = &self.connections[**index as usize];
                self.is_made_again(connection.pid, connection.qpn)
            });
            let request = proto::PartnerConnectRequest {
                session: self.session,
                peers,
                keys: keys.clone(),
                tables: tables.collect(),
                made_again: later.copied().collect(),
                marks: self.marks,
            };
            let knows = request.made_again.is_empty() || self.agent.peers.can(&partner.host, MADE_AGAIN);
            async move {
                if !knows {
                    bail!(
                        "the instance has contexts that are made again where it moves to, and the agent of {}, where a partner is, does \
                         not know that: upgrade the agent there",
                        partner.host
                    );
                }
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
        self.new_qps.get(&(pid, qpn))
    }
}
