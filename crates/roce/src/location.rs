//! Where a queue pair is.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::Qpn;

/// Where a queue pair is: the address of its RNIC, and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Location {
    /// The RNIC's address.
    pub address: IpAddr,
    /// The queue pair's number there.
    pub qpn: Qpn,
}

impl Location {
    /// Can a queue pair of a connection be there: the address of one host, and a number that is not kept for something
    /// else (IBA §3.5.3: 0 and 1 are for management, 0xffffff for multicast)?
    pub fn is_plausible(&self) -> bool {
        let one_host = match self.address {
            IpAddr::V4(address) => {
                !address.is_unspecified() && !address.is_multicast() && !address.is_broadcast()
            }
            IpAddr::V6(address) => !address.is_unspecified() && !address.is_multicast(),
        };
        one_host && (2..0x00ff_ffff).contains(&self.qpn.get())
    }
}
