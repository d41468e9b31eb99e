//! Who is at the other end of a guest library's channel, and whose a queue pair is.
//!
//! A road map is a program's own word. Before anything is done to a queue pair that one names, the RNIC is asked which
//! process has it, and that must be the one whose channel the road map came over. Both are the kernel's word
//! (`SCM_CREDENTIALS` there, `SO_PEERCRED` here), held by descriptors of the processes, so that a number that one process
//! had before another does not count. Of RNICs of the kernel's, the kernel says it ([`crate::kernel_rnics`]). RNIC and agent must be in one PID namespace.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

use anyhow::{Context, bail};
use verbatim_channel::{Endpoint, RoadMap};
use verbatim_device::control::{MAX_OWNERS, QpOwner, QpState, QpStatistics, Reply, Request};

use crate::agent::Agent;
use crate::guests::Guest;
use crate::kernel_rnics;
use crate::standby;

/// Whose the queue pairs with these physical numbers are.
pub async fn owners(agent: &Agent, qpns: Vec<u32>) -> anyhow::Result<HashMap<u32, QpOwner>> {
    if qpns.is_empty() {
        return Ok(HashMap::new());
    }
    let nic = agent.config.nic_socket();
    let asked = tokio::task::spawn_blocking(move || ask(&nic, &qpns));
    asked.await.context("asking the RNIC panicked")?
}

fn ask(nic: &Path, qpns: &[u32]) -> anyhow::Result<HashMap<u32, QpOwner>> {
    let has_kernel_s = !kernel_rnics::all().is_empty();
    let mut known = match ask_software(nic, qpns) {
        Ok(known) => known,
        // Hosts with RNICs of the kernel's need no other.
        Err(_) if has_kernel_s => qpns.iter().map(|qpn| (*qpn, QpOwner::None)).collect(),
        Err(error) => return Err(error),
    };
    if has_kernel_s && known.values().any(|owner| *owner == QpOwner::None) {
        let kernel_s = kernel_rnics::owners()?;
        for (qpn, owner) in &mut known {
            if let (QpOwner::None, Some(pid)) = (*owner, kernel_s.get(qpn)) {
                *owner = pid.map_or(QpOwner::Unknown, QpOwner::Process);
            }
        }
    }
    Ok(known)
}

fn ask_software(nic: &Path, qpns: &[u32]) -> anyhow::Result<HashMap<u32, QpOwner>> {
    let socket = standby::connect(nic)?;
    let mut known = HashMap::with_capacity(qpns.len());
    for qpns in qpns.chunks(MAX_OWNERS) {
        let request = Request::QueryOwners { qpns: qpns.to_vec() };
        match socket.call::<_, Reply>(&request, &[])?.message {
            Reply::Owners(owners) if owners.len() == qpns.len() => {
                known.extend(qpns.iter().copied().zip(owners));
            }
            other => bail!("the RNIC does not say whose queue pairs are: {other:?}"),
        }
    }
    Ok(known)
}

/// Physical numbers of this host's queue pairs that lead to one of `ends`, by the RNICs' word. `about_to`: also those that are about to
/// be connected, to whatever.
async fn leading_to(agent: &Agent, ends: Vec<Endpoint>, about_to: bool) -> anyhow::Result<Vec<u32>> {
    let nic = agent.config.nic_socket();
    let asked = tokio::task::spawn_blocking(move || ask_leading(&nic, &ends, about_to));
    asked.await.context("asking the RNIC panicked")?
}

fn ask_leading(nic: &Path, ends: &[Endpoint], about_to: bool) -> anyhow::Result<Vec<u32>> {
    let has_kernel_s = !kernel_rnics::all().is_empty();
    let mut leading = match ask_software_leading(nic, ends, about_to) {
        Ok(leading) => leading,
        // As above.
        Err(_) if has_kernel_s => Vec::new(),
        Err(error) => return Err(error),
    };
    if has_kernel_s {
        let qpns = ends.iter().map(|end| end.qpn).collect();
        leading.extend(kernel_rnics::leading_to(&qpns, about_to)?);
    }
    Ok(leading)
}

fn ask_software_leading(nic: &Path, ends: &[Endpoint], about_to: bool) -> anyhow::Result<Vec<u32>> {
    let socket = standby::connect(nic)?;
    let ends: HashSet<_> = ends.iter().map(|end| (end.gid, end.qpn)).collect();
    let (mut leading, mut from_qpn) = (Vec::new(), Some(0));
    while let Some(first) = from_qpn {
        let request = Request::QueryStatistics { from_qpn: first };
        let Reply::Statistics { qps, next, .. } = socket.call::<_, Reply>(&request, &[])?.message else {
            bail!("the RNIC does not say where queue pairs lead to");
        };
        let leads = |qp: &QpStatistics| {
            qp.remote.is_some_and(|end| ends.contains(&end)) || about_to && qp.state == QpState::Init
        };
        leading.extend(qps.iter().filter(|qp| leads(qp)).map(|qp| qp.qpn));
        from_qpn = next.filter(|next| *next > first);
    }
    Ok(leading)
}

/// The processes that have a connection to one of `ends`, by the RNICs' word.
pub async fn connected_to(agent: &Agent, ends: &[Endpoint]) -> anyhow::Result<BTreeSet<i32>> {
    let leading = leading_to(agent, ends.to_vec(), false).await?;
    let owners = owners(agent, leading).await?;
    let process = |owner| match owner {
        QpOwner::Process(pid) => Some(pid),
        QpOwner::Unknown | QpOwner::None => None,
    };
    Ok(owners.into_values().filter_map(process).collect())
}

