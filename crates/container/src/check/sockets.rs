//! Sockets that CRIU refuses (`criu/sockets.c`, `criu/sk-inet.c`, `criu/sk-unix.c`).

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::Process;
use super::owners::{Owner, Owners};
use crate::namespace::inside_of;
use crate::sock_diag::{self, Unix};

/// What the kernel calls the protocols that CRIU takes (`system.sockprotoname`).
const TAKEN: [&str; 11] = [
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "PACKET",
    "NETLINK",
    "UNIX",
];

/// How often AF_UNIX connections are looked at before one that is not accepted is believed to stay so, and how long apart.
const LOOKS: usize = 3;
const APART: std::time::Duration = std::time::Duration::from_millis(50);

/// Where a socket of AF_UNIX leads that has no other end in the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Other {
    /// To this one.
    Peer(u32),
    /// The socket is of another network namespace, maybe the host's own.
    Foreign,
}

/// A socket of the container's.
struct Held {
    process: i32,
    descriptor: String,
}

/// What stands in the way, with the process before it. Nobody outside of the container is looked for after `until`.
pub(super) fn problems(init: i32, processes: &BTreeMap<i32, Process>, until: Instant) -> Vec<String> {
    let mut problems = Vec::new();
    let mut held: HashMap<u32, Held> = HashMap::new();
    let mut of_unix = Vec::new();
    let signed = match inside_of(init, sock_diag::signed) {
        Ok(signed) => signed,
        Err(error) => {
            problems.push(format!("TCP sockets cannot be looked at: {error}"));
            HashSet::new()
        }
    };
    for (pid, process) in processes {
        for (descriptor, inode) in sockets(*pid) {
            if held.contains_key(&inode) {
                // Several descriptors may be one.
                continue;
            }
            let path = format!("/proc/{pid}/fd/{descriptor}");
            let Some(protocol) = protocol(Path::new(&path)) else {
                continue;
            };
            if !is_taken(&protocol) {
                problems.push(format!(
                    "process {pid} ({}): descriptor {descriptor} is a socket of {protocol}, which CRIU cannot write down; {}",
                    process.command,
                    way_out(&protocol)
                ));
            }
            if protocol.starts_with("UDP") && is_corked(*pid, &descriptor) {
                problems.push(format!(
                    "process {pid} ({}): descriptor {descriptor} is a UDP socket with a datagram that is not complete (UDP_CORK); let the program send it",
                    process.command
                ));
            }
            if protocol.starts_with("TCP")
                && let Some(upper) = upper_protocol(*pid, &descriptor)
            {
                problems.push(format!(
                    "process {pid} ({}): descriptor {descriptor} is a TCP socket whose data the kernel changes ({upper}), which CRIU does not keep; have the program do that by itself (OpenSSL: without `SSL_OP_ENABLE_KTLS`)",
                    process.command
                ));
            }
            if signed.contains(&inode) {
                problems.push(format!(
                    "process {pid} ({}): descriptor {descriptor} is a TCP socket with signatures (TCP_MD5SIG, RFC 2385), whose keys CRIU does not keep: its peers would drop all that it sends; have the program end those connections before the move",
                    process.command
                ));
            }
            if protocol.starts_with("UNIX") {
                of_unix.push((*pid, descriptor.clone(), inode));
            }
            held.entry(inode).or_insert(Held {
                process: *pid,
                descriptor,
            });
        }
    }
    if !of_unix.is_empty() {
        match unix_problems(init, processes, &held, &of_unix, until) {
            Ok(found) => problems.extend(found),
            Err(error) => problems.push(format!("sockets of AF_UNIX cannot be looked at: {error}")),
        }
    }
    problems
}

fn is_taken(protocol: &str) -> bool {
    TAKEN.contains(&protocol) || protocol.starts_with("UNIX")
}

fn way_out(protocol: &str) -> &'static str {
    match protocol {
        "MPTCP" | "MPTCPv6" => "have the program use TCP (Go: `-e GODEBUG=multipathtcp=0`)",
        "ALG" => "have the program encrypt by itself (without AF_ALG)",
        "PING" | "PINGv6" => "wait until the program has done its pings",
        _ => "end the process, or have it close the socket, before the move",
    }
}

