//! The network namespace of an instance, and its link to the host's bridge.
//!
//! ```text
//!   instance's namespace             host
//!   eth0  ADDRESS, MAC  ───veth───  vbXXXXXXXX ── bridge
//! ```
//!
//! The namespace is a file (`ip-netns(8)` keeps them so): it needs no process, and runc and CRIU take it by path. The
//! same address and the same MAC exist on the source and the destination of a move; the link is up on at most one of
//! them. A virtual machine has address and MAC itself ([`NetworkConfig::tap`]):
//!
//! ```text
//!   tap0 ── br0 ── eth0  ───veth───  vbXXXXXXXX ── bridge
//! ```
//!
//! [`Network::detach`] and [`Network::attach`] are what a blackout pays for: a few system calls each.

use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::mount::UnmountFlags;
use rustix::thread::UnshareFlags;
use verbatim_filter::LinkFilter;

use crate::namespace::{inside, inside_at, on_a_thread};
use crate::netlink::{Change, LinkIndex, Netlink};

mod announce;
mod contents;
mod tap;

pub use contents::Contents;

/// The instance's end of its link.
const INSIDE: &str = "eth0";

/// The link that a virtual machine opens ([`NetworkConfig::tap`]).
pub const TAP: &str = "tap0";

/// What joins it and the instance's end.
const BRIDGE_INSIDE: &str = "br0";

/// What fails where a host lacks nft(8), or its kernel the filter.
const FILTER: &str = "filter the link (`verbatim agent --no-address-filter` leaves that out)";

/// The network of an instance, as its agent wants it.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// Where the namespace is kept: a file is made there. Its directory is made if it is missing.
    pub path: PathBuf,
    /// The instance's address.
    pub address: Ipv4Addr,
    /// The length of its network's prefix in bits.
    pub prefix: u8,
    /// Where packets to other networks go.
    pub gateway: Option<Ipv4Addr>,
    /// The host's bridge.
    pub bridge: String,
    /// The largest packet in bytes; the kernel's default (1500) if `None`.
    pub mtu: Option<u32>,
    /// It is a virtual machine's, which has the address itself: in the namespace there are a tap link for it ([`TAP`]) and a bridge in place
    /// of an address.
    pub tap: bool,
    /// Addresses that it may send from beside its own and its link-local one; all other frames are dropped at the host's end of its link.
    /// `None`: no frame is.
    pub further: Option<Vec<IpAddr>>,
}

impl NetworkConfig {
    fn filter(&self) -> Option<LinkFilter> {
        let further = self.further.as_ref()?;
        let filter = LinkFilter::new(mac_of(self.address), self.address, further);
        Some(match self.tap {
            true => filter.with_rnic(),
            false => filter,
        })
    }
}

/// Whether an instance's link carries packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// It does.
    Attached,
    /// It does not: the instance is here only in part, or not any more.
    Detached,
}

/// What can go wrong with an instance's network.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// The bridge is missing.
    #[error("there is no bridge {bridge} on this host; make it, or name another one")]
    NoBridge {
        /// Its name.
        bridge: String,
    },
    /// The namespace exists already.
    #[error("{} exists already: an instance of that name is or was here", .path.display())]
    Exists {
        /// Its file.
        path: PathBuf,
    },
    /// A step failed.
    #[error("cannot {action} for the network namespace {}", .path.display())]
    Step {
        /// What was tried.
        action: &'static str,
        /// The namespace's file.
        path: PathBuf,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// The namespace cannot be made what it was elsewhere.
    #[error("the network namespace {} cannot be what it was", .path.display())]
    Contents {
        /// The namespace's file.
        path: PathBuf,
        /// What of it cannot.
        #[source]
        source: verbatim_netns::Error,
    },
    /// Its links take larger packets than those of this host.
    #[error(
        "eth0 of the instance has an MTU of {wanted}, and links of this host take {mtu}: start its agent with `--mtu {wanted}`"
    )]
    Mtu {
        /// What it has.
        wanted: u32,
        /// What is possible here.
        mtu: u32,
    },
}

/// The network namespace of an instance. Dropping it leaves it there; see [`Network::delete`].
#[derive(Debug)]
pub struct Network {
    path: PathBuf,
    address: Ipv4Addr,
    /// Somebody else does, where the address is somebody else's.
    announces: bool,
    filter: Option<LinkFilter>,
    link: LinkIndex,
    netlink: Netlink,
    reports: Netlink,
    inside: Inside,
}

