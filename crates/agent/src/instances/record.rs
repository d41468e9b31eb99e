//! What an instance is, wherever it is.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use verbatim_container::{ContainerName, Rnic, Workload};
use verbatim_vm::Arguments;

use super::machine::guest::{Guest, Owned};
use super::swap::SwapDisk;
use super::volumes::Mounted;

/// What an instance is. It is stored as JSON and goes to the destination as it is ([`Written`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
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
    pub visited: BTreeSet<String>,
    /// RNICs of the kernel's that it may open, as they are where it started. Each host that it is on has one of each name.
    pub rnics: Vec<Rnic>,
    /// It is a virtual machine.
    pub machine: Option<Guest>,
    /// Local disks that it has, as file systems, or as disks of a virtual machine.
    pub volumes: Vec<Mounted>,
    /// Memory of other hosts that it has as disks.
    pub swap: Vec<SwapDisk>,
    /// Limit of the bytes that it may have in files of its own ([`crate::own_files`]); 0: its host's default.
    pub files: u64,
    /// All of its RAM is allocated from the start. Only of virtual machines that an agent starts.
    pub prealloc: bool,
    /// Addresses that it may send from beside its own and its link-local one.
    pub further: Vec<IpAddr>,
}

/// As it is stored. What runs a virtual machine has a field of its own for each kind.
#[derive(Clone, Serialize, Deserialize)]
struct Written {
    name: ContainerName,
    workload: Workload,
    address: Ipv4Addr,
    prefix: u8,
    #[serde(default)]
    visited: BTreeSet<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rnics: Vec<Rnic>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    machine: Option<Arguments>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    volumes: Vec<Mounted>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    swap: Vec<SwapDisk>,
    /// A virtual machine, where there is no `machine`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    domain: Option<Owned>,
    #[serde(default, skip_serializing_if = "is_zero")]
    files: u64,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    prealloc: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    further: Vec<IpAddr>,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl From<Written> for Record {
    fn from(written: Written) -> Self {
        let domain = written.domain.map(Guest::Domain);
        Self {
            name: written.name,
            workload: written.workload,
            address: written.address,
            prefix: written.prefix,
            visited: written.visited,
            rnics: written.rnics,
            machine: written.machine.map(Guest::Qemu).or(domain),
            volumes: written.volumes,
            swap: written.swap,
            files: written.files,
            prealloc: written.prealloc,
            further: written.further,
        }
    }
}

impl From<Record> for Written {
    fn from(record: Record) -> Self {
        let (machine, domain) = match record.machine {
            Some(Guest::Qemu(arguments)) => (Some(arguments), None),
            Some(Guest::Domain(domain)) => (None, Some(domain)),
            None => (None, None),
        };
        Self {
            name: record.name,
            workload: record.workload,
            address: record.address,
            prefix: record.prefix,
            visited: record.visited,
            rnics: record.rnics,
            machine,
            volumes: record.volumes,
            swap: record.swap,
            domain,
            files: record.files,
            prealloc: record.prealloc,
            further: record.further,
        }
    }
}

impl Record {
    /// All addresses that others may know it by.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> + '_ {
        std::iter::once(IpAddr::V4(self.address)).chain(self.further.iter().copied())
    }

    /// The program and its arguments, for people.
    pub fn command(&self) -> Vec<String> {
        match &self.workload {
            Workload::Command { args, .. } => args.clone(),
            Workload::Bundle { path, .. } => vec![path.display().to_string()],
        }
    }
}

/// The most addresses that an instance may have beside its own.
const FURTHER: usize = 64;

/// Reads addresses that an instance may have beside its own.
pub fn parse_addresses(texts: &[impl AsRef<str>]) -> anyhow::Result<Vec<IpAddr>> {
    if texts.len() > FURTHER {
        bail!(
            "an instance has at most {FURTHER} further addresses, and these are {}",
            texts.len()
        );
    }
    let parse = |text: &str| {
        let address: IpAddr = text.parse().with_context(|| {
            format!("{text:?} is not an IPv4 or IPv6 address, such as 10.77.9.5 or fd00:5::1")
        })?;
        if address.is_unspecified() || address.is_multicast() || address.is_loopback() {
            bail!("{address} is no address that packets of one instance come from");
        }
        Ok(address)
    };
    texts.iter().map(|text| parse(text.as_ref())).collect()
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
    fn each_kind_of_virtual_machine_is_known_again() {
        let qemu = Arguments::parse(&["qemu", "-m", "64"]).unwrap();
        let owned = serde_json::json!({
            "domain": {"uri": "qemu:///system", "name": "web", "uuid": "u"}, "ram": 1 << 30
        });
        let owned: Owned = serde_json::from_value(owned).unwrap();
        let mut record = Record {
            name: ContainerName::new("web").unwrap(),
            workload: Workload::Bundle {
                path: "/bundle".into(),
                config: "{}".into(),
            },
            address: Ipv4Addr::new(10, 77, 1, 5),
            prefix: 16,
            visited: BTreeSet::new(),
            rnics: Vec::new(),
            machine: None,
            volumes: Vec::new(),
            swap: Vec::new(),
            files: 0,
            prealloc: false,
            further: Vec::new(),
        };
        for machine in [
            None,
            Some(Guest::Qemu(qemu.clone())),
            Some(Guest::Domain(owned.clone())),
        ] {
            record.machine = machine;
            let text = serde_json::to_string(&record).unwrap();
            assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record, "{text}");
        }
        // As agents write it that know no libvirt.
        record.machine = Some(Guest::Qemu(qemu.clone()));
        let written = serde_json::to_value(&record).unwrap();
        assert_eq!(written["machine"], serde_json::to_value(&qemu).unwrap());
        assert!(written.get("domain").is_none());
        // An agent that does not know these fields reads it.
        assert!(written.get("files").is_none() && written.get("prealloc").is_none());
        (record.files, record.prealloc) = (64 << 20, true);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&text).unwrap(), record);
    }

    #[test]
    fn addresses_are_checked() {
        assert_eq!(
            parse_address("10.77.1.5/16").unwrap(),
            (Ipv4Addr::new(10, 77, 1, 5), 16)
        );
        assert_eq!(parse_addresses(&["fd00::1", "10.0.0.2"]).unwrap().len(), 2);
        for bad in ["10.77.1.5/16", "::", "127.0.0.1", "ff02::1", ""] {
            parse_addresses(&[bad]).unwrap_err();
        }
        for bad in ["10.77.1.5", "10.77.1.5/33", "10.77.1/16", "x/1", ""] {
            assert!(
                parse_address(bad).unwrap_err().to_string().contains("such as"),
                "{bad}"
            );
        }
    }
}
