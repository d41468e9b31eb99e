//! Gratuitous ARP: RFC 826 packets by which a host tells its neighbours its own address (RFC 5227 §3).

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, Protocol, SendFlags, SocketFlags, SocketType};

use crate::netlink::LinkIndex;

const ETHERTYPE_ARP: u16 = 0x0806;
const ETHERTYPE_IPV4: u16 = 0x0800;
const HARDWARE_ETHERNET: u16 = 1;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
const BROADCAST: [u8; 6] = [0xff; 6];

/// Opens a socket that sends frames on a link of this thread's network namespace, and receives none.
pub(super) fn open(link: LinkIndex) -> io::Result<OwnedFd> {
    let no_protocol: Option<Protocol> = None;
    let socket = rustix::net::socket_with(
        AddressFamily::PACKET,
        SocketType::RAW,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        no_protocol,
    )?;
    bind(&socket, link)?;
    Ok(socket)
}

/// Ties a packet socket to a link (`man 7 packet`).
fn bind(socket: &OwnedFd, link: LinkIndex) -> io::Result<()> {
    // SAFETY: all of a `sockaddr_ll` may be zero; it is plain data.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_ifindex = i32::try_from(link.0).map_err(|_| io::ErrorKind::InvalidInput)?;
    // Protocol 0: nothing is received.
    let length = std::mem::size_of_val(&address) as libc::socklen_t;
    // SAFETY: the pointer and the length describe `address`, which lives across the call.
    match unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Announces `address` at `mac`: as a request, which every neighbour that knows the address takes in, and as a reply,
/// for those that only take replies.
pub(super) fn send(socket: &OwnedFd, address: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
    for operation in [REQUEST, REPLY] {
        rustix::net::send(socket, &frame(operation, address, mac), SendFlags::empty())?;
    }
    Ok(())
}

fn frame(operation: u16, address: Ipv4Addr, mac: [u8; 6]) -> Vec<u8> {
    let target = if operation == REQUEST { [0; 6] } else { BROADCAST };
    let address = address.octets();
    [
        &BROADCAST[..],
        &mac,
        &ETHERTYPE_ARP.to_be_bytes(),
        &HARDWARE_ETHERNET.to_be_bytes(),
        &ETHERTYPE_IPV4.to_be_bytes(),
        &[6, 4],
        &operation.to_be_bytes(),
        &mac,
        &address,
        &target,
        &address,
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_asks_for_its_own_address() {
        let frame = frame(REQUEST, Ipv4Addr::new(10, 0, 0, 7), [2, 0, 0, 0, 0, 1]);
        assert_eq!(frame.len(), 14 + 28);
        assert_eq!(
            frame[..14],
            [255, 255, 255, 255, 255, 255, 2, 0, 0, 0, 0, 1, 8, 6]
        );
        assert_eq!(frame[14..22], [0, 1, 8, 0, 6, 4, 0, 1]);
        assert_eq!(frame[22..28], frame[6..12], "sender hardware address");
        assert_eq!(frame[28..32], frame[38..42], "sender and target protocol address");
    }
}
