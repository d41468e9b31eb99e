//! The RNIC's UDP sockets: batches out with generic segmentation offload, batches in with generic receive offload
//! (udp(7), `UDP_SEGMENT` and `UDP_GRO`).
//!
//! They are not connected and have `IP_MTU_DISCOVER=DO`: so the kernel sets the IPv4 identification, which the ICRC
//! covers, to 0, or to the index of the segment in its batch, and never fragments. There is one for each address in the
//! GID table and one for each multicast group, bound to its address, so that it is known whom a datagram was sent to.

mod refusals;
mod transfer;

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use verbatim_roce::Traffic;

pub use transfer::{Arrival, RECEIVE_BYTES};

use crate::error::NicError;

/// `IPV6_FREEBIND` of linux/in6.h, which libc does not name.
const IPV6_FREEBIND: i32 = 78;

/// Room in the socket of requests, for messages and for what hosts say of them.
const REQUESTS_BYTES: usize = 64 << 10;

/// A socket, bound to an address of an interface, or to a multicast group on it.
#[derive(Debug)]
pub struct UdpPort {
    fd: OwnedFd,
    address: IpAddr,
    /// The interface's index: the scope of link-local addresses.
    ifindex: u32,
    /// What the IP headers of its packets say now.
    traffic: Traffic,
}

impl UdpPort {
    /// For an own address.
    pub fn bind(address: IpAddr, ifindex: u32, port: u16, buffer_bytes: usize) -> Result<Self, NicError> {
        let mut socket = Self::new(address, ifindex, buffer_bytes)?;
        match address {
            IpAddr::V4(address) => {
                let interface = address.octets();
                socket.set_bytes(libc::SOL_IP, libc::IP_MULTICAST_IF, &interface)?;
            }
            IpAddr::V6(_) => {
                // A new address takes a second until it is usable (RFC 4862, duplicate address detection).
                socket.set(libc::SOL_IPV6, IPV6_FREEBIND, 1)?;
                socket.set(libc::SOL_IPV6, libc::IPV6_MULTICAST_IF, ifindex as i32)?;
            }
        }
        socket.bind_to(port)?;
        Ok(socket)
    }

