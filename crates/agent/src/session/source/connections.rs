//! The connections of an instance, read from its processes' road maps.

use std::collections::{BTreeMap, HashMap};

use anyhow::bail;
use futures_util::future::try_join_all;
use verbatim_channel::{Endpoint, RoadMap};

use crate::agent::{Agent, Shared};
use crate::directory::Directory;
use crate::guests::Guest;
use crate::identity;
use crate::proto;
use crate::session::{in_time, told};
use crate::standby::{is_connected, is_unconnected, sends};

/// One connection of the instance.
#[derive(Debug, Clone)]
pub struct Connection {
    /// The process.
    pub pid: u32,
    /// The virtual number of the moving end.
    pub qpn: u32,
    /// The moving end as it is now, physical.
    pub moving: Endpoint,
    /// The other end as it is now, physical.
    pub partner: Endpoint,
    /// Where the other end is.
    pub other_end: OtherEnd,
    /// Which of the two ends are connected to the other.
    pub connected: Connected,
    /// The moving end may have sent something.
    pub sends: bool,
}

/// Which ends of a connection are connected to the other. A program sets up one after the other, and may be moved in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Connected {
    /// Both, as far as is known.
    Both,
    /// The moving one only.
    Moving,
    /// The partner's only.
    Partner,
}

/// Where the other end of a connection is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OtherEnd {
    /// On this host, which may be any: the agent there is asked.
    Host(String),
    /// Within the instance: another of its connections.
    Own(usize),
    /// Within the instance: a queue pair that is not connected yet.
    OwnUnconnected {
        /// The process.
        pid: u32,
        /// The virtual number.
        qpn: u32,
    },
}

/// A queue pair that is not connected yet: to it, somebody else may be.
#[derive(Debug, Clone, Copy)]
pub struct Unconnected {
    /// The process.
    pub pid: u32,
    /// The virtual number.
    pub qpn: u32,
    /// Where it is now, physical.
    pub end: Endpoint,
}

/// All that are in road maps.
pub fn unconnected(directory: &Directory, road_maps: &[&RoadMap]) -> Vec<Unconnected> {
    let gid = directory.own().gid();
    let of_map = |road_map: &&RoadMap| {
        let pid = road_map.pid;
        let qps: Vec<_> = road_map
            .contexts
            .iter()
            .flat_map(|context| &context.qps)
            .filter(|qp| is_unconnected(qp))
            .map(|qp| Unconnected {
                pid,
                qpn: qp.qpn,
                end: Endpoint {
                    gid,
                    qpn: qp.physical_qpn,
                },
            })
            .collect();
        qps
    };
    road_maps.iter().flat_map(of_map).collect()
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

/// The same, with nothing in them that is not the processes' own.
pub async fn describe_own(agent: &Agent, instance: &str) -> anyhow::Result<Vec<(Guest, RoadMap)>> {
    let versions = |described: &[(Guest, RoadMap)]| -> Vec<u64> {
        described.iter().map(|(_, road_map)| road_map.version).collect()
    };
    let mut described = describe(agent, instance).await?;
    loop {
        let strange = identity::strange(agent, &described).await?;
        let Some(strange) = strange.into_iter().next() else {
            return Ok(described);
        };
        // The program may have destroyed it since.
        let again = describe(agent, instance).await?;
        if versions(&again) == versions(&described) {
            bail!(strange);
        }
        described = again;
    }
}

/// The connections in road maps, and where their other ends are.
pub fn connections(directory: &Directory, road_maps: &[&RoadMap]) -> (Vec<Connection>, Vec<String>) {
    let gid = directory.own().gid();
    let mut found: Vec<Connection> = Vec::new();
    let mut blockers = Vec::new();
    for road_map in road_maps {
        let qps = road_map
            .contexts
            .iter()
            .flat_map(|context| &context.qps)
            .filter(|qp| is_connected(qp));
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
                moving: Endpoint {
                    gid,
                    qpn: qp.physical_qpn,
                },
                partner,
                other_end: OtherEnd::Host(host.name.clone()),
                connected: Connected::Both,
                sends: sends(qp),
            });
        }
    }
    let by_end: HashMap<Endpoint, usize> = found
        .iter()
        .enumerate()
        .map(|(index, connection)| (connection.moving, index))
        .collect();
    let unconnected = unconnected(directory, road_maps);
    let unconnected: HashMap<Endpoint, &Unconnected> = unconnected.iter().map(|own| (own.end, own)).collect();
    for connection in &mut found {
        if let Some(own) = by_end.get(&connection.partner) {
            connection.other_end = OtherEnd::Own(*own);
        } else if let Some(own) = unconnected.get(&connection.partner) {
            let (pid, qpn) = (own.pid, own.qpn);
            connection.other_end = OtherEnd::OwnUnconnected { pid, qpn };
            connection.connected = Connected::Moving;
        }
    }
    (found, blockers)
}

