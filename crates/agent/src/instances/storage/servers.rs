//! Servers of virtual machines' disks: whether another host reaches the same ones.
//!
//! ```text
//!  a Unix socket    the file that it is, in this boot of this kernel: another host has it if both share the kernel
//!  a loopback       another server on each host, and refused at the source
//!  another host     one server by one address, unless both hosts have that address themselves
//! ```
//!
//! Volumes and swap disks are left out: their agents know them.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use serde::{Deserialize, Serialize};
use verbatim_vm::{Remote, Server};

/// Which boot of which kernel this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Limit for the addresses of a name.
const RESOLVE: Duration = Duration::from_secs(5);

/// Limit of the servers that another host may ask for.
const MOST: usize = 256;

/// A port for questions about an address alone. Nothing is sent.
const ANY_PORT: u16 = 9;

/// A server of a disk, as the source reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reached {
    /// The disk, for display.
    disk: String,
    at: At,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum At {
    Socket {
        path: PathBuf,
        /// Equal where a connection leads to the same server.
        identity: String,
    },
    Host {
        name: String,
        addresses: BTreeSet<IpAddr>,
        /// Those that the source has itself.
        own: BTreeSet<IpAddr>,
    },
}

/// Findings at the source.
#[derive(Debug, Default)]
pub struct Found {
    /// The servers for the destination to compare.
    pub reached: Vec<Reached>,
    /// Obstacles.
    pub blockers: Vec<String>,
    /// Notes for an operator.
    pub notes: Vec<String>,
}

/// The servers of the disks of the QEMU with process `pid`.
pub async fn of(pid: u32, remotes: &[Remote]) -> Found {
    let mut found = Found::default();
    for remote in remotes {
        let disk = &remote.disk;
        if remote.servers.is_empty() {
            found.notes.push(format!(
                "the disk {disk} is where each host's own configuration says: see that it is the same there"
            ));
        }
        for server in &remote.servers {
            let at = match server {
                Server::Socket(path) => socket(pid, path),
                Server::Host(name) => host(name).await,
            };
            match at {
                Ok(at) => {
                    found.notes.extend(note(disk, &at));
                    let disk = disk.clone();
                    found.reached.push(Reached { disk, at });
                }
                Err(why) => found.blockers.push(format!("the disk {disk} {why}")),
            }
        }
    }
    found
}

fn note(disk: &str, at: &At) -> Option<String> {
    let At::Host { name, own, .. } = at else {
        return None;
    };
    let whose = if own.is_empty() {
        ""
    } else {
        ", which is this host"
    };
    Some(format!(
        "the disk {disk} is served by {name}{whose}: the address is taken for that of the same server there"
    ))
}

/// A socket at the source. The error says why no other host has the same one, behind the disk's name.
fn socket(pid: u32, path: &Path) -> Result<At, String> {
    let shown = path.display();
    let inside = PathBuf::from(format!("/proc/{pid}/root")).join(path.strip_prefix("/").unwrap_or(path));
    match (identity(&inside), identity(path)) {
        (Ok(inside), Ok(here)) if inside == here => Ok(At::Socket {
            path: path.to_owned(),
            identity: here,
        }),
        (Ok(_), _) => Err(format!(
            "is served at {shown} of the virtual machine's own container, and not of its host"
        )),
        (Err(error), _) => Err(format!(
            "is served at {shown}, where there is no socket any more ({error})"
        )),
    }
}

/// The socket file that a path leads to.
fn identity(path: &Path) -> io::Result<String> {
    let metadata = fs::metadata(path)?;
    if !metadata.file_type().is_socket() {
        return Err(io::Error::other("it is another file"));
    }
    let boot = fs::read_to_string(BOOT_ID)?;
    Ok(format!("{} {}:{}", boot.trim(), metadata.dev(), metadata.ino()))
}

/// A host at the source. The error says why it is none for other hosts, behind the disk's name.
async fn host(name: &str) -> Result<At, String> {
    let unlike = || {
        format!(
            "is served at {name}, which is another server on each host: serve it at an address that both reach, or make it a volume"
        )
    };
    if is_loopback_by_name(name) {
        return Err(unlike());
    }
    let resolved = resolve(name).await;
    let addresses =
        resolved.map_err(|error| format!("is served by {name}, and no address of it is known ({error})"))?;
    if addresses.iter().copied().any(is_of_each_host) {
        return Err(unlike());
    }
    Ok(At::Host {
        name: name.to_owned(),
        own: addresses
            .iter()
            .copied()
            .filter(|address| is_own(*address))
            .collect(),
        addresses,
    })
}

