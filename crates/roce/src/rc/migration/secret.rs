//! The secret that the RNICs of both ends of a connection share, and the MAC that it makes.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::wire::bth::Bth;
use crate::wire::migeth::{MAC_BYTES, MigrationEth};

/// Whose message it is, so that none can be sent back to who has sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u8)]
pub enum SecretEnd {
    /// The end that has made the secret.
    First = 0,
    /// The end that was given it.
    Second = 1,
}

impl SecretEnd {
    fn other(self) -> SecretEnd {
        match self {
            SecretEnd::First => SecretEnd::Second,
            SecretEnd::Second => SecretEnd::First,
        }
    }
}

/// A secret of one connection, shared by the RNICs of its ends and nobody else. How they agree on it is the affair of who
/// sets up the connection.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret {
    key: [u8; 32],
    end: SecretEnd,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "secret of the {:?} end", self.end)
    }
}

impl Secret {
    /// The secret, and which end of the connection this is: each end has another one. The key is random.
    pub fn new(key: [u8; 32], end: SecretEnd) -> Secret {
        Secret { key, end }
    }

    /// The MAC of a message of this end.
    pub(super) fn seal(&self, bth: &Bth, syndrome: u8, header: &MigrationEth) -> [u8; MAC_BYTES] {
        self.mac(self.end, bth, syndrome, header)
    }

    /// Is this a message of the other end? Takes as long for every answer.
    pub(super) fn verifies(&self, bth: &Bth, syndrome: u8, header: &MigrationEth) -> bool {
        let right = self.mac(self.end.other(), bth, syndrome, header);
        let differing = right
            .iter()
            .zip(header.mac)
            .fold(0, |bits, (a, b)| bits | (a ^ b));
        std::hint::black_box(differing) == 0
    }

    /// BLAKE3 with a key, of the fields that say something. Not the destination queue pair, which forwarding changes: the
    /// secret is for one connection.
    fn mac(&self, sender: SecretEnd, bth: &Bth, syndrome: u8, header: &MigrationEth) -> [u8; MAC_BYTES] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&[sender as u8, bth.opcode.0, syndrome]);
        hasher.update(&bth.psn.get().to_be_bytes());
        hasher.update(&header.covered());
        let whole = hasher.finalize();
        *whole.as_bytes().first_chunk().expect("a hash has 32 bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Link;
    use crate::wire::migeth::{MIGETH_BYTES, MIGETH_VERSION, MOST_HOPS};
    use crate::wire::opcode::Opcode;
    use crate::{Location, Psn, Qpn};

    #[test]
    fn every_field_counts_but_hops_and_destination() {
        let [ours, theirs] = [SecretEnd::First, SecretEnd::Second].map(|end| Secret::new([7; 32], end));
        let bth = Link::default().bth(Opcode::RC_RESUME, Psn::new(5));
        let source = Location {
            address: "10.0.0.1".parse().unwrap(),
            qpn: Qpn::new(9),
        };
        let mut header = MigrationEth {
            version: MIGETH_VERSION,
            hops: MOST_HOPS,
            begun: true,
            expected: Psn::new(6),
            source,
            counter: 1,
            about: 0,
            mac: [0; MAC_BYTES],
        };
        header.mac = ours.seal(&bth, 0, &header);
        assert!(theirs.verifies(&bth, 0, &header));
        assert!(!ours.verifies(&bth, 0, &header), "sent back to its sender");
        assert!(!Secret::new([8; 32], SecretEnd::Second).verifies(&bth, 0, &header));
        assert!(!theirs.verifies(&bth, 1, &header));
        let mut other = bth;
        other.psn = Psn::new(6);
        assert!(!theirs.verifies(&other, 0, &header));
        other = bth;
        other.opcode = Opcode::RC_ACKNOWLEDGE;
        assert!(!theirs.verifies(&other, 0, &header));
        other = bth;
        other.dest_qpn = Qpn::new(77);
        assert!(theirs.verifies(&other, 0, &header), "forwarding changes it");

        let mut bytes = [0; MIGETH_BYTES];
        header.emit(&mut bytes);
        for at in 0..MIGETH_BYTES {
            let mut changed = bytes;
            changed[at] ^= 0x01;
            let changed = MigrationEth::parse(&changed);
            let free = matches!(at, 1 | 3 | 4 | 8);
            assert_eq!(theirs.verifies(&bth, 0, &changed), free, "byte {at}");
        }
    }
}
