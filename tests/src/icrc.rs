//! The invariant CRC of a RoCEv2 packet, written down a second time from the standard, so that the RNIC's own is not its
//! only judge: IBA Vol 1 §7.8.1 and annex A17.3.3.

use anyhow::{Context, bail, ensure};

const ICRC_BYTES: usize = 4;
const UDP_BYTES: usize = 8;

/// The invariant CRC that an IP packet carries, and the one that it should carry.
pub fn of_packet(packet: &[u8]) -> anyhow::Result<(u32, u32)> {
    let version = packet.first().context("an empty packet")? >> 4;
    // What follows the IP packet is padding of the Ethernet frame.
    let (header_bytes, length) = match version {
        4 => (usize::from(packet[0] & 0xf) * 4, be16(packet, 2)?),
        6 => (40, 40 + be16(packet, 4)?),
        _ => bail!("neither IPv4 nor IPv6"),
    };
    let packet = packet.get(..length).context("a packet that was cut off")?;
    ensure!(
        length >= header_bytes + UDP_BYTES + 12 + ICRC_BYTES,
        "too short for RoCEv2"
    );
    let (covered, crc) = packet.split_at(length - ICRC_BYTES);
    let mut covered = covered.to_vec();
    // What routers may change counts as ones.
    let variant: &[usize] = match version {
        // Type of service, time to live, header checksum.
        4 => &[1, 8, 10, 11],
        // Traffic class and flow label (below), hop limit.
        _ => &[1, 2, 3, 7],
    };
    if version == 6 {
        covered[0] |= 0x0f;
    }
    for offset in variant {
        covered[*offset] = 0xff;
    }
    // The UDP checksum; and of the base transport header the byte with FECN, BECN and six reserved bits.
    for offset in [6, 7, UDP_BYTES + 4] {
        covered[header_bytes + offset] = 0xff;
    }
    // In the place of InfiniBand's local route header, which RoCEv2 does not have: eight bytes of ones.
    let state = [0xff; 8]
        .iter()
        .chain(&covered)
        .fold(!0, |state, byte| crc32(state, *byte));
    Ok((u32::from_le_bytes(crc.try_into()?), !state))
}

fn be16(bytes: &[u8], offset: usize) -> anyhow::Result<usize> {
    let field = bytes
        .get(offset..offset + 2)
        .context("a packet that was cut off")?;
    Ok(usize::from(u16::from_be_bytes([field[0], field[1]])))
}

/// One byte of CRC-32 as in Ethernet, bit by bit: the polynomial 0x04c11db7, least significant bit first.
fn crc32(state: u32, byte: u8) -> u32 {
    (0..8).fold(state ^ u32::from(byte), |state, _| {
        (state >> 1) ^ (0xedb8_8320 & (state & 1).wrapping_neg())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An acknowledgement over IPv4, without its Ethernet header.
    const ACKNOWLEDGE: &str = "45000030000040004011 26210a4d00020a4d0001 12b712b7001c14ca \
                               1140ffff006f0dcb0075a7c5 1f000000 68a53ca0";

    fn bytes(hex: &str) -> Vec<u8> {
        let digits: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        digits.chunks(2).map(byte).collect()
    }

    #[test]
    fn a_captured_packet_is_right() {
        let packet = bytes(ACKNOWLEDGE);
        let (found, right) = of_packet(&packet).unwrap();
        assert_eq!(found, right);
        // What may change on the way, and padding, does not count.
        let mut routed = packet.clone();
        routed[8] -= 1;
        routed[10] ^= 0x40;
        routed.push(0);
        assert_eq!(of_packet(&routed).unwrap(), (found, right));
        // Everything else does.
        let mut damaged = packet.clone();
        damaged[4] ^= 1;
        assert_ne!(of_packet(&damaged).unwrap().1, right, "the identification counts");
        for length in 0..packet.len() {
            assert!(of_packet(&packet[..length]).is_err());
        }
    }

    #[test]
    fn the_crc_is_that_of_ethernet() {
        let crc = !b"123456789".iter().fold(!0, |state, byte| crc32(state, *byte));
        assert_eq!(crc, 0xcbf4_3926, "the check value of CRC-32/ISO-HDLC");
    }
}
