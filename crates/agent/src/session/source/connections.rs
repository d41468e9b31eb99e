//! The connections of an instance, read from its processes' road maps.

use std::collections::HashMap;

use futures_util::future::try_join_all;
use verbatim_channel::{Endpoint, RoadMap};

use crate::agent::{Agent, Shared};
use crate::directory::Directory;
use crate::guests::Guest;
use crate::session::in_time;
use crate::standby::is_connected;

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
}

/// Where the other end of a connection is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OtherEnd {
    /// On this host, which may be any: the agent there is asked.
    Host(String),
    /// Within the instance: another of its connections.
    Own(usize),
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
            });
        }
    }
    let by_end: HashMap<Endpoint, usize> = found
        .iter()
        .enumerate()
        .map(|(index, connection)| (connection.moving, index))
        .collect();
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
