//! The 40 bytes in front of a received datagram (IBA Vol 1 §11.4.1.2; annex A17.4.5 for RoCEv2): an IPv6 header, or an IPv4
//! header in the last 20 bytes. `ibv_init_ah_from_wc`(3) reads the sender's address from it.

use std::net::Ipv4Addr;
use std::net::Ipv6Addr;

/// Offsets in an IPv6 header, which has the layout of InfiniBand's global route header.
const V6_SOURCE: usize = 8;
const V6_DESTINATION: usize = 24;
/// Where the IPv4 header starts, and offsets from the start of all.
const V4: usize = 20;
const V4_CHECKSUM: usize = V4 + 10;
const V4_SOURCE: usize = V4 + 12;
const V4_DESTINATION: usize = V4 + 16;

/// The bytes of one datagram.
#[derive(Debug)]
pub struct Grh([u8; Grh::BYTES]);

impl Grh {
    /// How many there are.
    pub const BYTES: usize = 40;

    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    pub fn bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }

    fn is_v6(&self) -> bool {
        self.0[0] >> 4 == 6
    }

    fn gid(&self, v6: usize, v4: usize) -> [u8; 16] {
        let mut gid = [0; 16];
        if self.is_v6() {
            gid.copy_from_slice(&self.0[v6..v6 + 16]);
            return gid;
        }
        let mut address = [0; 4];
        address.copy_from_slice(&self.0[v4..v4 + 4]);
        Ipv4Addr::from(address).to_ipv6_mapped().octets()
    }

    /// The sender's GID.
    pub fn source(&self) -> [u8; 16] {
        self.gid(V6_SOURCE, V4_SOURCE)
    }

    /// The receiver's GID, or the group's.
    pub fn destination(&self) -> [u8; 16] {
        self.gid(V6_DESTINATION, V4_DESTINATION)
    }

    /// Puts another sender in; one of another address family than the header's does not fit and changes nothing.
    pub fn set_source(&mut self, gid: [u8; 16]) {
        self.set(V6_SOURCE, V4_SOURCE, gid);
    }

    /// The same with the receiver.
    pub fn set_destination(&mut self, gid: [u8; 16]) {
        self.set(V6_DESTINATION, V4_DESTINATION, gid);
    }

    fn set(&mut self, v6: usize, v4: usize, gid: [u8; 16]) {
        match (self.is_v6(), Ipv6Addr::from(gid).to_ipv4_mapped()) {
            (true, None) => self.0[v6..v6 + 16].copy_from_slice(&gid),
            (false, Some(address)) => {
                self.0[v4..v4 + 4].copy_from_slice(&address.octets());
                self.0[V4_CHECKSUM..V4_CHECKSUM + 2].fill(0);
                let checksum = internet_checksum(&self.0[V4..]);
                self.0[V4_CHECKSUM..V4_CHECKSUM + 2].copy_from_slice(&checksum.to_be_bytes());
            }
            _ => {}
        }
    }

    /// As an RNIC makes one, with nothing but addresses and a checksum in it.
    #[cfg(test)]
    pub fn ipv4_for_tests(source: [u8; 4], destination: [u8; 4]) -> [u8; Self::BYTES] {
        let mut grh = Self([0; Self::BYTES]);
        grh.0[V4] = 0x45;
        grh.set_source(Ipv4Addr::from(source).to_ipv6_mapped().octets());
        grh.set_destination(Ipv4Addr::from(destination).to_ipv6_mapped().octets());
        grh.0
    }
}

/// RFC 1071, over a header whose checksum field is zero.
fn internet_checksum(header: &[u8]) -> u16 {
    let words = header
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_both_families_are_found_and_changed() {
        let v6 = |last| Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last).octets();
        let mut grh = Grh([0; Grh::BYTES]);
        grh.0[0] = 0x60;
        grh.set_source(v6(1));
        grh.set_destination(v6(2));
        assert_eq!((grh.source(), grh.destination()), (v6(1), v6(2)));
        grh.set_source(Ipv4Addr::LOCALHOST.to_ipv6_mapped().octets());
        assert_eq!(grh.source(), v6(1), "of another family");
        let grh = Grh(Grh::ipv4_for_tests([192, 168, 0, 7], [192, 168, 0, 8]));
        assert_eq!(grh.source()[12..], [192, 168, 0, 7]);
        assert_eq!(grh.destination()[12..], [192, 168, 0, 8]);
        assert_eq!(
            internet_checksum(&grh.0[V4..]),
            0,
            "the header with its checksum sums up to zero"
        );
    }
}
