//! The RNICs that the kernel has: their GIDs, and whose queue pairs are.
//!
//! Programs reach them through the system's libibverbs (`docs/backends.md`); the agent only asks about them. What the kernel says is in
//! sysfs, and behind its RDMA netlink family, for which iproute2's `rdma` is the client that distributions have.

use std::collections::{HashMap, HashSet};
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::Deserialize;

/// In network byte order.
type Gid = [u8; 16];

/// Where the kernel lists RDMA devices.
const CLASS: &str = "/sys/class/infiniband";
/// Programs see an RNIC's first port.
const PORT: &str = "ports/1";
/// What the kernel calls the only kind of GID that counts.
const ROCE_V2: &str = "RoCE v2";

/// A device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRnic {
    /// Its name.
    pub name: String,
    /// Its GIDs of RoCE version 2, by index; empty ones are zeroes.
    pub gids: Vec<Gid>,
}

/// All that there are.
pub fn all() -> Vec<KernelRnic> {
    all_in(Path::new(CLASS))
}

fn all_in(class: &Path) -> Vec<KernelRnic> {
    let Ok(entries) = std::fs::read_dir(class) else {
        return Vec::new();
    };
    let mut rnics: Vec<_> = entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            Some(KernelRnic {
                name,
                gids: gids(&entry.path().join(PORT)),
            })
        })
        .collect();
    rnics.sort_by(|one, other| one.name.cmp(&other.name));
    rnics
}

/// Up to the last one that counts. The kernel has hundreds of entries, most of them empty, and refuses to say the kind of those.
fn gids(port: &Path) -> Vec<Gid> {
    let mut gids = Vec::new();
    let Ok(entries) = std::fs::read_dir(port.join("gids")) else {
        return gids;
    };
    for entry in entries.flatten() {
        let Some(index) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<usize>().ok())
        else {
            continue;
        };
        let kind: PathBuf = port.join("gid_attrs/types").join(index.to_string());
        let is_v2 = std::fs::read_to_string(kind).is_ok_and(|kind| kind.trim() == ROCE_V2);
        let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
        if let (true, Ok(gid)) = (is_v2, text.trim().parse::<Ipv6Addr>()) {
            if gids.len() <= index {
                gids.resize(index + 1, Gid::default());
            }
            gids[index] = gid.octets();
        }
    }
    gids
}

/// A queue pair, as `rdma -j resource show qp` says it.
#[derive(Debug, Deserialize)]
struct Resource {
    lqpn: u32,
    /// Where it leads, once it is connected.
    rqpn: Option<u32>,
    state: Option<String>,
    /// The thread that made it. None of a queue pair of the kernel's own, or of a process outside of the caller's PID namespace.
    pid: Option<i32>,
}

/// Whose queue pairs are: by number, the process. A number that several devices have is nobody's: which is meant is not known.
pub fn owners() -> anyhow::Result<HashMap<u32, Option<i32>>> {
    let mut owners = owners_of(resources()?);
    for thread in owners.values_mut() {
        *thread = thread.and_then(process_of);
    }
    Ok(owners)
}

/// Queue pairs that lead to one of these numbers; `about_to`: and those that are about to be connected. The kernel does not say to
/// which host one leads.
pub fn leading_to(qpns: &HashSet<u32>, about_to: bool) -> anyhow::Result<Vec<u32>> {
    Ok(leading(resources()?, qpns, about_to))
}

fn leading(resources: Vec<Resource>, qpns: &HashSet<u32>, about_to: bool) -> Vec<u32> {
    let leads = |resource: &Resource| {
        let is_init = resource.state.as_deref() == Some("INIT");
        resource.rqpn.is_some_and(|qpn| qpns.contains(&qpn)) || about_to && is_init
    };
    resources
        .into_iter()
        .filter(leads)
        .map(|resource| resource.lqpn)
        .collect()
}

