//! Options of sockets that CRIU does not keep: a table, with one row for each.

use std::io;
use std::os::fd::BorrowedFd;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::fresh::{Fresh, Kind};
use crate::sockopt;

/// Which sockets have an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Tcp,
    Udp,
    Ip,
    Ipv6,
    /// All but TCP.
    IpDatagrams,
    Ipv6Datagrams,
    /// All of these.
    Inet,
}

/// An option: its name, which sockets have it, level and number, as the kernel's headers say. It is read by `getsockopt`, and put back by
/// `setsockopt` where the restored socket has another value.
struct Row(&'static str, Of, i32, i32);

/// `linux/in6.h`, `linux/in.h`, `linux/tcp.h`, `asm-generic/socket.h`: what the library has no names for.
const TCP_THIN_LINEAR_TIMEOUTS: i32 = 16;
const IPV6_RECVERR: i32 = 25;
const IPV6_MTU_DISCOVER: i32 = 23;
const SO_RCVLOWAT: i32 = 18;
const IP_MULTICAST_ALL: i32 = 49;
const IPV6_MULTICAST_ALL: i32 = 29;
const UDP_SEGMENT: i32 = 103;
const UDP_GRO: i32 = 104;

const TABLE: &[Row] = &[
    Row("TCP_CONGESTION", Of::Tcp, libc::IPPROTO_TCP, libc::TCP_CONGESTION),
    Row(
        "TCP_USER_TIMEOUT",
        Of::Tcp,
        libc::IPPROTO_TCP,
        libc::TCP_USER_TIMEOUT,
    ),
    Row(
        "TCP_NOTSENT_LOWAT",
        Of::Tcp,
        libc::IPPROTO_TCP,
        libc::TCP_NOTSENT_LOWAT,
    ),
    Row("TCP_SYNCNT", Of::Tcp, libc::IPPROTO_TCP, libc::TCP_SYNCNT),
    Row("TCP_LINGER2", Of::Tcp, libc::IPPROTO_TCP, libc::TCP_LINGER2),
    Row(
        "TCP_DEFER_ACCEPT",
        Of::Tcp,
        libc::IPPROTO_TCP,
        libc::TCP_DEFER_ACCEPT,
    ),
    Row(
        "TCP_THIN_LINEAR_TIMEOUTS",
        Of::Tcp,
        libc::IPPROTO_TCP,
        TCP_THIN_LINEAR_TIMEOUTS,
    ),
    Row("IP_MTU_DISCOVER", Of::Ip, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER),
    Row("IP_RECVERR", Of::Ip, libc::IPPROTO_IP, libc::IP_RECVERR),
    Row("IP_RECVTTL", Of::Ip, libc::IPPROTO_IP, libc::IP_RECVTTL),
    Row("IP_RECVTOS", Of::Ip, libc::IPPROTO_IP, libc::IP_RECVTOS),
    Row(
        "IP_MULTICAST_TTL",
        Of::IpDatagrams,
        libc::IPPROTO_IP,
        libc::IP_MULTICAST_TTL,
    ),
    Row(
        "IP_MULTICAST_LOOP",
        Of::Ip,
        libc::IPPROTO_IP,
        libc::IP_MULTICAST_LOOP,
    ),
    Row(
        "IPV6_MTU_DISCOVER",
        Of::Ipv6,
        libc::IPPROTO_IPV6,
        IPV6_MTU_DISCOVER,
    ),
    Row("IPV6_RECVERR", Of::Ipv6, libc::IPPROTO_IPV6, IPV6_RECVERR),
    Row(
        "IPV6_UNICAST_HOPS",
        Of::Ipv6,
        libc::IPPROTO_IPV6,
        libc::IPV6_UNICAST_HOPS,
    ),
    Row(
        "IPV6_MULTICAST_HOPS",
        Of::Ipv6Datagrams,
        libc::IPPROTO_IPV6,
        libc::IPV6_MULTICAST_HOPS,
    ),
    Row(
        "IPV6_MULTICAST_LOOP",
        Of::Ipv6,
        libc::IPPROTO_IPV6,
        libc::IPV6_MULTICAST_LOOP,
    ),
    Row("IPV6_TCLASS", Of::Ipv6, libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
    Row(
        "IPV6_RECVTCLASS",
        Of::Ipv6,
        libc::IPPROTO_IPV6,
        libc::IPV6_RECVTCLASS,
    ),
    Row(
        "IPV6_RECVHOPLIMIT",
        Of::Ipv6,
        libc::IPPROTO_IPV6,
        libc::IPV6_RECVHOPLIMIT,
    ),
    Row(
        "IP_MULTICAST_IF",
        Of::IpDatagrams,
        libc::IPPROTO_IP,
        libc::IP_MULTICAST_IF,
    ),
    Row(
        "IPV6_MULTICAST_IF",
        Of::Ipv6Datagrams,
        libc::IPPROTO_IPV6,
        libc::IPV6_MULTICAST_IF,
    ),
    Row(
        "IP_MULTICAST_ALL",
        Of::IpDatagrams,
        libc::IPPROTO_IP,
        IP_MULTICAST_ALL,
    ),
    Row(
        "IPV6_MULTICAST_ALL",
        Of::Ipv6Datagrams,
        libc::IPPROTO_IPV6,
        IPV6_MULTICAST_ALL,
    ),
    Row("UDP_SEGMENT", Of::Udp, libc::IPPROTO_UDP, UDP_SEGMENT),
    Row("UDP_GRO", Of::Udp, libc::IPPROTO_UDP, UDP_GRO),
    Row("SO_TIMESTAMP", Of::Inet, libc::SOL_SOCKET, libc::SO_TIMESTAMP),
    Row("SO_TIMESTAMPNS", Of::Inet, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS),
    Row(
        "SO_TIMESTAMPING",
        Of::Inet,
        libc::SOL_SOCKET,
        libc::SO_TIMESTAMPING,
    ),
    Row("SO_RXQ_OVFL", Of::Inet, libc::SOL_SOCKET, libc::SO_RXQ_OVFL),
    Row("SO_RCVLOWAT", Of::Inet, libc::SOL_SOCKET, SO_RCVLOWAT),
    Row(
        "SO_MAX_PACING_RATE",
        Of::Inet,
        libc::SOL_SOCKET,
        libc::SO_MAX_PACING_RATE,
    ),
];

/// The longest value: names of congestion controls, and of links, have 16 bytes.
const LONGEST: usize = 16;

/// What a value is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Bytes that mean the same everywhere.
    Bytes,
    /// A name, up to the first zero.
    Name,
    /// The number of a link, which another host counts otherwise: it is kept by its name, and 0 as no bytes.
    Link,
}

impl Row {
    fn has(&self, Kind { family, protocol, .. }: Kind) -> bool {
        match self.1 {
            Of::Tcp => protocol == libc::IPPROTO_TCP,
            Of::Udp => protocol == libc::IPPROTO_UDP,
            Of::Ip | Of::Inet => true,
            Of::Ipv6 => family == libc::AF_INET6,
            Of::IpDatagrams => protocol != libc::IPPROTO_TCP,
            Of::Ipv6Datagrams => family == libc::AF_INET6 && protocol != libc::IPPROTO_TCP,
        }
    }

    fn form(&self) -> Form {
        match (self.2, self.3) {
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => Form::Name,
            (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF) => Form::Link,
            _ => Form::Bytes,
        }
    }

    /// What a new socket has is another host's choice: it is kept always. All else that a new socket has is the kernel's, or a sysctl of the
    /// network namespace, which moves.
    fn is_of_the_host(&self) -> bool {
        self.form() == Form::Name
    }

    fn read(&self, socket: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
        let mut value = [0; LONGEST];
        let length = sockopt::get(socket, self.2, self.3, &mut value)?;
        let value = &value[..length];
        match self.form() {
            Form::Bytes => Ok(value.to_vec()),
            Form::Name => {
                let end = value.iter().position(|byte| *byte == 0);
                Ok(value[..end.unwrap_or(value.len())].to_vec())
            }
            Form::Link => {
                let index = value.first_chunk().map_or(0, |index| u32::from_ne_bytes(*index));
                if index == 0 {
                    return Ok(Vec::new());
                }
                // By the socket: links are counted in its network namespace.
                Ok(rustix::net::netdevice::index_to_name(socket, index)?.into_bytes())
            }
        }
    }

    fn write(&self, socket: BorrowedFd<'_>, value: &[u8]) -> io::Result<()> {
        if self.form() != Form::Link {
            return sockopt::set(socket, self.2, self.3, value);
        }
        let index = match value {
            [] => 0,
            name => {
                let name = std::str::from_utf8(name).map_err(|_| io::ErrorKind::InvalidData)?;
                rustix::net::netdevice::name_to_index(socket, name)?
            }
        };
        sockopt::set(socket, self.2, self.3, &index.to_ne_bytes())
    }
}

/// Options of a socket, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Options(Vec<(String, Vec<u8>)>);

impl Options {
    /// Those in which a socket differs from a new one of its kind; `None` where it does in none, and of sockets of other families.
    pub(super) fn read(socket: BorrowedFd<'_>, fresh: &mut Fresh) -> io::Result<Option<Self>> {
        let Some(kind) = Kind::of(socket)? else {
            return Ok(None);
        };
        let usual = fresh.of(kind, |socket| Self::all(socket, kind))?;
        let mut differing = Self::default();
        for row in TABLE.iter().filter(|row| row.has(kind)) {
            match row.read(socket) {
                Ok(value) if !row.is_of_the_host() && usual.get(row.0) == Some(&value) => {}
                Ok(value) => differing.0.push((row.0.to_owned(), value)),
                // An older kernel, or a socket of a kind that has no such option.
                Err(error) if is_unknown(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok((!differing.0.is_empty()).then_some(differing))
    }

    /// All that a socket has.
    fn all(socket: BorrowedFd<'_>, kind: Kind) -> Self {
        let rows = TABLE.iter().filter(|row| row.has(kind));
        Self(
            rows.filter_map(|row| Some((row.0.to_owned(), row.read(socket).ok()?)))
                .collect(),
        )
    }

    fn get(&self, name: &str) -> Option<&Vec<u8>> {
        let mut all = self.0.iter();
        all.find_map(|(known, value)| (known == name).then_some(value))
    }

    pub(super) fn put_back(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        for (name, wanted) in &self.0 {
            // A later release may know more.
            let Some(row) = TABLE.iter().find(|row| row.0 == name) else {
                continue;
            };
            if row.read(socket).ok().as_ref() == Some(wanted) {
                continue;
            }
            let shown = || {
                let text = String::from_utf8_lossy(wanted);
                match row.form() {
                    Form::Name => format!(
                        "{name} {text}: this host's kernel needs that congestion control (`modprobe tcp_{text}`)"
                    ),
                    Form::Link => format!("{name} {text} is refused"),
                    Form::Bytes => format!("{name} is refused"),
                }
            };
            row.write(socket, wanted).with_context(shown)?;
        }
        Ok(())
    }
}

fn is_unknown(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTCONN | libc::ENODEV)
    )
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::AsFd;

    use super::*;

    fn set(socket: BorrowedFd<'_>, level: i32, name: i32, value: i32) {
        sockopt::set(socket, level, name, &value.to_ne_bytes()).unwrap();
    }

    fn read(socket: BorrowedFd<'_>) -> Option<Options> {
        Options::read(socket, &mut Fresh::here()).unwrap()
    }

    #[test]
    fn a_new_socket_has_nothing_of_its_own() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (Ok(udp), Ok(tcp)) = (UdpSocket::bind(address), TcpListener::bind(address)) else {
                continue;
            };
            assert_eq!(read(udp.as_fd()), None);
            // Of a TCP socket its congestion control is kept, which a host chooses.
            let kept = read(tcp.as_fd()).unwrap();
            assert_eq!(kept.0.len(), 1, "{kept:?}");
            assert!(kept.get("TCP_CONGESTION").is_some());
            set(udp.as_fd(), libc::IPPROTO_UDP, UDP_SEGMENT, 1200);
            let kept = read(udp.as_fd()).unwrap();
            assert_eq!(
                kept.0,
                [("UDP_SEGMENT".to_owned(), 1200i32.to_ne_bytes().to_vec())]
            );
        }
    }

    #[test]
    fn a_link_is_kept_by_its_name() {
        let (Ok(udp), Ok(again)) = (UdpSocket::bind("[::1]:0"), UdpSocket::bind("[::1]:0")) else {
            return eprintln!("skipped: there is no IPv6");
        };
        let lo = rustix::net::netdevice::name_to_index(&udp, "lo").unwrap();
        set(
            udp.as_fd(),
            libc::IPPROTO_IPV6,
            libc::IPV6_MULTICAST_IF,
            lo as i32,
        );
        let kept = read(udp.as_fd()).unwrap();
        assert_eq!(kept.get("IPV6_MULTICAST_IF").unwrap(), b"lo");
        kept.put_back(again.as_fd()).unwrap();
        assert_eq!(read(again.as_fd()).unwrap(), kept);
        let none = Options(vec![("IPV6_MULTICAST_IF".to_owned(), Vec::new())]);
        none.put_back(again.as_fd()).unwrap();
        assert_eq!(read(again.as_fd()), None);
        let gone = Options(vec![("IPV6_MULTICAST_IF".to_owned(), b"none-such".to_vec())]);
        assert!(gone.put_back(again.as_fd()).is_err());
    }

    #[test]
    fn what_a_socket_had_another_one_gets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        set(here.as_fd(), libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 12345);
        set(here.as_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4096);
        sockopt::set(here.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").unwrap();
        let kept = read(here.as_fd()).unwrap();
        assert_ne!(read(there.as_fd()).unwrap(), kept);
        kept.put_back(there.as_fd()).unwrap();
        assert_eq!(read(there.as_fd()).unwrap(), kept);
    }

    #[test]
    fn every_row_can_be_put_into_a_new_socket_of_its_kind() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (Ok(udp), Ok(tcp)) = (UdpSocket::bind(address), TcpListener::bind(address)) else {
                continue;
            };
            let again = UdpSocket::bind(address).unwrap();
            set(udp.as_fd(), libc::SOL_SOCKET, libc::SO_TIMESTAMP, 1);
            set(
                udp.as_fd(),
                libc::IPPROTO_IP,
                libc::IP_MTU_DISCOVER,
                libc::IP_PMTUDISC_DO,
            );
            for socket in [udp.as_fd(), tcp.as_fd()] {
                let kept = Options::all(socket, Kind::of(socket).unwrap().unwrap());
                // Each is set, also where it is the same: the kernel takes what it has said.
                for (name, value) in &kept.0 {
                    let row = TABLE.iter().find(|row| row.0 == name).unwrap();
                    row.write(socket, value)
                        .unwrap_or_else(|error| panic!("{name} {value:?}: {error}"));
                }
            }
            let kept = read(udp.as_fd()).unwrap();
            kept.put_back(again.as_fd()).unwrap();
            assert_eq!(read(again.as_fd()).unwrap(), kept);
        }
    }

    #[test]
    fn a_congestion_control_that_is_missing_is_named() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let odd = Options(vec![("TCP_CONGESTION".to_owned(), b"none_such".to_vec())]);
        let error = format!("{:#}", odd.put_back(listener.as_fd()).unwrap_err());
        assert!(error.contains("none_such"), "{error}");
        let later = Options(vec![("TCP_OF_THE_FUTURE".to_owned(), vec![1])]);
        later.put_back(listener.as_fd()).unwrap();
    }
}
