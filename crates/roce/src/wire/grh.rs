//! The 40 bytes in front of a received datagram: the place of InfiniBand's global route header (IBA §8.3).
//!
//! RoCEv2 has an IP header in that place (annex A17.4.5): an IPv6 header as it is; an IPv4 header in the last 20 bytes,
//! the first 20 undefined, which are zeros here. `ibv_init_ah_from_wc` reads the sender's address from it.

use super::icrc::Flow;
use crate::Traffic;

/// Size in bytes.
pub const GRH_BYTES: usize = 40;

const IPV4_BYTES: usize = 20;
const UDP_BYTES: usize = 8;
const UDP_PROTOCOL: u8 = 17;

/// The header of a datagram of `datagram_bytes` (BTH to ICRC) that came over this flow, made again from what a UDP
/// socket tells of it.
pub fn from_flow(flow: &Flow, datagram_bytes: usize, traffic: Traffic) -> [u8; GRH_BYTES] {
    use std::net::IpAddr::{V4, V6};
    let mut grh = [0; GRH_BYTES];
    // An IP packet has less than 65,536 bytes.
    let udp_bytes = (UDP_BYTES + datagram_bytes) as u16;
    match (flow.source().ip(), flow.destination().ip()) {
        (V4(source), V4(destination)) => {
            let ip = &mut grh[GRH_BYTES - IPV4_BYTES..];
            ip[0] = 0x45;
            ip[1] = traffic.traffic_class;
            ip[2..4].copy_from_slice(&udp_bytes.wrapping_add(IPV4_BYTES as u16).to_be_bytes());
            ip[6] = 0x40;
            ip[8] = traffic.hop_limit;
            ip[9] = UDP_PROTOCOL;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&destination.octets());
            let checksum = internet_checksum(ip);
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        }
        (V6(source), V6(destination)) => {
            let first = 6 << 28 | u32::from(traffic.traffic_class) << 20 | traffic.flow_label & 0x000f_ffff;
            grh[..4].copy_from_slice(&first.to_be_bytes());
            grh[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
            grh[6] = UDP_PROTOCOL;
            grh[7] = traffic.hop_limit;
            grh[8..24].copy_from_slice(&source.octets());
            grh[24..40].copy_from_slice(&destination.octets());
        }
        _ => unreachable!("a flow has one address family"),
    }
    grh
}

/// RFC 1071, over a header whose checksum field is zero.
fn internet_checksum(header: &[u8]) -> u16 {
    let words = header
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    let sum: u32 = words.sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    !((folded & 0xffff) + (folded >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The IPv4 header of the UC packet in Scapy's `roce.uts`, whose checksum is given there: 0xb4d5 for
    /// identification 1144 and type of service 1; both are zero here.
    #[test]
    fn ipv4_header_is_in_the_last_20_bytes() {
        let end = |port| format!("192.168.0.7:{port}").parse().unwrap();
        let flow = Flow::new(end(49152), end(4791)).unwrap();
        let grh = from_flow(&flow, 36, Traffic::default());
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(grh[20..24], [0x45, 0, 0, 64]);
        assert_eq!(grh[30..32], (0xb4d5_u16 + 1144 + 1).to_be_bytes());
        assert_eq!(grh[32..], [192, 168, 0, 7, 192, 168, 0, 7]);
    }

    #[test]
    fn ipv6_header_is_as_on_the_wire() {
        let flow = Flow::new("[fe80::1]:1".parse().unwrap(), "[fe80::2]:4791".parse().unwrap()).unwrap();
        let traffic = Traffic {
            traffic_class: 0xab,
            hop_limit: 9,
            flow_label: 0xfff1_2345,
        };
        let grh = from_flow(&flow, 36, traffic);
        assert_eq!(grh[..8], [0x6a, 0xb1, 0x23, 0x45, 0, 44, 17, 9]);
        assert_eq!((grh[8], grh[23], grh[24], grh[39]), (0xfe, 1, 0xfe, 2));
    }
}
