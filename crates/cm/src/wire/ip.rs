//! Private data of the IP CM service (IBA annex A11.3), in front of the program's own in a REQ or SIDR_REQ: Linux's rdma_cm puts
//! it there for every address of IPv4 or IPv6.
//!
//! ```text
//!   0     version:8, 0           4..20   source address, IPv4 in its last four bytes
//!   1     IP version:4 reserved  20..36  destination address
//!   2..4  source port
//! ```

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use super::data::{get, put};

/// Size in bytes.
pub const IP_HEADER_BYTES: usize = 36;

/// The addresses of the program that asks, and of whom it asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IpHeader {
    /// Its address.
    pub source: IpAddr,
    /// Its port.
    pub source_port: u16,
    /// The address that it asks, of the same family. The port is in the service id.
    pub destination: IpAddr,
}

/// Private data that does not begin with such a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("version {version} for IPv{ip_version} is no header of the IP CM service")]
pub struct IpHeaderError {
    /// The header's version.
    pub version: u8,
    /// The IP's.
    pub ip_version: u8,
}

impl IpHeader {
    /// Reads the header.
    pub fn parse(bytes: &[u8; IP_HEADER_BYTES]) -> Result<IpHeader, IpHeaderError> {
        let (version, ip_version) = (bytes[0], bytes[1] >> 4);
        let address = |at: usize| match ip_version {
            4 => IpAddr::V4(Ipv4Addr::from(get::<4>(bytes, at + 12))),
            _ => IpAddr::V6(Ipv6Addr::from(get::<16>(bytes, at))),
        };
        if version != 0 || !matches!(ip_version, 4 | 6) {
            return Err(IpHeaderError { version, ip_version });
        }
        Ok(IpHeader {
            source: address(4),
            source_port: u16::from_be_bytes(get(bytes, 2)),
            destination: address(20),
        })
    }

    /// The header's bytes; both addresses are of one family.
    pub fn emit(&self) -> [u8; IP_HEADER_BYTES] {
        let mut bytes = [0; IP_HEADER_BYTES];
        bytes[1] = if self.source.is_ipv4() { 4 } else { 6 } << 4;
        put(&mut bytes, 2, self.source_port.to_be_bytes());
        for (at, address) in [(4, self.source), (20, self.destination)] {
            match address {
                IpAddr::V4(address) => put(&mut bytes, at + 12, address.octets()),
                IpAddr::V6(address) => put(&mut bytes, at, address.octets()),
            }
        }
        bytes
    }
}