/// What we hold of the namespace itself.
#[derive(Debug)]
struct Inside {
    link: LinkIndex,
    reports: Netlink,
    announcer: OwnedFd,
}

impl Inside {
    /// In a thread in the namespace.
    fn open() -> io::Result<Self> {
        let link = index_inside(INSIDE)?;
        Ok(Self {
            link,
            reports: Netlink::listen()?,
            announcer: announce::open(link)?,
        })
    }
}

impl Network {
    /// Makes the namespace and its link. Takes some ms. Needs the same mount namespace as runc.
    pub fn create(config: &NetworkConfig, link: Link) -> Result<Self, NetworkError> {
        let path = &config.path;
        let step = |action| {
            move |source| NetworkError::Step {
                action,
                path: path.clone(),
                source,
            }
        };
        let bridge = index_of(&config.bridge).ok_or_else(|| NetworkError::NoBridge {
            bridge: config.bridge.clone(),
        })?;
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(step("make the directory"))?;
        }
        File::create_new(path).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => NetworkError::Exists { path: path.clone() },
            _ => step("make the file")(source),
        })?;
        let made = Self::build(config, bridge, link);
        if made.is_err() {
            let _ = remove_namespace(path);
            // If the pair of links was made, it goes with the namespace that holds one of them.
        }
        made
    }

    fn build(config: &NetworkConfig, bridge: LinkIndex, link: Link) -> Result<Self, NetworkError> {
        let path = &config.path;
        let step = |action| {
            move |source| NetworkError::Step {
                action,
                path: path.clone(),
                source,
            }
        };
        make_namespace(path).map_err(step("make a namespace"))?;
        let namespace = File::open(path).map_err(step("open the namespace"))?;
        let netlink = Netlink::open().map_err(step("open a netlink socket"))?;
        let name = outside_name(path);
        let mac = match config.tap {
            // The address is the guest's, and a bridge would keep its frames.
            true => bridge_mac_of(config.address),
            false => mac_of(config.address),
        };
        netlink
            .add_veth(&name, INSIDE, mac, namespace.as_fd(), config.mtu)
            .map_err(step("make a pair of veth links"))?;
        let outside =
            index_of(&name).ok_or_else(|| step("find the link just made")(io::ErrorKind::NotFound.into()))?;
        set_filter(config, &name).map_err(step(FILTER))?;
        netlink
            .change(outside, Change::Master(bridge))
            .map_err(step("attach a link to the bridge"))?;
        let inside = inside(&namespace, || {
            let netlink = Netlink::open()?;
            netlink.change(index_inside("lo")?, Change::Up)?;
            let eth0 = index_inside(INSIDE)?;
            if config.tap {
                join_tap(&netlink, eth0)?;
                return Inside::open();
            }
            netlink.add_address(eth0, config.address, config.prefix)?;
            netlink.change(eth0, Change::Up)?;
            if let Some(gateway) = config.gateway {
                netlink.add_default_route(eth0, gateway)?;
            }
            Inside::open()
        })
        .map_err(step("configure the instance's end of its link"))?;
        let reports = Netlink::listen().map_err(step("open a netlink socket"))?;
        let address = config.address;
        let network = Self {
            path: path.clone(),
            address,
            announces: !config.tap,
            filter: config.filter(),
            link: outside,
            netlink,
            reports,
            inside,
        };
        if link == Link::Attached {
            network.attach()?;
        }
        Ok(network)
    }

    /// Takes a network that was made earlier (before the agent was restarted).
    pub fn open(config: &NetworkConfig) -> Result<Self, NetworkError> {
        let path = &config.path;
        let step = |action| {
            move |source| NetworkError::Step {
                action,
                path: path.clone(),
                source,
            }
        };
        let namespace = File::open(path).map_err(step("open the namespace"))?;
        let netlink = Netlink::open().map_err(step("open a netlink socket"))?;
        let name = outside_name(path);
        let link = index_of(&name).ok_or_else(|| step("find the link")(io::ErrorKind::NotFound.into()))?;
        // The agent before this one may have been told otherwise, or be of a release that has no filter.
        if let Err(error) = set_filter(config, &name) {
            // The instance runs, as it did before: an agent that lost it for that could neither move nor stop it.
            let error = anyhow::Error::from(step(FILTER)(error));
            tracing::error!(
                error = format!("{error:#}"),
                "an instance can send from addresses that are not its own"
            );
        }
        let inside = inside(&namespace, Inside::open).map_err(step("open sockets in the namespace"))?;
        let reports = Netlink::listen().map_err(step("open a netlink socket"))?;
        Ok(Self {
            path: path.clone(),
            address: config.address,
            announces: !config.tap,
            filter: config.filter(),
            link,
            netlink,
            reports,
            inside,
        })
    }

    /// The namespace's file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Stops the instance's traffic; its addresses and routes stay. Some microseconds.
    pub fn detach(&self) -> Result<(), NetworkError> {
        self.step("detach the link", self.netlink.change(self.link, Change::Down))
    }

    /// Lets the instance's traffic flow and tells its neighbours where it is now (a gratuitous ARP, RFC 5227 §3).
    ///
    /// Returns when packets pass: the kernel turns the queues of a link, and its bridge port, on some time after the
    /// link is set up. Usually below a millisecond, at most a second.
    pub fn attach(&self) -> Result<(), NetworkError> {
        if !self.step("look at the link", self.netlink.is_running(self.link))? {
            self.reports.forget();
            self.inside.reports.forget();
            self.step("attach the link", self.netlink.change(self.link, Change::Up))?;
            let deadline = Instant::now() + Duration::from_secs(1);
            self.step(
                "wait for the link",
                self.reports.wait_running(self.link, deadline),
            )?;
            let inside = self.inside.reports.wait_running(self.inside.link, deadline);
            self.step("wait for the instance's end of the link", inside)?;
        }
        self.announce()
    }

    /// Drops the first packet of each new TCP connection to the instance, from wherever, until [`Network::take_connections`]. Clients
    /// repeat it. Takes some 10 ms.
    pub fn refuse_connections(&self) -> Result<(), NetworkError> {
        let refused = inside_at(&self.path, verbatim_filter::moving::refuse_connections);
        self.step("hold new connections back", refused)
    }

    /// Ends [`Network::refuse_connections`]; harmless where it was not called.
    pub fn take_connections(&self) -> Result<(), NetworkError> {
        let taken = inside_at(&self.path, verbatim_filter::moving::take_connections);
        self.step("let new connections in", taken)
    }

    /// Whether connections to the instance are on their way to a process that accepts.
    pub fn are_connections_arriving(&self) -> Result<bool, NetworkError> {
        let arriving = inside_at(&self.path, crate::kept::unaccepted::are_arriving);
        self.step("list the sockets", arriving)
    }

    /// Whether connections that the instance's processes have closed are still sending what is left of them.
    pub fn are_connections_closing(&self) -> Result<bool, NetworkError> {
        let closing = inside_at(&self.path, crate::kept::unaccepted::are_closing);
        self.step("list the sockets", closing)
    }

    /// Listeners of the instance with connections that no process has accepted yet, and how many.
    pub fn unaccepted(&self) -> Result<Vec<(SocketAddr, u32)>, NetworkError> {
        let queues = inside_at(&self.path, crate::kept::unaccepted::queues);
        self.step("list the sockets", queues)
    }

    /// Tells the neighbours again; harmless at any time. A virtual machine does that itself.
    pub fn announce(&self) -> Result<(), NetworkError> {
        if !self.announces {
            return Ok(());
        }
        self.step(
            "announce the address",
            announce::send(&self.inside.announcer, self.address, mac_of(self.address)),
        )
    }

    /// Addresses of the instance's end of its link from which nothing passes its filter.
    pub fn filtered(&self) -> Result<Vec<IpAddr>, NetworkError> {
        let Some(filter) = &self.filter else {
            return Ok(Vec::new());
        };
        let namespace = self.step("open the namespace", File::open(&self.path))?;
        let link = self.inside.link;
        let found = inside(&namespace, || Netlink::open()?.addresses(link));
        let mut found = self.step("read the addresses", found)?;
        found.retain(|address| !filter.allows(*address));
        Ok(found)
    }

    /// What its programs make of the namespace; nothing of a virtual machine's, whose programs are not in it.
    pub fn contents(&self) -> Result<Option<Contents>, NetworkError> {
        if !self.announces {
            return Ok(None);
        }
        let namespace = self.step("open the namespace", File::open(&self.path))?;
        let (path, mac) = (self.path.clone(), mac_of(self.address));
        Ok(Some(Contents::new(namespace, path, mac)))
    }

    /// Removes what an agent that died may have left of a network at `path`; nothing if there is nothing.
    pub fn clear(path: &Path) -> Result<(), NetworkError> {
        let step = |action| {
            move |source| NetworkError::Step {
                action,
                path: path.to_owned(),
                source,
            }
        };
        let name = outside_name(path);
        if let Some(link) = index_of(&name) {
            let netlink = Netlink::open().map_err(step("open a netlink socket"))?;
            netlink.delete(link).map_err(step("delete the link"))?;
            drop_filter(&name);
        }
        remove_namespace(path).map_err(step("remove the namespace"))
    }

    /// Removes the link and the namespace. Processes in it are cut off.
    pub fn delete(self) -> Result<(), NetworkError> {
        match self.netlink.delete(self.link) {
            // Someone has removed it by hand.
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
            result => self.step("delete the link", result)?,
        }
        if self.filter.is_some() {
            drop_filter(&outside_name(&self.path));
        }
        self.step("remove the namespace", remove_namespace(&self.path))
    }

    fn step<T>(&self, action: &'static str, result: io::Result<T>) -> Result<T, NetworkError> {
        result.map_err(|source| NetworkError::Step {
            action,
            path: self.path.clone(),
            source,
        })
    }
}

