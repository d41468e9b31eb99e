//! The RNIC as connections and buffers keep it open.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use verbatim_verbs::{Context, Process};

use crate::error::Error;
use crate::which::Which;

/// What verbs keep of this process; let go of with the last RNIC.
#[derive(Debug)]
struct Daemon(Arc<Process>);

impl Drop for Daemon {
    fn drop(&mut self) {
        self.0.cleanup();
    }
}

/// An RNIC that this process has opened; closed with the last that uses it.
#[derive(Debug)]
pub struct Opened {
    _daemon: Arc<Daemon>,
    pub context: Arc<Context>,
    pub name: String,
    /// The index of the GID that it is reached by.
    pub gid_index: u8,
}

impl Opened {
    pub fn open(which: &Which) -> Result<Arc<Self>, Error> {
        let daemon = Arc::new(Daemon(Process::unattended(&which.runtime)));
        let process = &daemon.0;
        let is_wanted = |name: &str| which.name.as_deref().is_none_or(|wanted| wanted == name);
        let mut found: Option<Arc<Self>> = None;
        let mut refused = None;
        for device in process.devices() {
            if !is_wanted(&device.name) {
                continue;
            }
            let context = match process.open(&device.name) {
                Ok(context) => context,
                Err(error) => {
                    refused = refused.or(Some(Error::verbs("the RNIC cannot be opened")(error)));
                    continue;
                }
            };
            let gids: Vec<_> = context.port_attr().gid_table();
            let reached = reached_by(&gids, which.address);
            let opened = Arc::new(Self {
                _daemon: Arc::clone(&daemon),
                context,
                name: device.name,
                gid_index: reached.map_or(0, |(index, _)| index),
            });
            match reached {
                Some((_, true)) => return Ok(opened),
                Some((_, false)) if found.is_none() => found = Some(opened),
                _ => {}
            }
        }
        let none = || Error::NoDevice {
            name: which.name.clone(),
            runtime: which.runtime.display().to_string(),
        };
        found.ok_or_else(|| refused.unwrap_or_else(none))
    }
}

/// The GID of a table that is to be used, and whether it is the address that is wanted. Without that, it is the first that routers pass
/// on; entries of zeroes are none (RNICs of hardware have RoCE version 1 there).
fn reached_by(gids: &[[u8; 16]], address: Option<IpAddr>) -> Option<(u8, bool)> {
    let wanted = address.map(|address| match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    });
    let all = (0u8..=u8::MAX).zip(gids).filter(|(_, gid)| **gid != [0; 16]);
    let is_local = |gid: &[u8; 16]| Ipv6Addr::from(*gid).is_unicast_link_local();
    let best = all.min_by_key(|(index, gid)| (Some(**gid) != wanted, is_local(gid), *index));
    best.map(|(index, gid)| (index, wanted.is_none_or(|wanted| wanted == *gid)))
}

impl Drop for Opened {
    fn drop(&mut self) {
        // An RNIC that is gone needs no word.
        let _ = self.context.close();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(text: &str) -> [u8; 16] {
        text.parse::<Ipv6Addr>().unwrap().octets()
    }

    #[test]
    fn the_gid_is_the_hosts_address_else_one_that_routers_pass_on() {
        let gids = [
            "::",
            "fe80::1",
            "2001:db8::1",
            "::ffff:10.0.0.1",
            "::ffff:10.0.0.2",
        ]
        .map(gid);
        let by = |address: &str| reached_by(&gids, Some(address.parse().unwrap()));
        assert_eq!(by("10.0.0.2"), Some((4, true)));
        assert_eq!(by("2001:db8::1"), Some((2, true)));
        assert_eq!(by("10.0.0.9"), Some((2, false)));
        assert_eq!(reached_by(&gids, None), Some((2, true)));
        assert_eq!(reached_by(&gids[..2], None), Some((1, true)));
        assert_eq!(reached_by(&gids[..1], None), None);
        assert_eq!(reached_by(&[], None), None);
    }
}