/// Whether a name is that of each host for itself (RFC 6761 §6.3), whatever its `/etc/hosts` has.
fn is_loopback_by_name(name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    let names = [
        "localhost",
        "localhost.localdomain",
        "ip6-localhost",
        "ip6-loopback",
    ];
    names.contains(&name.as_str()) || name.ends_with(".localhost")
}

/// Whether each host, or each link, has another machine at an address.
fn is_of_each_host(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    address.is_loopback() || address.is_unspecified() || is_link_local
}

/// All addresses of a name.
async fn resolve(name: &str) -> Result<BTreeSet<IpAddr>, String> {
    // `fe80::1%eth0` is a name for the resolver.
    let looked = tokio::time::timeout(RESOLVE, tokio::net::lookup_host((name, ANY_PORT))).await;
    let looked = looked.map_err(|_| format!("the resolver has not answered in {RESOLVE:?}"))?;
    let addresses = looked.map_err(|error| error.to_string())?;
    Ok(addresses.map(|address| address.ip().to_canonical()).collect())
}

/// Whether this host has an address: the kernel would send packets to it from the address itself.
fn is_own(address: IpAddr) -> bool {
    let any: SocketAddr = match address {
        IpAddr::V4(_) => ([0, 0, 0, 0], 0).into(),
        IpAddr::V6(_) => ([0; 8], 0).into(),
    };
    // A datagram socket sends nothing when it is connected.
    let from = UdpSocket::bind(any).and_then(|socket| {
        socket.connect((address, ANY_PORT))?;
        socket.local_addr()
    });
    from.is_ok_and(|from| from.ip() == address)
}

/// Reasons why a virtual machine that reaches these cannot come to this host.
pub async fn others(theirs: &[Reached]) -> Vec<String> {
    if theirs.len() > MOST {
        return vec![format!(
            "its disks have {} servers, and {MOST} at most are compared",
            theirs.len()
        )];
    }
    let mut found = Vec::new();
    for reached in theirs {
        let other = match &reached.at {
            At::Socket { path, identity } => other_socket(path, identity),
            At::Host { name, addresses, own } => other_host(name, addresses, own).await,
        };
        found.extend(other.map(|why| format!("{why}; it serves the disk {}", reached.disk)));
    }
    found
}

fn other_socket(path: &Path, theirs: &str) -> Option<String> {
    let shown = path.display();
    match identity(path) {
        Ok(here) if here == theirs => None,
        Ok(_) => Some(format!(
            "{shown} there is the socket of another server than on the source, and the guest would have another disk: \
             let both hosts reach one server by its address, or make the disk a volume"
        )),
        Err(error) => Some(format!("{shown} there is no socket ({error})")),
    }
}