/// What speaks against moving an instance as far as its connections and their other ends go. Nothing is touched.
pub async fn blockers(agent: &Shared, instance: &str, destination: &str) -> anyhow::Result<Vec<String>> {
    let described = describe_own(agent, instance).await?;
    let road_maps: Vec<_> = described.iter().map(|(_, road_map)| road_map).collect();
    let (connections, mut blockers) = connections(agent.peers.directory(), &road_maps);
    blockers.extend(road_maps.iter().flat_map(|road_map| road_map.blockers.clone()));
    blockers.extend(agent.guests.refused(instance));
    let mut by_host: BTreeMap<String, Vec<proto::PartnerConnection>> = BTreeMap::new();
    for (index, connection) in connections.into_iter().enumerate() {
        if let OtherEnd::Host(host) = connection.other_end {
            let connection = proto::PartnerConnection {
                connection: index as u32,
                moving: Some(connection.moving.into()),
                partner: Some(connection.partner.into()),
                late: false,
            };
            by_host.entry(host).or_default().push(connection);
        }
    }
    for (host, connections) in by_host {
        let request = proto::PartnerPrepareRequest {
            session: 0,
            source: agent.name().to_owned(),
            instance: instance.to_owned(),
            destination: destination.to_owned(),
            connections,
            pauses: false,
        };
        let checked = async {
            let mut client = agent.peers.connect(&host).await?;
            told(&host, "look at its programs", client.check_partner(request).await)
        };
        match checked.await {
            Ok(reply) => blockers.extend(reply.blockers),
            Err(error) => blockers.push(format!("a partner is out of reach: {error:#}")),
        }
    }
    Ok(blockers)
}

/// Bytes of adopted memory in a road map.
pub fn memory_bytes(road_map: &RoadMap) -> u64 {
    let segments = road_map
        .contexts
        .iter()
        .flat_map(|context| &context.mrs)
        .flat_map(|mr| &mr.segments);
    segments
        .filter(|segment| segment.offset.is_some())
        .map(|segment| segment.length)
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_channel::{ContextRecord, QpRecord};
    use verbatim_device::control::{QpAttr, QpCap, QpState, QpType};

    fn directory() -> Directory {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hosts.json");
        std::fs::write(
            &path,
            r#"[{"name": "a", "address": "10.0.0.1"}, {"name": "b", "address": "10.0.0.2"}]"#,
        )
        .unwrap();
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
            srq: None,
            qp_type: QpType::Rc,
            cap: QpCap::default(),
            attr: QpAttr {
                state,
                ..QpAttr::default()
            },
            // It has moved before: what the program knows and what the RNIC knows differ.
            groups: Vec::new(),
            physical_qpn: qpn + 100,
            paused: false,
            remote,
        }
    }

    fn road_map(pid: u32, qps: Vec<QpRecord>) -> RoadMap {
        let context = ContextRecord {
            id: 1,
            qps,
            ..ContextRecord::default()
        };
        RoadMap {
            pid,
            contexts: vec![context],
            ..RoadMap::default()
        }
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
        let second = road_map(
            2,
            vec![qp(4, QpState::Rts, to(1, 103)), qp(6, QpState::Rts, to(1, 999))],
        );
        let (found, blockers) = connections(&directory(), &[&first, &second]);
        assert!(blockers.is_empty(), "{blockers:?}");
        let ends: Vec<_> = found
            .iter()
            .map(|c| (c.pid, c.qpn, c.moving.qpn, c.other_end.clone()))
            .collect();
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
        assert!(
            blockers[0].contains("no known host: known are a, b"),
            "{blockers:?}"
        );
    }
}
