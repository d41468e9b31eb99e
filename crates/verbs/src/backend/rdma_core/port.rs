//! What a device and its port are.
//!
//! A device is shown with its first port. Its GID table keeps its indices; entries that are not RoCE version 2 are shown as
//! empty, since the objects above know no other kind.

use std::mem::MaybeUninit;
use std::net::Ipv6Addr;

use verbatim_device::control::{AddressVector, DeviceAttr, Gid, PortAttr};

use super::convert;
use super::ffi;
use super::live::Opened;
use crate::error::VerbsError;

const PORT: u8 = 1;

pub fn query_device(name: &str, opened: &Opened) -> Result<DeviceAttr, VerbsError> {
    let library = opened.library();
    let mut attr = MaybeUninit::<ffi::ibv_device_attr>::zeroed();
    // SAFETY: the device is open; the structure is as the header has it.
    let returned = unsafe { (library.functions().ibv_query_device)(opened.context(), attr.as_mut_ptr()) };
    library.check("query_device", returned)?;
    // SAFETY: plain numbers, for which zeroes would do too.
    Ok(convert::device_attr(name, unsafe { attr.assume_init_ref() }))
}

pub fn query_port(name: &str, opened: &Opened) -> Result<PortAttr, VerbsError> {
    let library = opened.library();
    let mut port = ffi::ibv_port_attr::default();
    // SAFETY: the device is open. The library fills a structure of the header's, or of an older and shorter one.
    let returned = unsafe { (library.functions().ibv_query_port)(opened.context(), PORT, &mut port) };
    library.check("query_port", returned)?;
    if port.link_layer != ffi::LINK_LAYER_ETHERNET {
        return Err(VerbsError::Unsupported(format!(
            "{name} is not an Ethernet device, and only RoCE is supported"
        )));
    }
    let entries = gid_table(opened, port.gid_tbl_len.max(0) as usize)?;
    let netdev = entries.iter().find(|entry| entry.ndev_ifindex != 0);
    let netdev = netdev
        .and_then(|entry| interface_name(entry.ndev_ifindex))
        .unwrap_or_default();
    Ok(PortAttr {
        active_mtu: port.active_mtu as u8,
        max_mtu: port.max_mtu as u8,
        gids: gids(&entries),
        netdev,
        max_msg_bytes: port.max_msg_sz,
    })
}

fn gid_table(opened: &Opened, length: usize) -> Result<Vec<ffi::ibv_gid_entry>, VerbsError> {
    let library = opened.library();
    let mut entries = vec![ffi::ibv_gid_entry::default(); length.max(1)];
    // SAFETY: the device is open; the room is what the call is told.
    let found = unsafe {
        (library.functions()._ibv_query_gid_table)(
            opened.context(),
            entries.as_mut_ptr(),
            entries.len(),
            0,
            size_of::<ffi::ibv_gid_entry>(),
        )
    };
    // This one returns its errno as a negative number.
    let found = usize::try_from(found).map_err(|_| VerbsError::Refused {
        verb: "query_gid_table",
        errno: found.unsigned_abs() as i32,
        message: "the device's GIDs cannot be read".to_owned(),
    })?;
    entries.truncate(found);
    Ok(entries)
}

/// The table by index, up to the last entry that counts.
fn gids(entries: &[ffi::ibv_gid_entry]) -> Vec<Gid> {
    let ours = |entry: &&ffi::ibv_gid_entry| {
        entry.port_num == PORT.into() && entry.gid_type == ffi::GID_TYPE_ROCE_V2
    };
    let mut gids = Vec::new();
    for entry in entries.iter().filter(ours) {
        let index = entry.gid_index as usize;
        if gids.len() <= index {
            gids.resize(index + 1, Gid::default());
        }
        gids[index] = Gid {
            gid: entry.gid.raw,
            ifindex: entry.ndev_ifindex,
        };
    }
    gids
}

/// An address vector to the port itself: by an IPv4 address if it has one, and by a link-local one if it has no other.
pub fn way_to_itself(port: &PortAttr) -> AddressVector {
    let rank = |gid: [u8; 16]| match Ipv6Addr::from(gid) {
        address if address.is_unspecified() => 3,
        address if address.to_ipv4_mapped().is_some() => 0,
        address if address.is_unicast_link_local() => 2,
        _ => 1,
    };
    let best = (0..port.gids.len()).min_by_key(|index| rank(port.gids[*index].gid));
    let index = best.unwrap_or(0);
    AddressVector {
        dgid: port.gids.get(index).map(|entry| entry.gid).unwrap_or_default(),
        sgid_index: index as u8,
        hop_limit: 1,
        port_num: PORT,
        ..AddressVector::default()
    }
}

fn interface_name(index: u32) -> Option<String> {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        None,
    );
    rustix::net::netdevice::index_to_name(socket.ok()?, index).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_to_itself_prefers_what_is_routed_everywhere() {
        let gid = |text: &str| Gid {
            gid: text.parse::<Ipv6Addr>().unwrap().octets(),
            ifindex: 1,
        };
        let way = |gids: &[&str]| {
            let port = PortAttr {
                gids: gids.iter().map(|text| gid(text)).collect(),
                ..PortAttr::default()
            };
            way_to_itself(&port).sgid_index
        };
        assert_eq!(way(&["::", "fe80::1", "2001:db8::1", "::ffff:10.0.0.1"]), 3);
        assert_eq!(way(&["::", "fe80::1", "2001:db8::1"]), 2);
        assert_eq!(way(&["::", "fe80::1"]), 1);
        assert_eq!(way(&[]), 0);
    }

    #[test]
    fn gids_keep_their_indices_and_other_kinds_leave_holes() {
        let entry = |index, kind, port| ffi::ibv_gid_entry {
            gid: ffi::ibv_gid {
                raw: [index as u8 + 1; 16],
            },
            gid_index: index,
            port_num: port,
            gid_type: kind,
            ndev_ifindex: 3,
        };
        let v2 = ffi::GID_TYPE_ROCE_V2;
        let table = gids(&[entry(0, 1, 1), entry(1, v2, 1), entry(3, v2, 1), entry(4, v2, 2)]);
        let firsts: Vec<u8> = table.iter().map(|gid| gid.gid[0]).collect();
        assert_eq!(firsts, [0, 2, 0, 4]);
        assert_eq!(table[0], Gid::default());
    }
}