    /// For requests of queue pair 1 only, from another port: hosts that refuse them are heard of ([`Self::take_refusals`]). On the socket of
    /// all packets each such word would make one batch fail that is somebody else's.
    pub fn bind_for_requests(address: IpAddr, ifindex: u32) -> Result<Self, NicError> {
        let socket = Self::bind(address, ifindex, 0, REQUESTS_BYTES)?;
        let (level, option) = match address {
            IpAddr::V4(_) => (libc::SOL_IP, libc::IP_RECVERR),
            IpAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_RECVERR),
        };
        socket.set(level, option, 1)?;
        Ok(socket)
    }

    /// The port that it is bound to.
    pub fn port(&self) -> Option<u16> {
        let name = rustix::net::getsockname(&self.fd).ok()?;
        SocketAddr::try_from(name).ok().map(|end| end.port())
    }

    /// For a multicast group, of which it becomes a member on the interface that has the address `over`.
    pub fn join(
        group: IpAddr,
        over: IpAddr,
        ifindex: u32,
        port: u16,
        buffer_bytes: usize,
    ) -> Result<Self, NicError> {
        let mut socket = Self::new(group, ifindex, buffer_bytes)?;
        // Other RNICs of this host may be members too.
        socket.set(libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        socket.bind_to(port)?;
        match (group, over) {
            (IpAddr::V4(group), _) => {
                let over = match over {
                    IpAddr::V4(over) => over.octets(),
                    IpAddr::V6(_) => [0; 4],
                };
                // A struct ip_mreqn: group, own address, interface.
                let mut request = [0; 12];
                request[..4].copy_from_slice(&group.octets());
                request[4..8].copy_from_slice(&over);
                request[8..].copy_from_slice(&ifindex.to_ne_bytes());
                socket.set_bytes(libc::SOL_IP, libc::IP_ADD_MEMBERSHIP, &request)?;
                // Only this socket's own memberships count.
                socket.set(libc::SOL_IP, libc::IP_MULTICAST_ALL, 0)?;
            }
            (IpAddr::V6(group), _) => {
                // A struct ipv6_mreq: group, interface.
                let mut request = [0; 20];
                request[..16].copy_from_slice(&group.octets());
                request[16..].copy_from_slice(&ifindex.to_ne_bytes());
                socket.set_bytes(libc::SOL_IPV6, libc::IPV6_ADD_MEMBERSHIP, &request)?;
            }
        }
        Ok(socket)
    }

    fn new(address: IpAddr, ifindex: u32, buffer_bytes: usize) -> Result<Self, NicError> {
        let family = match address {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = rustix::net::socket_with(family, SocketType::DGRAM, flags, None)
            .map_err(|errno| NicError::os("socket", errno))?;
        let socket = Self {
            fd,
            address,
            ifindex,
            traffic: Traffic::default(),
        };
        match address {
            IpAddr::V4(_) => {
                socket.set(libc::SOL_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
                socket.set(libc::SOL_IP, libc::IP_RECVTOS, 1)?;
                socket.set(libc::SOL_IP, libc::IP_RECVTTL, 1)?;
            }
            IpAddr::V6(_) => {
                socket.set(libc::SOL_IPV6, libc::IPV6_V6ONLY, 1)?;
                socket.set(libc::SOL_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)?;
                socket.set(libc::SOL_IPV6, libc::IPV6_RECVTCLASS, 1)?;
                socket.set(libc::SOL_IPV6, libc::IPV6_RECVHOPLIMIT, 1)?;
                // RNICs, and the kernel's rxe, leave the UDP checksum 0: the ICRC covers more (annex A17). Without this
                // such a packet is dropped over IPv6 (udp6_csum_init of net/ipv6, RFC 8200 §8.1).
                socket.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1)?;
            }
        }
        socket.set(libc::SOL_UDP, libc::UDP_GRO, 1)?;
        socket.set_hops(Traffic::default().hop_limit)?;
        let bytes = buffer_bytes.min(i32::MAX as usize / 2) as i32;
        for (force, plain) in [
            (libc::SO_RCVBUFFORCE, libc::SO_RCVBUF),
            (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF),
        ] {
            // Without CAP_NET_ADMIN the kernel's limit (net.core.rmem_max) applies.
            if socket.set(libc::SOL_SOCKET, force, bytes).is_err() {
                socket.set(libc::SOL_SOCKET, plain, bytes)?;
            }
        }
        Ok(socket)
    }

    fn bind_to(&mut self, port: u16) -> Result<(), NicError> {
        rustix::net::bind(&self.fd, &self.end(self.address, port)).map_err(|errno| NicError::Bind {
            address: self.address,
            port,
            source: errno.into(),
        })
    }

    /// The address that it is bound to.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// With the scope that link-local addresses need.
    fn end(&self, address: IpAddr, port: u16) -> SocketAddr {
        match address {
            IpAddr::V4(address) => SocketAddrV4::new(address, port).into(),
            IpAddr::V6(address) => {
                let [first, second, ..] = address.octets();
                // fe80::/10, and ff01::/16 and ff02::/16 with any flags (RFC 4291 §2.5.6, §2.7).
                let link_local =
                    first == 0xfe && second & 0xc0 == 0x80 || first == 0xff && second & 0x0f <= 2;
                let scope = if link_local { self.ifindex } else { 0 };
                SocketAddrV6::new(address, port, 0, scope).into()
            }
        }
    }

    /// The IP headers of what is sent from now on. Most RNICs' partners all ask for the same, so that it is set once.
    fn set_traffic(&mut self, traffic: Traffic) -> Result<(), NicError> {
        if traffic == self.traffic {
            return Ok(());
        }
        if traffic.traffic_class != self.traffic.traffic_class {
            let (level, option) = match self.address {
                IpAddr::V4(_) => (libc::SOL_IP, libc::IP_TOS),
                IpAddr::V6(_) => (libc::SOL_IPV6, libc::IPV6_TCLASS),
            };
            self.set(level, option, traffic.traffic_class.into())?;
        }
        if traffic.hop_limit != self.traffic.hop_limit {
            self.set_hops(traffic.hop_limit)?;
        }
        self.traffic = traffic;
        Ok(())
    }

    fn set_hops(&self, hops: u8) -> Result<(), NicError> {
        let (level, options) = match self.address {
            IpAddr::V4(_) => (libc::SOL_IP, [libc::IP_TTL, libc::IP_MULTICAST_TTL]),
            IpAddr::V6(_) => (
                libc::SOL_IPV6,
                [libc::IPV6_UNICAST_HOPS, libc::IPV6_MULTICAST_HOPS],
            ),
        };
        options
            .into_iter()
            .try_for_each(|option| self.set(level, option, hops.into()))
    }

    fn set(&self, level: i32, option: i32, value: i32) -> Result<(), NicError> {
        self.set_bytes(level, option, &value.to_ne_bytes())
    }

    fn set_bytes(&self, level: i32, option: i32, value: &[u8]) -> Result<(), NicError> {
        // SAFETY: the option's value lives through the call, with its length; all options that are set here are ints or
        // structures without padding.
        match unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                option,
                value.as_ptr().cast(),
                value.len() as libc::socklen_t,
            )
        } {
            0 => Ok(()),
            _ => Err(NicError::os("setsockopt", io::Error::last_os_error())),
        }
    }
}

