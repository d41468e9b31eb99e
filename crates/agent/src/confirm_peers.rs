//! Which connections other hosts have to confirm.

use std::net::IpAddr;
use std::str::FromStr;

use crate::directory::address_of;

/// A GID in network byte order.
type Gid = [u8; 16];

/// Which other ends have to be confirmed before this host's RNIC sends to them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ConfirmPeers {
    /// Those at hosts that the agent knows: in the list of hosts, or by a GID that such a host says is its own.
    #[default]
    Hosts,
    /// Those with an address in one of these networks, known or not.
    Networks(Vec<Network>),
    /// None.
    Off,
}

impl ConfirmPeers {
    /// Must the end at this GID be confirmed, also if no known host has it?
    pub fn demands(&self, gid: &Gid) -> bool {
        match self {
            Self::Networks(networks) => networks.iter().any(|network| network.contains(address_of(gid))),
            Self::Hosts | Self::Off => false,
        }
    }

    /// May the end at this GID have to be confirmed?
    pub fn concerns(&self, gid: &Gid) -> bool {
        match self {
            Self::Hosts => true,
            Self::Networks(_) => self.demands(gid),
            Self::Off => false,
        }
    }
}

impl FromStr for ConfirmPeers {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "hosts" => Ok(Self::Hosts),
            "off" => Ok(Self::Off),
            networks => networks
                .split(',')
                .map(str::parse)
                .collect::<Result<_, _>>()
                .map(Self::Networks),
        }
    }
}

/// Addresses that begin alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    fn contains(self, address: IpAddr) -> bool {
        let (own, other, bits): (u128, u128, u32) = match (self.address, address) {
            (IpAddr::V4(own), IpAddr::V4(other)) => (own.to_bits().into(), other.to_bits().into(), 32),
            (IpAddr::V6(own), IpAddr::V6(other)) => (own.to_bits(), other.to_bits(), 128),
            _ => return false,
        };
        let rest = bits - u32::from(self.prefix);
        (own ^ other).checked_shr(rest).unwrap_or(0) == 0
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let error =
            || format!("{text:?} is no network; write `hosts`, `off`, or networks as in 10.0.0.0/8,fd00::/8");
        let (address, prefix) = text.split_once('/').ok_or_else(error)?;
        let address: IpAddr = address.parse().map_err(|_| error())?;
        let prefix: u8 = prefix.parse().map_err(|_| error())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        match prefix <= most {
            true => Ok(Self { address, prefix }),
            false => Err(error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(address: &str) -> Gid {
        match address.parse().unwrap() {
            IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            IpAddr::V6(address) => address.octets(),
        }
    }

    #[test]
    fn an_operator_names_the_networks_that_must_confirm() {
        let networks: ConfirmPeers = "10.77.0.0/16,fd00::/8,192.0.2.7/32".parse().unwrap();
        for inside in ["10.77.0.1", "10.77.255.255", "fd00::1", "fdff::", "192.0.2.7"] {
            assert!(
                networks.demands(&gid(inside)) && networks.concerns(&gid(inside)),
                "{inside}"
            );
        }
        for outside in ["10.78.0.1", "fe80::1", "192.0.2.6", "::1"] {
            assert!(!networks.concerns(&gid(outside)), "{outside}");
        }
        let all: ConfirmPeers = "0.0.0.0/0".parse().unwrap();
        assert!(all.demands(&gid("10.0.0.1")) && !all.demands(&gid("fd00::1")));
        let hosts: ConfirmPeers = "hosts".parse().unwrap();
        assert!(hosts.concerns(&gid("10.0.0.1")) && !hosts.demands(&gid("10.0.0.1")));
        assert!(!"off".parse::<ConfirmPeers>().unwrap().concerns(&gid("10.0.0.1")));
        for wrong in [
            "",
            "host",
            "10.0.0.0",
            "10.0.0.0/33",
            "fd00::/129",
            "10.0.0.0/8,",
            "x/8",
        ] {
            assert!(
                wrong
                    .parse::<ConfirmPeers>()
                    .unwrap_err()
                    .contains("is no network"),
                "{wrong}"
            );
        }
    }
}
