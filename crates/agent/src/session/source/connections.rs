//! The connections of an instance, read from its processes' road maps.

use std::collections::{BTreeMap, HashMap};
use std::net::Ipv6Addr;

use anyhow::bail;
use futures_util::future::try_join_all;
use verbatim_channel::{Endpoint, RoadMap};
use verbatim_device::gids::{GidKind, counterpart};

use super::made_again;
use crate::agent::{Agent, Shared};
use crate::gids::{Gid, Places};
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

/// All that are in road maps, of the host whose RNIC has these GIDs: under its first.
pub fn unconnected(own: &[Gid], road_maps: &[&RoadMap]) -> Vec<Unconnected> {
    let gid = own.first().copied().unwrap_or_default();
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
        let (road_map, held) = in_time("describing a process", guest.describe_held()).await?;
        anyhow::Ok(((guest, road_map), held))
    });
    // They count together until all are here.
    let (described, _held): (Vec<_>, Vec<_>) = try_join_all(described).await?.into_iter().unzip();
    Ok(described)
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
pub fn connections(places: &Places, road_maps: &[&RoadMap]) -> (Vec<Connection>, Vec<String>) {
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
            let host = match places.host(&partner.gid) {
                Ok(host) => host,
                Err(why) => {
                    blockers.push(format!("where queue pair {:#x} leads is unknown: {why}", qp.qpn));
                    continue;
                }
            };
            // A program's own word, of which nothing is believed that the RNIC does not say.
            let local = qp.local_gid.filter(|gid| places.own.contains(gid));
            let gid = local.unwrap_or(places.own[0]);
            found.push(Connection {
                pid: road_map.pid,
                qpn: qp.qpn,
                moving: Endpoint {
                    gid,
                    qpn: qp.physical_qpn,
                },
                partner,
                other_end: OtherEnd::Host(host.to_owned()),
                connected: Connected::Both,
                sends: sends(qp),
            });
        }
    }
    let by_qpn: HashMap<u32, usize> = found
        .iter()
        .enumerate()
        .map(|(index, connection)| (connection.moving.qpn, index))
        .collect();
    let unconnected = unconnected(&places.own, road_maps);
    let unconnected: HashMap<u32, &Unconnected> = unconnected.iter().map(|own| (own.end.qpn, own)).collect();
    for connection in &mut found {
        let partner = connection.partner;
        if !places.own.contains(&partner.gid) {
            continue;
        }
        if let Some(own) = by_qpn.get(&partner.qpn) {
            connection.other_end = OtherEnd::Own(*own);
        } else if let Some(own) = unconnected.get(&partner.qpn) {
            let (pid, qpn) = (own.pid, own.qpn);
            connection.other_end = OtherEnd::OwnUnconnected { pid, qpn };
            connection.connected = Connected::Moving;
        }
    }
    (found, blockers)
}

/// What the RNIC of `to`, with these GIDs, lacks for the instance's connections and address handles.
pub fn lacking(
    places: &Places,
    connections: &[Connection],
    road_maps: &[&RoadMap],
    (to, there): (&str, &[Gid]),
) -> Vec<String> {
    let mut lacking = BTreeMap::new();
    for connection in connections {
        let gid = connection.moving.gid;
        if counterpart(&places.own, gid, there).is_none() {
            let what = || format!("queue pair {:#x} is connected", connection.qpn);
            lacking.entry(gid).or_insert_with(what);
        }
    }
    for context in road_maps.iter().flat_map(|road_map| &road_map.contexts) {
        for gid in &context.handle_gids {
            if counterpart(&context.gids, *gid, there).is_none() {
                lacking
                    .entry(*gid)
                    .or_insert_with(|| "an address handle sends".to_owned());
            }
        }
    }
    let text = |(gid, what): (Gid, String)| {
        let kind = GidKind::of(gid).map_or_else(|| "no".to_owned(), |kind| format!("a {kind}"));
        format!(
            "{what} by the GID {}, which is {kind} address, and the RNIC of {to} has none of that kind: give its interface one \
             and start the RNIC there again, or move to a host that has one",
            Ipv6Addr::from(gid)
        )
    };
    lacking.into_iter().map(text).collect()
}

