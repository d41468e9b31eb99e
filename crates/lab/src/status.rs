//! What a lab tells about itself.

use serde::{Deserialize, Serialize};
use std::net::Ipv4Addr;

/// A lab, its hosts and their services.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabStatus {
    /// The lab's name.
    pub name: String,
    /// Whether its supervisor runs; if not, so does no host, and [`crate::Lab::down`] clears what is left.
    pub running: bool,
    /// The supervisor's pid.
    pub supervisor: u32,
    /// The hosts, in the order of their addresses.
    pub hosts: Vec<HostStatus>,
}

/// One host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostStatus {
    /// Its name.
    pub name: String,
    /// Its address on the lab's network.
    pub address: Ipv4Addr,
    /// Whether its pid 1 lives.
    pub running: bool,
    /// Its pid 1, as the machine numbers it.
    pub pid: u32,
    /// Its services, in the order in which they were started.
    pub services: Vec<ServiceStatus>,
}

/// One service of a host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceStatus {
    /// Its name.
    pub name: String,
    /// How it is.
    #[serde(flatten)]
    pub state: ServiceState,
}

/// How a service is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum ServiceState {
    /// Not started yet.
    Waiting,
    /// Started, its sockets do not accept connections yet.
    Starting {
        /// Its pid in the host.
        pid: u32,
    },
    /// Ready.
    Running {
        /// Its pid in the host.
        pid: u32,
    },
    /// Ended, by itself or by [`crate::Lab::kill`].
    Exited {
        /// How it ended, in words.
        how: String,
    },
}
