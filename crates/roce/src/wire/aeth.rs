//! ACK extended transport header (IBA §9.3.5): syndrome and message sequence number.
//!
//! The syndrome's top bits say ACK (000, with end-to-end credits), RNR NAK (001, with a timer code) or NAK (011, with a
//! code); the other patterns are reserved. Of the reserved NAK codes one is ours: see `docs/wire-extension.md`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Size in bytes.
pub const AETH_BYTES: usize = 4;

/// The credit code for "no end-to-end flow control" (IBA §9.7.7.2).
pub const CREDITS_UNLIMITED: u8 = 0x1f;

/// The syndrome of our own NAK "stopped": of the NAK codes that the standard reserves (01100101 to 01111111) the last but
/// three.
const STOPPED: u8 = 0b011 << 5 | 0x1c;

/// Why a request was refused (IBA §9.7.5.2.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum NakCode {
    /// A packet before this one is missing.
    PsnSequenceError = 0,
    /// The request makes no sense here.
    InvalidRequest = 1,
    /// The memory may not be accessed so.
    RemoteAccessError = 2,
    /// The responder cannot complete the request.
    RemoteOperationalError = 3,
    /// Reliable datagram only.
    InvalidRdRequest = 4,
}

/// What an acknowledgement says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "u8", into = "u8")]
pub enum Syndrome {
    /// All is well up to this PSN.
    Ack {
        /// Code of the end-to-end credits: 0 to 31.
        credits: u8,
    },
    /// No RECV for this request: come again later.
    RnrNak {
        /// Code of the time to wait: 0 to 31, see [`rnr_delay`].
        timer: u8,
    },
    /// Refused.
    Nak(NakCode),
    /// Not executed, because the queue pair is stopped and will go on, perhaps elsewhere (MigrOS §3.3). Counts only in a
    /// packet with a migration header.
    Stopped,
    /// A reserved pattern.
    Unknown(u8),
}

impl From<u8> for Syndrome {
    fn from(byte: u8) -> Syndrome {
        let value = byte & 0x1f;
        match (byte >> 5, value) {
            (0b000, credits) => Syndrome::Ack { credits },
            (0b001, timer) => Syndrome::RnrNak { timer },
            (0b011, 0) => Syndrome::Nak(NakCode::PsnSequenceError),
            (0b011, 1) => Syndrome::Nak(NakCode::InvalidRequest),
            (0b011, 2) => Syndrome::Nak(NakCode::RemoteAccessError),
            (0b011, 3) => Syndrome::Nak(NakCode::RemoteOperationalError),
            (0b011, 4) => Syndrome::Nak(NakCode::InvalidRdRequest),
            _ if byte == STOPPED => Syndrome::Stopped,
            _ => Syndrome::Unknown(byte),
        }
    }
}

impl From<Syndrome> for u8 {
    fn from(syndrome: Syndrome) -> u8 {
        match syndrome {
            Syndrome::Ack { credits } => credits & 0x1f,
            Syndrome::RnrNak { timer } => 0b001 << 5 | timer & 0x1f,
            Syndrome::Nak(code) => 0b011 << 5 | code as u8,
            Syndrome::Stopped => STOPPED,
            Syndrome::Unknown(byte) => byte,
        }
    }
}

/// The time to wait after an RNR NAK with this timer code (IBA §9.7.5.2.8).
pub fn rnr_delay(timer: u8) -> Duration {
    /// In units of 10 microseconds.
    const TABLE: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048,
        3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(u64::from(TABLE[usize::from(timer & 0x1f)]) * 10)
}

/// The ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// ACK or NAK.
    pub syndrome: Syndrome,
    /// Message sequence number: messages completed by the responder, modulo 2^24.
    pub msn: u32,
}

impl Aeth {
    /// Reads the header.
    pub fn parse(bytes: &[u8; AETH_BYTES]) -> Aeth {
        let [syndrome, m0, m1, m2] = *bytes;
        Aeth {
            syndrome: syndrome.into(),
            msn: u32::from_be_bytes([0, m0, m1, m2]),
        }
    }

    /// Writes the header.
    pub fn emit(&self, bytes: &mut [u8; AETH_BYTES]) {
        let [_, m0, m1, m2] = self.msn.to_be_bytes();
        *bytes = [self.syndrome.into(), m0, m1, m2];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rnr_delays_at_the_ends() {
        assert_eq!(rnr_delay(0), Duration::from_micros(655_360));
        assert_eq!(rnr_delay(1), Duration::from_micros(10));
        assert_eq!(rnr_delay(12), Duration::from_micros(640));
        assert_eq!(rnr_delay(31), Duration::from_micros(491_520));
    }

    proptest! {
        #[test]
        fn round_trip(bytes: [u8; AETH_BYTES]) {
            let mut again = [0; AETH_BYTES];
            Aeth::parse(&bytes).emit(&mut again);
            prop_assert_eq!(bytes, again);
        }
    }
}
