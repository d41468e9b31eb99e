//! Base transport header (IBA §9.2).
//!
//! ```text
//!  0        opcode
//!  1        SE:1 MigReq:1 PadCnt:2 TVer:4
//!  2..4     partition key
//!  4        FECN:1 BECN:1 reserved:6      (resv8a: not covered by the ICRC)
//!  5..8     destination QP
//!  8        AckReq:1 reserved:7
//!  9..12    PSN
//! ```

use super::opcode::Opcode;
use crate::{Psn, Qpn};

/// Size in bytes.
pub const BTH_BYTES: usize = 12;

/// Offset of the byte with FECN and BECN, which routers may change: all ones for the ICRC.
pub const RESV8A_OFFSET: usize = 4;

/// The only version of the transport headers.
pub const TRANSPORT_VERSION: u8 = 0;

/// The base transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bth {
    /// What the packet is and which headers follow.
    pub opcode: Opcode,
    /// Solicited event.
    pub solicited: bool,
    /// Path migration state: set is "migrated", the state without path migration.
    pub migrated: bool,
    /// Bytes of padding after the payload: 0 to 3.
    pub pad_count: u8,
    /// Transport header version: 0 to 15.
    pub version: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward explicit congestion notification.
    pub fecn: bool,
    /// Backward explicit congestion notification.
    pub becn: bool,
    /// The queue pair that the packet is for.
    pub dest_qpn: Qpn,
    /// The sender wants an acknowledgement.
    pub ack_request: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Reads the header. Reserved bits are not looked at.
    pub fn parse(bytes: &[u8; BTH_BYTES]) -> Bth {
        let [opcode, flags, p0, p1, ecn, q0, q1, q2, ack, s0, s1, s2] = *bytes;
        Bth {
            opcode: Opcode(opcode),
            solicited: flags & 0x80 != 0,
            migrated: flags & 0x40 != 0,
            pad_count: flags >> 4 & 3,
            version: flags & 0x0f,
            pkey: u16::from_be_bytes([p0, p1]),
            fecn: ecn & 0x80 != 0,
            becn: ecn & 0x40 != 0,
            dest_qpn: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])),
            ack_request: ack & 0x80 != 0,
            psn: Psn::new(u32::from_be_bytes([0, s0, s1, s2])),
        }
    }

    /// Writes the header, reserved bits zero.
    pub fn emit(&self, bytes: &mut [u8; BTH_BYTES]) {
        let [_, q0, q1, q2] = self.dest_qpn.get().to_be_bytes();
        let [_, s0, s1, s2] = self.psn.get().to_be_bytes();
        let [p0, p1] = self.pkey.to_be_bytes();
        let flags = u8::from(self.solicited) << 7
            | u8::from(self.migrated) << 6
            | (self.pad_count & 3) << 4
            | self.version & 0x0f;
        let ecn = u8::from(self.fecn) << 7 | u8::from(self.becn) << 6;
        let ack = u8::from(self.ack_request) << 7;
        *bytes = [self.opcode.0, flags, p0, p1, ecn, q0, q1, q2, ack, s0, s1, s2];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_but_reserved_bits_survive(mut bytes: [u8; BTH_BYTES]) {
            let mut again = [0; BTH_BYTES];
            Bth::parse(&bytes).emit(&mut again);
            bytes[RESV8A_OFFSET] &= 0xc0;
            bytes[8] &= 0x80;
            prop_assert_eq!(bytes, again);
        }
    }
}