impl AsFd for UdpPort {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags};
    use std::net::{Ipv4Addr, Ipv6Addr};

    const PORT: u16 = 47_913;
    /// The index of the loopback interface in every network namespace.
    const LO: u32 = 1;

    fn wait(socket: &UdpPort) {
        rustix::event::poll(&mut [PollFd::new(&socket.fd, PollFlags::IN)], None).unwrap();
    }

    fn a_batch_arrives(from: &mut UdpPort, to: &mut UdpPort, traffic: Traffic) {
        let destination = SocketAddr::new(to.address, PORT);
        let mut buffer = vec![0; RECEIVE_BYTES];
        assert!(to.receive(&mut buffer).unwrap().is_none());
        let bytes: Vec<u8> = (0..1050u32).map(|n| n as u8).collect();
        from.send(destination, &bytes, 100, traffic).unwrap();
        let mut seen = Vec::new();
        while seen.len() < bytes.len() {
            wait(to);
            let arrival = to.receive(&mut buffer).unwrap().unwrap();
            assert_eq!(arrival.source, SocketAddr::new(from.address, PORT));
            assert_eq!(arrival.traffic, traffic);
            let mut datagrams = arrival.bytes.chunks(arrival.segment_bytes);
            assert!(datagrams.all(|datagram| datagram.len() <= 100));
            seen.extend_from_slice(arrival.bytes);
        }
        assert_eq!(seen, bytes);
        from.send(destination, b"one", 3, Traffic::default()).unwrap();
        wait(to);
        let arrival = to.receive(&mut buffer).unwrap().unwrap();
        assert_eq!((arrival.bytes, arrival.segment_bytes), (&b"one"[..], 3));
        assert_eq!(arrival.traffic, Traffic::default());
    }

    #[test]
    fn a_batch_arrives_with_its_segments_and_the_values_of_its_ip_header() {
        let marked = Traffic {
            traffic_class: 0x68,
            hop_limit: 7,
            flow_label: 0,
        };
        let bind = |address: IpAddr| UdpPort::bind(address, LO, PORT, 1 << 20);
        let [a, b] = [1, 2].map(|host| IpAddr::from([127, 7, 1, host]));
        let (mut from, mut to) = (bind(a).unwrap(), bind(b).unwrap());
        assert!(matches!(bind(b), Err(NicError::Bind { .. })));
        a_batch_arrives(&mut from, &mut to, marked);

        let lo = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let mut to = bind(lo).unwrap();
        let mut from = UdpPort::new(lo, LO, 1 << 20).unwrap();
        from.bind_to(PORT - 1).unwrap();
        from.send(SocketAddr::new(lo, PORT), b"six", 3, marked).unwrap();
        wait(&to);
        let mut buffer = vec![0; RECEIVE_BYTES];
        let arrival = to.receive(&mut buffer).unwrap().unwrap();
        assert_eq!(
            (arrival.source, arrival.traffic),
            (SocketAddr::new(lo, PORT - 1), marked)
        );
    }

    #[test]
    fn packets_without_a_udp_checksum_are_taken_over_ipv6() {
        let lo = IpAddr::V6(Ipv6Addr::LOCALHOST);
        let mut to = UdpPort::bind(lo, LO, PORT + 1, 1 << 20).unwrap();
        let mut from = UdpPort::new(lo, LO, 1 << 20).unwrap();
        from.set(libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1).unwrap();
        from.bind_to(PORT - 2).unwrap();
        from.send(SocketAddr::new(lo, PORT + 1), b"six", 3, Traffic::default())
            .unwrap();
        wait(&to);
        let mut buffer = vec![0; RECEIVE_BYTES];
        assert_eq!(to.receive(&mut buffer).unwrap().unwrap().bytes, b"six");
    }

    #[test]
    fn a_group_reaches_its_members_and_nobody_else() {
        let group = IpAddr::from([224, 7, 1, 9]);
        let own = IpAddr::V4(Ipv4Addr::new(127, 7, 1, 3));
        let mut sender = UdpPort::bind(own, LO, PORT, 1 << 20).unwrap();
        let join = |group| UdpPort::join(group, own, LO, PORT, 1 << 20).unwrap();
        let mut members = [join(group), join(group)];
        let mut other = join(IpAddr::from([224, 7, 1, 10]));
        sender
            .send(SocketAddr::new(group, PORT), b"all", 3, Traffic::default())
            .unwrap();
        let mut buffer = vec![0; RECEIVE_BYTES];
        for member in &mut members {
            wait(member);
            assert_eq!(member.receive(&mut buffer).unwrap().unwrap().bytes, b"all");
        }
        assert!(other.receive(&mut buffer).unwrap().is_none());
    }

    #[test]
    fn link_local_addresses_have_the_scope_of_their_interface() {
        let socket = UdpPort::new(Ipv6Addr::LOCALHOST.into(), 7, 1 << 16).unwrap();
        let scope = |address: &str| match socket.end(address.parse().unwrap(), 1) {
            SocketAddr::V6(end) => end.scope_id(),
            SocketAddr::V4(_) => panic!("an IPv6 address"),
        };
        assert_eq!(["fe80::1", "febf::1", "ff02::1", "ff12::1"].map(scope), [7; 4]);
        assert_eq!(["fd00::1", "2001:db8::1", "ff0e::1", "::1"].map(scope), [0; 4]);
    }
}
