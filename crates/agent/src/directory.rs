//! The hosts of a cluster: names and addresses, from `hosts.json` in the runtime folder.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;

use anyhow::{Context, bail};
use serde::Deserialize;

use crate::PORT;

/// One host.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct HostEntry {
    /// Its name, as in its certificate.
    pub name: String,
    /// Where its agent listens; also the address of its RNIC, whose GID is derived from it.
    pub address: IpAddr,
    /// Whether memory may go to and from it without encryption, where a migration leaves that to the list
    /// (`--memory-transport auto`).
    #[serde(default)]
    pub trusted_network: bool,
}

/// All hosts, this one among them.
#[derive(Debug, Clone)]
pub struct Directory {
    own: String,
    hosts: Vec<HostEntry>,
}

impl Directory {
    /// Reads the file at `path`: a JSON array of `{"name", "address"}`.
    pub fn load(path: &Path, own: &str) -> anyhow::Result<Self> {
        let text = std::fs::read(path)
            .with_context(|| format!("cannot read the list of hosts {}", path.display()))?;
        let hosts = serde_json::from_slice(&text).with_context(|| {
            format!(
                "{} is not a JSON array of {{\"name\", \"address\"}}",
                path.display()
            )
        })?;
        Self::new(own, hosts).with_context(|| format!("in {}", path.display()))
    }

    fn new(own: &str, hosts: Vec<HostEntry>) -> anyhow::Result<Self> {
        if !hosts.iter().any(|host| host.name == own) {
            bail!("this host, {own}, is not in the list of hosts; add it, or start the agent with --name");
        }
        Ok(Self {
            own: own.to_owned(),
            hosts,
        })
    }

    /// This host's entry.
    pub fn own(&self) -> &HostEntry {
        self.host(&self.own).expect("checked when the directory was made")
    }

    /// The host of that name.
    pub fn host(&self, name: &str) -> Option<&HostEntry> {
        self.hosts.iter().find(|host| host.name == name)
    }

    /// The host whose RNIC has that GID.
    pub fn by_gid(&self, gid: &[u8; 16]) -> Option<&HostEntry> {
        let address = address_of(gid);
        self.hosts.iter().find(|host| host.address == address)
    }

    /// All of them.
    pub fn all(&self) -> &[HostEntry] {
        &self.hosts
    }

    /// All names, for messages.
    pub fn names(&self) -> String {
        self.hosts
            .iter()
            .map(|host| host.name.as_str())
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl HostEntry {
    /// Where its agent listens.
    pub fn socket_address(&self) -> SocketAddr {
        SocketAddr::new(self.address, PORT)
    }

    /// The GID of its RNIC: the address, an IPv4 one mapped into IPv6 (RoCEv2, IBA annex A17).
    pub fn gid(&self) -> [u8; 16] {
        match self.address {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        }
    }

    /// This host's number in its subnet, from which the addresses of its instances are made.
    pub fn number(&self) -> u8 {
        match self.address {
            IpAddr::V4(address) => address.octets()[3],
            IpAddr::V6(address) => address.octets()[15],
        }
    }

    /// The first two bytes of its subnet (a /16), for IPv4.
    pub fn subnet(&self) -> anyhow::Result<[u8; 2]> {
        match self.address {
            IpAddr::V4(address) => Ok([address.octets()[0], address.octets()[1]]),
            IpAddr::V6(_) => bail!(
                "instances need a host with an IPv4 address, and {} is not one",
                self.address
            ),
        }
    }
}

pub fn address_of(gid: &[u8; 16]) -> IpAddr {
    let address = Ipv6Addr::from(*gid);
    address
        .to_ipv4_mapped()
        .map_or(IpAddr::V6(address), |v4: Ipv4Addr| IpAddr::V4(v4))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, address: &str) -> HostEntry {
        HostEntry {
            name: name.to_owned(),
            address: address.parse().unwrap(),
            trusted_network: false,
        }
    }

    #[test]
    fn a_gid_names_its_host() {
        let directory = Directory::new("a", vec![entry("a", "10.77.0.1"), entry("b", "10.77.0.2")]).unwrap();
        let gid = directory.host("b").unwrap().gid();
        assert_eq!(directory.by_gid(&gid).unwrap().name, "b");
        assert_eq!(directory.by_gid(&[0; 16]), None);
        assert_eq!(directory.own().number(), 1);
    }

    #[test]
    fn a_network_is_trusted_where_the_list_says_so() {
        let hosts = r#"[{"name": "a", "address": "10.77.0.1", "trusted_network": true}, {"name": "b", "address": "10.77.0.2"}]"#;
        let directory = Directory::new("a", serde_json::from_str(hosts).unwrap()).unwrap();
        assert!(directory.own().trusted_network && !directory.host("b").unwrap().trusted_network);
    }

    #[test]
    fn a_directory_without_this_host_is_refused() {
        let error = Directory::new("c", vec![entry("a", "10.77.0.1")]).unwrap_err();
        assert!(error.to_string().contains("c, is not in the list"));
    }
}
