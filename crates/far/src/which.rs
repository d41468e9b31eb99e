//! Which RNIC a daemon opens.

use std::net::IpAddr;
use std::path::PathBuf;

/// Which of this host's RNICs: the software RNIC, or one that the kernel drives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Which {
    /// The folder of the software RNIC's control socket; there need not be one.
    pub runtime: PathBuf,
    /// The one of this name only.
    pub name: Option<String>,
    /// Rather the one that has this address among its GIDs, and that GID of it: other hosts reach this one by it.
    pub address: Option<IpAddr>,
}
