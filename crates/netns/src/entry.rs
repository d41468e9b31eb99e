//! Addresses, routes, rules and neighbours, as rtnetlink(7) says them.
//!
//! Each is a header of a fixed length and attributes. What refers to a link by its number refers to it by its name here.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::links::Links;
use crate::netlink::{attributes, put, word};

/// An attribute: its number, and what the kernel says.
pub(crate) type Attribute = (u16, Vec<u8>);

/// An address, a route, a rule or a neighbour.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// Without the number of its link.
    header: Vec<u8>,
    link: Option<String>,
    attributes: Vec<Attribute>,
    /// What passes by itself, as lifetimes do.
    passing: Vec<Attribute>,
    /// Those of a route with several next hops.
    hops: Vec<Hop>,
}

/// One of several next hops.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Hop {
    flags: u8,
    weight: u8,
    link: String,
    attributes: Vec<Attribute>,
}

/// Why an entry cannot be carried.
pub(crate) type Obstacle = String;

/// A kind of entries: how it is asked for, and what of it is carried.
#[derive(Debug)]
pub(crate) struct Kind {
    name: &'static str,
    pub new: u16,
    pub delete: u16,
    pub get: u16,
    /// The length of its header.
    pub header: usize,
    /// Where in the header the link's number is.
    link_at: Option<usize>,
    /// The attribute that is the link's number.
    link: Option<u16>,
    /// The attribute with the address that it is known by.
    known_by: u16,
    carried: &'static [u16],
    passing: &'static [u16],
    /// Statistics, and what the kernel works out by itself.
    dropped: &'static [u16],
}

/// `struct ifaddrmsg`, `IFA_*`.
pub(crate) const ADDRESS: Kind = Kind {
    name: "address",
    new: libc::RTM_NEWADDR,
    delete: libc::RTM_DELADDR,
    get: libc::RTM_GETADDR,
    header: 8,
    link_at: Some(4),
    link: None,
    known_by: libc::IFA_ADDRESS,
    carried: &[
        libc::IFA_ADDRESS,
        libc::IFA_LOCAL,
        libc::IFA_LABEL,
        libc::IFA_BROADCAST,
        IFA_FLAGS,
        9,
    ],
    // Who has made it (`IFA_PROTO`) not every kernel knows.
    passing: &[libc::IFA_CACHEINFO, IFA_PROTO],
    dropped: &[10],
};

const IFA_FLAGS: u16 = 8;
const IFA_PROTO: u16 = 11;

/// Flags of addresses that are asked for; the others say how the kernel takes them.
const ASKED_FLAGS: u32 = 0x10 | 0x100 | 0x200 | 0x400;

/// `struct rtmsg`, `RTA_*`.
pub(crate) const ROUTE: Kind = Kind {
    name: "route",
    new: libc::RTM_NEWROUTE,
    delete: libc::RTM_DELROUTE,
    get: libc::RTM_GETROUTE,
    header: 12,
    link_at: None,
    link: Some(libc::RTA_OIF),
    known_by: libc::RTA_DST,
    carried: &[
        libc::RTA_DST,
        libc::RTA_SRC,
        libc::RTA_GATEWAY,
        libc::RTA_PRIORITY,
        libc::RTA_PREFSRC,
        libc::RTA_METRICS,
        libc::RTA_FLOW,
        libc::RTA_TABLE,
        libc::RTA_MARK,
        18,
        19,
        20,
        21,
        22,
        25,
        26,
    ],
    passing: &[23],
    dropped: &[libc::RTA_CACHEINFO, 17, 24],
};

/// `struct fib_rule_hdr`, `FRA_*`.
pub(crate) const RULE: Kind = Kind {
    name: "rule",
    new: libc::RTM_NEWRULE,
    delete: libc::RTM_DELRULE,
    get: libc::RTM_GETRULE,
    header: 12,
    link_at: None,
    link: None,
    known_by: 1,
    carried: &[
        1, 2, 3, 4, 6, 10, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32,
    ],
    passing: &[],
    dropped: &[18],
};

