//! Datagram extended transport header (IBA §9.3.2): queue key and source queue pair.

use crate::Qpn;

/// Size in bytes.
pub const DETH_BYTES: usize = 8;

/// Who sent a datagram, and with which key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// Queue key.
    pub qkey: u32,
    /// The sender's queue pair.
    pub source_qpn: Qpn,
}

impl Deth {
    /// Reads the header. The reserved byte is not looked at.
    pub fn parse(bytes: &[u8; DETH_BYTES]) -> Deth {
        let [k0, k1, k2, k3, _, q0, q1, q2] = *bytes;
        Deth {
            qkey: u32::from_be_bytes([k0, k1, k2, k3]),
            source_qpn: Qpn::new(u32::from_be_bytes([0, q0, q1, q2])),
        }
    }

    /// Writes the header, the reserved byte zero.
    pub fn emit(&self, bytes: &mut [u8; DETH_BYTES]) {
        bytes[..4].copy_from_slice(&self.qkey.to_be_bytes());
        bytes[4..].copy_from_slice(&self.source_qpn.get().to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_but_the_reserved_byte_survives(mut bytes: [u8; DETH_BYTES]) {
            let mut again = [0; DETH_BYTES];
            Deth::parse(&bytes).emit(&mut again);
            bytes[4] = 0;
            prop_assert_eq!(bytes, again);
        }
    }
}