/// Whether a process has a connection to `end`, or a queue pair that is about to be connected, by the RNICs' word: a guest library asks
/// where an endpoint is before it connects a queue pair to it.
pub async fn may_connect_to(agent: &Agent, pid: i32, end: Endpoint) -> anyhow::Result<bool> {
    let leading = leading_to(agent, vec![end], true).await?;
    let owners = owners(agent, leading).await?;
    Ok(owners.into_values().any(|owner| owner == QpOwner::Process(pid)))
}

/// The queue pairs that processes call their own and that are not, in words for an operator.
pub async fn strange(agent: &Agent, described: &[(Guest, RoadMap)]) -> anyhow::Result<Vec<String>> {
    let told = described.iter().flat_map(|(_, road_map)| qpns(road_map));
    let owners = owners(agent, told.collect()).await?;
    let mut strange = Vec::new();
    for (guest, road_map) in described {
        let pid = guest.host_pid();
        for qpn in qpns(road_map) {
            let owner = owners.get(&qpn).copied().unwrap_or(QpOwner::None);
            if let Some(whose) = objection(owner, pid) {
                strange.push(format!(
                    "{} (process {}) describes queue pair {qpn:#x} as its own, which {whose}",
                    guest.program, guest.pid
                ));
            }
        }
    }
    Ok(strange)
}

fn qpns(road_map: &RoadMap) -> impl Iterator<Item = u32> {
    let qps = road_map.contexts.iter().flat_map(|context| &context.qps);
    qps.map(|qp| qp.physical_qpn)
}

/// Why a queue pair is not that of the process `pid`, if it is not.
pub fn objection(owner: QpOwner, pid: Option<i32>) -> Option<String> {
    match owner {
        QpOwner::Process(owner) if Some(owner) == pid => None,
        QpOwner::Process(owner) => Some(format!("is that of process {owner} of this host")),
        QpOwner::Unknown => Some(
            "is that of a process that has ended or that the RNIC cannot see (it must be in the agent's PID namespace)"
                .to_owned(),
        ),
        QpOwner::None => Some("no RNIC of this host has".to_owned()),
    }
}

/// Whether the process `host_pid` has the number `pid` in its own PID namespace.
pub fn is_called(host_pid: i32, pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{host_pid}/status")).unwrap_or_default();
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let own = numbers.and_then(|numbers| numbers.split_whitespace().next_back());
    own.is_some_and(|own| own.parse() == Ok(pid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_its_process_s_or_there_is_an_objection() {
        assert_eq!(objection(QpOwner::Process(7), Some(7)), None);
        for (owner, pid) in [
            (QpOwner::Process(7), Some(8)),
            (QpOwner::Process(7), None),
            (QpOwner::Unknown, Some(7)),
            (QpOwner::Unknown, None),
            (QpOwner::None, Some(7)),
        ] {
            assert!(objection(owner, pid).is_some(), "{owner:?} {pid:?}");
        }
    }

    fn qp(qpn: u32, state: QpState, remote: Option<(u8, u32)>) -> QpStatistics {
        QpStatistics {
            qpn,
            context: String::new(),
            pid: 0,
            qp_type: verbatim_device::control::QpType::Rc,
            state,
            remote: remote.map(|(gid, qpn)| ([gid; 16], qpn)),
            counters: Vec::new(),
        }
    }

    /// An RNIC with these queue pairs, of which it tells two at a time.
    fn rnic(folder: &Path, qps: Vec<QpStatistics>) -> std::path::PathBuf {
        let path = folder.join("nic.sock");
        let listener = verbatim_seqpacket::Listener::bind(&path).unwrap();
        std::thread::spawn(move || {
            let socket = listener.accept().unwrap();
            while let Ok(asked) = socket.recv::<Request>() {
                let Request::QueryStatistics { from_qpn } = asked.message else {
                    panic!("asked for something else");
                };
                let mut left = qps.iter().filter(|qp| qp.qpn >= from_qpn).cloned();
                let told = left.by_ref().take(2).collect();
                let next = left.next().map(|qp| qp.qpn);
                let device = Vec::new();
                let reply = Reply::Statistics {
                    device,
                    qps: told,
                    next,
                };
                socket.send(&reply, &[]).unwrap();
            }
        });
        path
    }

    #[test]
    fn the_rnic_says_which_queue_pairs_lead_to_an_endpoint_or_are_about_to() {
        let qps = vec![
            qp(2, QpState::Rts, Some((1, 7))),
            qp(3, QpState::Init, None),
            qp(4, QpState::Rts, Some((2, 7))),
            qp(5, QpState::Reset, None),
            qp(6, QpState::Rtr, Some((1, 8))),
            qp(7, QpState::Err, Some((1, 7))),
        ];
        let end = |gid, qpn| Endpoint { gid: [gid; 16], qpn };
        for (ends, about_to, wanted) in [
            (vec![end(1, 7)], false, vec![2, 7]),
            (vec![end(1, 7), end(1, 8)], false, vec![2, 6, 7]),
            (vec![end(1, 7)], true, vec![2, 3, 7]),
            (vec![end(3, 7)], true, vec![3]),
            (vec![], false, vec![]),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let nic = rnic(folder.path(), qps.clone());
            assert_eq!(ask_software_leading(&nic, &ends, about_to).unwrap(), wanted);
        }
    }

    #[test]
    fn a_process_is_called_what_the_kernel_calls_it() {
        let own = std::process::id();
        // In this process's own namespace, whatever that is called outside.
        assert!(is_called(own as i32, own));
        assert!(!is_called(own as i32, own + 1));
        assert!(!is_called(-1, own));
    }
}
