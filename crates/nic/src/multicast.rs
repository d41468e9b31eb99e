//! Multicast groups, and the queue pairs that are attached to them (IBA Vol 1 §10.5).
//!
//! A group has a socket of its own, bound to its address: it is the membership, tells this group's datagrams from
//! others', and ends both when the last queue pair is detached, or with the process.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::error::Refused;
use crate::socket::UdpPort;
use crate::table::Table;

/// A group with at least one member.
#[derive(Debug)]
pub struct Group {
    pub address: IpAddr,
    pub socket: UdpPort,
    /// Queue pairs.
    pub members: Vec<u32>,
    /// The socket may have something.
    pub readable: bool,
}

#[derive(Debug)]
pub struct Groups {
    numbers: HashMap<IpAddr, u32>,
    groups: Table<Group>,
}

impl Groups {
    pub fn new(max: u32) -> Self {
        Self {
            numbers: HashMap::new(),
            groups: Table::new(1, max, 0),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.numbers.is_empty()
    }

    /// How many groups there are.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    pub fn get_mut(&mut self, number: u32) -> Option<&mut Group> {
        self.groups.get_mut(number)
    }

    /// Those whose sockets may have something.
    pub fn readable(&self) -> impl Iterator<Item = u32> + '_ {
        self.groups
            .iter()
            .filter(|(_, group)| group.readable)
            .map(|(number, _)| number)
    }

    /// Whether a queue pair is attached to a group.
    pub fn is_attached(&self, qpn: u32, address: IpAddr) -> bool {
        let group = self
            .numbers
            .get(&address)
            .and_then(|number| self.groups.get(*number));
        group.is_some_and(|group| group.members.contains(&qpn))
    }

    /// Attaches a queue pair; says whether it was not attached already. `open` makes the socket of a new group, of which
    /// it gets the number.
    pub fn attach(
        &mut self,
        qpn: u32,
        address: IpAddr,
        open: impl FnOnce() -> Result<UdpPort, Refused>,
    ) -> Result<(u32, bool), Refused> {
        let number = match self.numbers.get(&address) {
            Some(number) => *number,
            None => {
                if !self.groups.has_room() {
                    return Err(Refused::new(
                        libc::ENOMEM,
                        "the RNIC is a member of as many groups as it can be",
                    ));
                }
                let socket = open()?;
                let make = |_, _| Group {
                    address,
                    socket,
                    members: Vec::new(),
                    readable: true,
                };
                let number = self.groups.insert_with(make).expect("there was room");
                self.numbers.insert(address, number);
                number
            }
        };
        let group = self.groups.get_mut(number).expect("a numbered group");
        let new = !group.members.contains(&qpn);
        if new {
            group.members.push(qpn);
        }
        Ok((number, new))
    }

    /// Detaches a queue pair; says whether it was attached.
    pub fn detach(&mut self, qpn: u32, address: IpAddr) -> bool {
        let Some(number) = self.numbers.get(&address).copied() else {
            return false;
        };
        let group = self.groups.get_mut(number).expect("a numbered group");
        let before = group.members.len();
        group.members.retain(|member| *member != qpn);
        let was_attached = group.members.len() < before;
        if group.members.is_empty() {
            self.numbers.remove(&address);
            self.groups.remove(number);
        }
        was_attached
    }

    /// Detaches a queue pair from all groups.
    pub fn detach_all(&mut self, qpn: u32) {
        let addresses: Vec<_> = self.numbers.keys().copied().collect();
        for address in addresses {
            self.detach(qpn, address);
        }
    }
}

/// The IP group of a multicast GID. IPv4 groups are mapped as the kernel's `cma_iboe_set_mgid` maps them: for RoCEv2
/// as addresses are (`::ffff:a.b.c.d`), and for RoCEv1, which programs may copy from, `ff0e::ffff:a.b.c.d`.
pub fn group_address(mgid: [u8; 16]) -> Option<IpAddr> {
    let v6 = Ipv6Addr::from(mgid);
    let v4 = match v6.to_ipv4_mapped() {
        Some(v4) => Some(v4),
        None if mgid[..12] == [0xff, 0x0e, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff] => {
            Some(Ipv4Addr::new(mgid[12], mgid[13], mgid[14], mgid[15]))
        }
        None => None,
    };
    match v4 {
        Some(v4) => v4.is_multicast().then_some(IpAddr::V4(v4)),
        None => v6.is_multicast().then_some(IpAddr::V6(v6)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_the_addresses_that_the_kernel_gives_them() {
        let group = |text: &str| group_address(text.parse::<Ipv6Addr>().unwrap().octets());
        let v4 = Some(IpAddr::from([224, 1, 2, 3]));
        assert_eq!(group("::ffff:224.1.2.3"), v4);
        assert_eq!(group("ff0e::ffff:224.1.2.3"), v4);
        assert_eq!(group("ff0e::1"), Some("ff0e::1".parse().unwrap()));
        for not_a_group in ["::ffff:10.1.2.3", "ff0e::ffff:10.1.2.3", "fe80::1", "::1"] {
            assert_eq!(group(not_a_group), None, "{not_a_group}");
        }
    }

    #[test]
    fn the_last_member_takes_the_group_with_it() {
        let mut groups = Groups::new(1);
        let address = IpAddr::from([224, 7, 2, 1]);
        let open = || Ok(UdpPort::join(address, [127, 7, 2, 1].into(), 1, 47_914, 1 << 16).unwrap());
        let (number, new) = groups.attach(5, address, open).unwrap();
        assert!(new && !groups.attach(5, address, open).unwrap().1);
        assert_eq!(groups.attach(6, address, open).unwrap(), (number, true));
        let other = IpAddr::from([224, 7, 2, 2]);
        assert_eq!(groups.attach(5, other, open).unwrap_err().errno, libc::ENOMEM);
        assert!(!groups.detach(7, address) && groups.detach(5, address));
        groups.detach_all(6);
        assert!(groups.is_empty() && groups.get_mut(number).is_none());
    }
}
