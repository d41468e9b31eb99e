//! Ports of the RNIC's addresses, shared by all programs (the rules of the kernel's `cma_use_port`).

use std::collections::HashMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use verbatim_cm::PortSpace;

use crate::error::Refused;

/// Those that are given unasked (`ip_local_port_range`).
const EPHEMERAL: std::ops::RangeInclusive<u16> = 32_768..=60_999;

/// Who has a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// An id.
    Id(u32),
    /// A context whose program is to come.
    Context(u32),
}

/// A port that somebody has.
#[derive(Debug, Clone, Copy)]
struct Taken {
    holder: Holder,
    address: SocketAddr,
    sharing: Sharing,
}

/// What an id allows others.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sharing {
    /// `RDMA_OPTION_ID_REUSEADDR`: others that say so too may have the same port.
    pub reuse: bool,
    /// `RDMA_OPTION_ID_AFONLY`: another of the other family may have the same port.
    pub family_only: bool,
}

#[derive(Debug, Default)]
pub struct Ports(HashMap<(PortSpace, u16), Vec<Taken>>);

impl Taken {
    fn allows(&self, other: &Self) -> Result<(), Refused> {
        let both = |of: fn(&Sharing) -> bool| of(&self.sharing) && of(&other.sharing);
        let refused = |errno| {
            let port = other.address.port();
            Err(Refused::new(errno, format!("port {port} is taken")))
        };
        if both(|sharing| sharing.reuse)
            || both(|sharing| sharing.family_only) && self.address.is_ipv4() != other.address.is_ipv4()
        {
            return Ok(());
        }
        if self.address.ip().is_unspecified() || other.address.ip().is_unspecified() {
            return refused(libc::EADDRNOTAVAIL);
        }
        match self.address.ip() == other.address.ip() {
            true => refused(libc::EADDRINUSE),
            false => Ok(()),
        }
    }
}

impl Ports {
    /// Gives the port of that address to somebody; another one than it has. Port 0 is any that nobody has. Gives the port.
    pub fn take(
        &mut self,
        space: PortSpace,
        holder: Holder,
        mut address: SocketAddr,
        sharing: Sharing,
    ) -> Result<u16, Refused> {
        if address.port() == 0 {
            address.set_port(self.free(space)?);
        }
        let taken = Taken {
            holder,
            address,
            sharing,
        };
        let holders = self.0.get(&(space, address.port()));
        for other in holders.into_iter().flatten() {
            other.allows(&taken)?;
        }
        self.0.entry((space, address.port())).or_default().push(taken);
        Ok(address.port())
    }

    fn free(&self, space: PortSpace) -> Result<u16, Refused> {
        let (first, count) = (*EPHEMERAL.start(), EPHEMERAL.len() as u16);
        let start = rand::random_range(0..count);
        let mut all = (0..count).map(|step| first + (start + step) % count);
        all.find(|port| !self.0.contains_key(&(space, *port)))
            .ok_or_else(|| Refused::new(libc::EADDRNOTAVAIL, "no port is free"))
    }

    /// Takes it back.
    pub fn release(&mut self, space: PortSpace, holder: Holder, port: u16) {
        if let Some(holders) = self.0.get_mut(&(space, port)) {
            holders.retain(|taken| taken.holder != holder);
            if holders.is_empty() {
                self.0.remove(&(space, port));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(ports: &mut Ports, id: u32, address: &str, sharing: Sharing) -> Result<u16, i32> {
        let taken = ports.take(PortSpace::TCP, Holder::Id(id), address.parse().unwrap(), sharing);
        taken.map_err(|refused| refused.errno)
    }

    #[test]
    fn a_port_is_one_ids_unless_both_agree_or_the_addresses_differ() {
        let mut ports = Ports::default();
        let alone = Sharing::default();
        assert_eq!(take(&mut ports, 1, "10.0.0.1:7", alone), Ok(7));
        assert_eq!(take(&mut ports, 2, "10.0.0.1:7", alone), Err(libc::EADDRINUSE));
        assert_eq!(take(&mut ports, 2, "0.0.0.0:7", alone), Err(libc::EADDRNOTAVAIL));
        assert_eq!(take(&mut ports, 2, "10.0.0.2:7", alone), Ok(7));
        let udp = ports.take(
            PortSpace::UDP,
            Holder::Id(3),
            "10.0.0.1:7".parse().unwrap(),
            alone,
        );
        assert_eq!(udp, Ok(7), "another space");
        ports.release(PortSpace::TCP, Holder::Id(1), 7);
        assert_eq!(take(&mut ports, 4, "10.0.0.1:7", alone), Ok(7));

        let reuse = Sharing { reuse: true, ..alone };
        assert_eq!(take(&mut ports, 5, "0.0.0.0:9", reuse), Ok(9));
        assert_eq!(take(&mut ports, 6, "0.0.0.0:9", alone), Err(libc::EADDRNOTAVAIL));
        assert_eq!(take(&mut ports, 6, "0.0.0.0:9", reuse), Ok(9));

        let family = Sharing {
            family_only: true,
            ..alone
        };
        assert_eq!(take(&mut ports, 7, "[::]:11", family), Ok(11));
        assert_eq!(take(&mut ports, 8, "0.0.0.0:11", family), Ok(11));
    }

    #[test]
    fn ports_that_are_not_asked_for_are_all_different_and_run_out() {
        let mut ports = Ports::default();
        let mut seen = std::collections::HashSet::new();
        for id in 0..EPHEMERAL.len() as u32 {
            let port = take(&mut ports, id, "0.0.0.0:0", Sharing::default()).unwrap();
            assert!(EPHEMERAL.contains(&port) && seen.insert(port));
        }
        let none = take(&mut ports, 0, "0.0.0.0:0", Sharing::default());
        assert_eq!(none, Err(libc::EADDRNOTAVAIL));
        let port = *seen.iter().next().unwrap();
        ports.release(PortSpace::TCP, Holder::Id(1 << 20), port);
        assert!(ports.0.contains_key(&(PortSpace::TCP, port)), "another's");
    }
}
