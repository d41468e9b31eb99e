//! The processes at the other ends of an instance's connections.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::Ipv6Addr;

use anyhow::{Context, bail};
use futures_util::StreamExt;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use verbatim_channel::Endpoint;
use verbatim_device::control::QpOwner;

use crate::agent::Shared;
use crate::guests::Guest;
use crate::identity;
use crate::proto::{PartnerConnection, PartnerPrepareRequest, Standby};
use crate::session::in_time;
use crate::session::members::{KeptMember, Member};
use crate::standby::{is_connected, is_unconnected, sends};

/// The connections that a request names, by the physical number of the partner's end: the moving ends that are connected to it,
/// or it to them, with the connections' numbers.
type Wanted = HashMap<u32, Vec<(Endpoint, u32)>>;

async fn wanted(agent: &Shared, request: &PartnerPrepareRequest) -> anyhow::Result<Wanted> {
    let own_gids = agent.own_gids().await?;
    let mut wanted = Wanted::new();
    for connection in &request.connections {
        let moving = connection.moving.clone();
        let moving = moving
            .context("a connection without its moving end")?
            .try_into()?;
        let partner = connection.partner.clone();
        let partner: Endpoint = partner
            .context("a connection without its partner's end")?
            .try_into()?;
        if !own_gids.contains(&partner.gid) {
            bail!(
                "a connection's end, of the GID {}, is not on {}",
                Ipv6Addr::from(partner.gid),
                agent.name()
            );
        }
        let ends = wanted.entry(partner.qpn).or_default();
        ends.push((moving, connection.connection));
    }
    Ok(wanted)
}

/// Whose the partner's ends are, by the RNIC's word, and the guest libraries of those processes.
struct Owners {
    by_qpn: HashMap<u32, QpOwner>,
    guests: BTreeMap<i32, Vec<Guest>>,
}

async fn owners_of(
    agent: &Shared,
    request: &PartnerPrepareRequest,
    wanted: &Wanted,
) -> anyhow::Result<Owners> {
    let qpns = wanted.keys().copied().collect();
    let by_qpn = identity::owners(agent, qpns).await?;
    let mut guests = BTreeMap::new();
    for (qpn, owner) in &by_qpn {
        let pid = match owner {
            QpOwner::Process(pid) => Some(*pid),
            QpOwner::Unknown => None,
            // The other end is gone, and the program will find out.
            QpOwner::None => continue,
        };
        let of_process = pid.map(|pid| guests.entry(pid).or_insert_with(|| agent.guests.of_process(pid)));
        if of_process.is_none_or(|guests| guests.is_empty()) {
            let whose = identity::objection(*owner, None).unwrap_or_default();
            bail!(stranger(agent, request, wanted.len(), *qpn, &whose));
        }
    }
    Ok(Owners { by_qpn, guests })
}

fn stranger(agent: &Shared, request: &PartnerPrepareRequest, count: usize, qpn: u32, whose: &str) -> String {
    format!(
        "{count} connection(s) of {} lead to programs on {} that do not use the guest library (queue pair {qpn:#x}, for \
         one, which {whose}); run them with LD_PRELOAD=libverbatim.so",
        request.instance,
        agent.name(),
    )
}

/// The instances of this host that the connections lead to.
pub async fn instances_of(
    agent: &Shared,
    request: &PartnerPrepareRequest,
) -> anyhow::Result<BTreeSet<String>> {
    let wanted = wanted(agent, request).await?;
    let owners = owners_of(agent, request, &wanted).await?;
    Ok(owners
        .guests
        .into_values()
        .flatten()
        .filter_map(|guest| guest.instance)
        .collect())
}

/// The partners' ends of connections.
pub struct Found {
    pub members: Vec<Member>,
    /// Connections whose end may have sent something.
    pub senders: HashSet<u32>,
    /// Connections whose end is not connected, or gone.
    pub unconnected: Vec<u32>,
}

