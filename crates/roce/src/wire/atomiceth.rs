//! Atomic extended transport header and its answer (IBA §9.3.4, §9.5.3).

use crate::Rkey;

/// Size in bytes.
pub const ATOMIC_ETH_BYTES: usize = 28;
/// Size in bytes of the answer.
pub const ATOMIC_ACK_ETH_BYTES: usize = 8;

/// What an atomic operation does where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// Address in the responder's memory, a multiple of 8.
    pub virtual_addr: u64,
    /// Key of the region.
    pub rkey: Rkey,
    /// Value to swap in, or to add.
    pub swap_or_add: u64,
    /// Value to compare with.
    pub compare: u64,
}

fn be64(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

impl AtomicEth {
    /// Reads the header.
    pub fn parse(bytes: &[u8; ATOMIC_ETH_BYTES]) -> AtomicEth {
        AtomicEth {
            virtual_addr: be64(&bytes[..8]),
            rkey: Rkey(be64(&bytes[8..12]) as u32),
            swap_or_add: be64(&bytes[12..20]),
            compare: be64(&bytes[20..]),
        }
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8; ATOMIC_ETH_BYTES]) {
        bytes[..8].copy_from_slice(&self.virtual_addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.swap_or_add.to_be_bytes());
        bytes[20..].copy_from_slice(&self.compare.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(bytes: [u8; ATOMIC_ETH_BYTES]) {
            let mut again = [0; ATOMIC_ETH_BYTES];
            AtomicEth::parse(&bytes).emit(&mut again);
            prop_assert_eq!(bytes, again);
        }
    }
}
