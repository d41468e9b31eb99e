//! Multicast groups that sockets of an instance's tasks are members of.
//!
//! CRIU does not write them down. The kernel lists groups by link (`/proc/PID/net/igmp`, `igmp6`), and says of a socket and a group whether
//! it is a member, with which sources (`MCAST_MSFILTER`, RFC 3678). Both are asked while the tasks stand still, on descriptors of our own for
//! their sockets; the groups are joined again in the same way, in tasks that are restored and do not run yet.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde::{Deserialize, Serialize};

use crate::check::processes_of;
use crate::descriptors::Descriptors;

/// Sources of a group that are carried, for each socket; the kernel's usual limit is 10.
const MAX_SOURCES: usize = 1024;

/// So many memberships are carried.
const MAX_MEMBERSHIPS: usize = 16 << 10;

/// A group that a socket is a member of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// A process with the socket, in the instance's own PID namespace.
    pid: i32,
    /// The socket's descriptor there.
    descriptor: RawFd,
    /// The name of the link.
    link: String,
    group: IpAddr,
    /// Only packets of the sources are taken; else all others.
    includes: bool,
    sources: Vec<IpAddr>,
}

/// Why memberships do not move.
#[derive(Debug, thiserror::Error)]
pub enum MembershipError {
    /// They cannot be read.
    #[error("the multicast groups of the instance's sockets cannot be read")]
    Read(#[source] io::Error),
    /// There are too many.
    #[error("the instance's sockets are members of more than {MAX_MEMBERSHIPS} multicast groups")]
    Many,
    /// One cannot be joined.
    #[error(
        "descriptor {descriptor} of process {pid} (in the instance) cannot join the multicast group {group} on {link}"
    )]
    Join {
        /// The process, in the instance's own PID namespace.
        pid: i32,
        /// Its descriptor.
        descriptor: RawFd,
        /// The group.
        group: IpAddr,
        /// The link's name.
        link: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A group on a link of the namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Joined {
    index: u32,
    link: String,
    group: IpAddr,
    /// How many have joined it, the kernel included.
    users: u32,
}

/// Those of the container with this first process, whose tasks must stand still. `descriptors` are theirs.
pub fn memberships(init_pid: i32, descriptors: &Descriptors) -> Result<Vec<Membership>, MembershipError> {
    let read = |error| MembershipError::Read(error);
    let groups = groups_of(init_pid).map_err(read)?;
    if groups.iter().all(is_the_kernel_s_own) {
        // No socket has any: they need not be looked at.
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    for pid in processes_of(init_pid).map_err(read)?.into_keys() {
        match of_process((pid, descriptors.of_process(pid)), &groups, &mut seen, &mut found) {
            Err(error) if !has_ended(&error) => return Err(MembershipError::Read(error)),
            _ => {}
        }
        if found.len() > MAX_MEMBERSHIPS {
            return Err(MembershipError::Many);
        }
    }
    Ok(found)
}

/// Has the sockets of a restored container, whose tasks do not run yet, join their groups again.
pub fn join_again(init_pid: i32, memberships: &[Membership]) -> Result<(), MembershipError> {
    if memberships.is_empty() {
        return Ok(());
    }
    if memberships.len() > MAX_MEMBERSHIPS {
        return Err(MembershipError::Many);
    }
    let read = |error| MembershipError::Read(error);
    let links: BTreeMap<_, _> = groups_of(init_pid)
        .map_err(read)?
        .into_iter()
        .map(|joined| (joined.link, joined.index))
        .collect();
    let processes = processes_of(init_pid).map_err(read)?;
    let by_own_number: BTreeMap<_, _> = processes
        .into_keys()
        .filter_map(|pid| Some((number_inside(pid).ok()?, pid)))
        .collect();
    for membership in memberships {
        let joined = by_own_number
            .get(&membership.pid)
            .ok_or_else(|| io::ErrorKind::NotFound.into())
            .and_then(|pid| {
                let index = links.get(&membership.link).ok_or(io::ErrorKind::NotFound)?;
                let socket = socket_of(*pid, membership.descriptor)?;
                join(&socket, *index, membership)
            });
        joined.map_err(|source| MembershipError::Join {
            pid: membership.pid,
            descriptor: membership.descriptor,
            group: membership.group,
            link: membership.link.clone(),
            source,
        })?;
    }
    Ok(())
}

fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// The number of a process in its own PID namespace.
fn number_inside(pid: i32) -> io::Result<i32> {
    let status = std::fs::read(format!("/proc/{pid}/status"))?;
    let status = String::from_utf8_lossy(&status);
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let number = numbers.and_then(|numbers| numbers.split_whitespace().last()?.parse().ok());
    number.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn socket_of(pid: i32, descriptor: RawFd) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(pidfd_getfd(&pidfd, descriptor, PidfdGetfdFlags::empty())?)
}

/// Adds what the sockets of a process are members of; sockets that were `seen` are another process's, too.
fn of_process(
    (pid, descriptors): (i32, &[RawFd]),
    groups: &[Joined],
    seen: &mut HashSet<String>,
    found: &mut Vec<Membership>,
) -> io::Result<()> {
    let own_number = number_inside(pid)?;
    for &descriptor in descriptors {
        // `socket:[INODE]`: several descriptors may be one.
        let target = std::fs::read_link(format!("/proc/{pid}/fd/{descriptor}"))?;
        let name = target.to_string_lossy().into_owned();
        if !name.starts_with("socket:") || !seen.insert(name) {
            continue;
        }
        let socket = socket_of(pid, descriptor)?;
        let domain = number_option(&socket, libc::SOL_SOCKET, libc::SO_DOMAIN)?;
        let kind = number_option(&socket, libc::SOL_SOCKET, libc::SO_TYPE)?;
        if ![libc::AF_INET, libc::AF_INET6].contains(&domain)
            || ![libc::SOCK_DGRAM, libc::SOCK_RAW].contains(&kind)
        {
            continue;
        }
        for joined in groups {
            if let Some((includes, sources)) = filter_of(&socket, joined)? {
                found.push(Membership {
                    pid: own_number,
                    descriptor,
                    link: joined.link.clone(),
                    group: joined.group,
                    includes,
                    sources,
                });
            }
        }
    }
    Ok(())
}

/// The groups of a process's network namespace, with those of the kernel's own.
fn groups_of(pid: i32) -> io::Result<Vec<Joined>> {
    let read = |name: &str| match std::fs::read_to_string(format!("/proc/{pid}/net/{name}")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        text => text,
    };
    let mut groups = parse_igmp(&read("igmp")?);
    groups.extend(parse_igmp6(&read("igmp6")?));
    Ok(groups)
}

/// `/proc/net/igmp`: a line for each link, and below it one for each group, in hexadecimal of the processor's order.
fn parse_igmp(text: &str) -> Vec<Joined> {
    let (mut found, mut link) = (Vec::new(), None);
    for line in text.lines().skip(1) {
        let words: Vec<_> = line.split_whitespace().collect();
        if !line.starts_with(char::is_whitespace) {
            let index = words.first().and_then(|index| index.parse().ok());
            link = index.zip(words.get(1).map(|name| name.trim_end_matches(':').to_owned()));
            continue;
        }
        let group = words
            .first()
            .and_then(|group| u32::from_str_radix(group, 16).ok());
        let users = words.get(1).and_then(|users| users.parse().ok());
        if let (Some((index, link)), Some(group), Some(users)) = (&link, group, users) {
            found.push(Joined {
                index: *index,
                link: link.clone(),
                group: Ipv4Addr::from(group.to_ne_bytes()).into(),
                users,
            });
        }
    }
    found
}

/// `/proc/net/igmp6`: a line for each group.
fn parse_igmp6(text: &str) -> Vec<Joined> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let index = words.next()?.parse().ok()?;
        let link = words.next()?.to_owned();
        let group = u128::from_str_radix(words.next()?, 16).ok()?;
        let users = words.next()?.parse().ok()?;
        Some(Joined {
            index,
            link,
            group: Ipv6Addr::from(group).into(),
            users,
        })
    };
    text.lines().filter_map(parse).collect()
}

