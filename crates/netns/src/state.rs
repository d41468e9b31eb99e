//! What is carried from one namespace to the other.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use crate::entry::{ADDRESS, Entry};
use crate::links::Link;

/// A state is not longer in bytes, written down. A table of a thousand routes has about 200 KiB.
const MAX_BYTES: usize = 8 << 20;

/// So many of each kind are taken.
const MAX_ENTRIES: usize = 32 << 10;

/// All that moves of a network namespace.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct State {
    pub(crate) links: Vec<Link>,
    pub(crate) addresses: Vec<Entry>,
    pub(crate) routes: Vec<Entry>,
    pub(crate) rules: Vec<Entry>,
    pub(crate) neighbours: Vec<Entry>,
    /// The ruleset of nftables, as nft(8) writes it; empty if there is none.
    #[serde(default)]
    pub(crate) nftables: String,
    /// Sysctls below `net` that are not what they are in a new namespace of the source.
    #[serde(default)]
    pub(crate) set: BTreeMap<String, String>,
    /// All others.
    #[serde(default)]
    pub(crate) usual: BTreeMap<String, String>,
}

/// What another host said is no state.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// It is too long.
    #[error("the state of a network namespace is longer than {MAX_BYTES} bytes")]
    Long,
    /// There are too many entries of a kind.
    #[error("the state of a network namespace has more than {MAX_ENTRIES} entries of a kind")]
    Many,
    /// It does not say what a state says.
    #[error("the state of a network namespace is malformed")]
    Json(#[from] serde_json::Error),
}

impl State {
    /// Writes it down.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        self.bounded()?;
        let bytes = serde_json::to_vec(self)?;
        match bytes.len() {
            ..=MAX_BYTES => Ok(bytes),
            _ => Err(Malformed::Long),
        }
    }

    /// Reads what another host wrote down.
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() > MAX_BYTES {
            return Err(Malformed::Long);
        }
        let state: Self = serde_json::from_slice(bytes)?;
        state.bounded()?;
        Ok(state)
    }

    fn bounded(&self) -> Result<(), Malformed> {
        let lengths = [
            self.links.len(),
            self.addresses.len(),
            self.routes.len(),
            self.rules.len(),
            self.neighbours.len(),
            self.set.len(),
            self.usual.len(),
        ];
        match lengths.iter().all(|length| *length <= MAX_ENTRIES) {
            true => Ok(()),
            false => Err(Malformed::Many),
        }
    }

    /// The MTU of a link in bytes.
    pub fn mtu(&self, link: &str) -> Option<u32> {
        self.links.iter().find(|has| has.name == link).map(|has| has.mtu)
    }

    /// The Ethernet address of a link.
    pub fn mac(&self, link: &str) -> Option<&[u8]> {
        let found = self.links.iter().find(|has| has.name == link);
        found.map(|has| &has.mac[..])
    }

    /// Whether no program has changed anything in it, as far as a namespace shows it whose only address is `own`.
    pub fn is_as_made(&self, own: Ipv4Addr) -> bool {
        let is_given = |entry: &Entry| match entry.address(&ADDRESS) {
            Some(IpAddr::V4(address)) => address == own || address == Ipv4Addr::LOCALHOST,
            Some(IpAddr::V6(address)) => address.is_unicast_link_local() || address.is_loopback(),
            None => false,
        };
        self.addresses.iter().all(is_given)
            && self.routes.iter().all(Entry::is_route_of_kernel)
            && self.rules.iter().all(Entry::is_usual_rule)
            && self.neighbours.is_empty()
            && self.nftables.is_empty()
            && self.set.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_hand_us_is_bounded() {
        let state = State::default();
        assert_eq!(State::decode(&state.encode().unwrap()).unwrap(), state);
        let long = vec![b' '; MAX_BYTES + 1];
        assert!(matches!(State::decode(&long), Err(Malformed::Long)));
        let mut many = State::default();
        for number in 0..=MAX_ENTRIES {
            many.set.insert(number.to_string(), String::new());
        }
        let written = serde_json::to_vec(&many).unwrap();
        assert!(matches!(State::decode(&written), Err(Malformed::Many)));
        assert!(matches!(State::decode(b"{}"), Err(Malformed::Json(_))));
    }
}
