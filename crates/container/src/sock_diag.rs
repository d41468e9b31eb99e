//! Sockets of a network namespace, as the kernel lists them (`man 7 sock_diag`).
//!
//! A list is one of the thread's own network namespace. It is a snapshot: sockets come and go while it is made.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// The one kind of request.
const SOCK_DIAG_BY_FAMILY: u16 = 20;

/// States of a TCP socket (`net/tcp_states.h`), as bits.
pub(crate) const ESTABLISHED: u32 = 1 << 1;
pub(crate) const SYN_RECV: u32 = 1 << 3;
pub(crate) const FIN_WAIT1: u32 = 1 << 4;
pub(crate) const CLOSE_WAIT: u32 = 1 << 8;
pub(crate) const LAST_ACK: u32 = 1 << 9;
pub(crate) const LISTEN: u32 = 1 << 10;
pub(crate) const CLOSING: u32 = 1 << 11;

/// A TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tcp {
    /// A bit.
    pub state: u32,
    pub local: SocketAddr,
    pub remote: SocketAddr,
    /// Bytes that nobody has read; of a listener, connections that nobody has accepted.
    pub unread: u32,
    /// Bytes that are not acknowledged.
    pub unsent: u32,
    /// 0 where no process has it: it is not accepted yet, or it is closed.
    pub inode: u32,
}

/// A socket of AF_UNIX.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Unix {
    pub inode: u32,
    /// It is a listener.
    pub listens: bool,
    /// `SOCK_STREAM` and so on.
    pub kind: u8,
    pub name: Option<String>,
    /// The inode of the other end.
    pub peer: Option<u32>,
    /// Of a listener: the inodes of clients that nobody has accepted; 0 for one that has closed since.
    pub waiting: Vec<u32>,
    /// Bytes that the other end has not read.
    pub unsent: u32,
}

/// TCP sockets in some states, of both families.
pub(crate) fn tcp(states: u32) -> io::Result<Vec<Tcp>> {
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        dump(&tcp_request(family, states), |message| {
            found.extend(tcp_of(message))
        })?;
    }
    Ok(found)
}

/// Inodes of TCP sockets that have keys for signatures (`TCP_MD5SIG`), of both families. The kernel says it to who has `CAP_NET_ADMIN`.
pub(crate) fn signed() -> io::Result<HashSet<u32>> {
    let mut found = HashSet::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        dump(&tcp_request(family, u32::MAX), |message| {
            if has_signatures(message) {
                found.extend(word(message, 68));
            }
        })?;
    }
    Ok(found)
}