/// `struct ndmsg`, `NDA_*`.
pub(crate) const NEIGHBOUR: Kind = Kind {
    name: "neighbour",
    new: libc::RTM_NEWNEIGH,
    delete: libc::RTM_DELNEIGH,
    get: libc::RTM_GETNEIGH,
    header: 12,
    link_at: Some(4),
    link: None,
    known_by: 1,
    carried: &[1, 2, 12],
    passing: &[],
    dropped: &[3, 4],
};

/// `NTF_PROXY` of a neighbour: its address is answered for.
pub(crate) const PROXY: u8 = 8;
const NTF_ROUTER: u8 = 0x80;
const NUD_PERMANENT: u16 = 0x80;

/// `FIB_RULE_INVERT`.
const RULE_INVERT: u32 = 2;

/// Where a route comes from (`RTPROT_*`): redirects, the kernel, advertisements of routers.
const BY_REDIRECT: u8 = 1;
const BY_KERNEL: u8 = 2;
const BY_ROUTERS: u8 = 9;

/// What the header of a request for both families is.
pub(crate) fn asking(kind: &Kind, family: i32) -> Vec<u8> {
    let mut header = vec![0; kind.header];
    header[0] = family as u8;
    header
}

impl Entry {
    /// Reads what the kernel said. `None`: the kernel makes it, or learns it, by itself.
    pub fn read(kind: &Kind, message: &[u8], links: &Links) -> Result<Option<Self>, Obstacle> {
        let Some((header, rest)) = message.split_at_checked(kind.header) else {
            return Err(format!("the kernel says a {} in an unknown form", kind.name));
        };
        let named = |index: u32| {
            let name = links.name(index).map(str::to_owned);
            name.ok_or_else(|| format!("a {} is of a link that is not there", kind.name))
        };
        let mut entry = Self {
            header: header.to_vec(),
            link: None,
            attributes: Vec::new(),
            passing: Vec::new(),
            hops: Vec::new(),
        };
        if !entry.is_kept(kind, rest) {
            return Ok(None);
        }
        if let Some(at) = kind.link_at {
            entry.link = Some(named(word(header, at).unwrap_or(0))?);
            entry.header[at..at + 4].fill(0);
        }
        for (number, value) in attributes(rest) {
            if Some(number) == kind.link {
                entry.link = Some(named(word(value, 0).unwrap_or(0))?);
            } else if kind.name == ROUTE.name && number == libc::RTA_MULTIPATH {
                entry.hops = hops(value, &named)?;
            } else if kind.carried.contains(&number) {
                entry.attributes.push((number, value.to_vec()));
            } else if kind.passing.contains(&number) {
                entry.passing.push((number, value.to_vec()));
            } else if !kind.dropped.contains(&number) {
                return Err(match (kind.name == ROUTE.name, number) {
                    (true, 30) => format!("{} goes by a nexthop object", entry.told(kind)),
                    _ => format!(
                        "{} has the attribute {number}, which is not known",
                        entry.told(kind)
                    ),
                });
            }
        }
        entry.settle(kind, rest);
        Ok(Some(entry))
    }

    /// Whether it is somebody's, and not made or learnt by the kernel.
    fn is_kept(&self, kind: &Kind, rest: &[u8]) -> bool {
        let family = i32::from(self.header[0]);
        if ![libc::AF_INET, libc::AF_INET6].contains(&family) {
            return false;
        }
        match kind.name {
            "route" => {
                let flags = word(&self.header, 8).unwrap_or(0);
                let by = self.header[5];
                let is_made = by == BY_KERNEL && family == libc::AF_INET6;
                let is_cached = flags & libc::RTM_F_CLONED != 0;
                // Deleted by hand those of IPv4 stay so; those of IPv6 come and go with the carrier.
                !is_cached && !is_made && by != BY_REDIRECT && by != BY_ROUTERS
            }
            "neighbour" => {
                let state = u16::from_ne_bytes([self.header[8], self.header[9]]);
                state & NUD_PERMANENT != 0 || self.header[10] & PROXY != 0
            }
            // One that failed is none.
            "address" => {
                let flags = flags_of(rest);
                flags & 0x08 == 0
            }
            _ => true,
        }
    }

