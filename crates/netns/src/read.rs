//! Reads a namespace.

use std::collections::BTreeMap;
use std::io;

use crate::entry::{self, Entry, Kind, Obstacle};
use crate::found::Found;
use crate::links::Links;
use crate::netlink::{Netlink, is_unknown};
use crate::state::State;
use crate::{nft, obstacles, sysctl};

/// Reads namespaces; it knows how a new one is.
#[derive(Debug, Clone)]
pub struct Reader {
    new: BTreeMap<String, String>,
    /// Sysctls that it has found in the namespace.
    known: Vec<String>,
}

impl Reader {
    /// Makes a namespace, looks at it and lets it go. Takes some ms, and a thread of its own.
    pub fn new() -> io::Result<Self> {
        let looked = std::thread::scope(|scope| {
            scope
                .spawn(|| {
                    // SAFETY: only descriptors (`FILES`) and signal state are unsafe to unshare; a network namespace is neither.
                    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }?;
                    sysctl::read()
                })
                .join()
                .expect("looking at a namespace does not panic")
        });
        Ok(Self {
            new: looked?,
            known: Vec::new(),
        })
    }

    /// Keeps in mind which sysctls there are in a namespace that was read, so that it is read again in half of the time.
    pub fn knows(&mut self, found: &Found) {
        let state = &found.state;
        self.known = state.set.keys().chain(state.usual.keys()).cloned().collect();
    }

    /// Reads the namespace of this thread. Takes some ms.
    pub fn read(&self) -> io::Result<Found> {
        let sysctls = match self.known.is_empty() {
            true => sysctl::read()?,
            false => sysctl::read_known(self.known.iter())?,
        };
        let mut found = read_with(sysctls)?;
        let (usual, set) = std::mem::take(&mut found.state.usual)
            .into_iter()
            .partition(|(name, value)| {
                sysctl::usual(&self.new, name) == Some(value) || follows_link(&found.state, name, value)
            });
        (found.state.usual, found.state.set) = (usual, set);
        Ok(found)
    }
}

/// The MTU of IPv6 is that of its link.
fn follows_link(state: &State, name: &str, value: &str) -> bool {
    let link = name
        .strip_prefix("ipv6/conf/")
        .and_then(|rest| rest.strip_suffix("/mtu"));
    let mtu = link.and_then(|link| state.mtu(link));
    mtu.is_some_and(|mtu| value.parse() == Ok(mtu))
}

/// Reads the namespace of this thread, and calls no sysctl set.
pub fn read() -> io::Result<Found> {
    read_with(sysctl::read()?)
}

fn read_with(sysctls: BTreeMap<String, String>) -> io::Result<Found> {
    let netlink = Netlink::route()?;
    let links = Links::read(&netlink)?;
    let mut found = Found::default();
    let lists = [
        (&entry::ADDRESS, &mut found.state.addresses),
        (&entry::ROUTE, &mut found.state.routes),
        (&entry::RULE, &mut found.state.rules),
        (&entry::NEIGHBOUR, &mut found.state.neighbours),
    ];
    for (kind, list) in lists {
        let (entries, not_carried) = entries(&netlink, kind, &links)?;
        *list = entries;
        found.obstacles.extend(not_carried);
    }
    found.state.usual = sysctls;
    found.state.links = links
        .all()
        .filter(|link| obstacles::is_moved(link))
        .cloned()
        .collect();
    match nft::list() {
        Ok(ruleset) => found.state.nftables = ruleset,
        Err(error) => found
            .obstacles
            .push(format!("the rules of nftables cannot be read: {error}")),
    }
    obstacles::find(&netlink, &links, &mut found)?;
    Ok(found)
}

/// All of a kind, and those that cannot be carried.
pub(crate) fn entries(
    netlink: &Netlink,
    kind: &Kind,
    links: &Links,
) -> io::Result<(Vec<Entry>, Vec<Obstacle>)> {
    let (mut entries, mut obstacles) = (Vec::new(), Vec::new());
    for family in [libc::AF_INET, libc::AF_INET6] {
        let mut asked = vec![entry::asking(kind, family)];
        if kind.get == libc::RTM_GETNEIGH {
            let mut proxies = entry::asking(kind, family);
            proxies[10] = entry::PROXY;
            asked.push(proxies);
        }
        for header in asked {
            let messages = match netlink.dump(kind.get, &header) {
                // A kernel without IPv6, or without policy routing.
                Err(error) if is_unknown(&error) => continue,
                messages => messages?,
            };
            for message in messages {
                // Asked for a family that it does not have, a kernel says all.
                if message.first().copied().map(i32::from) != Some(family) {
                    continue;
                }
                match Entry::read(kind, &message, links) {
                    Ok(read) => entries.extend(read),
                    Err(obstacle) => obstacles.push(obstacle),
                }
            }
        }
    }
    Ok((entries, obstacles))
}
