//! What a lab is made of.

use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A lab to bring up.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabConfig {
    /// The lab's name: letters, digits and `-`, at most 32 characters. Labs of different names do not disturb each
    /// other.
    pub name: String,
    /// The hosts, in the order of their addresses.
    pub hosts: Vec<HostConfig>,
    /// The network that the hosts share. Host number N (from 1) has address N in it.
    pub subnet: Subnet,
    /// MTU of every link in bytes. Default 9000, range 1280 to 65000.
    pub mtu: u32,
    /// What each host runs that names nothing else, started in this order: a service is started once the one before it is
    /// ready.
    pub services: Vec<Service>,
    /// The program that takes the lab's roles: its `main` calls [`crate::run_role`]. Default: the running program.
    pub program: PathBuf,
    /// How long [`crate::Lab::up`] waits for every host to be ready. Default 20 s.
    pub ready_timeout: Duration,
}

impl LabConfig {
    /// A lab with the hosts `src`, `dst` and `peer` on 10.77.0.0/16, running `services`.
    pub fn new(name: impl Into<String>, services: Vec<Service>) -> Result<Self> {
        let program = std::env::current_exe().map_err(Error::io("find the path of the running program"))?;
        Ok(Self {
            name: name.into(),
            hosts: ["src", "dst", "peer"].map(HostConfig::new).to_vec(),
            subnet: Subnet::default(),
            mtu: 9000,
            services,
            program,
            ready_timeout: Duration::from_secs(20),
        })
    }

    /// The same with other hosts.
    pub fn with_hosts<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.hosts = names.into_iter().map(HostConfig::new).collect();
        self
    }

    /// The address of the host at `index` (from 0).
    pub fn address(&self, index: usize) -> Ipv4Addr {
        self.subnet.host(index as u32 + 1)
    }

    /// What a host runs.
    pub(crate) fn services_of<'a>(&'a self, host: &'a HostConfig) -> &'a [Service] {
        host.services.as_deref().unwrap_or(&self.services)
    }

    /// Everything that can be said to be wrong before anything is started.
    pub(crate) fn check(&self) -> Result<()> {
        check_name("lab", &self.name)?;
        for (index, host) in self.hosts.iter().enumerate() {
            check_name("host", &host.name)?;
            if self.hosts[..index]
                .iter()
                .any(|earlier| earlier.name == host.name)
            {
                return Err(Error::Config(format!("two hosts are called {}", host.name)));
            }
        }
        for service in self.hosts.iter().flat_map(|host| self.services_of(host)) {
            check_name("service", &service.name)?;
        }
        if self.hosts.is_empty() || self.hosts.len() > 200 {
            return Err(Error::Config(format!(
                "a lab has 1 to 200 hosts, not {}",
                self.hosts.len()
            )));
        }
        if !(16..=23).contains(&self.subnet.prefix) {
            return Err(Error::Config(format!(
                "the prefix of subnet {}/{} is not in 16..=23: each host needs a /24 for its instances",
                self.subnet.base, self.subnet.prefix
            )));
        }
        if !(1280..=65000).contains(&self.mtu) {
            return Err(Error::Config(format!("mtu {} is not in 1280..=65000", self.mtu)));
        }
        Ok(())
    }
}

/// A name that may be part of paths, cgroups and host names.
pub(crate) fn check_name(what: &'static str, name: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_alphanumeric() || c == '-';
    if (1..=32).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('-') {
        Ok(())
    } else {
        Err(Error::Name {
            what,
            name: name.to_owned(),
        })
    }
}

/// One host of a lab.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostConfig {
    /// Its host name.
    pub name: String,
    /// What it runs in the place of [`LabConfig::services`].
    pub services: Option<Vec<Service>>,
}

impl HostConfig {
    /// A host of that name.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            services: None,
        }
    }
}

/// An IPv4 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subnet {
    /// Its lowest address.
    pub base: Ipv4Addr,
    /// Its prefix length in bits.
    pub prefix: u8,
}

impl Subnet {
    /// Address number `number`.
    pub fn host(self, number: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.base.to_bits() + number)
    }
}

impl Default for Subnet {
    /// 10.77.0.0/16: hosts are 10.77.0.N, their instances 10.77.N.x.
    fn default() -> Self {
        Self {
            base: Ipv4Addr::new(10, 77, 0, 0),
            prefix: 16,
        }
    }
}

/// A long-running program that every host starts.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Service {
    /// Its name, for example `agent`; also that of its log file.
    pub name: String,
    /// The program, as a path that is valid in the host (where only `/run`, `/proc`, `/sys` and `/dev/shm` differ from
    /// the machine's).
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// Environment variables to add. Always there are `VERBATIM_LAB`, `VERBATIM_HOST` and `VERBATIM_ADDRESS` (the
    /// host's own), `VERBATIM_CGROUP_PARENT`: the cgroup below which the host's containers belong, since two hosts may have
    /// containers of one name, and `VERBATIM_NIC_CPU`: the core for the host's RNIC, since the hosts share the machine's,
    /// `VERBATIM_NIC_NICE`: that this RNIC is not preferred, and `VERBATIM_HOST_NUMBER`: the part of the numbers that its RNIC gives.
    pub env: BTreeMap<String, String>,
    /// Unix sockets (absolute paths in the host) that accept connections once the service is ready.
    pub sockets: Vec<PathBuf>,
}

impl Service {
    /// `program` with `args`, ready as soon as it runs.
    pub fn new<S: Into<String>>(
        name: impl Into<String>,
        program: impl AsRef<Path>,
        args: impl IntoIterator<Item = S>,
    ) -> Self {
        Self {
            name: name.into(),
            program: program.as_ref().to_owned(),
            args: args.into_iter().map(Into::into).collect(),
            env: BTreeMap::new(),
            sockets: Vec::new(),
        }
    }

    /// Ready when `socket` accepts connections.
    pub fn socket(mut self, socket: impl AsRef<Path>) -> Self {
        self.sockets.push(socket.as_ref().to_owned());
        self
    }

    /// With an environment variable.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> LabConfig {
        LabConfig::new("lab", Vec::new()).expect("the test program has a path")
    }

    #[test]
    fn hosts_are_numbered_from_one() {
        assert_eq!(config().address(0), Ipv4Addr::new(10, 77, 0, 1));
        assert_eq!(config().address(2), Ipv4Addr::new(10, 77, 0, 3));
    }

    #[test]
    fn names_cannot_leave_their_directory() {
        for name in ["", "..", "a/b", "-x", "ä", &"x".repeat(33)] {
            assert!(check_name("lab", name).is_err(), "{name:?} was taken");
        }
        assert!(check_name("lab", "lab-2").is_ok());
    }

    #[test]
    fn twice_the_same_host_is_refused() {
        assert!(config().check().is_ok());
        assert!(config().with_hosts(["a", "b", "a"]).check().is_err());
        assert!(config().with_hosts([""; 0]).check().is_err());
    }
}