/// Which process has which of the connections. Only those are asked that the RNIC knows as the owners.
pub async fn find_members(agent: &Shared, request: PartnerPrepareRequest) -> anyhow::Result<Found> {
    let mut wanted = wanted(agent, &request).await?;
    let Owners { by_qpn, guests } = owners_of(agent, &request, &wanted).await?;
    let described = guests.into_iter().flat_map(|(pid, guests)| {
        guests
            .into_iter()
            .map(move |guest| async move { (pid, in_time("describing", guest.describe_held()).await, guest) })
    });
    // Each is done with before it is known how many more there are.
    let mut described: FuturesUnordered<_> = described.collect();
    let mut members = BTreeMap::new();
    let mut found = Found {
        members: Vec::new(),
        senders: HashSet::new(),
        unconnected: Vec::new(),
    };
    while let Some((pid, described, guest)) = described.next().await {
        // A process that ends while we ask has no connections, and its number may be another's by now.
        let Ok((road_map, _held)) = described else {
            continue;
        };
        if guest.host_pid() != Some(pid) {
            continue;
        }
        let (mut connections, mut unconnected) = (Vec::new(), Vec::new());
        for qp in road_map.contexts.iter().flat_map(|context| &context.qps) {
            let own = qp.physical_qpn;
            // Those of other processes that it may tell are not its own.
            if by_qpn.get(&own) != Some(&QpOwner::Process(pid)) {
                continue;
            }
            let mut not_connected = None;
            for (moving, connection) in wanted.remove(&own).into_iter().flatten() {
                if qp.remote == Some(moving) {
                    connections.push((connection, qp.qpn));
                    found.senders.extend(sends(qp).then_some(connection));
                } else {
                    // Not yet, or not any more, or to somebody else: nothing will come from there meanwhile.
                    found.unconnected.push(connection);
                    not_connected = is_unconnected(qp).then_some((connection, qp.qpn));
                }
            }
            unconnected.extend(not_connected);
        }
        if !connections.is_empty() || !unconnected.is_empty() {
            let kept = KeptMember {
                instance: guest.instance.clone(),
                pid: guest.pid,
                connections,
                unconnected,
            };
            let place = (pid, guest.id());
            let member = Member {
                guest: Some(guest),
                kept,
                moves: None,
            };
            members.insert(place, member);
        }
    }
    found.members.extend(members.into_values());
    // Whoever does not tell of them may have destroyed them meanwhile.
    let left = wanted.keys().copied().collect();
    let owners = identity::owners(agent, left).await?;
    let untold = |(_, owner): &(&u32, &QpOwner)| **owner != QpOwner::None;
    if let Some((qpn, _)) = owners.iter().find(untold) {
        let whose = "its process does not tell of";
        bail!(stranger(agent, &request, wanted.len(), *qpn, whose));
    }
    let gone = wanted.into_values().flatten();
    found.unconnected.extend(gone.map(|(_, connection)| connection));
    Ok(found)
}

/// Connections of this host's programs that lead to one of `ends`. Only programs are asked that have one by the RNIC's word.
pub async fn connected_to(agent: &Shared, ends: &[Endpoint]) -> anyhow::Result<Vec<PartnerConnection>> {
    if agent.guests.all().is_empty() {
        return Ok(Vec::new());
    }
    let processes = identity::connected_to(agent, ends).await?;
    let ends: HashSet<&Endpoint> = ends.iter().collect();
    let guests = processes.into_iter().flat_map(|pid| agent.guests.of_process(pid));
    let mut described: FuturesUnordered<_> = guests
        .map(|guest| async move {
            (
                guest.host_pid(),
                in_time("describing", guest.describe_held()).await,
            )
        })
        .collect();
    let mut found = Vec::new();
    while let Some((pid, described)) = described.next().await {
        // A process that ends while we ask has no connections.
        let (Some(pid), Ok((road_map, _held))) = (pid, described) else {
            continue;
        };
        let qps = road_map.contexts.iter().flat_map(|context| &context.qps);
        let connected = qps.filter(|qp| is_connected(qp));
        let leading = connected.filter_map(|qp| {
            let gid = qp.local_gid.unwrap_or_else(|| agent.gid());
            let qpn = qp.physical_qpn;
            Some((Endpoint { gid, qpn }, qp.remote?))
        });
        let wanted = leading.filter(|(_, remote)| ends.contains(remote));
        found.extend(wanted.map(|(own, remote)| (pid, own, remote)));
    }
    let owners = identity::owners(agent, found.iter().map(|(_, own, _)| own.qpn).collect()).await?;
    // Those of other processes that one may tell are not its own.
    found.retain(|(pid, own, _)| owners.get(&own.qpn) == Some(&QpOwner::Process(*pid)));
    let connections = found.into_iter().map(|(_, own, remote)| PartnerConnection {
        connection: 0,
        moving: Some(remote.into()),
        partner: Some(own.into()),
        late: false,
    });
    Ok(connections.collect())
}

/// A member, in words, one of whose queue pairs is not there any more, if one has destroyed some.
pub async fn has_destroyed(members: &[Member]) -> Option<String> {
    let looked = members.iter().map(|member| async move {
        let guest = member.guest.as_ref()?;
        let road_map = in_time("describing", guest.describe()).await.ok()?;
        let qps = road_map.contexts.iter().flat_map(|context| &context.qps);
        let there: HashSet<u32> = qps.map(|qp| qp.qpn).collect();
        let is_gone = member.qpns().iter().any(|qpn| !there.contains(qpn));
        is_gone.then(|| format!("process {}", member.kept.pid))
    });
    join_all(looked).await.into_iter().flatten().next()
}

/// The queue pairs that members have made for a session are their own: the other ends will be connected to them.
pub async fn must_own(agent: &Shared, members: &[Member], standbys: &[Standby]) -> anyhow::Result<()> {
    let qpns = standbys.iter().map(|standby| standby.physical_qpn).collect();
    let owners = identity::owners(agent, qpns).await?;
    let of_connection: HashMap<u32, &Member> = members
        .iter()
        .flat_map(|member| {
            member
                .kept
                .connections
                .iter()
                .map(move |(connection, _)| (*connection, member))
        })
        .collect();
    for standby in standbys {
        let member = of_connection.get(&standby.connection);
        let member = member.context("a standby queue pair of no connection")?;
        let pid = member.guest.as_ref().and_then(Guest::host_pid);
        let owner = owners
            .get(&standby.physical_qpn)
            .copied()
            .unwrap_or(QpOwner::None);
        if let Some(whose) = identity::objection(owner, pid) {
            bail!(
                "process {} offers queue pair {:#x} for a connection, which {whose}",
                member.kept.pid,
                standby.physical_qpn
            );
        }
    }
    Ok(())
}
