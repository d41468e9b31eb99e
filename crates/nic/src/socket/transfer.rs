//! One call to the kernel, one batch.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;

use verbatim_roce::Traffic;

use super::UdpPort;

/// Room for one received batch: an IP packet's worth.
pub const RECEIVE_BYTES: usize = 65_536;

/// Room for the control messages of one datagram, in words so that it is aligned.
const CONTROL_WORDS: usize = 16;

/// What arrived in one call: datagrams of one flow and one size, but for the last, which may be shorter.
#[derive(Debug)]
pub struct Arrival<'a> {
    pub source: SocketAddr,
    /// What their IP headers say.
    pub traffic: Traffic,
    pub bytes: &'a [u8],
    pub segment_bytes: usize,
}

/// A socket address as the kernel has it.
#[repr(C)]
pub(super) union Address {
    family: libc::sa_family_t,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl Address {
    fn new(end: SocketAddr) -> (Self, libc::socklen_t) {
        match end {
            SocketAddr::V4(end) => {
                let v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: end.port().to_be(),
                    sin_addr: libc::in_addr {
                        s_addr: u32::from(*end.ip()).to_be(),
                    },
                    sin_zero: [0; 8],
                };
                (Self { v4 }, size_of::<libc::sockaddr_in>() as libc::socklen_t)
            }
            SocketAddr::V6(end) => {
                let v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: end.port().to_be(),
                    sin6_flowinfo: 0,
                    sin6_addr: libc::in6_addr {
                        s6_addr: end.ip().octets(),
                    },
                    sin6_scope_id: end.scope_id(),
                };
                (Self { v6 }, size_of::<libc::sockaddr_in6>() as libc::socklen_t)
            }
        }
    }

    /// # Safety
    /// The kernel has written the address of a datagram here.
    pub(super) unsafe fn get(&self) -> SocketAddr {
        // SAFETY: the kernel sets the family of each address, which tells the variant.
        unsafe {
            match i32::from(self.family) {
                libc::AF_INET6 => SocketAddr::new(
                    IpAddr::V6(Ipv6Addr::from(self.v6.sin6_addr.s6_addr)),
                    u16::from_be(self.v6.sin6_port),
                ),
                _ => SocketAddr::new(
                    IpAddr::V4(Ipv4Addr::from(u32::from_be(self.v4.sin_addr.s_addr))),
                    u16::from_be(self.v4.sin_port),
                ),
            }
        }
    }
}

impl UdpPort {
    /// Sends datagrams of `segment_bytes` bytes each, but for the last, which may be shorter, in one call.
    pub fn send(
        &mut self,
        destination: SocketAddr,
        bytes: &[u8],
        segment_bytes: usize,
        traffic: Traffic,
    ) -> io::Result<()> {
        self.set_traffic(traffic).map_err(io::Error::other)?;
        let (mut address, address_bytes) = Address::new(self.end(destination.ip(), destination.port()));
        let mut vector = libc::iovec {
            iov_base: bytes.as_ptr().cast_mut().cast(),
            iov_len: bytes.len(),
        };
        let mut control = [0u64; CONTROL_WORDS];
        // SAFETY: all pointers in the header are to locals that outlive the call, with their sizes; the control buffer
        // is zeroed, aligned and long enough for one control message of two bytes. sendmsg only reads them.
        unsafe {
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_name = (&raw mut address).cast();
            header.msg_namelen = address_bytes;
            header.msg_iov = &mut vector;
            header.msg_iovlen = 1;
            if segment_bytes < bytes.len() {
                header.msg_control = control.as_mut_ptr().cast();
                header.msg_controllen = libc::CMSG_SPACE(size_of::<u16>() as u32) as usize;
                let message = libc::CMSG_FIRSTHDR(&header);
                (*message).cmsg_level = libc::SOL_UDP;
                (*message).cmsg_type = libc::UDP_SEGMENT;
                (*message).cmsg_len = libc::CMSG_LEN(size_of::<u16>() as u32) as usize;
                libc::CMSG_DATA(message)
                    .cast::<u16>()
                    .write_unaligned(segment_bytes as u16);
            }
            let send = || match libc::sendmsg(self.fd.as_raw_fd(), &header, libc::MSG_NOSIGNAL) {
                sent if sent >= 0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            };
            match send() {
                // A host's word about what was sent before, told once.
                Err(error) if error.raw_os_error() == Some(libc::ECONNREFUSED) => send(),
                sent => sent,
            }
        }
    }

    /// Receives what one call gives into `buffer`, of [`RECEIVE_BYTES`]; `None` if nothing has come.
    pub fn receive<'b>(&mut self, buffer: &'b mut [u8]) -> io::Result<Option<Arrival<'b>>> {
        let mut vector = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        let mut control = [0u64; CONTROL_WORDS];
        let mut segment_bytes = None;
        let mut traffic = Traffic::default();
        // SAFETY: all pointers in the header are to buffers that outlive the call, with their sizes; the control
        // messages that come back are walked with the macros made for it, and have the types that ip(7), ipv6(7) and
        // udp(7) name.
        let (received, source) = unsafe {
            let mut address: Address = std::mem::zeroed();
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_name = (&raw mut address).cast();
            header.msg_namelen = size_of::<Address>() as libc::socklen_t;
            header.msg_iov = &mut vector;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(&control);
            let received = libc::recvmsg(self.fd.as_raw_fd(), &mut header, 0);
            if received < 0 {
                let error = io::Error::last_os_error();
                return match error.raw_os_error() {
                    // ECONNREFUSED and the like: an ICMP answer to an earlier send, which says nothing about arrivals.
                    Some(libc::EAGAIN | libc::EINTR) => Ok(None),
                    _ => Err(error),
                };
            }
            let mut message = libc::CMSG_FIRSTHDR(&header);
            while !message.is_null() {
                let data = libc::CMSG_DATA(message);
                let int = || data.cast::<i32>().read_unaligned();
                match ((*message).cmsg_level, (*message).cmsg_type) {
                    (libc::SOL_UDP, libc::UDP_GRO) => segment_bytes = Some(int() as usize),
                    (libc::SOL_IP, libc::IP_TOS) => traffic.traffic_class = data.read(),
                    (libc::SOL_IPV6, libc::IPV6_TCLASS) => traffic.traffic_class = int() as u8,
                    (libc::SOL_IP, libc::IP_TTL) | (libc::SOL_IPV6, libc::IPV6_HOPLIMIT) => {
                        traffic.hop_limit = int() as u8;
                    }
                    _ => {}
                }
                message = libc::CMSG_NXTHDR(&header, message);
            }
            (received as usize, address.get())
        };
        Ok(Some(Arrival {
            source,
            traffic,
            bytes: &buffer[..received],
            segment_bytes: segment_bytes.unwrap_or(received).max(1),
        }))
    }
}
