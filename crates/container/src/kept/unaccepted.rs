//! Connections that no process has.
//!
//! CRIU writes down what processes hold. A connection that is in a listener's queue is held by nobody yet, and no call puts a restored
//! one back there; one that a process has closed before all was sent is held by nobody any more. After a move the kernel there knows
//! nothing of them, and a client that waits would wait for ever: it is told.

use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::namespace::inside_of;
use crate::sock_diag::{self, Tcp};

/// A TCP connection, by its ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// The container's.
    pub local: SocketAddr,
    /// Its client's.
    pub remote: SocketAddr,
}

/// States in which a connection without a process is not accepted.
const WAITS: u32 = sock_diag::SYN_RECV | sock_diag::ESTABLISHED | sock_diag::CLOSE_WAIT;

/// States of one that was closed and has not sent everything.
const CLOSES: u32 = sock_diag::FIN_WAIT1 | sock_diag::CLOSING | sock_diag::LAST_ACK;

/// Those of the container with this first process.
pub(super) fn all(init: i32) -> io::Result<Vec<Connection>> {
    let sockets = inside_of(init, || sock_diag::tcp(WAITS | CLOSES))?;
    Ok(sockets.iter().filter_map(held_by_nobody).collect())
}

fn held_by_nobody(socket: &Tcp) -> Option<Connection> {
    let is_waiting = socket.state & WAITS != 0;
    (socket.inode == 0 && (is_waiting || socket.unsent > 0)).then_some(Connection {
        local: socket.local,
        remote: socket.remote,
    })
}

/// A listener, and how many connections wait in its queue.
pub(crate) type Queue = (SocketAddr, u32);

/// Listeners of this thread's network namespace whose queues are not empty.
pub(crate) fn queues() -> io::Result<Vec<Queue>> {
    let listeners = sock_diag::tcp(sock_diag::LISTEN)?;
    let busy = listeners.iter().filter(|listener| listener.unread > 0);
    Ok(busy.map(|listener| (listener.local, listener.unread)).collect())
}

/// Whether connections to this thread's network namespace are on their way to a process: in a listener's queue, or not established yet.
pub(crate) fn are_arriving() -> io::Result<bool> {
    let sockets = sock_diag::tcp(sock_diag::LISTEN | sock_diag::SYN_RECV)?;
    Ok(sockets.iter().any(is_arriving))
}

fn is_arriving(socket: &Tcp) -> bool {
    socket.state == sock_diag::SYN_RECV || socket.unread > 0
}

/// Whether connections of this thread's network namespace that a process has closed are still sending, their FIN at least.
pub(crate) fn are_closing() -> io::Result<bool> {
    let sockets = sock_diag::tcp(CLOSES)?;
    Ok(sockets.iter().any(|socket| held_by_nobody(socket).is_some()))
}

/// Has the clients' kernels find out: in the container's network namespace, once it is connected.
///
/// A segment that is out of order has a client's kernel say what it expects (RFC 9293 §3.10.7.4), and that finds no connection here, so
/// that this kernel resets it, with the number that the client takes (§3.5.2).
pub(crate) fn reset(connections: &[Connection]) -> io::Result<()> {
    // All are tried; the error is the first.
    let mut all = Ok(());
    for connection in connections {
        all = all.and(provoke(connection));
    }
    all
}

fn provoke(connection: &Connection) -> io::Result<()> {
    let local = (plain(connection.local.ip()), connection.local.port());
    let remote = (plain(connection.remote.ip()), connection.remote.port());
    let family = match remote.0 {
        IpAddr::V4(_) => AddressFamily::INET,
        IpAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::RAW, flags, Some(rustix::net::ipproto::TCP))?;
    // The container may have several addresses, and the kernel would take one of them.
    rustix::net::bind(&socket, &SocketAddr::new(local.0, 0))?;
    // One of two numbers that are half of all apart is out of its window.
    for sequence in [0, 1 << 31] {
        let segment = segment(local, remote, sequence);
        rustix::net::sendto(
            &socket,
            &segment,
            SendFlags::empty(),
            &SocketAddr::new(remote.0, 0),
        )?;
    }
    Ok(())
}

/// An IPv4 address that a socket of IPv6 has is one.
fn plain(address: IpAddr) -> IpAddr {
    address.to_canonical()
}

/// A TCP segment with an acknowledgement and no data.
fn segment(local: (IpAddr, u16), remote: (IpAddr, u16), sequence: u32) -> [u8; 20] {
    const ACK: u8 = 1 << 4;
    let mut segment = [0; 20];
    segment[..2].copy_from_slice(&local.1.to_be_bytes());
    segment[2..4].copy_from_slice(&remote.1.to_be_bytes());
    segment[4..8].copy_from_slice(&sequence.to_be_bytes());
    // Five words of header.
    segment[12] = 5 << 4;
    segment[13] = ACK;
    let sum = checksum(local.0, remote.0, &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    segment
}

/// Over the pseudo header, too (RFC 9293 §3.1, RFC 8200 §8.1).
fn checksum(local: IpAddr, remote: IpAddr, segment: &[u8]) -> u16 {
    let mut all = Vec::new();
    for address in [local, remote] {
        match address {
            IpAddr::V4(address) => all.extend(address.octets()),
            IpAddr::V6(address) => all.extend(address.octets()),
        }
    }
    // In IPv6 they are further apart, which does not change the sum.
    all.extend([0, libc::IPPROTO_TCP as u8]);
    all.extend((segment.len() as u16).to_be_bytes());
    all.extend_from_slice(segment);
    let mut sum: u32 = all
        .chunks_exact(2)
        .map(|word| u32::from(u16::from_be_bytes([word[0], word[1]])))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_adds_up() {
        for (local, remote) in [("10.77.1.1", "10.77.2.3"), ("fd00::1", "fd00::2")] {
            let (local, remote): (IpAddr, IpAddr) = (local.parse().unwrap(), remote.parse().unwrap());
            let segment = segment((local, 80), (remote, 40000), 7);
            assert_eq!(checksum(local, remote, &segment), 0);
        }
    }

    #[test]
    fn who_has_no_process_is_held_by_nobody() {
        let socket = |state, inode, unsent| Tcp {
            state,
            local: "[::ffff:10.0.0.1]:80".parse().unwrap(),
            remote: "[::ffff:10.0.0.2]:90".parse().unwrap(),
            unread: 0,
            unsent,
            inode,
        };
        assert!(held_by_nobody(&socket(sock_diag::ESTABLISHED, 0, 0)).is_some());
        assert!(held_by_nobody(&socket(sock_diag::ESTABLISHED, 7, 0)).is_none());
        assert!(held_by_nobody(&socket(sock_diag::LAST_ACK, 0, 9)).is_some());
        assert!(held_by_nobody(&socket(sock_diag::LAST_ACK, 0, 0)).is_none());
        assert!(is_arriving(&socket(sock_diag::SYN_RECV, 0, 0)));
        let listener = |unread| Tcp {
            unread,
            ..socket(sock_diag::LISTEN, 7, 0)
        };
        assert!(is_arriving(&listener(1)) && !is_arriving(&listener(0)));
        assert_eq!(plain("::ffff:10.0.0.1".parse().unwrap()).to_string(), "10.0.0.1");
    }
}
