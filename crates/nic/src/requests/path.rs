//! From an address vector to the way of packets.

use std::net::{IpAddr, Ipv6Addr};

use verbatim_device::control::AddressVector;
use verbatim_roce::{Path, Traffic, UDP_PORT};

use crate::device::Device;
use crate::error::Refused;
use crate::multicast::group_address;

/// Checks the address vector's indices and resolves its addresses.
pub fn resolve(device: &Device, av: &AddressVector) -> Result<Path, Refused> {
    check(device, av)?;
    let source = address(device.port.gids[usize::from(av.sgid_index)].gid);
    let destination = group_address(av.dgid).unwrap_or_else(|| address(av.dgid));
    let one_host = match destination {
        IpAddr::V4(to) => !to.is_unspecified() && !to.is_broadcast(),
        IpAddr::V6(to) => !to.is_unspecified(),
    };
    if !one_host {
        return Err(Refused::invalid(format!(
            "{destination} is not the address of a host or a group"
        )));
    }
    if source.is_ipv4() != destination.is_ipv4() {
        return Err(Refused::invalid(format!(
            "the gid of index {} is {source}, which has no way to {destination}",
            av.sgid_index
        )));
    }
    let default = Traffic::default();
    Ok(Path {
        source,
        destination,
        source_port: UDP_PORT,
        traffic: Traffic {
            traffic_class: av.traffic_class,
            // As the kernel does, which asks the route instead.
            hop_limit: if av.hop_limit == 0 {
                default.hop_limit
            } else {
                av.hop_limit
            },
            // The flow label of packets is the kernel's to choose (RFC 6437).
            flow_label: default.flow_label,
        },
    })
}

/// Checks that the address vector's indices exist.
pub fn check(device: &Device, av: &AddressVector) -> Result<(), Refused> {
    if usize::from(av.sgid_index) >= device.port.gids.len() {
        return Err(Refused::invalid(format!(
            "there is no gid index {}",
            av.sgid_index
        )));
    }
    if av.port_num != 1 {
        return Err(Refused::invalid(format!(
            "there is no port {}, only port 1",
            av.port_num
        )));
    }
    Ok(())
}

/// The IP address of a GID.
pub fn address(gid: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}
