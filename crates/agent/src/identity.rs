//! Who is at the other end of a guest library's channel, and whose a queue pair is.
//!
//! A road map is a program's own word. Before anything is done to a queue pair that one names, the RNIC is asked which
//! process has it, and that must be the one whose channel the road map came over. Both are the kernel's word
//! (`SCM_CREDENTIALS` there, `SO_PEERCRED` here), held by descriptors of the processes, so that a number that one process
//! had before another does not count. Of RNICs of the kernel's, the kernel says it ([`crate::kernel_rnics`]). RNIC and agent must be in one PID namespace.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, bail};
use verbatim_channel::RoadMap;
use verbatim_device::control::{MAX_OWNERS, QpOwner, Reply, Request};

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

    #[test]
    fn a_process_is_called_what_the_kernel_calls_it() {
        let own = std::process::id();
        // In this process's own namespace, whatever that is called outside.
        assert!(is_called(own as i32, own));
        assert!(!is_called(own as i32, own + 1));
        assert!(!is_called(-1, own));
    }
}