/// Groups that the kernel joins on every link: all hosts, all nodes, and those of its addresses.
fn is_the_kernel_s_own(joined: &Joined) -> bool {
    match joined.group {
        IpAddr::V4(group) => joined.users <= 1 && group == Ipv4Addr::new(224, 0, 0, 1),
        IpAddr::V6(group) => {
            let segments = group.segments();
            let is_of_address = segments[0] == 0xff02 && segments[5] == 1 && segments[6] >> 8 == 0xff;
            let is_all_nodes =
                [0xff01, 0xff02].contains(&segments[0]) && segments[1..] == [0, 0, 0, 0, 0, 0, 1];
            is_of_address || joined.users <= 1 && is_all_nodes
        }
    }
}

/// `linux/in.h`: options of RFC 3678, and modes of a filter.
const JOIN_GROUP: libc::c_int = 42;
const JOIN_SOURCE_GROUP: libc::c_int = 46;
const FILTER: libc::c_int = 48;
const EXCLUDE: u32 = 0;
const INCLUDE: u32 = 1;

/// Of `struct group_filter`: where its group, its mode and its sources are.
const GROUP_AT: usize = 8;
const ADDRESS_BYTES: usize = 128;
const MODE_AT: usize = GROUP_AT + ADDRESS_BYTES;
const SOURCES_AT: usize = MODE_AT + 8;

