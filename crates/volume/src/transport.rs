//! Transport of a volume's copy: the wanted one, and the one in use.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Limit for a host's RNIC to make or release a ring; then the copy goes on without it.
pub const RNIC_LIMIT: Duration = Duration::from_secs(5);

/// The wanted transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Wanted {
    /// Everything by TLS.
    #[default]
    Tls,
    /// Chunks by RDMA, where both hosts can.
    Rdma,
    /// Chunks by RDMA where both hosts can and the list of hosts trusts the network.
    Auto,
}

/// The transport of chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// On the daemons' own connection.
    Tls,
    /// By one-sided RDMA, not encrypted; received data are compared with fingerprints that go over TLS.
    Rdma,
}

/// The transport of a move, and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carriage {
    /// The transport.
    pub transport: Transport,
    /// The reason, for the operator.
    pub reason: String,
    /// This host's RNIC, once both have a ring.
    #[serde(default)]
    pub device: Option<String>,
    /// Bytes that the other host has read by RDMA and verified.
    pub rdma_bytes: u64,
    /// Chunks that did not come by RDMA, or damaged, and were sent again by TLS.
    pub sent_again: u64,
}

impl Carriage {
    /// TLS, for this reason.
    pub fn tls(reason: impl Into<String>) -> Self {
        Self {
            transport: Transport::Tls,
            reason: reason.into(),
            device: None,
            rdma_bytes: 0,
            sent_again: 0,
        }
    }

    /// RDMA is not possible, or has failed: from now on the transport is TLS, for the first reason.
    pub fn fall_back(&mut self, why: String) {
        if self.transport == Transport::Rdma {
            tracing::warn!("a copy does not go by RDMA (any more), and goes on by TLS: {why}");
            (self.transport, self.reason) = (Transport::Tls, why);
        }
    }

    /// The transport to try first, before the RNICs are known. `untrusted`: hosts whose network the list of
    /// hosts does not trust.
    pub fn first(wanted: Wanted, untrusted: &[&str]) -> Self {
        let reason = match wanted {
            Wanted::Tls => return Self::tls("asked for"),
            Wanted::Auto if !untrusted.is_empty() => {
                return Self::tls(format!(
                    "the list of hosts does not say \"trusted_network\" of {}",
                    untrusted.join(" and ")
                ));
            }
            Wanted::Auto => "the list of hosts trusts the network of both hosts",
            Wanted::Rdma => "asked for",
        };
        Self {
            transport: Transport::Rdma,
            ..Self::tls(reason)
        }
    }
}

/// The RNIC of this host that copies go by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rnic {
    /// The folder of the software RNIC's socket.
    pub runtime_dir: PathBuf,
    /// The name of the RNIC, if only this one may be used.
    pub name: Option<String>,
    /// The address by which other hosts reach this one.
    pub address: Option<IpAddr>,
}

impl Rnic {
    /// Opens the RNIC, which takes a moment.
    pub fn open(&self) -> Result<verbatim_bulk::Device, verbatim_bulk::Error> {
        let which = verbatim_bulk::Which {
            runtime: self.runtime_dir.clone(),
            name: self.name.clone(),
            address: self.address,
        };
        Ok(verbatim_bulk::Device::choose(&which)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_hosts_decides_only_where_it_is_asked() {
        let of = |wanted, untrusted: &[&str]| Carriage::first(wanted, untrusted);
        assert_eq!(of(Wanted::Tls, &[]).transport, Transport::Tls);
        assert_eq!(of(Wanted::Rdma, &["a", "b"]).transport, Transport::Rdma);
        assert_eq!(of(Wanted::Auto, &[]).transport, Transport::Rdma);
        let refused = of(Wanted::Auto, &["a", "b"]);
        assert_eq!(refused.transport, Transport::Tls);
        assert!(refused.reason.contains("a and b"), "{}", refused.reason);
    }
}
