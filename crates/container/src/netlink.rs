//! rtnetlink (`man 7 rtnetlink`), as far as an instance's link needs it: a request, an acknowledgement, nothing else.
//!
//! A call is one system call each way and takes microseconds, so it may stand in a blackout; a forked `ip` may not.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

/// A link's number in its network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LinkIndex(pub u32);

/// A socket to the kernel's routing part, in the network namespace of the thread that opened it.
#[derive(Debug)]
pub(crate) struct Netlink(OwnedFd);

/// What to do to a link.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change {
    Up,
    Down,
    /// Make it a port of this bridge.
    Master(LinkIndex),
}

impl Netlink {
    /// Opens a socket here. Protocol 0 of this family is `NETLINK_ROUTE`.
    pub fn open() -> io::Result<Self> {
        Self::with_groups(0)
    }

    /// Opens a socket here that is told of every change of a link.
    pub fn listen() -> io::Result<Self> {
        Self::with_groups(libc::RTMGRP_LINK.unsigned_abs())
    }

    fn with_groups(groups: u32) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, groups))?;
        Ok(Self(socket))
    }

    /// Makes a pair of virtual Ethernet links: `name` here, `peer_name` with `peer_mac` in the namespace `peer_ns`.
    pub fn add_veth(
        &self,
        name: &str,
        peer_name: &str,
        peer_mac: [u8; 6],
        peer_ns: BorrowedFd<'_>,
        mtu: Option<u32>,
    ) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL);
        request.link_header(0, 0, 0);
        request.string(libc::IFLA_IFNAME, name);
        if let Some(mtu) = mtu {
            request.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
        }
        request.nest(libc::IFLA_LINKINFO, |request| {
            request.string(libc::IFLA_INFO_KIND, "veth");
            request.nest(libc::IFLA_INFO_DATA, |request| {
                request.nest(VETH_INFO_PEER, |request| {
                    request.link_header(0, 0, 0);
                    request.string(libc::IFLA_IFNAME, peer_name);
                    request.attribute(libc::IFLA_ADDRESS, &peer_mac);
                    if let Some(mtu) = mtu {
                        request.attribute(libc::IFLA_MTU, &mtu.to_ne_bytes());
                    }
                    request.attribute(libc::IFLA_NET_NS_FD, &peer_ns.as_raw_fd().to_ne_bytes());
                });
            });
        });
        self.call(request)
    }

    /// Makes a bridge.
    pub fn add_bridge(&self, name: &str) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, libc::NLM_F_CREATE | libc::NLM_F_EXCL);
        request.link_header(0, 0, 0);
        request.string(libc::IFLA_IFNAME, name);
        request.nest(libc::IFLA_LINKINFO, |request| {
            request.string(libc::IFLA_INFO_KIND, "bridge");
        });
        self.call(request)
    }

    /// Changes a link.
    pub fn change(&self, link: LinkIndex, change: Change) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_NEWLINK, 0);
        let up = libc::IFF_UP.unsigned_abs();
        match change {
            Change::Up => request.link_header(link.0, up, up),
            Change::Down => request.link_header(link.0, 0, up),
            Change::Master(bridge) => {
                request.link_header(link.0, 0, 0);
                request.attribute(libc::IFLA_MASTER, &bridge.0.to_ne_bytes());
            }
        }
        self.call(request)
    }

    /// Whether a link is up and its queues are active.
    pub fn is_running(&self, link: LinkIndex) -> io::Result<bool> {
        let mut request = Request::new(libc::RTM_GETLINK, 0);
        request.link_header(link.0, 0, 0);
        rustix::net::send(&self.0, &request.finish(), SendFlags::empty())?;
        let mut answer = [0u8; 16 * 1024];
        let (_, length) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        if u16::from_ne_bytes([answer[4], answer[5]]) != libc::RTM_NEWLINK {
            return acknowledged(&answer[..length]).map(|()| false);
        }
        let running = running_links(&answer[..length]).any(|running| running == link);
        let (_, length) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        acknowledged(&answer[..length]).map(|()| running)
    }

    /// Deletes a link, and its peer.
    pub fn delete(&self, link: LinkIndex) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_DELLINK, 0);
        request.link_header(link.0, 0, 0);
        self.call(request)
    }

    /// Gives a link an address; a route to its network comes with it.
    pub fn add_address(&self, link: LinkIndex, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_NEWADDR, libc::NLM_F_CREATE | libc::NLM_F_REPLACE);
        // struct ifaddrmsg
        request.bytes(&[libc::AF_INET as u8, prefix, 0, libc::RT_SCOPE_UNIVERSE]);
        request.bytes(&link.0.to_ne_bytes());
        request.attribute(libc::IFA_LOCAL, &address.octets());
        request.attribute(libc::IFA_ADDRESS, &address.octets());
        self.call(request)
    }

    /// A link's addresses, those of IPv4 first.
    pub fn addresses(&self, link: LinkIndex) -> io::Result<Vec<IpAddr>> {
        let mut addresses = Vec::new();
        for family in [libc::AF_INET, libc::AF_INET6] {
            let mut request = Request::new(libc::RTM_GETADDR, libc::NLM_F_DUMP);
            // struct ifaddrmsg
            request.bytes(&[family as u8, 0, 0, 0, 0, 0, 0, 0]);
            rustix::net::send(&self.0, &request.finish(), SendFlags::empty())?;
            loop {
                let mut answer = [0u8; 32 * 1024];
                let (_, length) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
                if !addresses_of(&answer[..length], link, &mut addresses)? {
                    break;
                }
            }
        }
        Ok(addresses)
    }

    /// Adds the default route.
    pub fn add_default_route(&self, link: LinkIndex, gateway: Ipv4Addr) -> io::Result<()> {
        let mut request = Request::new(libc::RTM_NEWROUTE, libc::NLM_F_CREATE | libc::NLM_F_REPLACE);
        // struct rtmsg
        request.bytes(&[
            libc::AF_INET as u8,
            0,
            0,
            0,
            libc::RT_TABLE_MAIN,
            libc::RTPROT_STATIC,
        ]);
        request.bytes(&[libc::RT_SCOPE_UNIVERSE, libc::RTN_UNICAST]);
        request.bytes(&0u32.to_ne_bytes());
        request.attribute(libc::RTA_GATEWAY, &gateway.octets());
        request.attribute(libc::RTA_OIF, &link.0.to_ne_bytes());
        self.call(request)
    }

    /// Waits until a link has carrier and its queues are active, as the kernel reports them some time after the link
    /// was set up (`net/core/link_watch.c`). Only for a socket from [`Netlink::listen`]; reports from before
    /// [`Netlink::forget`] are not counted.
    pub fn wait_running(&self, link: LinkIndex, deadline: Instant) -> io::Result<()> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
            if poll(&mut [PollFd::new(self, PollFlags::IN)], Some(&timeout))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut reports = [0u8; 16 * 1024];
            let length = match rustix::net::recv(&self.0, &mut reports[..], RecvFlags::DONTWAIT) {
                Ok((_, length)) => length,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            if running_links(&reports[..length]).any(|running| running == link) {
                return Ok(());
            }
        }
    }

    /// Drops the reports that have come so far.
    pub fn forget(&self) {
        let mut reports = [0u8; 4096];
        while rustix::net::recv(&self.0, &mut reports[..], RecvFlags::DONTWAIT).is_ok() {}
    }

    /// Sends a request and reads its acknowledgement.
    fn call(&self, request: Request) -> io::Result<()> {
        rustix::net::send(&self.0, &request.finish(), SendFlags::empty())?;
        let mut answer = [0u8; 4096];
        let (_, length) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        acknowledged(&answer[..length])
    }
}

