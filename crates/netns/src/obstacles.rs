//! What of a namespace is not moved.

use std::io;
use std::net::{Ipv6Addr, SocketAddrV6};
use std::path::Path;

use crate::found::Found;
use crate::links::{Link, Links, text_of};
use crate::netlink::{Netlink, attribute, is_unknown, word};
use crate::nft;

/// Links that the kernel makes in each namespace, if their modules are loaded.
const MADE_BY_KERNEL: [&str; 9] = [
    "sit0", "tunl0", "ip6tnl0", "gre0", "gretap0", "erspan0", "ip6gre0", "ip_vti0", "ip6_vti0",
];

/// Whether it is a link that every instance has.
pub(crate) fn is_moved(link: &Link) -> bool {
    link.name == "lo" || link.kind == "veth" && link.name == "eth0"
}

/// `struct tcmsg`, and `TCA_KIND`.
const QUEUE_HEADER: usize = 20;
const QUEUE_KIND: u16 = 1;
const GET_QUEUE: u16 = libc::RTM_GETQDISC;

/// `RTM_GETNEXTHOP`, and `struct nhmsg`.
const GET_NEXT_HOP: u16 = 106;
const NEXT_HOP_HEADER: usize = 8;

/// `XFRM_MSG_GETSA`, `XFRM_MSG_GETPOLICY`.
const GET_SA: u16 = 0x12;
const GET_POLICY: u16 = 0x15;

/// Tables of the packet filter before nftables.
const OLD_TABLES: [&str; 3] = ["ip_tables_names", "ip6_tables_names", "arp_tables_names"];

/// Adds to what was found what is not moved.
pub(crate) fn find(netlink: &Netlink, links: &Links, found: &mut Found) -> io::Result<()> {
    let obstacles = &mut found.obstacles;
    for link in links.all() {
        let (name, kind) = (&link.name, &link.kind);
        if !is_moved(link) {
            if !MADE_BY_KERNEL.contains(&name.as_str()) || link.is_up() {
                let kind = match kind.is_empty() {
                    true => String::new(),
                    false => format!(" ({kind})"),
                };
                obstacles.push(format!("the link {name}{kind} is not moved: delete it first"));
            }
            continue;
        }
        if !link.is_up() {
            obstacles.push(format!(
                "the link {name} is set down, and would be up: set it up first"
            ));
        }
        if link.has_xdp {
            obstacles.push(format!(
                "the program of XDP at {name} is not moved: detach it first"
            ));
        }
    }
    for message in dump_if_known(netlink, GET_QUEUE, &[0; QUEUE_HEADER])? {
        let kind = attribute(message.get(QUEUE_HEADER..).unwrap_or_default(), QUEUE_KIND);
        let kind = kind.map(text_of).unwrap_or_default();
        let name = word(&message, 4)
            .and_then(|index| links.name(index))
            .unwrap_or("?");
        if kind != "noqueue" && !MADE_BY_KERNEL.contains(&name) {
            obstacles.push(format!(
                "the queueing discipline {kind} of {name} is not moved: `tc qdisc del dev {name} …` removes it"
            ));
        }
    }
    if !dump_if_known(netlink, GET_NEXT_HOP, &[0; NEXT_HOP_HEADER])?.is_empty() {
        obstacles.push("nexthop objects are not moved: write the next hops into the routes".to_owned());
    }
    if let Ok(xfrm) = Netlink::xfrm() {
        for (kind, what) in [(GET_SA, "states"), (GET_POLICY, "policies")] {
            if !dump_if_known(&xfrm, kind, &[])?.is_empty() {
                obstacles.push(format!("{what} of IPsec (`ip xfrm`) are not moved"));
            }
        }
    }
    for table in OLD_TABLES {
        let names: Vec<_> = lines(table);
        if !names.is_empty() {
            obstacles.push(format!(
                "tables of iptables-legacy ({}) are not moved: use nftables",
                names.join(", ")
            ));
        }
    }
    // Headings of `/proc/net/ip_vs` and `/proc/net/ip_mr_vif`.
    for (file, heading, what) in [
        ("ip_vs", 3, "services of IPVS"),
        ("ip_mr_vif", 1, "links of a multicast router"),
        ("ip6_mr_vif", 1, "links of a multicast router for IPv6"),
    ] {
        if lines(file).len() > heading {
            obstacles.push(format!("{what} are not moved"));
        }
    }
    if !found.state.nftables.is_empty() && nft::has_foreign_rules()? {
        obstacles.push(
            "rules of iptables-nft with an extension of iptables's are not moved: `iptables-translate` says them for nft".to_owned(),
        );
    }
    obstacles.extend(lines("tcp6").iter().filter_map(|line| by_link_local(line)).map(|end| {
        format!(
            "the TCP connection by the link-local address {end} cannot be made again elsewhere (CRIU): close it, or use another address"
        )
    }));
    let tracked = crate::sysctl::read_one("netfilter/nf_conntrack_count");
    if let Some(tracked @ 1..) = tracked.and_then(|count| count.parse::<u32>().ok()) {
        found.notes.push(format!(
            "{tracked} entries of connection tracking are not moved: connections are tracked anew by their next packets, and what NAT \
             had translated ends"
        ));
    }
    Ok(())
}

/// The own end of a connection by a link-local address, of a line of `/proc/net/tcp6`: CRIU binds it without its link.
fn by_link_local(line: &str) -> Option<SocketAddrV6> {
    const LISTENS: &str = "0A";
    const WAITS: &str = "06";
    let mut words = line.split_whitespace().skip(1);
    let (own, _, state) = (words.next()?, words.next()?, words.next()?);
    let (address, port) = own.split_once(':')?;
    // Four words in the processor's order.
    let mut octets = Vec::with_capacity(16);
    for at in [0, 8, 16, 24] {
        let word = u32::from_str_radix(address.get(at..at + 8)?, 16).ok()?;
        octets.extend_from_slice(&word.to_ne_bytes());
    }
    let address = Ipv6Addr::from(<[u8; 16]>::try_from(octets).ok()?);
    let port = u16::from_str_radix(port, 16).ok()?;
    let is_one = address.is_unicast_link_local() && ![LISTENS, WAITS].contains(&state);
    is_one.then(|| SocketAddrV6::new(address, port, 0, 0))
}

fn dump_if_known(netlink: &Netlink, kind: u16, header: &[u8]) -> io::Result<Vec<Vec<u8>>> {
    match netlink.dump(kind, header) {
        Err(error) if is_unknown(&error) => Ok(Vec::new()),
        messages => messages,
    }
}

/// The lines of a file of this thread's `/proc/net`; none if there is no such file.
fn lines(file: &str) -> Vec<String> {
    let text = std::fs::read_to_string(Path::new("/proc/thread-self/net").join(file));
    text.unwrap_or_default().lines().map(str::to_owned).collect()
}