/// The sockets of a process: descriptors, and inodes.
fn sockets(pid: i32) -> Vec<(String, u32)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd"));
    // Those of a process that ends while we look are closed.
    let entries = entries.into_iter().flatten().flatten();
    let sockets = entries.filter_map(|entry| {
        let target = fs::read_link(entry.path()).ok()?;
        let inode = inode(&target.to_string_lossy())?;
        Some((entry.file_name().to_string_lossy().into_owned(), inode))
    });
    sockets.collect()
}

/// Of `socket:[INODE]`.
pub(super) fn inode(target: &str) -> Option<u32> {
    target.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

/// The protocol of a socket by the kernel's name for it; `None` if it is closed.
fn protocol(path: &Path) -> Option<String> {
    let mut name = [0u8; 64];
    let length = rustix::fs::getxattr(path, "system.sockprotoname", &mut name).ok()?;
    let name = name.get(..length)?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(length);
    Some(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// The upper layer protocol of a TCP socket (`TCP_ULP`: `tls`), if it has one.
fn upper_protocol(pid: i32, descriptor: &str) -> Option<String> {
    let socket = socket_of(pid, descriptor)?;
    let mut name = [0; 16];
    let length = crate::sockopt::get(
        std::os::fd::AsFd::as_fd(&socket),
        libc::IPPROTO_TCP,
        libc::TCP_ULP,
        &mut name,
    );
    let name = name.get(..length.ok()?)?;
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    (end > 0).then(|| String::from_utf8_lossy(&name[..end]).into_owned())
}

/// A duplicate of a process's descriptor.
fn socket_of(pid: i32, descriptor: &str) -> Option<OwnedFd> {
    let pidfd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
    pidfd_getfd(&pidfd, descriptor.parse().ok()?, PidfdGetfdFlags::empty()).ok()
}

/// Whether a UDP socket collects a datagram.
fn is_corked(pid: i32, descriptor: &str) -> bool {
    let corked = || -> Option<bool> {
        let socket = socket_of(pid, descriptor)?;
        let mut value = [0; 4];
        /// `linux/udp.h`.
        const UDP_CORK: i32 = 1;
        crate::sockopt::get(
            std::os::fd::AsFd::as_fd(&socket),
            libc::IPPROTO_UDP,
            UDP_CORK,
            &mut value,
        )
        .ok()?;
        Some(i32::from_ne_bytes(value) != 0)
    };
    corked().unwrap_or(false)
}

fn unix_problems(
    init: i32,
    processes: &BTreeMap<i32, Process>,
    held: &HashMap<u32, Held>,
    of_unix: &[(i32, String, u32)],
    until: Instant,
) -> io::Result<Vec<String>> {
    let list = || inside_of(init, sock_diag::unix);
    let all = list()?;
    let of = |all: &[Unix]| -> HashMap<u32, Unix> {
        all.iter().map(|socket| (socket.inode, socket.clone())).collect()
    };
    let known = of(&all);
    let mut problems = Vec::new();
    let name = |pid: i32| processes.get(&pid).map_or("", |process| process.command.as_str());
    let is_still_there = |pid: i32, descriptor: &str, inode: u32| {
        let target = fs::read_link(format!("/proc/{pid}/fd/{descriptor}"));
        target.is_ok_and(|target| self::inode(&target.to_string_lossy()) == Some(inode))
    };

    // Outside: another end that no process of the container has, and that is in no queue of the container's.
    let waiting: HashSet<u32> = all
        .iter()
        .flat_map(|socket| socket.waiting.iter().copied())
        .collect();
    let mut reported = HashSet::new();
    let mut leading: Vec<(&(i32, String, u32), Other)> = Vec::new();
    for one in of_unix {
        let inode = one.2;
        if !reported.insert(inode) {
            continue;
        }
        let other = match known.get(&inode) {
            None => Other::Foreign,
            Some(socket) => match socket.peer.filter(|peer| *peer != 0) {
                Some(peer) if !held.contains_key(&peer) && !waiting.contains(&inode) => Other::Peer(peer),
                _ => continue,
            },
        };
        leading.push((one, other));
    }
    // Of a socket of another network namespace the kernel says the peer there.
    let of_host = match leading.iter().any(|(_, other)| *other == Other::Foreign) {
        true => of(&sock_diag::unix().unwrap_or_default()),
        false => HashMap::new(),
    };
    let peer_of = |inode: u32, other: &Other| match other {
        Other::Peer(peer) => Some(*peer),
        Other::Foreign => of_host.get(&inode)?.peer.filter(|peer| *peer != 0),
    };
    let wanted = leading
        .iter()
        .filter_map(|(one, other)| peer_of(one.2, other))
        .collect();
    let owners = Owners::of(wanted, until);
    for ((pid, descriptor, inode), other) in leading {
        let owner = peer_of(*inode, &other).and_then(|peer| owners.get(peer));
        let is_ours = owner.is_some_and(Owner::is_ours);
        if is_ours || !is_still_there(*pid, descriptor, *inode) {
            // Its channels to our own daemons are closed for the move.
            continue;
        }
        let Other::Peer(peer) = other else {
            problems.push(format!(
                "process {pid} ({}): descriptor {descriptor} is a socket of AF_UNIX of another network namespace; have the program close it before the move",
                name(*pid)
            ));
            continue;
        };
        // It may have been made since, or be on its way in a message.
        if known.contains_key(&peer) && owner.is_none()
            || owner.is_some_and(|owner| processes.contains_key(&owner.pid))
        {
            continue;
        }
        let whose = match owner {
            Some(owner) => format!("process {} ({}) of the host", owner.pid, owner.command),
            None if !owners.is_whole => "a process that was not found in time: this host has many".to_owned(),
            None => "somebody outside of the container".to_owned(),
        };
        problems.push(format!(
            "process {pid} ({}): descriptor {descriptor} is connected to a socket of AF_UNIX of {whose}, which does not move; have the program close it before the move, or reach that service by TCP",
            name(*pid)
        ));
    }

    problems.extend(not_accepted(&known, held, list, &name)?);
    Ok(problems)
}

/// Connections that wait at listeners and have data, or are closed: others CRIU takes.
fn not_accepted<'a>(
    known: &HashMap<u32, Unix>,
    held: &HashMap<u32, Held>,
    list: impl Fn() -> io::Result<Vec<Unix>>,
    name: &impl Fn(i32) -> &'a str,
) -> io::Result<Vec<String>> {
    let stuck = |known: &HashMap<u32, Unix>| -> HashMap<(u32, u32), String> {
        let mut stuck = HashMap::new();
        for listener in known.values().filter(|socket| socket.listens) {
            for client in &listener.waiting {
                let has_data = known.get(client).is_some_and(|client| client.unsent > 0);
                if *client == 0 || has_data {
                    let path = listener.name.clone().unwrap_or_default();
                    stuck.insert((listener.inode, *client), path);
                }
            }
        }
        stuck
    };
    let mut found = stuck(known);
    // A server that accepts has them for a moment only.
    for _ in 1..LOOKS {
        if found.is_empty() {
            return Ok(Vec::new());
        }
        std::thread::sleep(APART);
        let again = list()?;
        let again = again.into_iter().map(|socket| (socket.inode, socket)).collect();
        let still = stuck(&again);
        found.retain(|key, _| still.contains_key(key));
    }
    let mut listeners: BTreeMap<u32, (String, usize)> = BTreeMap::new();
    for ((listener, _), path) in found {
        listeners.entry(listener).or_insert((path, 0)).1 += 1;
    }
    let words = listeners.into_iter().filter_map(|(listener, (path, count))| {
        let Held { process, descriptor } = held.get(&listener)?;
        Some(format!(
            "process {process} ({}): descriptor {descriptor} listens at {path}, and has not accepted {count} connection{} with data, or closed by the other end, which CRIU cannot write down; have the program accept",
            name(*process),
            if count == 1 { "" } else { "s" },
        ))
    });
    Ok(words.collect())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    fn socket(family: i32, kind: i32, protocol: i32) -> Option<std::os::fd::OwnedFd> {
        use std::os::fd::FromRawFd;

        // SAFETY: the call has no memory to misuse.
        let raw = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) };
        // SAFETY: it was just made, and is nobody else's.
        (raw >= 0).then(|| unsafe { std::os::fd::OwnedFd::from_raw_fd(raw) })
    }

    fn protocol_of(socket: &impl AsRawFd) -> String {
        protocol(Path::new(&format!("/proc/self/fd/{}", socket.as_raw_fd()))).unwrap()
    }

    #[test]
    fn sockets_that_criu_takes_are_known_by_their_protocols() {
        let taken = [
            (libc::AF_INET, libc::SOCK_STREAM, 0),
            (libc::AF_INET6, libc::SOCK_STREAM, 0),
            (libc::AF_INET, libc::SOCK_DGRAM, 0),
            (libc::AF_INET6, libc::SOCK_DGRAM, 0),
            (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_UDPLITE),
            (libc::AF_UNIX, libc::SOCK_STREAM, 0),
            (libc::AF_UNIX, libc::SOCK_DGRAM, 0),
            (libc::AF_UNIX, libc::SOCK_SEQPACKET, 0),
            (libc::AF_NETLINK, libc::SOCK_RAW, 0),
            (libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
            (libc::AF_PACKET, libc::SOCK_RAW, 0),
        ];
        for (family, kind, number) in taken {
            if let Some(socket) = socket(family, kind, number) {
                let name = protocol_of(&socket);
                assert!(is_taken(&name), "{family} {kind} {number}: {name}");
            }
        }
        let refused = [
            (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP),
            (libc::AF_INET6, libc::SOCK_STREAM, libc::IPPROTO_MPTCP),
            (libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_SCTP),
            (libc::AF_INET, libc::SOCK_SEQPACKET, libc::IPPROTO_SCTP),
            (libc::AF_VSOCK, libc::SOCK_STREAM, 0),
            (libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
            (libc::AF_INET, libc::SOCK_DGRAM, libc::IPPROTO_ICMP),
        ];
        for (family, kind, number) in refused {
            if let Some(socket) = socket(family, kind, number) {
                let name = protocol_of(&socket);
                assert!(!is_taken(&name), "{family} {kind} {number}: {name}");
                assert!(!way_out(&name).is_empty());
            }
        }
    }

    #[test]
    fn a_corked_socket_is_seen() {
        let socket = socket(libc::AF_INET, libc::SOCK_DGRAM, 0).unwrap();
        let own = std::process::id() as i32;
        let number = socket.as_raw_fd().to_string();
        assert!(!is_corked(own, &number));
        crate::sockopt::set(
            std::os::fd::AsFd::as_fd(&socket),
            libc::IPPROTO_UDP,
            1,
            &1i32.to_ne_bytes(),
        )
        .unwrap();
        assert!(is_corked(own, &number));
    }

    #[test]
    fn sockets_with_signatures_are_found() {
        use std::os::fd::AsFd;

        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        // struct tcp_md5sig: an address, flags, the key's length, and the key.
        let mut signature = [0u8; 216];
        signature[..2].copy_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
        signature[4..8].copy_from_slice(&[127, 0, 0, 2]);
        signature[130..132].copy_from_slice(&4u16.to_ne_bytes());
        signature[136..140].copy_from_slice(b"key!");
        let set = crate::sockopt::set(listener.as_fd(), libc::IPPROTO_TCP, libc::TCP_MD5SIG, &signature);
        if let Err(error) = set {
            return eprintln!("skipped: {error}");
        }
        let of = |socket: &std::net::TcpListener| {
            let link = fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
            inode(&link.to_string_lossy()).unwrap()
        };
        let signed = sock_diag::signed().unwrap();
        assert!(
            signed.contains(&of(&listener)),
            "it needs CAP_NET_ADMIN: {signed:?}"
        );
        assert!(!signed.contains(&of(&plain)));
    }

    #[test]
    fn inodes_are_read_from_links() {
        assert_eq!(inode("socket:[4711]"), Some(4711));
        assert_eq!(inode("pipe:[4711]"), None);
    }
}
