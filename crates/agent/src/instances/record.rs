//! What an instance is, wherever it is.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use verbatim_container::{ContainerName, Rnic, Workload};

use super::machine::guest::Guest;
use super::volumes::Mounted;

/// What an instance is. It is stored as JSON and goes to the destination as it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Its name, unique among the hosts.
    pub name: ContainerName,
    /// What runs in it.
    pub workload: Workload,
    /// Its own address, which moves with it.
    pub address: Ipv4Addr,
    /// The length of the prefix of its network.
    pub prefix: u8,
    /// Hosts that it has been on: somebody may ask for it there.
    #[serde(default)]
    pub visited: BTreeSet<String>,
    /// RNICs of the kernel's that it may open, as they are where it started. Each host that it is on has one of each name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rnics: Vec<Rnic>,
    /// It is a virtual machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<Guest>,
    /// Local disks that it has, as file systems, or as disks of a virtual machine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Mounted>,
}

impl Record {
    /// The program and its arguments, for people.
    pub fn command(&self) -> Vec<String> {
        match &self.workload {
            Workload::Command { args, .. } => args.clone(),
            Workload::Bundle { path, .. } => vec![path.display().to_string()],
        }
    }
}

/// Takes an address with the length of its prefix apart: `10.77.1.5/16`.
pub fn parse_address(text: &str) -> anyhow::Result<(Ipv4Addr, u8)> {
    let wrong = || format!("{text:?} is not an IPv4 address with a prefix length, such as 10.77.1.5/16");
    let (address, prefix) = text.split_once('/').with_context(wrong)?;
    let prefix: u8 = prefix.parse().with_context(wrong)?;
    if prefix > 32 {
        bail!(wrong());
    }
    Ok((address.parse().with_context(wrong)?, prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        assert_eq!(
            parse_address("10.77.1.5/16").unwrap(),
            (Ipv4Addr::new(10, 77, 1, 5), 16)
        );
        for bad in ["10.77.1.5", "10.77.1.5/33", "10.77.1/16", "x/1", ""] {
            assert!(
                parse_address(bad).unwrap_err().to_string().contains("such as"),
                "{bad}"
            );
        }
    }
}
