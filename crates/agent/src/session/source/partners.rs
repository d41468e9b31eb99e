//! Which hosts the other ends of the instance's connections are on, also of those that only the other end knows yet.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use anyhow::Context;
use futures_util::future::join_all;
use verbatim_channel::Endpoint;
use verbatim_session::Role;
use verbatim_session::record::Note;

use super::connections::{Connected, Connection, OtherEnd, Unconnected, unconnected};
use super::participants::PartnerHost;
use super::{Source, told};
use crate::held::Hold;
use crate::proto;

/// How long another host may take to look for partners.
const FINDING_TIMEOUT: Duration = Duration::from_secs(2);

impl Source {
    /// Which hosts the other ends are on.
    pub(super) async fn find_partners(&mut self) -> anyhow::Result<()> {
        self.find_early_partners().await;
        let mut by_host: HashMap<String, Vec<u32>> = HashMap::new();
        for (index, connection) in self.connections.iter().enumerate() {
            if let OtherEnd::Host(host) = &connection.other_end {
                by_host.entry(host.clone()).or_default().push(index as u32);
            }
        }
        let partners = Note {
            partners: by_host.keys().cloned().collect(),
            ..Note::default()
        };
        self.agent.journal.note(self.session, Role::Source, partners);
        self.partners.clear();
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

    /// Which connections a partner's host has a part in.
    pub(super) fn partner_request(&self, partner: &PartnerHost) -> proto::PartnerPrepareRequest {
        let connections = partner.connections.iter().map(|index| {
            let connection = &self.connections[*index as usize];
            proto::PartnerConnection {
                connection: *index,
                moving: Some(connection.moving.into()),
                partner: Some(connection.partner.into()),
                late: connection.connected == Connected::Partner,
            }
        });
        proto::PartnerPrepareRequest {
            session: self.session,
            source: self.agent.name().to_owned(),
            instance: self.instance.name().to_owned(),
            destination: self.request.destination.clone(),
            connections: connections.collect(),
            pauses: self.pauses(),
            protocol: self.agent.peers.spoken(&partner.host),
        }
    }

    /// The same for ends that are connected to queue pairs of the instance which are not connected yet. From now on nobody
    /// is told where those are.
    async fn find_early_partners(&mut self) {
        let unconnected = self.unconnected();
        let qpns = unconnected.iter().map(|own| own.end.qpn).collect();
        // One after the other: the end of the one before would let go of the same numbers.
        self.hold = None;
        self.hold = Some(Hold::new(&self.agent, self.instance.name(), qpns));
        let found = self.early_partners(&unconnected).await;
        self.connections.extend(found);
    }

    fn unconnected(&self) -> Vec<Unconnected> {
        let road_maps: Vec<_> = self.processes.iter().map(|process| &process.road_map).collect();
        unconnected(&self.gids.0, &road_maps)
    }

    /// Whether somebody had been told before that, and has connected meanwhile.
    pub(super) async fn has_new_partners(&self) -> bool {
        !self.early_partners(&self.unconnected()).await.is_empty()
    }

    /// Who is connected to these, and is not known yet? That may be anybody. A host that is out of reach has no connections
    /// that work.
    async fn early_partners(&self, unconnected: &[Unconnected]) -> Vec<Connection> {
        let (agent, mut early) = (&self.agent, Vec::new());
        if unconnected.is_empty() {
            return early;
        }
        // They may be known by any of this host's GIDs.
        let (own_gids, _) = &self.gids;
        let ends = unconnected.iter().flat_map(|own| {
            let qpn = own.end.qpn;
            own_gids.iter().map(move |gid| Endpoint { gid: *gid, qpn }.into())
        });
        let ends: Vec<proto::Endpoint> = ends.collect();
        let hosts = agent.peers.directory().all();
        let asked = hosts.iter().map(|host| {
            let ends = ends.clone();
            async move {
                let found = async {
                    let mut client = agent.peers.connect(&host.name).await?;
                    let request = proto::FindPartnersRequest { ends };
                    let reply = client.find_partners(request).await;
                    told(&host.name, "look for partners", reply)
                };
                match tokio::time::timeout(FINDING_TIMEOUT, found).await {
                    Ok(Ok(reply)) => reply.found,
                    failed => {
                        let host = &host.name;
                        tracing::warn!(host, ?failed, "not asked which programs are connected already");
                        Vec::new()
                    }
                }
            }
        });
        // The instance's own are among its connections.
        let known = self.connections.iter();
        let known: HashSet<Endpoint> = known.flat_map(|known| [known.moving, known.partner]).collect();
        let by_qpn: HashMap<u32, &Unconnected> = unconnected.iter().map(|own| (own.end.qpn, own)).collect();
        for (host, found) in hosts.iter().zip(join_all(asked).await) {
            for end in found {
                let ends = (
                    end.moving.map(Endpoint::try_from),
                    end.partner.map(Endpoint::try_from),
                );
                let (Some(Ok(moving)), Some(Ok(partner))) = ends else {
                    continue;
                };
                let is_own = own_gids.contains(&moving.gid) && !known.contains(&partner);
                if let Some(own) = by_qpn.get(&moving.qpn).filter(|_| is_own) {
                    early.push(Connection {
                        pid: own.pid,
                        qpn: own.qpn,
                        moving,
                        partner,
                        other_end: OtherEnd::Host(host.name.clone()),
                        connected: Connected::Partner,
                        sends: false,
                    });
                }
            }
        }
        early
    }
}
