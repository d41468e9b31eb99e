//! The links of a namespace, by number and by name.

use std::collections::BTreeMap;
use std::io;

use serde::{Deserialize, Serialize};

use crate::netlink::{Netlink, attribute, put, word};

/// `struct ifinfomsg`.
pub(crate) const HEADER: usize = 16;

/// Flags of a link that its programs set.
const SETTABLE: u32 =
    (libc::IFF_UP | libc::IFF_NOARP | libc::IFF_PROMISC | libc::IFF_ALLMULTI | libc::IFF_MULTICAST) as u32;

/// `IFLA_GROUP` (`linux/if_link.h`).
const GROUP: u16 = 27;

/// `IFLA_XDP`, and in it `IFLA_XDP_ATTACHED`.
const XDP: u16 = 43;
const XDP_ATTACHED: u16 = 2;

/// One link, as far as its programs can change it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub name: String,
    /// Empty for `lo`.
    pub kind: String,
    pub mac: Vec<u8>,
    pub mtu: u32,
    pub queue: u32,
    pub group: u32,
    pub alias: String,
    pub flags: u32,
    /// A program of XDP looks at its packets.
    #[serde(skip)]
    pub has_xdp: bool,
}

impl Link {
    /// Whether it carries packets, as far as the namespace says.
    pub fn is_up(&self) -> bool {
        self.flags & libc::IFF_UP.unsigned_abs() != 0
    }
}

/// The links of this thread's namespace by their numbers.
#[derive(Debug, Default)]
pub(crate) struct Links(BTreeMap<u32, Link>);

impl Links {
    pub fn read(netlink: &Netlink) -> io::Result<Self> {
        let mut links = BTreeMap::new();
        for message in netlink.dump(libc::RTM_GETLINK, &[0; HEADER])? {
            let (Some(index), Some(flags)) = (word(&message, 4), word(&message, 8)) else {
                continue;
            };
            let has = message.get(HEADER..).unwrap_or_default();
            let text = |kind| attribute(has, kind).map(text_of).unwrap_or_default();
            let number = |kind| attribute(has, kind).and_then(|value| word(value, 0)).unwrap_or(0);
            let info = attribute(has, libc::IFLA_LINKINFO).unwrap_or_default();
            let xdp = attribute(has, XDP).and_then(|xdp| attribute(xdp, XDP_ATTACHED));
            let link = Link {
                name: text(libc::IFLA_IFNAME),
                kind: attribute(info, libc::IFLA_INFO_KIND)
                    .map(text_of)
                    .unwrap_or_default(),
                mac: attribute(has, libc::IFLA_ADDRESS).unwrap_or_default().to_vec(),
                mtu: number(libc::IFLA_MTU),
                queue: number(libc::IFLA_TXQLEN),
                group: number(GROUP),
                alias: text(libc::IFLA_IFALIAS),
                flags: flags & SETTABLE,
                has_xdp: xdp.is_some_and(|attached| attached != [0]),
            };
            links.insert(index, link);
        }
        Ok(Self(links))
    }

    pub fn name(&self, index: u32) -> Option<&str> {
        self.0.get(&index).map(|link| link.name.as_str())
    }

    pub fn index(&self, name: &str) -> Option<u32> {
        let found = self.0.iter().find(|(_, link)| link.name == name);
        found.map(|(index, _)| *index)
    }

    pub fn all(&self) -> impl Iterator<Item = &Link> {
        self.0.values()
    }
}

/// A request that makes of the link `own` what `wanted` is; `None` if it is that.
pub(crate) fn change(index: u32, own: &Link, wanted: &Link) -> Option<Vec<u8>> {
    if own == wanted {
        return None;
    }
    let mut request = vec![0; HEADER];
    request[4..8].copy_from_slice(&index.to_ne_bytes());
    request[8..12].copy_from_slice(&(wanted.flags & SETTABLE).to_ne_bytes());
    request[12..16].copy_from_slice(&SETTABLE.to_ne_bytes());
    let numbers = [
        (libc::IFLA_MTU, own.mtu, wanted.mtu),
        (libc::IFLA_TXQLEN, own.queue, wanted.queue),
        (GROUP, own.group, wanted.group),
    ];
    for (kind, _, wanted) in numbers.iter().filter(|(_, own, wanted)| own != wanted) {
        put(&mut request, *kind, &wanted.to_ne_bytes());
    }
    if own.alias != wanted.alias {
        put(&mut request, libc::IFLA_IFALIAS, wanted.alias.as_bytes());
    }
    Some(request)
}

/// What the kernel ends with a zero.
pub(crate) fn text_of(value: &[u8]) -> String {
    let text = value.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text).into_owned()
}
