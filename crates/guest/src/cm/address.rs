//! `struct sockaddr` and its kinds.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::abi::AF_IB;
use crate::ffi::{Errno, unsupported};

/// Bytes of a `struct sockaddr_in`, `struct sockaddr_in6` and `struct sockaddr_ib`.
pub const INET_BYTES: usize = 16;
pub const INET6_BYTES: usize = 28;
pub const IB_BYTES: usize = 48;

const AF_UNSPEC: u16 = libc::AF_UNSPEC as u16;
const AF_INET: u16 = libc::AF_INET as u16;
const AF_INET6: u16 = libc::AF_INET6 as u16;

fn part<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], Errno> {
    let part = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    part.ok_or(Errno::INVALID)
}

/// The address that a program wrote.
pub fn from_c(bytes: &[u8]) -> Result<SocketAddr, Errno> {
    let family = u16::from_ne_bytes(part(bytes, 0)?);
    let port = u16::from_be_bytes(part(bytes, 2)?);
    match family {
        AF_INET => Ok(SocketAddr::from((Ipv4Addr::from(part::<4>(bytes, 4)?), port))),
        AF_INET6 => {
            let scope = u32::from_ne_bytes(part(bytes, 24)?);
            let address = Ipv6Addr::from(part::<16>(bytes, 8)?);
            Ok(SocketAddrV6::new(address, port, 0, scope).into())
        }
        AF_IB => {
            unsupported("addresses of InfiniBand (AF_IB) on RoCE");
            Err(Errno::new(libc::EAFNOSUPPORT))
        }
        _ => Err(Errno::INVALID),
    }
}

/// The same, or none where the program wrote none.
pub fn optional_from_c(bytes: &[u8]) -> Result<Option<SocketAddr>, Errno> {
    match u16::from_ne_bytes(part(bytes, 0)?) {
        AF_UNSPEC => Ok(None),
        _ => from_c(bytes).map(Some),
    }
}

/// Writes an address to the beginning of `to`; gives its length, 0 for none.
pub fn to_c(address: Option<SocketAddr>, to: &mut [u8]) -> usize {
    let Some(address) = address else { return 0 };
    to[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => {
            to[..2].copy_from_slice(&AF_INET.to_ne_bytes());
            to[4..8].copy_from_slice(&address.ip().octets());
            INET_BYTES
        }
        SocketAddr::V6(address) => {
            to[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            to[8..24].copy_from_slice(&address.ip().octets());
            to[24..28].copy_from_slice(&address.scope_id().to_ne_bytes());
            INET6_BYTES
        }
    }
}

/// A `struct sockaddr_ib` with a GID, for `RDMA_USER_CM_QUERY_GID`.
pub fn gid_to_c(gid: [u8; 16], to: &mut [u8]) -> usize {
    to[..2].copy_from_slice(&AF_IB.to_ne_bytes());
    to[2..4].copy_from_slice(&[0xff; 2]);
    to[8..24].copy_from_slice(&gid);
    IB_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_go_out_and_come_back() {
        for text in ["10.0.0.1:7471", "0.0.0.0:0", "[::]:18515", "[fd00::1]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let mut bytes = [0; 128];
            let length = to_c(Some(address), &mut bytes);
            assert_eq!(from_c(&bytes[..length]), Ok(address));
        }
        assert_eq!(to_c(None, &mut [0; 128]), 0);
        assert_eq!(optional_from_c(&[0; 28]), Ok(None));
    }

    #[test]
    fn what_is_no_ip_address_is_refused() {
        let mut bytes = [0; 48];
        gid_to_c([1; 16], &mut bytes);
        assert_eq!(from_c(&bytes), Err(Errno::new(libc::EAFNOSUPPORT)));
        assert_eq!(from_c(&[0; 28]), Err(Errno::INVALID));
        assert_eq!(from_c(&[2]), Err(Errno::INVALID));
        let mut short = [0; 28];
        to_c(Some("[fd00::1]:1".parse().unwrap()), &mut short);
        assert_eq!(from_c(&short[..16]), Err(Errno::INVALID));
    }
}