    /// Takes out what says how things are, and leaves what was asked for.
    fn settle(&mut self, kind: &Kind, rest: &[u8]) {
        match kind.name {
            "address" => {
                self.header[2] = 0;
                let flags = flags_of(rest) & ASKED_FLAGS;
                self.attributes.retain(|(number, _)| *number != IFA_FLAGS);
                self.attributes.push((IFA_FLAGS, flags.to_ne_bytes().to_vec()));
                self.passing
                    .retain(|(_, value)| value.get(..8) != Some(&[0xff; 8]));
            }
            "route" => {
                let flags = word(&self.header, 8).unwrap_or(0) & RTNH_F_ONLINK;
                self.header[8..12].copy_from_slice(&flags.to_ne_bytes());
                // rta_expires, in hundredths of a second.
                let cached = attributes(rest).find(|(number, _)| *number == libc::RTA_CACHEINFO);
                let expires = cached.and_then(|(_, value)| word(value, 8)).unwrap_or(0);
                if let Ok(expires @ 1..) = i32::try_from(expires) {
                    self.passing.push((23, (expires / 100).to_ne_bytes().to_vec()));
                }
            }
            "rule" => {
                self.header[5..7].fill(0);
                let flags = word(&self.header, 8).unwrap_or(0) & RULE_INVERT;
                self.header[8..12].copy_from_slice(&flags.to_ne_bytes());
            }
            _ => {
                let state = match self.header[10] & PROXY {
                    0 => NUD_PERMANENT,
                    _ => 0,
                };
                self.header[8..10].copy_from_slice(&state.to_ne_bytes());
                self.header[10] &= PROXY | NTF_ROUTER;
                self.header[11] = 0;
            }
        }
        self.attributes.sort();
    }

    /// The same, but for what passes by itself.
    pub fn is(&self, other: &Self) -> bool {
        let of = |entry: &Self| {
            (
                entry.header.clone(),
                entry.link.clone(),
                entry.attributes.clone(),
                entry.hops.clone(),
            )
        };
        of(self) == of(other)
    }

    /// A request that makes it, or deletes it.
    pub fn request(&self, kind: &Kind, links: &Links) -> Result<Vec<u8>, Obstacle> {
        let index = |name: &String| {
            let index = links.index(name);
            index.ok_or_else(|| format!("there is no link {name}"))
        };
        if self.header.len() != kind.header {
            return Err(format!("a {} is malformed", kind.name));
        }
        let mut request = self.header.clone();
        if let Some(at) = kind.link_at {
            let link = self.link.as_ref().ok_or_else(|| "it has no link".to_owned())?;
            request[at..at + 4].copy_from_slice(&index(link)?.to_ne_bytes());
        }
        // What another host says is not taken for more than it may say.
        let known = self.attributes.iter().chain(&self.passing);
        let known =
            known.filter(|(number, _)| kind.carried.contains(number) || kind.passing.contains(number));
        for (number, value) in known {
            let is_flags = kind.name == ADDRESS.name && *number == IFA_FLAGS;
            match is_flags && i32::from(self.header[0]) == libc::AF_INET6 {
                // Nobody has it but this instance: it had it before.
                true => {
                    let flags = word(value, 0).unwrap_or(0) | IFA_F_NODAD;
                    put(&mut request, IFA_FLAGS, &flags.to_ne_bytes());
                }
                false => put(&mut request, *number, value),
            }
        }
        if let (Some(number), Some(link)) = (kind.link, &self.link) {
            put(&mut request, number, &index(link)?.to_ne_bytes());
        }
        if !self.hops.is_empty() && kind.name == ROUTE.name {
            let mut hops = Vec::new();
            for hop in &self.hops {
                let mut one = vec![0, 0, hop.flags, hop.weight];
                one.extend_from_slice(&index(&hop.link)?.to_ne_bytes());
                let known = hop
                    .attributes
                    .iter()
                    .filter(|(number, _)| kind.carried.contains(number));
                known.for_each(|(number, value)| put(&mut one, *number, value));
                let length = u16::try_from(one.len()).map_err(|_| "a next hop is too long".to_owned())?;
                one[..2].copy_from_slice(&length.to_ne_bytes());
                hops.extend_from_slice(&one);
            }
            put(&mut request, libc::RTA_MULTIPATH, &hops);
        }
        Ok(request)
    }

