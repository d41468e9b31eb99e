//! Migration extended transport header: a header of our own, see `docs/wire-extension.md`. It makes a message of the
//! migration extension (the model is MigrOS §3.4) of a packet that only the partner's RNIC can have sent.
//!
//! ```text
//!  0        version
//!  1        hops left                     (not covered by the MAC: those who forward count it down)
//!  2        flags: 0x01 the sender's requester has begun
//!  3        reserved
//!  4        reserved
//!  5..8     expected PSN
//!  8        reserved
//!  9..12    source QP
//! 12..28    source GID
//! 28..36    counter
//! 36..44    about: a counter of the other side
//! 44..60    MAC
//! ```

use std::net::{IpAddr, Ipv6Addr};

use crate::{Location, Psn, Qpn};

/// Size in bytes.
pub const MIGETH_BYTES: usize = 60;

/// Size in bytes of the MAC.
pub const MAC_BYTES: usize = 16;

/// The only version of this header.
pub const MIGETH_VERSION: u8 = 1;

/// How often a RESUME may be forwarded.
pub const MOST_HOPS: u8 = 8;

const HOPS_OFFSET: usize = 1;
const FLAG_BEGUN: u8 = 0x01;
const MAC_OFFSET: usize = MIGETH_BYTES - MAC_BYTES;

/// The migration extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MigrationEth {
    /// [`MIGETH_VERSION`]; a message of another version is ignored.
    pub version: u8,
    /// How often it may still be forwarded.
    pub hops: u8,
    /// The sender's requester has begun, so that its PSNs mean something.
    pub begun: bool,
    /// The PSN that the sender's responder expects next.
    pub expected: Psn,
    /// Where the sender is.
    pub source: Location,
    /// Larger in each message of one end, see [`crate::wire::migeth`].
    pub counter: u64,
    /// Of an acknowledgement: the counter of the RESUME that it acknowledges. Zero otherwise.
    pub about: u64,
    /// Message authentication code.
    pub mac: [u8; MAC_BYTES],
}

fn bytes<const N: usize>(from: &[u8; MIGETH_BYTES], at: usize) -> [u8; N] {
    from[at..at + N]
        .try_into()
        .expect("all offsets lie within the header")
}

impl MigrationEth {
    /// Reads the header. Reserved bits are not looked at, and nothing is checked.
    pub fn parse(from: &[u8; MIGETH_BYTES]) -> MigrationEth {
        let address = Ipv6Addr::from(bytes::<16>(from, 12)).to_canonical();
        MigrationEth {
            version: from[0],
            hops: from[HOPS_OFFSET],
            begun: from[2] & FLAG_BEGUN != 0,
            expected: Psn::new(u32::from_be_bytes(bytes(from, 4))),
            source: Location {
                address,
                qpn: Qpn::new(u32::from_be_bytes(bytes(from, 8))),
            },
            counter: u64::from_be_bytes(bytes(from, 28)),
            about: u64::from_be_bytes(bytes(from, 36)),
            mac: bytes(from, MAC_OFFSET),
        }
    }

    /// Writes the header, reserved bits zero.
    pub fn emit(&self, to: &mut [u8; MIGETH_BYTES]) {
        let gid = match self.source.address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        to[0] = self.version;
        to[HOPS_OFFSET] = self.hops;
        to[2] = if self.begun { FLAG_BEGUN } else { 0 };
        to[3] = 0;
        to[4..8].copy_from_slice(&self.expected.get().to_be_bytes());
        to[8..12].copy_from_slice(&self.source.qpn.get().to_be_bytes());
        to[12..28].copy_from_slice(&gid.octets());
        to[28..36].copy_from_slice(&self.counter.to_be_bytes());
        to[36..44].copy_from_slice(&self.about.to_be_bytes());
        to[MAC_OFFSET..].copy_from_slice(&self.mac);
    }

    /// What the MAC covers of this header: all but the MAC, and the hops are zero.
    pub(crate) fn covered(&self) -> [u8; MAC_OFFSET] {
        let mut whole = [0; MIGETH_BYTES];
        self.emit(&mut whole);
        whole[HOPS_OFFSET] = 0;
        let (covered, _) = whole.split_first_chunk().expect("the MAC is at the end");
        *covered
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn all_but_reserved_bits_survive(mut from in prop::collection::vec(any::<u8>(), MIGETH_BYTES), mapped: bool) {
            if mapped {
                from[12..24].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff]);
            }
            let mut from: [u8; MIGETH_BYTES] = from.try_into().unwrap();
            let mut again = [0xee; MIGETH_BYTES];
            MigrationEth::parse(&from).emit(&mut again);
            from[2] &= FLAG_BEGUN;
            (from[3], from[4], from[8]) = (0, 0, 0);
            prop_assert_eq!(from, again);
        }
    }
}
