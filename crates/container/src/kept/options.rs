//! Options of sockets that CRIU does not keep: a table, with one row for each.

use std::io;
use std::os::fd::BorrowedFd;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::sockopt;

/// Which sockets have an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Of {
    Tcp,
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

/// The longest value: names of congestion controls have 16 bytes.
const LONGEST: usize = 16;

/// Options of a socket, by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Options(Vec<(String, Vec<u8>)>);

impl Options {
    /// `None` of sockets of other families.
    pub(super) fn read(socket: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        let number = |name| {
            let mut value = [0; 4];
            sockopt::get(socket, libc::SOL_SOCKET, name, &mut value).map(|_| i32::from_ne_bytes(value))
        };
        let (family, protocol) = (number(libc::SO_DOMAIN)?, number(libc::SO_PROTOCOL)?);
        if family != libc::AF_INET && family != libc::AF_INET6 {
            return Ok(None);
        }
        let has = |of: Of| match of {
            Of::Tcp => protocol == libc::IPPROTO_TCP,
            Of::Ip | Of::Inet => true,
            Of::Ipv6 => family == libc::AF_INET6,
            Of::IpDatagrams => protocol != libc::IPPROTO_TCP,
            Of::Ipv6Datagrams => family == libc::AF_INET6 && protocol != libc::IPPROTO_TCP,
        };
        let mut read = Vec::new();
        for Row(name, of, level, number) in TABLE {
            if !has(*of) {
                continue;
            }
            match value(socket, *level, *number) {
                Ok(value) => read.push(((*name).to_owned(), value)),
                // An older kernel, or a socket of a kind that has no such option.
                Err(error) if is_unknown(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(Some(Self(read)))
    }

    pub(super) fn put_back(&self, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
        for (name, wanted) in &self.0 {
            // A later release may know more.
            let Some(Row(_, _, level, number)) = TABLE.iter().find(|row| row.0 == name) else {
                continue;
            };
            if value(socket, *level, *number).ok().as_ref() == Some(wanted) {
                continue;
            }
            let shown = || match *number == libc::TCP_CONGESTION && *level == libc::IPPROTO_TCP {
                true => {
                    let text = String::from_utf8_lossy(wanted);
                    let text = text.trim_end_matches('\0');
                    format!(
                        "{name} {text}: this host's kernel needs that congestion control (`modprobe tcp_{text}`)"
                    )
                }
                false => format!("{name} is refused"),
            };
            sockopt::set(socket, *level, *number, wanted).with_context(shown)?;
        }
        Ok(())
    }
}

fn value(socket: BorrowedFd<'_>, level: i32, number: i32) -> io::Result<Vec<u8>> {
    let mut value = [0; LONGEST];
    let length = sockopt::get(socket, level, number, &mut value)?;
    let value = &value[..length];
    // A name is what is before the first zero.
    let is_name = level == libc::IPPROTO_TCP && number == libc::TCP_CONGESTION;
    let end = value.iter().position(|byte| *byte == 0).filter(|_| is_name);
    Ok(value[..end.unwrap_or(value.len())].to_vec())
}

fn is_unknown(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTCONN)
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

    #[test]
    fn what_a_socket_had_another_one_gets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        set(here.as_fd(), libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, 12345);
        set(here.as_fd(), libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT, 4096);
        sockopt::set(here.as_fd(), libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"reno").unwrap();
        let kept = Options::read(here.as_fd()).unwrap().unwrap();
        assert_ne!(Options::read(there.as_fd()).unwrap().unwrap(), kept);
        kept.put_back(there.as_fd()).unwrap();
        assert_eq!(Options::read(there.as_fd()).unwrap().unwrap(), kept);
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
                let kept = Options::read(socket).unwrap().unwrap();
                // Each is set, also where it is the same: the kernel takes what it has said.
                for (name, value) in &kept.0 {
                    let Row(_, _, level, number) = TABLE.iter().find(|row| row.0 == name).unwrap();
                    sockopt::set(socket, *level, *number, value)
                        .unwrap_or_else(|error| panic!("{name} {value:?}: {error}"));
                }
            }
            let kept = Options::read(udp.as_fd()).unwrap().unwrap();
            kept.put_back(again.as_fd()).unwrap();
            assert_eq!(Options::read(again.as_fd()).unwrap().unwrap(), kept);
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
