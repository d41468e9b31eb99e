//! The host's network interfaces: getifaddrs(3) and the MTU (netdevice(7)).

use std::ffi::CStr;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;

use crate::config::Port;
use crate::error::NicError;

/// Bytes of a RoCEv2 packet around its payload: IPv4 20, UDP 8, BTH 12, the largest extension headers (RETH 16 and
/// immediate 4), ICRC 4.
const HEADER_BYTES: u32 = 20 + 8 + 12 + 20 + 4;

/// The RNIC's port as the host has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub address: Ipv4Addr,
    pub mtu: u32,
}

impl Interface {
    /// Finds the interface that the operator means.
    pub fn find(port: &Port) -> Result<Self, NicError> {
        let all = ipv4_addresses()?;
        let (name, address) = match port {
            Port::Interface(name) => all
                .iter()
                .find(|entry| entry.name == *name)
                .map(|entry| (entry.name.clone(), entry.address))
                .ok_or_else(|| NicError::NoAddress { name: name.clone() })?,
            Port::Address(address) => all
                .iter()
                .find(|entry| entry.address == *address)
                // The loopback interface answers to the whole of its network.
                .or_else(|| {
                    all.iter()
                        .find(|entry| address.is_loopback() && entry.covers(*address))
                })
                .map(|entry| (entry.name.clone(), *address))
                .ok_or(NicError::NoInterface { address: *address })?,
        };
        let mtu = mtu(&name)?;
        if mtu < 256 + HEADER_BYTES {
            return Err(NicError::MtuTooSmall { name, mtu });
        }
        Ok(Self { name, address, mtu })
    }

    /// The largest `enum ibv_mtu` whose packets fit the interface.
    pub fn active_mtu(&self) -> u8 {
        (1..=5)
            .rev()
            .find(|code| (128 << code) + HEADER_BYTES <= self.mtu)
            .unwrap_or(1)
    }
}

struct Entry {
    name: String,
    address: Ipv4Addr,
    netmask: Ipv4Addr,
}

impl Entry {
    fn covers(&self, address: Ipv4Addr) -> bool {
        self.address & self.netmask == address & self.netmask
    }
}

fn ipv4_addresses() -> Result<Vec<Entry>, NicError> {
    let mut first = std::ptr::null_mut();
    // SAFETY: getifaddrs writes the head of a list that freeifaddrs frees below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(NicError::os("getifaddrs", std::io::Error::last_os_error()));
    }
    let ipv4 = |address: *const libc::sockaddr| {
        // SAFETY: entries of the list point to a socket address or to nothing; its family tells its type.
        unsafe {
            (!address.is_null() && i32::from((*address).sa_family) == libc::AF_INET).then(|| {
                Ipv4Addr::from(u32::from_be(
                    (*address.cast::<libc::sockaddr_in>()).sin_addr.s_addr,
                ))
            })
        }
    };
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the list is intact until it is freed.
        let entry = unsafe { &*next };
        if let (Some(address), Some(netmask)) = (ipv4(entry.ifa_addr), ipv4(entry.ifa_netmask)) {
            // SAFETY: the name is a C string that lives as long as the list.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }
                .to_string_lossy()
                .into_owned();
            found.push(Entry {
                name,
                address,
                netmask,
            });
        }
        next = entry.ifa_next;
    }
    // SAFETY: `first` is what getifaddrs gave, freed once.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

fn mtu(name: &str) -> Result<u32, NicError> {
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::INET,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|errno| NicError::os("socket", errno))?;
    // SAFETY: an ifreq is plain data, zero is a value of each field.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name[..libc::IFNAMSIZ - 1]
        .iter_mut()
        .zip(name.bytes())
    {
        *to = from as libc::c_char;
    }
    // SAFETY: the request is an ifreq with a terminated name, and SIOCGIFMTU writes `ifru_mtu` of it.
    let mtu = unsafe {
        if libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU, &mut request) != 0 {
            return Err(NicError::os("ioctl(SIOCGIFMTU)", std::io::Error::last_os_error()));
        }
        request.ifr_ifru.ifru_mtu
    };
    Ok(mtu.max(0) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_answers_to_its_whole_network() {
        let address = Ipv4Addr::new(127, 9, 8, 7);
        let interface = Interface::find(&Port::Address(address)).unwrap();
        assert_eq!(
            (interface.name.as_str(), interface.address, interface.active_mtu()),
            ("lo", address, 5)
        );
        assert_eq!(
            Interface::find(&Port::Interface("lo".into())).unwrap().address,
            Ipv4Addr::LOCALHOST
        );
        assert!(matches!(
            Interface::find(&Port::Interface("no-such-if".into())),
            Err(NicError::NoAddress { .. })
        ));
        assert!(matches!(
            Interface::find(&Port::Address(Ipv4Addr::new(203, 0, 113, 77))),
            Err(NicError::NoInterface { .. })
        ));
    }

    #[test]
    fn the_path_mtu_leaves_room_for_headers() {
        let with = |mtu| {
            Interface {
                name: String::new(),
                address: Ipv4Addr::LOCALHOST,
                mtu,
            }
            .active_mtu()
        };
        assert_eq!(
            [with(9000), with(4200), with(1500), with(1000), with(400)],
            [5, 5, 3, 2, 1]
        );
    }
}