/// Puts the filter in front of the host's end of a link, or takes it away.
fn set_filter(config: &NetworkConfig, link: &str) -> io::Result<()> {
    match config.filter() {
        Some(filter) => filter.put(link),
        None => {
            drop_filter(link);
            Ok(())
        }
    }
}

/// Takes a filter away. One that stays does nothing without its link.
fn drop_filter(link: &str) {
    if let Err(error) = LinkFilter::remove(link) {
        tracing::debug!(link, %error, "a filter of addresses may stay behind");
    }
}

/// The MAC of the instance with this address: locally administered, the same on every host, so that its neighbours'
/// ARP entries stay right when it moves.
pub fn mac_of(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, b'v', a, b, c, d]
}

/// That of the instance's end of its link, where the instance is a virtual machine behind a bridge.
fn bridge_mac_of(address: Ipv4Addr) -> [u8; 6] {
    let [a, b, c, d] = address.octets();
    [0x02, b'b', a, b, c, d]
}

/// In the namespace: makes the tap link, and joins it with the instance's end.
fn join_tap(netlink: &Netlink, eth0: LinkIndex) -> io::Result<()> {
    tap::make(TAP)?;
    netlink.add_bridge(BRIDGE_INSIDE)?;
    let (bridge, tap) = (index_inside(BRIDGE_INSIDE)?, index_inside(TAP)?);
    for port in [eth0, tap] {
        netlink.change(port, Change::Master(bridge))?;
        netlink.change(port, Change::Up)?;
    }
    netlink.change(bridge, Change::Up)
}

