//! The host's network interfaces: getifaddrs(3), if_nametoindex(3) and the MTU (netdevice(7)).

use std::ffi::{CStr, CString};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::AsRawFd;

use crate::config::{NicConfig, Port};
use crate::error::NicError;

/// Bytes of a RoCEv2 packet around its payload: IPv6 40, UDP 8, BTH 12, the largest extension headers (RETH 16 and
/// immediate 4), ICRC 4.
const HEADER_BYTES: u32 = 40 + 8 + 12 + 20 + 4;

/// The RNIC's port as the host has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    pub name: String,
    pub index: u32,
    pub mtu: u32,
    /// The port's address, then the others of the interface.
    pub addresses: Vec<IpAddr>,
}

impl Interface {
    /// Finds the interface that the operator means.
    pub fn find(config: &NicConfig) -> Result<Self, NicError> {
        let all = addresses()?;
        let (name, address) = match &config.port {
            Port::Interface(name) => all
                .iter()
                .filter(|entry| entry.name == *name)
                .min_by_key(|entry| rank(entry.address))
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
        let mut addresses = vec![address];
        let by_address = matches!(config.port, Port::Address(_));
        if config.all_addresses && !(by_address && address.is_loopback()) {
            let mut others: Vec<_> = all
                .iter()
                .filter(|entry| entry.name == name && entry.address != address)
                .map(|entry| entry.address)
                .collect();
            others.sort_by_key(|address| rank(*address));
            others.dedup();
            // A GID index has eight bits.
            others.truncate(MAX_GIDS - 1);
            addresses.extend(others);
        }
        Ok(Self {
            index: index(&name)?,
            name,
            mtu,
            addresses,
        })
    }

    /// The port's address.
    pub fn address(&self) -> IpAddr {
        self.addresses[0]
    }

    /// The MTU of the link now, in bytes.
    pub fn mtu_now(&self) -> Result<u32, NicError> {
        mtu(&self.name)
    }

    /// The largest `enum ibv_mtu` whose packets fit the interface.
    pub fn active_mtu(&self) -> u8 {
        (1..=5)
            .rev()
            .find(|code| (128 << code) + HEADER_BYTES <= self.mtu)
            .unwrap_or(1)
    }
}

/// Entries of the GID table.
const MAX_GIDS: usize = 32;

/// IPv4, then global, then link-local addresses.
fn rank(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(address) if address.is_unicast_link_local() => 2,
        IpAddr::V6(_) => 1,
    }
}

struct Entry {
    name: String,
    address: IpAddr,
    netmask: Option<IpAddr>,
}

impl Entry {
    fn covers(&self, address: IpAddr) -> bool {
        match (self.address, self.netmask, address) {
            (IpAddr::V4(own), Some(IpAddr::V4(mask)), IpAddr::V4(address)) => own & mask == address & mask,
            _ => false,
        }
    }
}

/// The address that an entry of getifaddrs(3) points to, if it is one of IP.
///
/// # Safety
/// `address` is null or points to a socket address of its family's type.
unsafe fn ip(address: *const libc::sockaddr) -> Option<IpAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: the family tells the type, see above.
    unsafe {
        match i32::from((*address).sa_family) {
            libc::AF_INET => {
                let bits = (*address.cast::<libc::sockaddr_in>()).sin_addr.s_addr;
                Some(Ipv4Addr::from(u32::from_be(bits)).into())
            }
            libc::AF_INET6 => {
                let bytes = (*address.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr;
                Some(Ipv6Addr::from(bytes).into())
            }
            _ => None,
        }
    }
}

fn addresses() -> Result<Vec<Entry>, NicError> {
    let mut first = std::ptr::null_mut();
    // SAFETY: getifaddrs writes the head of a list that freeifaddrs frees below.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(NicError::os("getifaddrs", std::io::Error::last_os_error()));
    }
    let mut found = Vec::new();
    let mut next = first;
    while !next.is_null() {
        // SAFETY: the list is intact until it is freed.
        let entry = unsafe { &*next };
        // SAFETY: entries of the list point to a socket address or to nothing.
        let (address, netmask) = unsafe { (ip(entry.ifa_addr), ip(entry.ifa_netmask)) };
        if let Some(address) = address {
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

fn index(name: &str) -> Result<u32, NicError> {
    let name = CString::new(name).expect("a name from the kernel has no NUL");
    // SAFETY: a C string that lives through the call.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        0 => Err(NicError::os("if_nametoindex", std::io::Error::last_os_error())),
        index => Ok(index),
    }
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

    fn find(port: Port) -> Result<Interface, NicError> {
        Interface::find(&NicConfig {
            port,
            ..NicConfig::new("/nowhere")
        })
    }

    #[test]
    fn loopback_answers_to_its_whole_network() {
        let address = IpAddr::from([127, 9, 8, 7]);
        let interface = find(Port::Address(address)).unwrap();
        assert_eq!((interface.name.as_str(), interface.active_mtu()), ("lo", 5));
        assert_eq!(
            interface.addresses,
            [address],
            "the others belong to somebody else"
        );
        let whole = find(Port::Interface("lo".into())).unwrap();
        assert_eq!(whole.address(), Ipv4Addr::LOCALHOST);
        assert!(matches!(
            find(Port::Interface("no-such-if".into())),
            Err(NicError::NoAddress { .. })
        ));
        assert!(matches!(
            find(Port::Address([203, 0, 113, 77].into())),
            Err(NicError::NoInterface { .. })
        ));
    }

    #[test]
    fn the_path_mtu_leaves_room_for_headers() {
        let with = |mtu| {
            Interface {
                name: String::new(),
                index: 1,
                mtu,
                addresses: vec![],
            }
            .active_mtu()
        };
        assert_eq!(
            [with(9000), with(4200), with(1500), with(1000), with(400)],
            [5, 5, 3, 2, 1]
        );
    }

    #[test]
    fn global_addresses_come_before_link_local_ones() {
        let parse = |text: &str| text.parse::<IpAddr>().unwrap();
        let mut addresses = ["fe80::1", "fd00::1", "10.0.0.1"].map(parse);
        addresses.sort_by_key(|address| rank(*address));
        assert_eq!(addresses, ["10.0.0.1", "fd00::1", "fe80::1"].map(parse));
    }
}
