//! Invariant CRC (IBA §7.8.1, annex A17.9.3): CRC-32 over everything that does not change on the way.
//!
//! It covers eight bytes of ones (in the place of InfiniBand's local route header), the IP header, the UDP header and
//! the packet, with what routers may change set to ones: for IPv4 the type of service, time to live and header
//! checksum; for IPv6 the traffic class, flow label and hop limit; the UDP checksum; and the BTH's `resv8a`. The result
//! is appended in little-endian order.
//!
//! # The IPv4 identification
//!
//! The ICRC covers the identification of the IPv4 header, and a program that receives from a UDP socket cannot see that
//! field. (Nor the flags: "don't fragment" is taken as set, as every known sender sets it.) Linux sends 0 from an
//! unconnected socket with `IP_MTU_DISCOVER=DO`, and `i` in segment `i` of a GSO batch; the kernel's rxe and hardware
//! choose as they like. So [`Flow::verify`] first tries the identification that the caller expects. If that fails, it
//! asks whether *any* identification explains the ICRC: a CRC is linear, so the difference between the expected and the
//! received one, taken back over the bytes after the identification, must be a value of 16 bits. This costs one
//! multiplication modulo the CRC's polynomial and no second pass.
//!
//! What this leaves: a damaged packet passes the first test with probability 2^-32, and the second with 2^-16. The
//! second is as strong as the UDP checksum, which is still checked by the kernel where the sender sets one. Both are
//! in addition to the checks of the link.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::bth::{BTH_BYTES, RESV8A_OFFSET};

/// Size in bytes.
pub const ICRC_BYTES: usize = 4;

const ROUTE_BYTES: usize = 8;
const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
const IPV4_ID_OFFSET: usize = ROUTE_BYTES + 4;
const MAX_PREFIX_BYTES: usize = ROUTE_BYTES + IPV6_BYTES + UDP_BYTES;

/// Source and destination are not of one address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{source_addr} and {destination} are not of one address family")]
pub struct MixedFamilies {
    source_addr: IpAddr,
    destination: IpAddr,
}

/// How a check of the ICRC ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is right for the expected identification (or over IPv6, which has none).
    Expected,
    /// It is right for this identification, which the sender must have used.
    Identification(u16),
    /// The packet was damaged, or comes from another flow.
    Damaged,
}

impl Verdict {
    /// May the packet be used?
    pub fn is_good(self) -> bool {
        self != Verdict::Damaged
    }
}

/// One direction of a UDP flow: the headers that the ICRC covers and the packet does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    source: SocketAddr,
    destination: SocketAddr,
    /// Eight ones, IP and UDP header with zero for identification and lengths.
    prefix: [u8; MAX_PREFIX_BYTES],
}