/// Whether a socket is a member: if it takes only packets of the sources, and these.
fn filter_of(socket: &OwnedFd, joined: &Joined) -> io::Result<Option<(bool, Vec<IpAddr>)>> {
    let mut filter = vec![0; SOURCES_AT + 16 * ADDRESS_BYTES];
    loop {
        filter[..4].copy_from_slice(&joined.index.to_ne_bytes());
        put_address(&mut filter, GROUP_AT, joined.group);
        let room = (filter.len() - SOURCES_AT) / ADDRESS_BYTES;
        filter[MODE_AT + 4..SOURCES_AT].copy_from_slice(&(room as u32).to_ne_bytes());
        if let Err(error) = get(socket, level(joined.group), FILTER, &mut filter) {
            // It is none; or a socket of IPv6 only, or a raw one, has no groups of IPv4; or it is of another link.
            let none = [
                libc::EADDRNOTAVAIL,
                libc::ENOPROTOOPT,
                libc::EINVAL,
                libc::ENODEV,
                libc::EOPNOTSUPP,
            ];
            return match error.raw_os_error() {
                Some(errno) if none.contains(&errno) => Ok(None),
                _ => Err(error),
            };
        }
        let number = |at: usize| u32::from_ne_bytes(filter[at..at + 4].try_into().expect("four bytes"));
        let (mode, sources) = (number(MODE_AT), number(MODE_AT + 4) as usize);
        if sources > room && sources <= MAX_SOURCES {
            filter = vec![0; SOURCES_AT + sources * ADDRESS_BYTES];
            continue;
        }
        if sources > MAX_SOURCES {
            return Err(io::Error::other(format!(
                "a socket takes packets of {sources} sources to {}",
                joined.group
            )));
        }
        let sources = (0..sources).map(|index| address_at(&filter, SOURCES_AT + index * ADDRESS_BYTES));
        return Ok(Some((mode == INCLUDE, sources.collect::<io::Result<_>>()?)));
    }
}

fn join(socket: &OwnedFd, index: u32, membership: &Membership) -> io::Result<()> {
    let level = level(membership.group);
    let request = |bytes: usize| {
        let mut request = vec![0; bytes];
        request[..4].copy_from_slice(&index.to_ne_bytes());
        put_address(&mut request, GROUP_AT, membership.group);
        request
    };
    if membership.includes {
        for source in &membership.sources {
            let mut request = request(MODE_AT + ADDRESS_BYTES);
            put_address(&mut request, MODE_AT, *source);
            set(socket, level, JOIN_SOURCE_GROUP, &request)?;
        }
        return Ok(());
    }
    set(socket, level, JOIN_GROUP, &request(MODE_AT))?;
    if membership.sources.is_empty() {
        return Ok(());
    }
    let mut filter = request(SOURCES_AT + membership.sources.len() * ADDRESS_BYTES);
    filter[MODE_AT..MODE_AT + 4].copy_from_slice(&EXCLUDE.to_ne_bytes());
    let count = membership.sources.len() as u32;
    filter[MODE_AT + 4..SOURCES_AT].copy_from_slice(&count.to_ne_bytes());
    for (at, source) in membership.sources.iter().enumerate() {
        put_address(&mut filter, SOURCES_AT + at * ADDRESS_BYTES, *source);
    }
    set(socket, level, FILTER, &filter)
}

fn level(group: IpAddr) -> libc::c_int {
    match group {
        IpAddr::V4(_) => libc::IPPROTO_IP,
        IpAddr::V6(_) => libc::IPPROTO_IPV6,
    }
}

/// `struct sockaddr_in`, or `sockaddr_in6`, in a `struct sockaddr_storage`.
fn put_address(bytes: &mut [u8], at: usize, address: IpAddr) {
    let (family, offset, octets) = match address {
        IpAddr::V4(address) => (libc::AF_INET, 4, address.octets().to_vec()),
        IpAddr::V6(address) => (libc::AF_INET6, 8, address.octets().to_vec()),
    };
    bytes[at..at + 2].copy_from_slice(&(family as u16).to_ne_bytes());
    bytes[at + offset..at + offset + octets.len()].copy_from_slice(&octets);
}

