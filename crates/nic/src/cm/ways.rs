//! From addresses of programs to the RNIC's own and to ways.
//!
//! A program that has moved keeps the GID table that it knows: all of its ids' addresses and ways are of that. Messages go by the
//! counterparts of this RNIC ([`verbatim_device::gids`]).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use serde::{Deserialize, Serialize};
use verbatim_cm::{Gid, Mtu, Path};
use verbatim_device::gids::counterpart;
use verbatim_roce::UDP_PORT;

use crate::device::Device;
use crate::error::Refused;

/// What a program that has moved knows: the RNIC where it began.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known {
    pub node_guid: [u8; 8],
    pub gids: Vec<[u8; 16]>,
}

/// The ways of one program.
#[derive(Debug, Clone, Copy)]
pub struct Ways<'a> {
    pub device: &'a Device,
    /// What it knows, if that is another RNIC.
    pub known: Option<&'a Known>,
}

/// The index in a GID table of an own address.
pub fn index_of(gids: &[[u8; 16]], gid: Gid) -> Option<u8> {
    let index = gids.iter().position(|own| *own == gid.0)?;
    u8::try_from(index).ok()
}

/// What takes the place of `gid`, of the table `here`, in the table `there`.
pub fn stands_for(here: &[[u8; 16]], gid: Gid, there: &[[u8; 16]]) -> Option<Gid> {
    Some(Gid(there[counterpart(here, gid.0, there)?]))
}

impl Ways<'_> {
    /// The GID table that the program knows.
    pub fn gids(&self) -> Vec<[u8; 16]> {
        self.known
            .map_or_else(|| self.device.port.gid_table(), |known| known.gids.clone())
    }

    /// The GUID that the program knows.
    pub fn node_guid(&self) -> [u8; 8] {
        self.known
            .map_or(self.device.attr.node_guid, |known| known.node_guid)
    }

    /// The own addresses that the program knows, in the order of the GID table.
    fn own_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.gids().into_iter().map(|gid| Gid(gid).ip())
    }

    /// What a program means by an address of its own: none for the unspecified one, which is any. `ENODEV` if it is none.
    pub fn own(&self, address: IpAddr) -> Result<Option<IpAddr>, Refused> {
        if address.is_unspecified() {
            return Ok(None);
        }
        let address = self.loops_to(address).unwrap_or(address);
        match self.own_addresses().any(|own| own == address) {
            true => Ok(Some(address)),
            // As rdma_translate_ip of the kernel.
            false => Err(Refused::new(
                libc::ENODEV,
                format!("{address} is no address of this RNIC"),
            )),
        }
    }

    /// The own address that programs of this host mean by one of the loopback interface, if the RNIC's port is another interface.
    fn loops_to(&self, address: IpAddr) -> Option<IpAddr> {
        let is_elsewhere = address.is_loopback() && !self.own_addresses().any(|own| own.is_loopback());
        let mut same_family = self
            .own_addresses()
            .filter(|own| own.is_ipv4() == address.is_ipv4());
        is_elsewhere.then(|| same_family.next()).flatten()
    }

    /// The way to a destination, from that own address or from the one that the host's routes name. The error is a negative errno for
    /// an event.
    pub fn find(&self, from: Option<IpAddr>, to: IpAddr) -> Result<Path, i32> {
        let mut same_family = self.own_addresses().filter(|own| own.is_ipv4() == to.is_ipv4());
        let to = match to.is_unspecified() {
            true => same_family.next().ok_or(-libc::ENODEV)?,
            false => self.loops_to(to).unwrap_or(to),
        };
        let from = match from {
            Some(from) => from,
            None => self.routed(to)?,
        };
        if from.is_ipv4() != to.is_ipv4() {
            return Err(-libc::ENETUNREACH);
        }
        let mtu = Mtu::try_from(self.device.port.active_mtu).unwrap_or_default();
        Ok(Path::new(from.into(), to.into(), mtu))
    }

    /// The same way, as messages go: an own GID is this RNIC's.
    pub fn physical(&self, path: Path) -> Path {
        let Some(known) = self.known else { return path };
        let here = self.device.port.gid_table();
        let of_here = |gid: Gid| {
            let is_own = known.gids.contains(&gid.0);
            let here = is_own.then(|| stands_for(&known.gids, gid, &here));
            here.flatten().unwrap_or(gid)
        };
        Path {
            local: of_here(path.local),
            remote: of_here(path.remote),
            ..path
        }
    }

    /// The own address from which the host would send there. Nothing is sent.
    fn routed(&self, to: IpAddr) -> Result<IpAddr, i32> {
        let any: IpAddr = match to {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let mut end = SocketAddr::new(to, UDP_PORT);
        if let SocketAddr::V6(end) = &mut end
            && end.ip().is_unicast_link_local()
        {
            end.set_scope_id(self.device.interface.index);
        }
        let local = UdpSocket::bind((any, 0)).and_then(|socket| {
            socket.connect(end)?;
            socket.local_addr()
        });
        let local = local.map_err(|error| -error.raw_os_error().unwrap_or(libc::ENETUNREACH))?;
        let here = self.device.port.gid_table();
        let local = match self.known {
            Some(known) => stands_for(&here, local.ip().into(), &known.gids).map(Gid::ip),
            None => Some(local.ip()),
        };
        let mut own = self.own_addresses();
        // The host may have it on another interface: then it is sent from the RNIC's all the same.
        own.find(|own| Some(*own) == local)
            .or_else(|| self.own_addresses().find(|own| own.is_ipv4() == to.is_ipv4()))
            .ok_or(-libc::ENODEV)
    }
}
