//! The RNIC's UDP socket: batches out with generic segmentation offload, batches in with generic receive offload
//! (udp(7), `UDP_SEGMENT` and `UDP_GRO`).
//!
//! It is not connected and has `IP_MTU_DISCOVER=DO`: so the kernel sets the IPv4 identification, which the ICRC covers,
//! to 0, or to the index of the segment in its batch, and never fragments.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::error::NicError;

/// Room for one received batch: an IP packet's worth.
const RECEIVE_BYTES: usize = 65_536;

/// Room for the control messages of one datagram, in words so that it is aligned.
const CONTROL_WORDS: usize = 16;

/// The socket.
#[derive(Debug)]
pub struct UdpPort {
    fd: OwnedFd,
    buffer: Box<[u8]>,
}

/// What arrived in one call: datagrams of one flow and one size, but for the last, which may be shorter.
#[derive(Debug)]
pub struct Arrival<'a> {
    pub source: SocketAddrV4,
    pub bytes: &'a [u8],
    pub segment_bytes: usize,
}

impl UdpPort {
    pub fn bind(address: Ipv4Addr, port: u16, buffer_bytes: usize) -> Result<Self, NicError> {
        let fd = rustix::net::socket_with(
            AddressFamily::INET,
            SocketType::DGRAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(|errno| NicError::os("socket", errno))?;
        let socket = Self {
            fd,
            buffer: vec![0; RECEIVE_BYTES].into_boxed_slice(),
        };
        socket.set(libc::SOL_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)?;
        socket.set(libc::SOL_UDP, libc::UDP_GRO, 1)?;
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
        rustix::net::bind(&socket.fd, &SocketAddrV4::new(address, port)).map_err(|errno| NicError::Bind {
            address,
            port,
            source: errno.into(),
        })?;
        Ok(socket)
    }

    fn set(&self, level: i32, option: i32, value: i32) -> Result<(), NicError> {
        let size = size_of::<i32>() as libc::socklen_t;
        // SAFETY: the option's value is an int that lives through the call.
        match unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                option,
                (&raw const value).cast(),
                size,
            )
        } {
            0 => Ok(()),
            _ => Err(NicError::os("setsockopt", io::Error::last_os_error())),
        }
    }

    /// Sends datagrams of `segment_bytes` bytes each, but for the last, which may be shorter, in one call.
    pub fn send(&self, destination: SocketAddrV4, bytes: &[u8], segment_bytes: usize) -> io::Result<()> {
        let mut address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: destination.port().to_be(),
            sin_addr: libc::in_addr {
                s_addr: u32::from(*destination.ip()).to_be(),
            },
            sin_zero: [0; 8],
        };
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
            header.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
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
            match libc::sendmsg(self.fd.as_raw_fd(), &header, libc::MSG_NOSIGNAL) {
                sent if sent >= 0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        }
    }

    /// Receives what one call gives; `None` if nothing has come.
    pub fn receive(&mut self) -> io::Result<Option<Arrival<'_>>> {
        let mut vector = libc::iovec {
            iov_base: self.buffer.as_mut_ptr().cast(),
            iov_len: self.buffer.len(),
        };
        let mut control = [0u64; CONTROL_WORDS];
        // SAFETY: all pointers in the header are to buffers that outlive the call, with their sizes; the control
        // messages that come back are walked with the macros made for it.
        let (received, address, segment_bytes) = unsafe {
            let mut address: libc::sockaddr_in = std::mem::zeroed();
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_name = (&raw mut address).cast();
            header.msg_namelen = size_of::<libc::sockaddr_in>() as libc::socklen_t;
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
            let mut segment_bytes = None;
            let mut message = libc::CMSG_FIRSTHDR(&header);
            while !message.is_null() {
                if ((*message).cmsg_level, (*message).cmsg_type) == (libc::SOL_UDP, libc::UDP_GRO) {
                    segment_bytes = Some(libc::CMSG_DATA(message).cast::<i32>().read_unaligned());
                }
                message = libc::CMSG_NXTHDR(&header, message);
            }
            (received as usize, address, segment_bytes)
        };
        let ip = Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr));
        Ok(Some(Arrival {
            source: SocketAddrV4::new(ip, u16::from_be(address.sin_port)),
            bytes: &self.buffer[..received],
            segment_bytes: segment_bytes.map_or(received, |bytes| bytes as usize).max(1),
        }))
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

    #[test]
    fn a_batch_arrives_with_its_segments() {
        const PORT: u16 = 47_913;
        let [a, b] = [Ipv4Addr::new(127, 7, 1, 1), Ipv4Addr::new(127, 7, 1, 2)];
        let from = UdpPort::bind(a, PORT, 1 << 20).unwrap();
        let mut to = UdpPort::bind(b, PORT, 1 << 20).unwrap();
        assert!(matches!(
            UdpPort::bind(b, PORT, 1 << 20),
            Err(NicError::Bind { .. })
        ));
        assert!(to.receive().unwrap().is_none());
        let bytes: Vec<u8> = (0..1050u32).map(|n| n as u8).collect();
        from.send(SocketAddrV4::new(b, PORT), &bytes, 100).unwrap();
        let mut seen = Vec::new();
        while seen.len() < bytes.len() {
            rustix::event::poll(&mut [PollFd::new(&to.fd, PollFlags::IN)], None).unwrap();
            let arrival = to.receive().unwrap().unwrap();
            assert_eq!(arrival.source, SocketAddrV4::new(a, PORT));
            assert!(
                arrival
                    .bytes
                    .chunks(arrival.segment_bytes)
                    .all(|datagram| datagram.len() <= 100)
            );
            seen.extend_from_slice(arrival.bytes);
        }
        assert_eq!(seen, bytes);
        from.send(SocketAddrV4::new(b, PORT), b"one", 3).unwrap();
        rustix::event::poll(&mut [PollFd::new(&to.fd, PollFlags::IN)], None).unwrap();
        let arrival = to.receive().unwrap().unwrap();
        assert_eq!((arrival.bytes, arrival.segment_bytes), (&b"one"[..], 3));
    }
}