fn address_at(bytes: &[u8], at: usize) -> io::Result<IpAddr> {
    match libc::c_int::from(u16::from_ne_bytes([bytes[at], bytes[at + 1]])) {
        libc::AF_INET => {
            let octets: [u8; 4] = bytes[at + 4..at + 8].try_into().expect("four bytes");
            Ok(octets.into())
        }
        libc::AF_INET6 => {
            let octets: [u8; 16] = bytes[at + 8..at + 24].try_into().expect("16 bytes");
            Ok(octets.into())
        }
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

fn number_option(socket: &OwnedFd, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let mut value = [0; 4];
    get(socket, level, name, &mut value)?;
    Ok(libc::c_int::from_ne_bytes(value))
}

fn get(socket: &OwnedFd, level: libc::c_int, name: libc::c_int, value: &mut [u8]) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes, all of `value`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            value.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn set(socket: &OwnedFd, level: libc::c_int, name: libc::c_int, value: &[u8]) -> io::Result<()> {
    let length = libc::socklen_t::try_from(value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the descriptor is open, and the kernel reads `length` bytes, all of `value`.
    let result = unsafe { libc::setsockopt(socket.as_raw_fd(), level, name, value.as_ptr().cast(), length) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IGMP: &str = "Idx\tDevice    : Count Querier\tGroup    Users Timer\tReporter\n\
        1\tlo        :     2      V3\n\
        \t\t\t\t030201EF     1 0:00000000\t\t0\n\
        \t\t\t\t010000E0     1 0:00000000\t\t0\n";
    const IGMP6: &str = "1    lo              ff020000000000000000000000000001     1 0000000C 0\n\
        2    eth0            ff0500000000000000000000000000fb     2 00000004 0\n";

    #[test]
    fn groups_are_read_as_the_kernel_writes_them() {
        let groups = parse_igmp(IGMP);
        let named: Vec<_> = groups.iter().map(|joined| joined.group.to_string()).collect();
        assert_eq!(named, ["239.1.2.3", "224.0.0.1"]);
        assert_eq!((groups[0].index, groups[0].link.as_str()), (1, "lo"));
        assert!(!is_the_kernel_s_own(&groups[0]) && is_the_kernel_s_own(&groups[1]));
        let groups = parse_igmp6(IGMP6);
        assert_eq!(groups[1].group.to_string(), "ff05::fb");
        assert!(is_the_kernel_s_own(&groups[0]) && !is_the_kernel_s_own(&groups[1]));
    }

    /// Sockets of this process, which stands for one of an instance's: they leave their groups, and join them again.
    #[test]
    fn sockets_join_their_groups_again() {
        use std::net::UdpSocket;
        use std::os::fd::AsFd;

        let any: Ipv4Addr = "239.77.1.3".parse().unwrap();
        let chosen: Ipv4Addr = "239.77.1.4".parse().unwrap();
        let without: Ipv4Addr = "239.77.1.5".parse().unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let own = std::process::id() as i32;
        let lo = 1;
        let as_if = |group: Ipv4Addr, includes, sources: &[Ipv4Addr]| Membership {
            pid: number_inside(own).unwrap(),
            descriptor: socket.as_raw_fd(),
            link: "lo".to_owned(),
            group: group.into(),
            includes,
            sources: sources.iter().copied().map(IpAddr::from).collect(),
        };
        let source = Ipv4Addr::new(10, 0, 0, 7);
        let all = [
            as_if(any, false, &[]),
            as_if(chosen, true, &[source]),
            as_if(without, false, &[source]),
        ];
        let ours = socket.as_fd().try_clone_to_owned().unwrap();
        for membership in &all {
            join(&ours, lo, membership).unwrap();
        }
        let mut found = Vec::new();
        let groups = groups_of(own).unwrap();
        let descriptors = [socket.as_raw_fd(), ours.as_raw_fd()];
        of_process((own, &descriptors), &groups, &mut HashSet::new(), &mut found).unwrap();
        found.retain(|membership| membership.descriptor == socket.as_raw_fd() || membership.group == any);
        // One of the two descriptors of this socket is told.
        found
            .iter_mut()
            .for_each(|membership| membership.descriptor = socket.as_raw_fd());
        found.sort_by_key(|membership| membership.group);
        assert_eq!(found, all);
        // What a socket is a member of already it cannot join again.
        let error = join(&ours, lo, &all[0]).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EADDRINUSE));
    }
}