/// Whether a `struct inet_diag_msg` has the attribute `INET_DIAG_MD5SIG` behind it.
fn has_signatures(message: &[u8]) -> bool {
    const HEAD_BYTES: usize = 72;
    const MD5SIG: u16 = 18;
    let mut rest = message.get(HEAD_BYTES..).unwrap_or_default();
    while let Some((&[low, high, kind, kind_high], _)) = rest.split_first_chunk::<4>() {
        if u16::from_ne_bytes([kind, kind_high]) == MD5SIG {
            return true;
        }
        let length = usize::from(u16::from_ne_bytes([low, high])).max(4);
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    false
}

/// `struct inet_diag_req_v2`: family, protocol, extensions, padding, states, and an empty id.
fn tcp_request(family: i32, states: u32) -> Vec<u8> {
    let mut request = vec![family as u8, libc::IPPROTO_TCP as u8, 0, 0];
    request.extend_from_slice(&states.to_ne_bytes());
    request.resize(56, 0);
    request
}

/// Sockets of AF_UNIX.
pub(crate) fn unix() -> io::Result<Vec<Unix>> {
    /// `linux/unix_diag.h`: name, peer, connections that wait, lengths of queues.
    const SHOW: u32 = 1 | 4 | 8 | 16;
    // struct unix_diag_req: family, protocol, padding, states, inode, what to show, cookie.
    let mut request = vec![libc::AF_UNIX as u8, 0, 0, 0];
    request.extend_from_slice(&u32::MAX.to_ne_bytes());
    request.extend_from_slice(&0u32.to_ne_bytes());
    request.extend_from_slice(&SHOW.to_ne_bytes());
    request.resize(24, 0);
    let mut found = Vec::new();
    dump(&request, |message| found.extend(unix_of(message)))?;
    Ok(found)
}

fn dump(request: &[u8], mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let (flags, protocol) = (SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG));
    let socket: OwnedFd = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    let mut message = Vec::with_capacity(16 + request.len());
    message.extend_from_slice(&(16 + request.len() as u32).to_ne_bytes());
    message.extend_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    let wanted = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    message.extend_from_slice(&wanted.to_ne_bytes());
    message.resize(16, 0);
    message.extend_from_slice(request);
    rustix::net::send(&socket, &message, SendFlags::empty())?;
    let mut part = vec![0; 64 * 1024];
    loop {
        let (_, length) = rustix::net::recv(&socket, &mut part[..], RecvFlags::empty())?;
        let mut rest = &part[..length];
        while let Some((header, _)) = rest.split_first_chunk::<16>() {
            let [a, b, c, d, low, high, ..] = *header;
            let length = (u32::from_ne_bytes([a, b, c, d]) as usize).max(16);
            let message = rest.get(..length).unwrap_or(rest);
            match i32::from(u16::from_ne_bytes([low, high])) {
                libc::NLMSG_DONE => return Ok(()),
                libc::NLMSG_ERROR => {
                    let error = word(message, 16).map_or(0, |error| error as i32);
                    // A family that this kernel lacks has no sockets.
                    return match -error {
                        0 | libc::ENOENT => Ok(()),
                        error => Err(io::Error::from_raw_os_error(error)),
                    };
                }
                _ => each(&message[16..]),
            }
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// `struct inet_diag_msg`.
fn tcp_of(message: &[u8]) -> Option<Tcp> {
    let (family, state) = (*message.first()?, *message.get(1)?);
    let port = |at: usize| Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?));
    let address = |at: usize| -> Option<IpAddr> {
        let bytes: [u8; 16] = message.get(at..at + 16)?.try_into().ok()?;
        Some(match i32::from(family) {
            libc::AF_INET => Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into(),
            _ => Ipv6Addr::from(bytes).into(),
        })
    };
    Some(Tcp {
        state: 1u32.checked_shl(state.into())?,
        local: SocketAddr::new(address(8)?, port(4)?),
        remote: SocketAddr::new(address(24)?, port(6)?),
        unread: word(message, 56)?,
        unsent: word(message, 60)?,
        inode: word(message, 68)?,
    })
}

/// `struct unix_diag_msg`, and attributes.
fn unix_of(message: &[u8]) -> Option<Unix> {
    const LISTENS: u8 = 10;
    let mut socket = Unix {
        kind: *message.get(1)?,
        listens: *message.get(2)? == LISTENS,
        inode: word(message, 4)?,
        ..Unix::default()
    };
    let mut rest = message.get(16..)?;
    while let Some((&[low, high, kind, kind_high], _)) = rest.split_first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([low, high])).max(4);
        let value = rest.get(4..length)?;
        match u16::from_ne_bytes([kind, kind_high]) {
            0 => socket.name = Some(name_of(value)),
            2 => socket.peer = word(value, 0),
            3 => {
                let inodes = value.chunks_exact(4).filter_map(|inode| word(inode, 0));
                socket.waiting = inodes.collect();
            }
            4 => socket.unsent = word(value, 4)?,
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(socket)
}

/// A path, or `@` and an abstract name.
fn name_of(bytes: &[u8]) -> String {
    match bytes.split_first() {
        Some((0, name)) => format!("@{}", String::from_utf8_lossy(name)),
        _ => {
            let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    fn inode(socket: &impl AsRawFd) -> u32 {
        let target = std::fs::read_link(format!("/proc/self/fd/{}", socket.as_raw_fd())).unwrap();
        let text = target.to_string_lossy().into_owned();
        text.trim_start_matches("socket:[")
            .trim_end_matches(']')
            .parse()
            .unwrap()
    }

    #[test]
    fn a_connection_that_is_not_accepted_has_no_process() {
        for own in ["127.0.0.1:0", "[::1]:0"] {
            let listener = match TcpListener::bind(own) {
                Err(error) if error.raw_os_error() == Some(libc::EADDRNOTAVAIL) => continue,
                listener => listener.unwrap(),
            };
            let address = listener.local_addr().unwrap();
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(b"hello").unwrap();
            let all = tcp(LISTEN | ESTABLISHED).unwrap();
            let listening = all
                .iter()
                .find(|socket| socket.inode == inode(&listener))
                .unwrap();
            assert_eq!((listening.state, listening.unread), (LISTEN, 1));
            let waiting = |all: &[Tcp]| {
                let mut found = all.iter().filter(|socket| socket.inode == 0);
                found
                    .find(|socket| socket.local == address)
                    .map(|socket| socket.remote)
            };
            assert_eq!(waiting(&all), Some(client.local_addr().unwrap()));
            let accepted = listener.accept().unwrap();
            assert_eq!(waiting(&tcp(ESTABLISHED).unwrap()), None);
            drop(accepted);
        }
    }

    #[test]
    fn what_waits_at_a_listener_of_af_unix_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"hello").unwrap();
        drop(UnixStream::connect(&path).unwrap());
        let (one, other) = UnixStream::pair().unwrap();
        let all = unix().unwrap();
        let of = |inode: u32| all.iter().find(|socket| socket.inode == inode).unwrap();
        let listening = of(inode(&listener));
        assert!(listening.listens);
        assert_eq!(listening.name.as_deref(), path.to_str());
        assert_eq!(listening.waiting, [inode(&client), 0]);
        assert_ne!(of(inode(&client)).unsent, 0);
        assert_eq!(of(inode(&one)).peer, Some(inode(&other)));
        assert_eq!(of(inode(&one)).unsent, 0);
    }
}