/// The name of the host's end: at most 15 bytes, and its own for each namespace path of a host.
fn outside_name(path: &Path) -> String {
    // FNV-1a: stable across versions and restarts, unlike the standard library's hasher.
    let hash = path
        .as_os_str()
        .as_encoded_bytes()
        .iter()
        .fold(0x811c_9dc5u32, |hash, byte| {
            (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
        });
    format!("vb{hash:08x}")
}

/// A link's number in this thread's network namespace.
fn index_of(name: &str) -> Option<LinkIndex> {
    index_inside(name).ok()
}

fn index_inside(name: &str) -> io::Result<LinkIndex> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        None,
    )?;
    Ok(LinkIndex(rustix::net::netdevice::name_to_index(&socket, name)?))
}

/// Makes a network namespace and keeps it at `path`.
fn make_namespace(path: &Path) -> io::Result<()> {
    // A thread of its own: the namespace that it makes must not become that of a thread which goes on.
    on_a_thread(|| {
        // SAFETY: only descriptors (`FILES`) and signal state are unsafe to unshare; a network namespace is neither.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        rustix::mount::mount_bind("/proc/thread-self/ns/net", path)?;
        Ok(())
    })
}

fn remove_namespace(path: &Path) -> io::Result<()> {
    match rustix::mount::unmount(path, UnmountFlags::DETACH) {
        Ok(()) | Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOENT) => {}
        Err(errno) => return Err(errno.into()),
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_is_a_unicast_address_of_our_own_making() {
        let mac = mac_of(Ipv4Addr::new(10, 77, 1, 20));
        assert_eq!(mac[0] & 0b11, 0b10);
        assert_eq!(mac[2..], [10, 77, 1, 20]);
    }

    #[test]
    fn the_hosts_end_has_a_name_that_fits() {
        let name = outside_name(Path::new("/run/verbatim/net/web"));
        assert!(name.len() < 16);
        assert_ne!(name, outside_name(Path::new("/run/verbatim/net/web2")));
    }
}