impl AsFd for Netlink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What an acknowledgement says: `struct nlmsghdr`, then `struct nlmsgerr` with a negative errno or 0.
fn acknowledged(answer: &[u8]) -> io::Result<()> {
    let kind = answer
        .get(4..6)
        .map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
    let error = answer
        .get(16..20)
        .and_then(|bytes| bytes.try_into().ok())
        .map(i32::from_ne_bytes);
    match (kind, error) {
        (Some(kind), Some(error)) if i32::from(kind) == libc::NLMSG_ERROR => match error {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(-error)),
        },
        _ => Err(io::Error::other(
            "the kernel did not acknowledge a netlink request",
        )),
    }
}

/// The links that a datagram of reports (`RTM_NEWLINK`) says are up and running.
fn running_links(reports: &[u8]) -> impl Iterator<Item = LinkIndex> {
    let mut rest = reports;
    std::iter::from_fn(move || {
        let word = |at: usize| rest.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes);
        let length = word(0)? as usize;
        let kind = word(4)? as u16;
        // struct ifinfomsg follows the 16 bytes of struct nlmsghdr.
        let (index, flags) = (word(20)?, word(24)?);
        rest = rest.get(length.max(16).next_multiple_of(4)..).unwrap_or_default();
        let wanted = (libc::IFF_UP | libc::IFF_RUNNING).unsigned_abs();
        Some((kind == libc::RTM_NEWLINK && flags & wanted == wanted).then_some(LinkIndex(index)))
    })
    .flatten()
}

