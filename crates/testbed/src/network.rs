//! The network of a machine: a bridge in a network namespace, to which its tap is joined. It may be that of a lab, so
//! that machines and virtual hosts meet, or one of our own.

use crate::error::{Error, Result};
use rustix::fs::{Mode, OFlags, open};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space};
use serde::{Deserialize, Serialize};
use std::ffi::CStr;
use std::fmt;
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::process::Command;
use std::str::FromStr;
use verbatim_lab::Lab;

/// What the bridge is called, in a lab as in a network of our own.
const BRIDGE: &str = "switch";
/// Of a network of our own, in bytes. RoCEv2's largest MTU of 4096 with its headers fits.
const MTU: u32 = 9000;

/// A bridge that machines can be joined to. It is there as long as this is, or a machine that was joined.
#[derive(Debug)]
pub struct Network {
    namespace: OwnedFd,
}

impl Network {
    /// A network of its own, with nobody in it.
    pub fn new() -> Result<Self> {
        in_thread(|| {
            // SAFETY: this thread alone leaves its network namespace, and ends right after; no memory or descriptor
            // table is taken apart.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }
                .map_err(Error::io("make a network namespace"))?;
            ip(&[
                "link",
                "add",
                BRIDGE,
                "mtu",
                &MTU.to_string(),
                "type",
                "bridge",
                "stp_state",
                "0",
                "forward_delay",
                "0",
                "mcast_snooping",
                "0",
            ])?;
            ip(&["link", "set", BRIDGE, "up"])?;
            Self::at("/proc/thread-self/ns/net")
        })
    }

    /// The network of a lab, which must be up.
    pub fn of_lab(name: &str) -> Result<Self> {
        let status = Lab::open(name)?.status()?;
        if !status.running {
            return Err(Error::Config(format!("lab {name} does not run")));
        }
        Self::of_process(status.supervisor)
    }

    /// The network of a machine's QEMU, or of anybody in whose namespace there is a bridge `switch`.
    pub fn of_process(pid: u32) -> Result<Self> {
        Self::at(&format!("/proc/{pid}/ns/net"))
    }

    fn at(path: &str) -> Result<Self> {
        let namespace = open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(Error::io(format!("open the network namespace {path}")))?;
        Ok(Self { namespace })
    }

    /// Moves this thread into the network's namespace; what it starts from now on lives there.
    pub(crate) fn enter(&self) -> Result<()> {
        move_into_link_name_space(self.namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(Error::io("enter the machine's network namespace"))
    }

    /// Runs `work` in a thread that is in the network's namespace, for example to start a command there.
    pub fn within<T: Send>(&self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        in_thread(|| {
            self.enter()?;
            work()
        })
    }
}

impl From<OwnedFd> for Network {
    /// The network whose namespace this is.
    fn from(namespace: OwnedFd) -> Self {
        Self { namespace }
    }
}

impl AsFd for Network {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.namespace.as_fd()
    }
}

fn in_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope
            .spawn(work)
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// An Ethernet port of a machine: a tap, which is gone when its descriptor is closed.
#[derive(Debug)]
pub(crate) struct Tap {
    pub fd: OwnedFd,
    /// Of the bridge, and so of the machine's interface, in bytes.
    pub mtu: u32,
}

impl Tap {
    /// Makes a tap on the bridge of this thread's network namespace.
    pub fn new() -> Result<Self> {
        let mtu = bridge_mtu()?;
        let (fd, name) = open_tap().map_err(Error::io("make a tap (/dev/net/tun)"))?;
        ip(&[
            "link",
            "set",
            &name,
            "mtu",
            &mtu.to_string(),
            "master",
            BRIDGE,
            "up",
        ])?;
        Ok(Self { fd, mtu })
    }
}

fn open_tap() -> std::io::Result<(OwnedFd, String)> {
    let fd = open("/dev/net/tun", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
    // SAFETY: all zeroes is a valid ifreq: an empty name and no flags.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"vm%d\0") {
        *to = from.cast_signed();
    }
    // IFF_VNET_HDR: large packets and open checksums pass whole.
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq: the kernel's Documentation/networking/tuntap.rst.
    if unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    // SAFETY: the kernel has put a name there that ends in a zero byte.
    let name = unsafe { CStr::from_ptr(request.ifr_name.as_ptr()) };
    Ok((fd, name.to_string_lossy().into_owned()))
}

fn bridge_mtu() -> Result<u32> {
    let line = ip(&["-o", "link", "show", "dev", BRIDGE])?;
    let mut words = line
        .split_ascii_whitespace()
        .skip_while(|&word| word != "mtu")
        .skip(1);
    words
        .next()
        .and_then(|mtu| mtu.parse().ok())
        .ok_or_else(|| Error::Config(format!("no MTU in what ip says about {BRIDGE}: {line}")))
}

/// Runs `ip` in this thread's network namespace; what it wrote.
fn ip(arguments: &[&str]) -> Result<String> {
    let output = Command::new("ip")
        .args(arguments)
        .output()
        .map_err(Error::io("run ip (package iproute2)"))?;
    if !output.status.success() {
        return Err(Error::Command {
            command: format!("ip {}", arguments.join(" ")),
            output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// An address with the length of its network's prefix, such as `10.77.0.100/16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub ip: IpAddr,
    /// The prefix's length in bits.
    pub prefix: u8,
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let parse = || {
            let (ip, prefix) = text.split_once('/')?;
            let (ip, prefix) = (ip.parse::<IpAddr>().ok()?, prefix.parse().ok()?);
            (prefix <= if ip.is_ipv4() { 32 } else { 128 }).then_some(Self { ip, prefix })
        };
        parse().ok_or_else(|| format!("{text:?} is not ADDRESS/LENGTH, such as 10.77.0.100/16"))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.ip, self.prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_need_a_prefix_that_fits() {
        for good in ["10.77.0.100/16", "fd00::1/64"] {
            assert_eq!(good.parse::<Address>().unwrap().to_string(), good);
        }
        for bad in ["10.77.0.100", "10.77.0.100/33", "x/8", ""] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