async fn other_host(name: &str, theirs: &BTreeSet<IpAddr>, own: &BTreeSet<IpAddr>) -> Option<String> {
    let here = match resolve(name).await {
        Ok(here) => here,
        Err(error) => return Some(format!("no address of {name} is known there ({error})")),
    };
    if here.is_disjoint(theirs) {
        let list = |all: &BTreeSet<IpAddr>| {
            let all: Vec<_> = all.iter().map(ToString::to_string).collect();
            all.join(", ")
        };
        return Some(format!(
            "{name} there is another host ({}) than on the source ({})",
            list(&here),
            list(theirs)
        ));
    }
    let both = own.iter().copied().find(|address| is_own(*address))?;
    Some(format!(
        "{both} is an address of the source and of the destination, and leads to another server there"
    ))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn remote(server: Server) -> Remote {
        Remote {
            disk: "db (nbd)".to_owned(),
            servers: vec![server],
        }
    }

    async fn found(server: Server) -> Found {
        of(std::process::id(), &[remote(server)]).await
    }

    fn set(addresses: &[&str]) -> BTreeSet<IpAddr> {
        addresses.iter().map(|address| address.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn a_socket_is_the_same_until_another_is_at_its_path() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk.sock");
        let none = found(Server::Socket(path.clone())).await;
        assert!(none.blockers[0].contains("no socket any more"), "{none:?}");
        // Both are there at once: no number is used again.
        let _first = UnixListener::bind(&path).unwrap();
        let at_source = found(Server::Socket(path.clone())).await;
        assert!(
            at_source.blockers.is_empty() && at_source.notes.is_empty(),
            "{at_source:?}"
        );
        let sent = serde_json::to_string(&at_source.reached).unwrap();
        let sent: Vec<Reached> = serde_json::from_str(&sent).unwrap();
        assert_eq!(others(&sent).await, Vec::<String>::new());
        fs::rename(&path, folder.path().join("old.sock")).unwrap();
        let gone = others(&sent).await;
        assert!(
            gone[0].contains("there is no socket") && gone[0].contains("db (nbd)"),
            "{gone:?}"
        );
        let _second = UnixListener::bind(&path).unwrap();
        let other = others(&sent).await;
        assert!(
            other[0].contains("the socket of another server than on the source"),
            "{other:?}"
        );
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert!(others(&sent).await[0].contains("it is another file"));
        // Another kernel has the same numbers.
        let At::Socket { identity, .. } = &sent[0].at else {
            unreachable!("a socket was asked for");
        };
        let (boot, file) = identity.split_once(' ').unwrap();
        assert_eq!(boot.len(), 36);
        fs::rename(folder.path().join("old.sock"), &path).unwrap();
        assert_eq!(other_socket(&path, identity), None);
        assert!(other_socket(&path, &format!("{} {file}", "0".repeat(36))).is_some());
    }

    #[tokio::test]
    async fn a_loopback_is_no_place_for_two_hosts() {
        for name in [
            "localhost",
            "LOCALHOST.",
            "db.localhost",
            "ip6-localhost",
            "127.0.0.1",
            "127.0.1.1",
            // As the C library reads it.
            "127.1",
            "::1",
            "::ffff:127.0.0.1",
            "0.0.0.0",
            "::",
            "169.254.1.1",
            "fe80::1",
        ] {
            let found = found(Server::Host(name.to_owned())).await;
            assert!(
                found.reached.is_empty() && found.blockers[0].contains("another server on each host"),
                "{name}: {found:?}"
            );
        }
        let named = found(Server::Host("no-such-host.invalid".to_owned())).await;
        assert!(
            named.blockers[0].contains("no address of it is known"),
            "{named:?}"
        );
    }

    #[tokio::test]
    async fn another_hosts_address_is_noted() {
        let there = found(Server::Host("192.0.2.7".to_owned())).await;
        assert!(there.blockers.is_empty(), "{there:?}");
        assert!(
            there.notes[0].contains("db (nbd) is served by 192.0.2.7:"),
            "{there:?}"
        );
        assert_eq!(others(&there.reached).await, Vec::<String>::new());
        let nobody = Remote {
            servers: Vec::new(),
            ..remote(Server::Host(String::new()))
        };
        let ceph = of(std::process::id(), &[nobody]).await;
        assert!(
            ceph.blockers.is_empty() && ceph.notes[0].contains("own configuration"),
            "{ceph:?}"
        );
    }

    #[tokio::test]
    async fn a_name_must_lead_to_the_same_host_and_not_to_each_for_itself() {
        let theirs = set(&["192.0.2.7", "192.0.2.8"]);
        let none = BTreeSet::new();
        assert_eq!(other_host("192.0.2.8", &theirs, &none).await, None);
        let other = other_host("192.0.2.9", &theirs, &none).await.unwrap();
        assert!(
            other.contains("192.0.2.9 there is another host (192.0.2.9) than"),
            "{other}"
        );
        let unknown = other_host("no-such-host.invalid", &theirs, &none).await;
        assert!(unknown.unwrap().contains("no address of"));
        // An address that this host has, as it would have it at its source.
        let own = set(&["127.0.0.1"]);
        assert!(is_own("127.0.0.1".parse().unwrap()) && !is_own("192.0.2.7".parse().unwrap()));
        let both = other_host("127.0.0.1", &own, &own).await.unwrap();
        assert!(
            both.contains("an address of the source and of the destination"),
            "{both}"
        );
        assert_eq!(
            other_host("127.0.0.1", &own, &none).await,
            None,
            "it is the destination's alone"
        );
    }

    #[tokio::test]
    async fn the_number_of_servers_is_bounded() {
        let at = At::Socket {
            path: "/s".into(),
            identity: String::new(),
        };
        let reached = Reached {
            disk: String::new(),
            at,
        };
        let many = others(&vec![reached; MOST + 1]).await;
        assert!(many.len() == 1 && many[0].contains("257 servers"), "{many:?}");
    }
}
