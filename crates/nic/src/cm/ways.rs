//! From addresses of programs to the RNIC's own and to ways.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use verbatim_cm::{Gid, Mtu, Path};
use verbatim_roce::UDP_PORT;

use crate::device::Device;
use crate::error::Refused;

/// The RNIC's own addresses, in the order of the GID table.
pub fn own_addresses(device: &Device) -> impl Iterator<Item = IpAddr> + '_ {
    device.port.gids.iter().map(|entry| Gid(entry.gid).ip())
}

/// The index in the GID table of an own address.
pub fn index_of(gids: &[[u8; 16]], gid: Gid) -> Option<u8> {
    let index = gids.iter().position(|own| *own == gid.0)?;
    u8::try_from(index).ok()
}

/// What a program means by an address of its own: none for the unspecified one, which is any. `EADDRNOTAVAIL` if the RNIC has not
/// got it.
pub fn own(device: &Device, address: IpAddr) -> Result<Option<IpAddr>, Refused> {
    if address.is_unspecified() {
        return Ok(None);
    }
    let address = loops_to(device, address).unwrap_or(address);
    match own_addresses(device).any(|own| own == address) {
        true => Ok(Some(address)),
        // As rdma_translate_ip of the kernel.
        false => Err(Refused::new(
            libc::ENODEV,
            format!("{address} is no address of this RNIC"),
        )),
    }
}

/// The own address that programs of this host mean by one of the loopback interface, if the RNIC's port is another interface.
fn loops_to(device: &Device, address: IpAddr) -> Option<IpAddr> {
    let is_elsewhere = address.is_loopback() && !own_addresses(device).any(|own| own.is_loopback());
    let mut same_family = own_addresses(device).filter(|own| own.is_ipv4() == address.is_ipv4());
    is_elsewhere.then(|| same_family.next()).flatten()
}

/// The way to a destination, from that own address or from the one that the host's routes name. The error is a negative errno for
/// an event.
pub fn find(device: &Device, from: Option<IpAddr>, to: IpAddr) -> Result<Path, i32> {
    let mut same_family = own_addresses(device).filter(|own| own.is_ipv4() == to.is_ipv4());
    let to = match to.is_unspecified() {
        true => same_family.next().ok_or(-libc::ENODEV)?,
        false => loops_to(device, to).unwrap_or(to),
    };
    let from = match from {
        Some(from) => from,
        None => routed(device, to)?,
    };
    if from.is_ipv4() != to.is_ipv4() {
        return Err(-libc::ENETUNREACH);
    }
    let mtu = Mtu::try_from(device.port.active_mtu).unwrap_or_default();
    Ok(Path::new(from.into(), to.into(), mtu))
}

/// The own address from which the host would send there. Nothing is sent.
fn routed(device: &Device, to: IpAddr) -> Result<IpAddr, i32> {
    let any: IpAddr = match to {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let mut end = SocketAddr::new(to, UDP_PORT);
    if let SocketAddr::V6(end) = &mut end
        && end.ip().is_unicast_link_local()
    {
        end.set_scope_id(device.interface.index);
    }
    let local = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(end)?;
        socket.local_addr()
    });
    let local = local.map_err(|error| -error.raw_os_error().unwrap_or(libc::ENETUNREACH))?;
    let mut own = own_addresses(device);
    // The host may have it on another interface: then it is sent from the RNIC's all the same.
    own.find(|own| *own == local.ip())
        .or_else(|| own_addresses(device).find(|own| own.is_ipv4() == to.is_ipv4()))
        .ok_or(-libc::ENODEV)
}
