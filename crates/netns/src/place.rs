//! Makes of a namespace what another one was.

use std::io;

use crate::entry::{self, Entry, Kind};
use crate::links::{self, Links};
use crate::netlink::Netlink;
use crate::read::entries;
use crate::state::State;
use crate::{nft, sysctl};

/// Some of what is set changes what else is set, and some routes need others: so many times all is looked at.
const ROUNDS: usize = 8;

/// Why a namespace cannot be made what another one was.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its links are others.
    #[error("there is no link {name} in the network namespace")]
    NoLink {
        /// The link's name.
        name: String,
    },
    /// Its Ethernet address is another.
    #[error("the Ethernet address of {name} was changed; it cannot be here")]
    Mac {
        /// The link's name.
        name: String,
    },
    /// The kernel here does not know it.
    #[error("the sysctl {name} = {value} is not known here; a module may be missing")]
    NoSysctl {
        /// Its name.
        name: String,
        /// What it was set to.
        value: String,
    },
    /// It is another one afterwards.
    #[error("{what} is not what it was")]
    Differs {
        /// In words.
        what: String,
    },
    /// The kernel refused.
    #[error("cannot {what}")]
    Step {
        /// What was tried.
        what: String,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
}

fn step<T>(what: impl Into<String>, result: io::Result<T>) -> Result<T, Error> {
    result.map_err(|source| Error::Step {
        what: what.into(),
        source,
    })
}

/// Makes of this thread's namespace, which `own` was read in, what `wanted` was read in. Nothing may run in it yet. What is equal
/// already costs nothing.
pub fn place(wanted: &State, own: &State) -> Result<(), Error> {
    let netlink = step("open a netlink socket", Netlink::route())?;
    let links = step("read the links", Links::read(&netlink))?;
    for link in &wanted.links {
        let name = link.name.clone();
        let Some(has) = own.links.iter().find(|has| has.name == name) else {
            return Err(Error::NoLink { name });
        };
        if has.mac != link.mac {
            return Err(Error::Mac { name });
        }
        let Some(index) = links.index(&name) else {
            return Err(Error::NoLink { name });
        };
        if let Some(request) = links::change(index, has, link) {
            let what = format!(
                "give {name} its MTU of {}, its flags and its queue length",
                link.mtu
            );
            step(what, netlink.call(libc::RTM_NEWLINK, 0, &request))?;
        }
    }
    set(wanted, own)?;
    // Some change of a link, or of a sysctl, takes addresses and routes with it.
    let lists = [
        (&entry::ADDRESS, &wanted.addresses),
        (&entry::NEIGHBOUR, &wanted.neighbours),
        (&entry::ROUTE, &wanted.routes),
        (&entry::RULE, &wanted.rules),
    ];
    for (kind, wanted) in lists {
        settle(&netlink, &links, kind, wanted)?;
    }
    if nft::lasting(&wanted.nftables) != nft::lasting(&own.nftables) {
        step("put the rules of nftables in place", nft::put(&wanted.nftables))?;
        let put = step("read the rules of nftables", nft::list())?;
        if nft::lasting(&put) != nft::lasting(&wanted.nftables) {
            return Err(Error::Differs {
                what: "the ruleset of nftables, written down and read again,".to_owned(),
            });
        }
    }
    Ok(())
}

/// Sets sysctls until they are what is wanted.
fn set(wanted: &State, own: &State) -> Result<(), Error> {
    let mut all: Vec<_> = wanted.set.iter().map(|one| (one, true)).collect();
    all.extend(wanted.usual.iter().map(|one| (one, false)));
    all.sort_by_key(|((name, _), _)| sysctl::order(name));
    let mut has: std::collections::BTreeMap<_, _> = own.usual.clone();
    has.extend(own.set.clone());
    for _ in 0..ROUNDS {
        let mut has_written = false;
        for ((name, value), is_set) in &all {
            match has.get(*name) {
                Some(has) if has == *value => continue,
                // One that is set for the first time cannot be read before: `stable_secret` is one.
                None if *is_set && !name.ends_with("/stable_secret") => {
                    return Err(Error::NoSysctl {
                        name: sysctl::told(name),
                        value: (*value).clone(),
                    });
                }
                // Another kernel's, or of a module that is not loaded here.
                None if !*is_set => continue,
                _ if !is_safe(name) => continue,
                _ => {}
            }
            match sysctl::write(name, value) {
                Ok(()) => has_written = true,
                Err(error) if *is_set => {
                    return step(format!("set {} to {value}", sysctl::told(name)), Err(error));
                }
                Err(error) => {
                    tracing::warn!(name = sysctl::told(name), value, %error, "a sysctl stays what it is on this host");
                }
            }
        }
        if !has_written {
            return Ok(());
        }
        has = step("read the sysctls", sysctl::read())?;
        if let Some((_, value)) = all
            .iter()
            .map(|(one, is_set)| (is_set, one))
            .find(|(is_set, (name, value))| **is_set && has.get(*name) != Some(*value))
        {
            tracing::debug!(name = value.0, "a sysctl is set again");
            continue;
        }
        return Ok(());
    }
    let differs = all
        .iter()
        .find(|((name, value), is_set)| *is_set && has.get(*name) != Some(*value));
    match differs {
        Some(((name, value), _)) => Err(Error::Differs {
            what: format!("the sysctl {}, set to {value},", sysctl::told(name)),
        }),
        None => Ok(()),
    }
}

/// Whether a name that another host says stays below `/proc/sys/net`.
fn is_safe(name: &str) -> bool {
    !name.starts_with('/') && name.split('/').all(|part| !["", ".", ".."].contains(&part))
}

/// Makes entries, and deletes those that are too many, until they are what is wanted.
fn settle(netlink: &Netlink, links: &Links, kind: &Kind, wanted: &[Entry]) -> Result<(), Error> {
    let mut failed = None;
    for round in 0.. {
        let read = entries(netlink, kind, links);
        let (own, _) = step(format!("read {}", "what is in the namespace"), read)?;
        let spare: Vec<_> = own
            .iter()
            .filter(|has| !wanted.iter().any(|entry| entry.is(has)))
            .collect();
        let missing: Vec<_> = wanted
            .iter()
            .filter(|entry| !own.iter().any(|has| has.is(entry)))
            .collect();
        let Some(first) = missing.first().or(spare.first()) else {
            return Ok(());
        };
        if round == ROUNDS {
            let what = first.told(kind);
            return match failed.take() {
                Some(source) => step(format!("put {what} in place"), Err(source)),
                None => Err(Error::Differs { what }),
            };
        }
        failed = None;
        for (flags, entries, request) in [
            (0, spare, kind.delete),
            (libc::NLM_F_CREATE | APPENDED, missing, kind.new),
        ] {
            for entry in entries {
                let asked = entry.request(kind, links).map_err(|why| Error::Differs {
                    what: format!("{} ({why})", entry.told(kind)),
                })?;
                // A route that needs another one comes after it, and an address goes with the first of its network.
                if let Err(error) = netlink.call(request, flags, &asked) {
                    failed.get_or_insert(error);
                }
            }
        }
    }
    Ok(())
}

/// Of two routes that differ in their next hop only the first is used.
const APPENDED: i32 = libc::NLM_F_APPEND;
