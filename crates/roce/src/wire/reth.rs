//! RDMA extended transport header (IBA §9.3.3): virtual address, R_Key, DMA length.

use crate::Rkey;

/// Size in bytes.
pub const RETH_BYTES: usize = 16;

/// What memory of the responder a WRITE or READ is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// Address in the responder's memory.
    pub virtual_addr: u64,
    /// Key of the region.
    pub rkey: Rkey,
    /// Length of the whole message in bytes.
    pub dma_len: u32,
}

impl Reth {
    /// Reads the header.
    pub fn parse(bytes: &[u8; RETH_BYTES]) -> Reth {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3] = *bytes;
        Reth {
            virtual_addr: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            rkey: Rkey(u32::from_be_bytes([k0, k1, k2, k3])),
            dma_len: u32::from_be_bytes([l0, l1, l2, l3]),
        }
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8; RETH_BYTES]) {
        bytes[..8].copy_from_slice(&self.virtual_addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.0.to_be_bytes());
        bytes[12..].copy_from_slice(&self.dma_len.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(bytes: [u8; RETH_BYTES]) {
            let mut again = [0; RETH_BYTES];
            Reth::parse(&bytes).emit(&mut again);
            prop_assert_eq!(bytes, again);
        }
    }
}