/// Adds the addresses of a link that a part of a dump says. False after the last part.
fn addresses_of(part: &[u8], link: LinkIndex, addresses: &mut Vec<IpAddr>) -> io::Result<bool> {
    let mut rest = part;
    while let Some((header, _)) = rest.split_first_chunk::<16>() {
        let [a, b, c, d, low, high, ..] = *header;
        let length = (u32::from_ne_bytes([a, b, c, d]) as usize).max(16);
        let message = rest.get(..length).unwrap_or(rest);
        match i32::from(u16::from_ne_bytes([low, high])) {
            libc::NLMSG_DONE => return Ok(false),
            libc::NLMSG_ERROR => return acknowledged(message).map(|()| false),
            _ => addresses.extend(address_of(message, link)),
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

/// The address in a `RTM_NEWADDR`, if it is one of this link: `struct nlmsghdr`, `struct ifaddrmsg`, attributes.
fn address_of(message: &[u8], link: LinkIndex) -> Option<IpAddr> {
    let index = u32::from_ne_bytes(message.get(20..24)?.try_into().ok()?);
    let mut rest = message.get(24..)?;
    let mut found = None;
    while let Some((&[low, high, kind, kind_high], _)) = rest.split_first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([low, high])).max(4);
        let value = rest.get(4..length)?;
        let kind = u16::from_ne_bytes([kind, kind_high]);
        let address = <[u8; 4]>::try_from(value)
            .map(IpAddr::from)
            .or_else(|_| <[u8; 16]>::try_from(value).map(IpAddr::from));
        // A link between two points has that of its other end as IFA_ADDRESS.
        match kind {
            libc::IFA_LOCAL => return address.ok().filter(|_| index == link.0),
            libc::IFA_ADDRESS => found = address.ok(),
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found.filter(|_| index == link.0)
}

/// Takes a table of the family `inet` away from the packet filter of this thread's network namespace; nft(8) takes some 10 ms to start.
pub(crate) fn delete_table(name: &str) -> io::Result<()> {
    /// `linux/netfilter/nfnetlink.h`, `linux/netfilter/nf_tables.h`.
    const BATCH_BEGIN: u16 = 0x10;
    const BATCH_END: u16 = 0x11;
    const NFTABLES: u16 = 10;
    const DELETE_TABLE: u16 = NFTABLES << 8 | 2;
    const TABLE_NAME: u16 = 1;
    const INET: u8 = 1;
    let header = |kind, family, resource: u16| {
        let mut request = Request::new(kind, 0);
        // struct nfgenmsg
        request.bytes(&[family, 0]);
        request.bytes(&resource.to_be_bytes());
        request
    };
    let mut delete = header(DELETE_TABLE, INET, 0);
    delete.string(TABLE_NAME, name);
    let mut batch = header(BATCH_BEGIN, 0, NFTABLES).without_answer().finish();
    batch.extend(delete.finish());
    batch.extend(header(BATCH_END, 0, NFTABLES).without_answer().finish());
    let (flags, protocol) = (SocketFlags::CLOEXEC, Some(netlink::NETFILTER));
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    rustix::net::send(&socket, &batch, SendFlags::empty())?;
    let mut answer = [0u8; 4096];
    let (_, length) = rustix::net::recv(&socket, &mut answer[..], RecvFlags::empty())?;
    match acknowledged(&answer[..length]) {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        result => result,
    }
}

/// The peer's own link message within a veth's data (`linux/veth.h`).
const VETH_INFO_PEER: u16 = 1;

/// A request under construction. Everything in it is in the host's byte order and padded to four bytes.
struct Request(Vec<u8>);

impl Request {
    fn new(kind: u16, flags: i32) -> Self {
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK | flags) as u16;
        let mut request = Self(vec![0; 4]);
        request.bytes(&kind.to_ne_bytes());
        request.bytes(&flags.to_ne_bytes());
        request.bytes(&[0; 8]);
        request
    }

    /// The kernel answers it by an error alone.
    fn without_answer(mut self) -> Self {
        self.0[6..8].copy_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
        self
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// `struct ifinfomsg`.
    fn link_header(&mut self, index: u32, flags: u32, mask: u32) {
        self.bytes(&[libc::AF_UNSPEC as u8, 0, 0, 0]);
        self.bytes(&index.to_ne_bytes());
        self.bytes(&flags.to_ne_bytes());
        self.bytes(&mask.to_ne_bytes());
    }

    fn attribute(&mut self, kind: u16, value: &[u8]) {
        self.nest(kind, |request| request.bytes(value));
    }

    fn string(&mut self, kind: u16, value: &str) {
        self.nest(kind, |request| {
            request.bytes(value.as_bytes());
            request.bytes(&[0]);
        });
    }

    fn nest(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let start = self.0.len();
        self.bytes(&[0; 2]);
        self.bytes(&kind.to_ne_bytes());
        fill(self);
        let length = u16::try_from(self.0.len() - start).expect("requests are a few hundred bytes");
        self.0[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        let length = u32::try_from(self.0.len()).expect("requests are a few hundred bytes");
        self.0[..4].copy_from_slice(&length.to_ne_bytes());
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_nested_lengths_add_up() {
        let mut request = Request::new(libc::RTM_NEWLINK, 0);
        request.nest(18, |request| request.string(1, "veth"));
        let bytes = request.finish();
        assert_eq!(bytes.len(), 16 + 4 + 12);
        assert_eq!(bytes[..4], 32u32.to_ne_bytes());
        assert_eq!(bytes[16..18], 16u16.to_ne_bytes());
        assert_eq!(bytes[20..22], 9u16.to_ne_bytes());
        assert_eq!(&bytes[24..32], b"veth\0\0\0\0");
    }

    #[test]
    fn running_links_are_found_among_reports() {
        let report = |index, flags: i32| {
            let mut report = Request::new(libc::RTM_NEWLINK, 0);
            report.link_header(index, flags.unsigned_abs(), 0);
            report.string(libc::IFLA_IFNAME, "eth0");
            report.finish()
        };
        let down = report(3, libc::IFF_UP);
        let up = report(4, libc::IFF_UP | libc::IFF_RUNNING);
        let found: Vec<_> = running_links(&[down.as_slice(), &up].concat()).collect();
        assert_eq!(found, [LinkIndex(4)]);
        assert_eq!(running_links(&up[..20]).count(), 0);
    }

    #[test]
    fn an_error_of_the_kernel_comes_back_as_such() {
        let error = Netlink::open()
            .unwrap()
            .change(LinkIndex(0x7fff_fff0), Change::Up)
            .unwrap_err();
        assert!(
            matches!(error.raw_os_error(), Some(libc::ENODEV | libc::EPERM)),
            "{error}"
        );
    }
}
