//! Hosts that say that nobody takes what was sent to them (ICMP "port unreachable"; ip(7), `IP_RECVERR`).

use std::net::IpAddr;
use std::os::fd::AsRawFd;

use super::UdpPort;
use super::transfer::Address;

/// Words taken at a time.
const TAKEN: usize = 16;

/// Room for the beginning of a message, which is not looked at.
const MESSAGE_BYTES: usize = 16;

/// Room for the control messages, in words so that they are aligned.
const CONTROL_WORDS: usize = 16;

impl UdpPort {
    /// The hosts that have refused what was sent to them, each once; some are left if there are many. What has come for this socket is
    /// thrown away: nobody has a reason to send here.
    pub fn take_refusals(&self) -> Vec<IpAddr> {
        let mut refusals = Vec::new();
        for _ in 0..TAKEN {
            match self.next_refusal() {
                Some(Some(host)) if !refusals.contains(&host) => refusals.push(host),
                Some(_) => {}
                None => break,
            }
        }
        let mut byte = 0u8;
        for _ in 0..TAKEN {
            // SAFETY: room for one byte, of which the kernel writes one at most.
            let taken =
                unsafe { libc::recv(self.fd.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_DONTWAIT) };
            if taken < 0 {
                break;
            }
        }
        refusals
    }

    /// The next word of a host; inside of it, the host if it is a refusal.
    fn next_refusal(&self) -> Option<Option<IpAddr>> {
        let mut message = [0u8; MESSAGE_BYTES];
        let mut vector = libc::iovec {
            iov_base: message.as_mut_ptr().cast(),
            iov_len: message.len(),
        };
        let mut control = [0u64; CONTROL_WORDS];
        // SAFETY: all pointers in the header are to locals that outlive the call, with their sizes; the control messages that come
        // back are walked with the macros made for it, and have the type that ip(7) and ipv6(7) name.
        unsafe {
            let mut address: Address = std::mem::zeroed();
            let mut header: libc::msghdr = std::mem::zeroed();
            header.msg_name = (&raw mut address).cast();
            header.msg_namelen = size_of::<Address>() as libc::socklen_t;
            header.msg_iov = &mut vector;
            header.msg_iovlen = 1;
            header.msg_control = control.as_mut_ptr().cast();
            header.msg_controllen = size_of_val(&control);
            let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
            if libc::recvmsg(self.fd.as_raw_fd(), &mut header, flags) < 0 {
                return None;
            }
            let mut refused = false;
            let mut next = libc::CMSG_FIRSTHDR(&header);
            while !next.is_null() {
                if matches!(
                    ((*next).cmsg_level, (*next).cmsg_type),
                    (libc::SOL_IP, libc::IP_RECVERR) | (libc::SOL_IPV6, libc::IPV6_RECVERR)
                ) {
                    let error = libc::CMSG_DATA(next)
                        .cast::<libc::sock_extended_err>()
                        .read_unaligned();
                    refused |= error.ee_errno == libc::ECONNREFUSED as u32;
                }
                next = libc::CMSG_NXTHDR(&header, next);
            }
            Some(refused.then(|| address.get().ip()))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

    use rustix::event::{PollFd, PollFlags, poll};
    use verbatim_roce::Traffic;

    use super::*;

    /// The index of the loopback interface in every network namespace.
    const LO: u32 = 1;

    #[test]
    fn a_host_that_takes_nothing_says_so_and_the_next_request_goes_out() {
        for (own, others) in [
            (
                IpAddr::from(Ipv4Addr::new(127, 9, 1, 1)),
                IpAddr::from(Ipv4Addr::new(127, 9, 1, 2)),
            ),
            (Ipv6Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()),
        ] {
            let Ok(mut socket) = UdpPort::bind_for_requests(own, LO) else {
                eprintln!("skipped: {own} cannot be bound");
                continue;
            };
            let receiver = std::net::UdpSocket::bind((others, 0)).unwrap();
            let taken = receiver.local_addr().unwrap();
            let free = std::net::UdpSocket::bind((others, 0))
                .unwrap()
                .local_addr()
                .unwrap();
            assert!(socket.port().is_some_and(|port| port != 0));
            let mut send = |end: SocketAddr| socket.send(end, b"request", 7, Traffic::default());
            send(free).unwrap();
            send(free).unwrap();
            send(taken).unwrap();
            assert_eq!(receiver.recv(&mut [0; 16]).unwrap(), 7);
            poll(&mut [PollFd::new(&socket, PollFlags::IN)], None).unwrap();
            assert_eq!(socket.take_refusals(), [others]);
            assert!(socket.take_refusals().is_empty());
        }
    }
}
