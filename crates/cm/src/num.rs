//! Names and numbers of the communication manager.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The name of an id: the *local communication ID* by which the peer's messages find it (IBA §12.9.8). It stays the same
/// when the id goes on at another RNIC. Listeners have one, too, though no message carries it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CommId(pub u32);

impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// Whose an id is: a number of the caller's, for example of a program's context. What it means is not known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Owner(pub u64);

/// A GID in network byte order: an IPv6 address, or an IPv4 one mapped into it (IBA annex A17.4.5.1).
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The address that it is.
    pub fn ip(self) -> IpAddr {
        let address = Ipv6Addr::from(self.0);
        address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Gid {
        match address {
            IpAddr::V4(address) => Gid(address.to_ipv6_mapped().octets()),
            IpAddr::V6(address) => Gid(address.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ip())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.ip())
    }
}

/// `enum rdma_port_space`: which service ids a port number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PortSpace(pub u16);

impl PortSpace {
    /// `RDMA_PS_IPOIB`.
    pub const IPOIB: PortSpace = PortSpace(0x0002);
    /// `RDMA_PS_TCP`: connections.
    pub const TCP: PortSpace = PortSpace(0x0106);
    /// `RDMA_PS_UDP`: datagrams.
    pub const UDP: PortSpace = PortSpace(0x0111);
    /// `RDMA_PS_IB`: any service id of InfiniBand's own.
    pub const IB: PortSpace = PortSpace(0x013f);
}

/// What a REQ or SIDR_REQ asks for. Of the IP CM service (IBA annex A11.2) it has the prefix 0x0000000001, the number of the IP
/// protocol and a port, which is what Linux's rdma_cm makes of a port space and a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// The service of a port.
    pub const fn of_port(space: PortSpace, port: u16) -> ServiceId {
        ServiceId((space.0 as u64) << 16 | port as u64)
    }

    /// The bits in which [`ServiceId::of_port`] puts the port space.
    pub const fn port_space(self) -> PortSpace {
        PortSpace((self.0 >> 16) as u16)
    }

    /// The bits in which [`ServiceId::of_port`] puts the port.
    pub const fn port(self) -> u16 {
        self.0 as u16
    }
}

/// What is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
}

/// The time that a five-bit field of the communication manager means: 4.096 µs × 2^n.
pub fn field_time(exponent: u8) -> Duration {
    Duration::from_nanos(4096 << exponent.min(31))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gids_are_addresses() {
        let four: IpAddr = "10.1.2.3".parse().unwrap();
        assert_eq!(
            Gid::from(four).0,
            [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3]
        );
        let six: IpAddr = "fd00::7".parse().unwrap();
        for address in [four, six] {
            assert_eq!(Gid::from(address).ip(), address);
        }
    }

    /// IBA annex A11: prefix 00 00 00 00 01, protocol 06, port.
    #[test]
    fn services_of_the_ip_cm_service() {
        let service = ServiceId::of_port(PortSpace::TCP, 0x1c21);
        assert_eq!(service.0.to_be_bytes(), [0, 0, 0, 0, 1, 6, 0x1c, 0x21]);
        assert_eq!((service.port_space(), service.port()), (PortSpace::TCP, 0x1c21));
        assert_eq!(ServiceId::of_port(PortSpace::UDP, 1).0, 0x0111_0001);
    }

    #[test]
    fn times_of_fields() {
        assert_eq!(field_time(0), Duration::from_nanos(4096));
        assert_eq!(field_time(20), Duration::from_nanos(4_294_967_296));
        assert_eq!(field_time(255), field_time(31));
    }
}
