//! What an agent is told when it starts.

use std::path::PathBuf;

use verbatim_device::control::SOCKET_NAME as NIC_SOCKET_NAME;

use crate::confirm_peers::ConfirmPeers;

/// What an agent is told when it starts.
#[derive(Debug, Clone)]
pub struct Config {
    /// This host's name in the list of hosts and in its certificate.
    pub name: String,
    /// Sockets, instances; on tmpfs. `/run/verbatim`.
    pub runtime_dir: PathBuf,
    /// The journal; on a disk, since it must outlive a restart of the machine. `/var/lib/verbatim`.
    pub state_dir: PathBuf,
    /// The list of hosts: a JSON array of `{"name", "address"}`. `RUNTIME_DIR/hosts.json`.
    pub hosts: PathBuf,
    /// The folder of `ca.pem`, `cert.pem` and `key.pem`. `RUNTIME_DIR/tls`.
    pub tls: PathBuf,
    /// The guest library to give to instances.
    pub library: PathBuf,
    /// The program that acts as CRIU's proxy when it is started under the name `criu`.
    pub program: PathBuf,
    /// CRIU's plugin for instances with RNICs of the kernel's.
    pub criu_plugin: PathBuf,
    /// The RNIC by which this host's memory goes to other hosts; if `None`, the one that has the host's address.
    pub memory_device: Option<String>,
    /// Default limit of the bytes that an instance may have in files of its own.
    pub instance_files: u64,
    /// Factor by which this host's memory may be promised to instances; 1: no more than there is.
    pub memory_overcommit: f64,
    /// The bridge to which instances are linked.
    pub bridge: String,
    /// The largest packet of an instance's link in bytes; the kernel's default if `None`.
    pub mtu: Option<u32>,
    /// Frames of an instance with addresses of others are dropped at its link.
    pub filters_addresses: bool,
    /// Which connections to other hosts those have to confirm.
    pub confirm_peers: ConfirmPeers,
    /// The parent of the instances' cgroups; unique to this host where virtual hosts share a machine.
    pub cgroup_parent: PathBuf,
}

impl Config {
    /// The RNIC's control socket.
    pub fn nic_socket(&self) -> PathBuf {
        self.runtime_dir.join(NIC_SOCKET_NAME)
    }

    /// The command line's socket.
    pub fn api_socket(&self) -> PathBuf {
        self.runtime_dir.join(crate::API_SOCKET_NAME)
    }
}