fn resources() -> anyhow::Result<Vec<Resource>> {
    let output = Command::new("rdma")
        .args(["-j", "resource", "show", "qp"])
        .output()
        .context(
            "the kernel cannot be asked whose queue pairs are: `rdma` cannot be started; install iproute2",
        )?;
    if !output.status.success() {
        bail!(
            "the kernel does not say whose queue pairs are: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    resources_from(&output.stdout)
}

/// The process of a thread; none if it has ended. The kernel names the thread that made a queue pair.
fn process_of(thread: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let process = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
    process.trim().parse().ok()
}

fn resources_from(json: &[u8]) -> anyhow::Result<Vec<Resource>> {
    if json.iter().all(u8::is_ascii_whitespace) {
        return Ok(Vec::new());
    }
    serde_json::from_slice(json).context("`rdma -j resource show qp` says what is not understood")
}

fn owners_of(resources: Vec<Resource>) -> HashMap<u32, Option<i32>> {
    let mut owners = HashMap::new();
    for Resource { lqpn, pid, .. } in resources {
        // Each device has queue pairs 0 and 1, which are the kernel's.
        owners
            .entry(lqpn)
            .and_modify(|owner: &mut Option<i32>| *owner = None)
            .or_insert(pid);
    }
    owners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_s_list_is_read() {
        let json = br#"[{"ifindex":0,"ifname":"rxe0","port":1,"lqpn":1,"type":"GSI","state":"RTS","sq-psn":0,"comm":"[ib_core]"},
            {"ifindex":0,"ifname":"rxe0","port":1,"lqpn":17,"rqpn":18,"type":"RC","state":"RTS","rq-psn":0,"sq-psn":0,
             "path-mig-state":"MIGRATED","pdn":8,"pid":533,"comm":"ib_send_bw"},
            {"ifindex":0,"ifname":"rxe0","port":1,"lqpn":19,"type":"RC","state":"INIT","sq-psn":0,"pdn":8,"pid":534,"comm":"ib_send_bw"},
            {"ifindex":1,"ifname":"rxe1","port":1,"lqpn":1,"type":"GSI","state":"RTS","sq-psn":0,"comm":"[ib_core]"}]"#;
        let owners = owners_of(resources_from(json).unwrap());
        assert_eq!(
            owners,
            HashMap::from([(1, None), (17, Some(533)), (19, Some(534))])
        );
        assert!(resources_from(b"\n").unwrap().is_empty());
        assert!(resources_from(b"error").is_err());
        let leading = |qpn, about_to| leading(resources_from(json).unwrap(), &HashSet::from([qpn]), about_to);
        assert_eq!((leading(18, false), leading(17, false)), (vec![17], vec![]));
        assert_eq!((leading(18, true), leading(17, true)), (vec![17, 19], vec![19]));
    }

    #[test]
    fn a_thread_is_its_process_s() {
        let own = std::process::id() as i32;
        let thread = std::thread::spawn(move || {
            // SAFETY: has no arguments.
            let thread = unsafe { libc::gettid() };
            (thread, process_of(thread))
        });
        let (thread, process) = thread.join().expect("it only looks");
        assert_ne!(thread, own);
        assert_eq!((process, process_of(own)), (Some(own), Some(own)));
        assert_eq!(process_of(-1), None);
    }

    #[test]
    fn gids_of_other_kinds_and_empty_ones_do_not_count() {
        let class = tempfile::tempdir().unwrap();
        let port = class.path().join("rxe0/ports/1");
        std::fs::create_dir_all(port.join("gids")).unwrap();
        std::fs::create_dir_all(port.join("gid_attrs/types")).unwrap();
        for (index, gid, kind) in [
            (0, "fe80::1", "IB/RoCE v1\n"),
            (1, "fe80::1", "RoCE v2\n"),
            (3, "::ffff:10.0.0.1", "RoCE v2\n"),
        ] {
            std::fs::write(port.join(format!("gids/{index}")), format!("{gid}\n")).unwrap();
            std::fs::write(port.join(format!("gid_attrs/types/{index}")), kind).unwrap();
        }
        std::fs::write(port.join("gids/5"), "::\n").unwrap();
        let rnics = all_in(class.path());
        let gid = |text: &str| text.parse::<Ipv6Addr>().unwrap().octets();
        let expected = [
            Gid::default(),
            gid("fe80::1"),
            Gid::default(),
            gid("::ffff:10.0.0.1"),
        ];
        assert_eq!(rnics[0].gids, expected);
        assert_eq!(rnics[0].name, "rxe0");
        assert!(all_in(Path::new("/nowhere")).is_empty());
    }
}
