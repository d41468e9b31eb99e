//! Links and addresses, by iproute2.

use crate::error::{Error, Result};
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::Path;
use std::process::{Command, Stdio};

/// Runs a batch of `ip` commands in this process's network namespace: one process for all of them.
pub(crate) fn ip(batch: &str) -> Result<()> {
    let run = || {
        let mut child = Command::new("ip")
            .args(["-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        // The pipe is closed after this statement, which ends the batch.
        child
            .stdin
            .take()
            .expect("stdin is piped")
            .write_all(batch.as_bytes())?;
        child.wait_with_output()
    };
    let output = run().map_err(Error::io("run ip (package iproute2)"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(Error::Command {
        command: format!("ip -batch: {}", batch.trim().replace('\n', "; ")),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

/// Sets what the kernel has as a setting of this network namespace; settings that it lacks are left out.
pub(crate) fn sysctl(settings: &[(&str, &str)]) -> Result<()> {
    for (path, value) in settings {
        let path = Path::new("/proc/sys/net").join(path);
        match fs::write(&path, value) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("write {value} to {}", path.display()))(error));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Settings of every namespace of a lab: no waiting for IPv6 duplicate detection, no guessing by source address (an
/// instance's address moves from host to host), and no firewall rules for what a bridge forwards.
pub(crate) const SETTINGS: &[(&str, &str)] = &[
    ("ipv6/conf/default/accept_dad", "0"),
    ("ipv6/conf/all/accept_dad", "0"),
    ("ipv4/conf/default/rp_filter", "0"),
    ("ipv4/conf/all/rp_filter", "0"),
    ("bridge/bridge-nf-call-iptables", "0"),
    ("bridge/bridge-nf-call-ip6tables", "0"),
    ("bridge/bridge-nf-call-arptables", "0"),
];

/// A bridge that forwards from its first moment on and leaves multicast alone.
pub(crate) const BRIDGE: &str = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0";

/// The bridge's own Ethernet address. Without a fixed one a bridge takes the lowest of its ports, and changes it
/// whenever an instance comes or goes, under the feet of everyone who has it in an ARP cache.
pub(crate) fn bridge_mac(address: Ipv4Addr) -> String {
    let [a, b, c, d] = address.octets();
    // 02: locally administered, unicast.
    format!("02:76:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

/// The IPv6 address of a host, one of a unique local prefix (RFC 4193), for the RNIC's IPv6 GID. It ends in the IPv4
/// address.
pub(crate) fn ipv6(address: Ipv4Addr) -> Ipv6Addr {
    with_prefix(0xfd76, address)
}

/// The link-local one, likewise. The kernel would make one, but some time after the link is up: too late for an RNIC that is
/// started at once.
pub(crate) fn link_local(address: Ipv4Addr) -> Ipv6Addr {
    with_prefix(0xfe80, address)
}

fn with_prefix(prefix: u16, address: Ipv4Addr) -> Ipv6Addr {
    let [a, b, c, d] = address.octets().map(u16::from);
    Ipv6Addr::new(prefix, 0, 0, 0, 0, 0, a << 8 | b, c << 8 | d)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_address_ends_in_the_ipv4_address() {
        let address = Ipv4Addr::new(10, 77, 3, 1);
        assert_eq!(ipv6(address), "fd76::10.77.3.1".parse::<Ipv6Addr>().unwrap());
        assert_eq!(
            link_local(address),
            "fe80::10.77.3.1".parse::<Ipv6Addr>().unwrap()
        );
    }

    #[test]
    fn a_failed_command_says_why() {
        let error = ip("link set no-such-link up\n").unwrap_err().to_string();
        assert!(error.contains("no-such-link"), "{error}");
    }
}
