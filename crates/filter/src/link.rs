//! The frames that an instance may send over its link: those with its own addresses, and from containers none to RNICs.
//!
//! A container with `CAP_NET_RAW` sends any frame, one with `CAP_NET_ADMIN` gives itself any address, and so does a
//! guest. The filter lies at the host's end of the link, where neither of them reaches: a chain of the host's table
//! `netdev verbatim`, at the link's ingress, which drops all that no rule accepts. Rules are given to the kernel by
//! nft(8), in one transaction: a link is never up without them.

use std::fmt::Write;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{ROCE, nft};

/// The host's table of all these chains.
const TABLE: &str = "netdev verbatim";

/// What may be sent over a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkFilter {
    mac: [u8; 6],
    ipv4: Vec<Ipv4Addr>,
    ipv6: Vec<Ipv6Addr>,
    has_rnic: bool,
}

impl LinkFilter {
    /// An instance's own address and link-local address, and those that it may have beside them.
    pub fn new(mac: [u8; 6], own: Ipv4Addr, further: &[IpAddr]) -> Self {
        let mut filter = Self {
            mac,
            ipv4: vec![own],
            ipv6: vec![link_local(mac)],
            has_rnic: false,
        };
        for address in further {
            match address {
                IpAddr::V4(address) => filter.ipv4.push(*address),
                IpAddr::V6(address) => filter.ipv6.push(*address),
            }
        }
        filter.ipv4.sort_unstable();
        filter.ipv4.dedup();
        filter.ipv6.sort_unstable();
        filter.ipv6.dedup();
        filter
    }

    /// Packets to RNICs pass, too: a virtual machine's kernel may have an RNIC of its own, on its own addresses.
    #[must_use]
    pub fn with_rnic(self) -> Self {
        Self {
            has_rnic: true,
            ..self
        }
    }

    /// Whether frames with this source address pass.
    pub fn allows(&self, address: IpAddr) -> bool {
        match address {
            IpAddr::V4(address) => self.ipv4.contains(&address),
            IpAddr::V6(address) => self.ipv6.contains(&address),
        }
    }

    /// Puts the filter in front of a link of this network namespace, in the place of one that is there.
    pub fn put(&self, link: &str) -> io::Result<()> {
        nft::run(&self.rules(link))
    }

    /// Takes it away. A link that is gone may have taken it along: kernels before Linux 6.16 do that.
    pub fn remove(link: &str) -> io::Result<()> {
        nft::remove(TABLE, link)
    }

    fn rules(&self, link: &str) -> String {
        let mac = mac_text(self.mac);
        let ipv4 = set(&self.ipv4);
        let own = set(&self.ipv6);
        // Duplicate address detection has no source address yet (RFC 4862 §5.4.2), nor has a probe by ARP (RFC 5227 §2.1.1).
        let ipv6 = format!("{{ ::, {} }}", list(&self.ipv6));
        let targets: Vec<_> = self.ipv6.iter().map(|address| hex(*address)).collect();
        let mut rules = format!(
            "add table {TABLE}\n\
             add chain {TABLE} {link} {{ type filter hook ingress device \"{link}\" priority 0; policy drop; }}\n\
             flush chain {TABLE} {link}\n"
        );
        // Packets to RNICs come from RNICs (RoCEv2, IBA Annex A17.3.1).
        let to_rnics = match self.has_rnic {
            true => None,
            false => Some(format!("udp dport {ROCE} counter drop")),
        };
        let rest = [
            // Its neighbours' bridges learn from frames behind which port an Ethernet address is.
            format!("ether saddr != {mac} counter drop"),
            format!(
                "ether type arp arp saddr ether {mac} arp saddr ip {{ 0.0.0.0, {} }} accept",
                list(&self.ipv4)
            ),
            // QEMU tells bridges by RARP where its guest is now.
            "ether type 0x8035 accept".to_owned(),
            format!("ip saddr {ipv4} accept"),
            // A router's advertisement, or a redirect, changes the routes of neighbours.
            "icmpv6 type { nd-router-advert, nd-redirect } counter drop".to_owned(),
            // The target address of a neighbour advertisement is an address that its sender has (RFC 4861 §4.4).
            format!(
                "icmpv6 type nd-neighbor-advert @th,64,128 != {{ {} }} counter drop",
                targets.join(", ")
            ),
            // Other extension headers could hide a UDP header from the rule above.
            format!("ip6 saddr {ipv6} ip6 nexthdr {{ tcp, udp, icmpv6 }} accept"),
            format!("ip6 saddr {own} frag nexthdr {{ tcp, udp, icmpv6 }} accept"),
            // Reports of multicast listeners come with a hop-by-hop header (RFC 3810 §5).
            format!("ip6 saddr {ipv6} ip6 nexthdr 0 ip6 daddr ff02::16 accept"),
            "counter".to_owned(),
        ];
        for rule in to_rnics.into_iter().chain(rest) {
            writeln!(rules, "add rule {TABLE} {link} {rule}").expect("a string takes all");
        }
        rules
    }
}

/// The link-local address that Linux makes from an Ethernet address (RFC 4291 Appendix A).
fn link_local(mac: [u8; 6]) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac;
    Ipv6Addr::from([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

fn mac_text(mac: [u8; 6]) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

fn hex(address: Ipv6Addr) -> String {
    format!("{:#034x}", u128::from(address))
}

fn list<T: ToString>(addresses: &[T]) -> String {
    let texts: Vec<_> = addresses.iter().map(T::to_string).collect();
    texts.join(", ")
}

fn set<T: ToString>(addresses: &[T]) -> String {
    format!("{{ {} }}", list(addresses))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x02, b'v', 10, 77, 1, 20];

    #[test]
    fn an_instance_has_its_own_addresses_and_those_that_it_was_given() {
        let further = ["10.77.9.9".parse().unwrap(), "fd00:5::1".parse().unwrap()];
        let filter = LinkFilter::new(MAC, Ipv4Addr::new(10, 77, 1, 20), &further);
        for own in ["10.77.1.20", "10.77.9.9", "fd00:5::1", "fe80::76:aff:fe4d:114"] {
            assert!(filter.allows(own.parse().unwrap()), "{own}");
        }
        for strange in ["10.77.1.21", "fd00:5::2", "fe80::1", "::"] {
            assert!(!filter.allows(strange.parse().unwrap()), "{strange}");
        }
    }

    #[test]
    fn the_rules_name_each_address_and_end_with_a_drop() {
        let rules = LinkFilter::new(MAC, Ipv4Addr::new(10, 77, 1, 20), &[]).rules("vb01234567");
        assert!(rules.contains("policy drop"));
        assert!(rules.contains("udp dport 4791 counter drop"));
        assert!(rules.contains("ip saddr { 10.77.1.20 } accept"));
        assert!(rules.contains("!= { 0xfe8000000000000000760afffe4d0114 }"));
        let of_a_guest = LinkFilter::new(MAC, Ipv4Addr::new(10, 77, 1, 20), &[])
            .with_rnic()
            .rules("vb01234567");
        assert!(!of_a_guest.contains("4791"));
        assert!(of_a_guest.contains("policy drop"));
        assert!(of_a_guest.contains("ip saddr { 10.77.1.20 } accept"));
        assert_eq!(hex(Ipv6Addr::LOCALHOST), "0x00000000000000000000000000000001");
    }
}