impl Flow {
    /// The flow from `source` to `destination`. IPv4 addresses that are mapped into IPv6 are taken as IPv4.
    pub fn new(source: SocketAddr, destination: SocketAddr) -> Result<Flow, MixedFamilies> {
        let source = SocketAddr::new(source.ip().to_canonical(), source.port());
        let destination = SocketAddr::new(destination.ip().to_canonical(), destination.port());
        let mut prefix = [0; MAX_PREFIX_BYTES];
        prefix[..ROUTE_BYTES].fill(0xff);
        let ip = &mut prefix[ROUTE_BYTES..];
        let udp = match (source.ip(), destination.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                ipv4_header(ip, from, to);
                &mut ip[IPV4_BYTES..IPV4_BYTES + UDP_BYTES]
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                ipv6_header(ip, from, to);
                &mut ip[IPV6_BYTES..IPV6_BYTES + UDP_BYTES]
            }
            (source_addr, destination) => {
                return Err(MixedFamilies {
                    source_addr,
                    destination,
                });
            }
        };
        udp[..2].copy_from_slice(&source.port().to_be_bytes());
        udp[2..4].copy_from_slice(&destination.port().to_be_bytes());
        udp[6..].fill(0xff);
        Ok(Flow {
            source,
            destination,
            prefix,
        })
    }

    /// Where packets come from.
    pub fn source(&self) -> SocketAddr {
        self.source
    }

    /// Where packets go.
    pub fn destination(&self) -> SocketAddr {
        self.destination
    }

    fn is_ipv4(&self) -> bool {
        self.source.is_ipv4()
    }

    /// The ICRC of a packet, given without it (BTH to padding), that is sent with this IPv4 identification.
    pub fn icrc(&self, body: &[u8], identification: u16) -> u32 {
        let mut head = [0; MAX_PREFIX_BYTES + BTH_BYTES];
        head[..MAX_PREFIX_BYTES].copy_from_slice(&self.prefix);
        // A UDP datagram has less than 65,536 bytes; a longer body has no right ICRC, and this gives a wrong one.
        let udp_len = (UDP_BYTES + body.len() + ICRC_BYTES) as u16;
        let ip = &mut head[ROUTE_BYTES..];
        let ip_bytes = if self.is_ipv4() {
            ip[2..4].copy_from_slice(&udp_len.wrapping_add(IPV4_BYTES as u16).to_be_bytes());
            ip[4..6].copy_from_slice(&identification.to_be_bytes());
            IPV4_BYTES
        } else {
            ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
            IPV6_BYTES
        };
        ip[ip_bytes + 4..ip_bytes + 6].copy_from_slice(&udp_len.to_be_bytes());

        let (bth, rest) = body.split_at(body.len().min(BTH_BYTES));
        let bth_at = ROUTE_BYTES + ip_bytes + UDP_BYTES;
        head[bth_at..bth_at + bth.len()].copy_from_slice(bth);
        if bth.len() > RESV8A_OFFSET {
            head[bth_at + RESV8A_OFFSET] = 0xff;
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&head[..bth_at + bth.len()]);
        hasher.update(rest);
        hasher.finalize()
    }

    /// Checks the ICRC at the end of a received datagram, of which the IPv4 identification is believed to be
    /// `expected`: the index of the segment in a batch that was received as one (`UDP_GRO`), otherwise 0.
    pub fn verify(&self, datagram: &[u8], expected: u16) -> Verdict {
        let Some((body, received)) = datagram.split_last_chunk::<ICRC_BYTES>() else {
            return Verdict::Damaged;
        };
        let difference = self.icrc(body, expected) ^ u32::from_le_bytes(*received);
        if difference == 0 {
            return Verdict::Expected;
        }
        if !self.is_ipv4() {
            return Verdict::Damaged;
        }
        let covered = ROUTE_BYTES + IPV4_BYTES + UDP_BYTES + body.len();
        let change = gf2::take_back(difference, covered - IPV4_ID_OFFSET);
        match u16::try_from(change) {
            // The first byte on the wire is the low one of a reflected CRC.
            Ok(change) => Verdict::Identification(expected ^ change.swap_bytes()),
            Err(_) => Verdict::Damaged,
        }
    }
}

fn ipv4_header(ip: &mut [u8], source: Ipv4Addr, destination: Ipv4Addr) {
    const DONT_FRAGMENT: u8 = 0x40;
    ip[0] = 0x45;
    ip[1] = 0xff;
    ip[6] = DONT_FRAGMENT;
    ip[8] = 0xff;
    ip[9] = 17;
    ip[10..12].fill(0xff);
    ip[12..16].copy_from_slice(&source.octets());
    ip[16..20].copy_from_slice(&destination.octets());
}

fn ipv6_header(ip: &mut [u8], source: Ipv6Addr, destination: Ipv6Addr) {
    ip[0] = 0x6f;
    ip[1..4].fill(0xff);
    ip[6] = 17;
    ip[7] = 0xff;
    ip[8..24].copy_from_slice(&source.octets());
    ip[24..40].copy_from_slice(&destination.octets());
}

/// Arithmetic modulo the polynomial of CRC-32, in the reflected order of bits: bit 31 is the coefficient of 1.
mod gf2 {
    const POLYNOMIAL: u32 = 0xedb8_8320;
    const ONE: u32 = 1 << 31;

    const fn times_x(a: u32) -> u32 {
        if a & 1 != 0 { a >> 1 ^ POLYNOMIAL } else { a >> 1 }
    }

    const fn divide_by_x(a: u32) -> u32 {
        if a & ONE != 0 {
            (a ^ POLYNOMIAL) << 1 | 1
        } else {
            a << 1
        }
    }

    const fn multiply(a: u32, mut b: u32) -> u32 {
        let mut product = 0;
        let mut bit = ONE;
        while bit != 0 {
            if a & bit != 0 {
                product ^= b;
            }
            b = times_x(b);
            bit >>= 1;
        }
        product
    }

    /// Element `k` is x^(-8 × 2^k): it takes a CRC back over 2^k bytes of zeros.
    const BACK: [u32; 17] = {
        let mut table = [0; 17];
        let mut power = ONE;
        let mut i = 0;
        while i < 8 {
            power = divide_by_x(power);
            i += 1;
        }
        let mut k = 0;
        while k < table.len() {
            table[k] = power;
            power = multiply(power, power);
            k += 1;
        }
        table
    };

    /// The value that, `bytes` bytes earlier, makes a difference of `difference` now.
    pub(super) fn take_back(difference: u32, bytes: usize) -> u32 {
        let powers = BACK.iter().enumerate().filter(|(k, _)| bytes >> k & 1 != 0);
        powers.fold(difference, |value, (_, power)| multiply(*power, value))
    }
}

#[cfg(test)]
#[path = "icrc_tests.rs"]
mod tests;