/// What speaks against moving an instance as far as its connections and their other ends go. Nothing is touched.
pub async fn blockers(agent: &Shared, instance: &str, destination: &str) -> anyhow::Result<Vec<String>> {
    let described = describe_own(agent, instance).await?;
    let road_maps: Vec<_> = described.iter().map(|(_, road_map)| road_map).collect();
    let places = agent.places(&road_maps).await?;
    let (connections, mut blockers) = connections(&places, &road_maps);
    // A host that is out of reach is told of elsewhere.
    if let Ok(there) = agent.gids_of(destination).await {
        blockers.extend(lacking(&places, &connections, &road_maps, (destination, &there)));
    }
    blockers.extend(road_maps.iter().flat_map(|road_map| road_map.blockers.clone()));
    blockers.extend(agent.guests.refused(instance));
    if let Some(found) = agent.instances.get(instance) {
        // Connected with before it is asked what it can do; one that is out of reach is told of elsewhere.
        let reached = agent.peers.connect(destination).await.is_ok();
        let all: Vec<_> = described
            .iter()
            .flat_map(|(guest, _)| guest.made_again())
            .collect();
        if reached {
            blockers.extend(made_again::blockers(agent, &found.home.record, &all, destination));
            let guests = described.iter().map(|(guest, _)| guest);
            blockers.extend(made_again::handed_over(agent, guests, destination));
        }
    }
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
            protocol: agent.peers.spoken(&host),
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
    use crate::gids;
    use verbatim_channel::{ContextRecord, QpRecord};
    use verbatim_device::control::{QpAttr, QpCap, QpState, QpType};

    /// This host is a, at 10.0.0.1 and fd00::1.
    fn places() -> Places {
        let v6 = |last| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, last).octets();
        let hosts = [(gid(1), "a"), (v6(1), "a"), (gid(2), "b"), (v6(2), "b")];
        gids::tests::places(vec![gid(1), v6(1)], &hosts)
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
            local_gid: None,
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
        let (found, blockers) = connections(&places(), &[&first, &second]);
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
        let (found, blockers) = connections(&places(), &[&road_map(1, vec![qp(1, QpState::Rts, remote)])]);
        assert!(found.is_empty());
        assert!(
            blockers[0].starts_with("where queue pair 0x1 leads is unknown"),
            "{blockers:?}"
        );
    }

    #[test]
    fn a_connection_is_known_by_the_gid_that_it_uses() {
        let places = places();
        let v6 = places.own[1];
        let by = |qpn, local_gid, to| QpRecord {
            local_gid,
            ..qp(qpn, QpState::Rts, Some(to))
        };
        let end = |gid, qpn| Endpoint { gid, qpn };
        let map = road_map(
            1,
            vec![
                by(1, Some(v6), end(v6, 102)),
                by(2, Some(v6), end(v6, 101)),
                by(3, Some(v6), end(v6, 104)),
                qp(4, QpState::Init, None),
                // Not a GID of this host's RNIC, whatever the program says.
                by(5, Some(gid(2)), end(gid(2), 7)),
            ],
        );
        let (found, blockers) = connections(&places, &[&map]);
        assert!(blockers.is_empty(), "{blockers:?}");
        let found: Vec<_> = found.iter().map(|c| (c.moving, c.other_end.clone())).collect();
        let unconnected = OtherEnd::OwnUnconnected { pid: 1, qpn: 4 };
        assert_eq!(
            found,
            [
                (end(v6, 101), OtherEnd::Own(1)),
                (end(v6, 102), OtherEnd::Own(0)),
                (end(v6, 103), unconnected),
                (end(gid(1), 105), OtherEnd::Host("b".into())),
            ]
        );
    }

    #[test]
    fn what_the_destination_lacks_is_said_once_for_each_gid() {
        let places = places();
        let v6 = places.own[1];
        let connected = |qpn| QpRecord {
            local_gid: Some(v6),
            ..qp(qpn, QpState::Rts, Some(Endpoint { gid: v6, qpn: 7 }))
        };
        let mut map = road_map(1, vec![connected(1), connected(2)]);
        let lacks = |map: &RoadMap, there: &[Gid]| {
            let (connections, _) = connections(&places, &[map]);
            lacking(&places, &connections, &[map], ("c", there))
        };
        let other_v6 = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 3).octets();
        assert!(lacks(&map, &[gid(3), other_v6]).is_empty());
        let found = lacks(&map, &[gid(3)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with(
                "queue pair 0x1 is connected by the GID fd00::1, which is a global IPv6 address, and the RNIC of c has none"
            ),
            "{found:?}"
        );
        map = road_map(1, Vec::new());
        (map.contexts[0].gids, map.contexts[0].handle_gids) = (places.own.clone(), vec![v6]);
        assert!(lacks(&map, &[gid(3), other_v6]).is_empty());
        let found = lacks(&map, &[gid(3)]);
        assert!(
            found[0].starts_with("an address handle sends by the GID fd00::1"),
            "{found:?}"
        );
    }
}