    /// The address that it is known by.
    pub fn address(&self, kind: &Kind) -> Option<IpAddr> {
        let of = |wanted: u16| self.attributes.iter().find(|(number, _)| *number == wanted);
        // That of a link between two points is the other end's.
        let local = of(libc::IFA_LOCAL).filter(|_| kind.name == ADDRESS.name);
        let (_, value) = local.or_else(|| of(kind.known_by))?;
        address_of(value)
    }

    /// Whether it is a route that the kernel has made.
    pub fn is_route_of_kernel(&self) -> bool {
        self.header.get(5) == Some(&BY_KERNEL)
    }

    /// Whether it is one of the rules that each namespace has.
    pub fn is_usual_rule(&self) -> bool {
        let priority = self.attributes.iter().find(|(number, _)| *number == 6);
        let priority = priority.and_then(|(_, value)| word(value, 0)).unwrap_or(0);
        [0, 32766, 32767].contains(&priority)
    }

    /// In words for an operator.
    pub fn told(&self, kind: &Kind) -> String {
        let known = |wanted: u16| {
            let found = self.attributes.iter().find(|(number, _)| *number == wanted);
            found.and_then(|(_, value)| address_of(value))
        };
        let version = match i32::from(self.header.first().copied().unwrap_or(0)) {
            libc::AF_INET6 => "IPv6",
            _ => "IPv4",
        };
        let prefix = self.header.get(1).copied().unwrap_or(0);
        let mut told = match kind.name {
            "rule" => {
                let priority = self.attributes.iter().find(|(number, _)| *number == 6);
                let priority = priority.and_then(|(_, value)| word(value, 0)).unwrap_or(0);
                format!("the {version} rule of priority {priority}")
            }
            "route" => match known(kind.known_by) {
                Some(address) => format!("the route to {address}/{prefix}"),
                None => format!("the {version} default route"),
            },
            name => match self.address(kind) {
                Some(address) => format!("the {name} {address}"),
                None => format!("an {version} {name}"),
            },
        };
        if kind.name == "route"
            && let Some(gateway) = known(libc::RTA_GATEWAY)
        {
            told.push_str(&format!(" via {gateway}"));
        }
        if let Some(link) = &self.link {
            told.push_str(&format!(" at {link}"));
        }
        told
    }
}

/// `RTNH_F_ONLINK`.
const RTNH_F_ONLINK: u32 = 4;
const IFA_F_NODAD: u32 = 2;

fn flags_of(rest: &[u8]) -> u32 {
    let found = attributes(rest).find(|(number, _)| *number == IFA_FLAGS);
    found.and_then(|(_, value)| word(value, 0)).unwrap_or(0)
}

/// The next hops of a route: `struct rtnexthop` and attributes, each.
fn hops(value: &[u8], named: &impl Fn(u32) -> Result<String, Obstacle>) -> Result<Vec<Hop>, Obstacle> {
    let (mut hops, mut rest) = (Vec::new(), value);
    while let Some((&[low, high, flags, weight], _)) = rest.split_first_chunk::<4>() {
        let length = usize::from(u16::from_ne_bytes([low, high]));
        let (Some(index), Some(has)) = (word(rest, 4), rest.get(8..length)) else {
            break;
        };
        let has: Vec<_> = attributes(has)
            .map(|(number, value)| (number, value.to_vec()))
            .collect();
        if let Some((number, _)) = has.iter().find(|(number, _)| !ROUTE.carried.contains(number)) {
            return Err(format!(
                "a next hop has the attribute {number}, which is not known"
            ));
        }
        hops.push(Hop {
            flags: flags & RTNH_F_ONLINK as u8,
            weight,
            link: named(index)?,
            attributes: has,
        });
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(hops)
}

fn address_of(value: &[u8]) -> Option<IpAddr> {
    let of_four = <[u8; 4]>::try_from(value).map(IpAddr::from);
    let of_sixteen = || <[u8; 16]>::try_from(value).map(IpAddr::from);
    of_four.or_else(|_| of_sixteen()).ok()
}
