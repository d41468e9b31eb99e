//! The 40 bytes in front of a datagram: who sent it.
//!
//! Over IPv6 they are the IPv6 header, which has the GRH's layout (IBA Vol 1 §8.3). Over IPv4 the IPv4 header is in the
//! last 20 of them and the first 20 are undefined (annex A17). Nothing says which of the two it is, so a checksum
//! that is right is believed first.

use crate::ffi::Errno;

/// What an answer needs to know. GIDs are in network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sender {
    pub sgid: [u8; 16],
    pub dgid: [u8; 16],
    pub flow_label: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

/// Version 4 and five words of header, no options.
const IPV4_START: u8 = 0x45;

impl Sender {
    /// Reads them; `EINVAL` if they are neither.
    pub fn parse(bytes: &[u8; 40]) -> Result<Self, Errno> {
        let (_, ipv4) = bytes.split_last_chunk::<20>().ok_or(Errno::INVALID)?;
        match (ipv4[0] == IPV4_START, bytes[0] >> 4) {
            (true, _) if ones_complement_sum(ipv4) == 0xffff => Ok(Self::ipv4(ipv4)),
            (_, 6) => Ok(Self::ipv6(bytes)),
            // A device need not fill in the checksum.
            (true, _) => Ok(Self::ipv4(ipv4)),
            _ => Err(Errno::INVALID),
        }
    }

    fn ipv4(header: &[u8; 20]) -> Self {
        let gid = |at: usize| {
            let mut gid = [0; 16];
            gid[10..12].fill(0xff);
            gid[12..].copy_from_slice(&header[at..at + 4]);
            gid
        };
        Self {
            sgid: gid(12),
            dgid: gid(16),
            flow_label: 0,
            hop_limit: header[8],
            traffic_class: header[1],
        }
    }

    fn ipv6(header: &[u8; 40]) -> Self {
        let gid = |at: usize| {
            let mut gid = [0; 16];
            gid.copy_from_slice(&header[at..at + 16]);
            gid
        };
        let first = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
        Self {
            sgid: gid(8),
            dgid: gid(24),
            flow_label: first & 0xf_ffff,
            hop_limit: header[7],
            traffic_class: (first >> 20) as u8,
        }
    }
}

/// The sum of RFC 1071; 0xffff over a header whose checksum is right.
fn ones_complement_sum(header: &[u8; 20]) -> u32 {
    let words = header
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    (folded & 0xffff) + (folded >> 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 10.0.0.1 to 10.0.0.2, TTL 64, UDP, its checksum right.
    const IPV4: [u8; 20] = [
        0x45, 0x08, 0x00, 0x3c, 0x00, 0x00, 0x40, 0x00, 0x40, 0x11, 0x26, 0xa7, 10, 0, 0, 1, 10, 0, 0, 2,
    ];

    fn with_ipv4(first: u8, header: [u8; 20]) -> [u8; 40] {
        let mut bytes = [0; 40];
        bytes[0] = first;
        bytes[20..].copy_from_slice(&header);
        bytes
    }

    #[test]
    fn an_ipv4_header_is_found_whatever_is_in_front_of_it() {
        for first in [0x00, 0x60, 0xff] {
            let sender = Sender::parse(&with_ipv4(first, IPV4)).unwrap();
            assert_eq!(sender.sgid[10..], [0xff, 0xff, 10, 0, 0, 1]);
            assert_eq!(sender.dgid[10..], [0xff, 0xff, 10, 0, 0, 2]);
            assert_eq!((sender.hop_limit, sender.traffic_class), (64, 8));
        }
    }

    #[test]
    fn a_checksum_that_nobody_filled_in_does_not_matter() {
        let mut header = IPV4;
        header[10..12].fill(0);
        assert!(Sender::parse(&with_ipv4(0, header)).is_ok());
    }

    #[test]
    fn an_ipv6_header_is_a_grh() {
        let mut bytes = [0; 40];
        bytes[..4].copy_from_slice(&0x6a5b_cdefu32.to_be_bytes());
        bytes[7] = 3;
        bytes[8..24].fill(0x11);
        bytes[24..].fill(0x22);
        let sender = Sender::parse(&bytes).unwrap();
        assert_eq!(
            sender,
            Sender {
                sgid: [0x11; 16],
                dgid: [0x22; 16],
                flow_label: 0xb_cdef,
                hop_limit: 3,
                traffic_class: 0xa5,
            }
        );
        // An address inside of it may look like the start of an IPv4 header.
        bytes[20] = IPV4_START;
        assert_eq!(Sender::parse(&bytes).unwrap().hop_limit, 3);
    }

    #[test]
    fn anything_else_is_nothing() {
        assert_eq!(Sender::parse(&[0; 40]), Err(Errno::INVALID));
    }
}
