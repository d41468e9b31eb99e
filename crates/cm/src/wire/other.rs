//! The messages that refer to a connection: MRA, REJ, RTU, DREQ, DREP (IBA §12.6.6, 7, 9, 10, 11; tables 107, 108, 111 to 113).
//!
//! Each begins with the sender's and the receiver's comm ID. Then:
//!
//! ```text
//! MRA    8 which message:2   9 service timeout:5   10..232 private data
//! REJ    8 which message:2   9 length of additional information:7   10..12 reason
//!        12..84 additional information   84..232 private data
//! RTU    8..232 private data
//! DREQ   8..11 the receiver's QPN   12..232 private data
//! DREP   8..232 private data
//! ```

use super::data::{MESSAGE_BYTES, get, get_24_8, put, put_24_8};
use super::reason::RejectReason;
use crate::num::CommId;
use verbatim_roce::Qpn;

/// Which message an MRA or REJ is about, 2 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rejected(pub u8);

impl Rejected {
    /// A REQ.
    pub const REQ: Rejected = Rejected(0);
    /// A REP.
    pub const REP: Rejected = Rejected(1);
    /// None, or another one.
    pub const OTHER: Rejected = Rejected(2);
}

fn comm_ids(bytes: &[u8; MESSAGE_BYTES]) -> (CommId, CommId) {
    let id = |at| CommId(u32::from_be_bytes(get(bytes, at)));
    (id(0), id(4))
}

fn put_comm_ids(bytes: &mut [u8; MESSAGE_BYTES], local: CommId, remote: CommId) {
    put(bytes, 0, local.0.to_be_bytes());
    put(bytes, 4, remote.0.to_be_bytes());
}

/// "Message received: the answer will take a while."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mra {
    /// The sender's id.
    pub local_comm_id: CommId,
    /// The receiver's id.
    pub remote_comm_id: CommId,
    /// Which message has come.
    pub message: Rejected,
    /// How long the answer may take, 5 bits.
    pub service_timeout: u8,
    /// Private data.
    pub private_data: [u8; Mra::PRIVATE_DATA],
}

impl Mra {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x11;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 222;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Mra {
        let (local_comm_id, remote_comm_id) = comm_ids(bytes);
        Mra {
            local_comm_id,
            remote_comm_id,
            message: Rejected(bytes[8] >> 6),
            service_timeout: bytes[9] >> 3,
            private_data: get(bytes, 10),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put_comm_ids(bytes, self.local_comm_id, self.remote_comm_id);
        bytes[8] = self.message.0 << 6;
        bytes[9] = self.service_timeout << 3;
        put(bytes, 10, self.private_data);
    }
}

/// "No."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rej {
    /// The sender's id; 0 if it has none.
    pub local_comm_id: CommId,
    /// The receiver's id; 0 if the sender does not know it.
    pub remote_comm_id: CommId,
    /// What is rejected.
    pub message: Rejected,
    /// How many bytes of `additional` count, 7 bits.
    pub additional_length: u8,
    /// Why.
    pub reason: RejectReason,
    /// What the reason needs to be understood: of [`RejectReason::TIMEOUT`] the sender's CA GUID.
    pub additional: [u8; Rej::ADDITIONAL],
    /// Private data.
    pub private_data: [u8; Rej::PRIVATE_DATA],
}

impl Rej {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x12;
    /// Bytes of additional information.
    pub const ADDITIONAL: usize = 72;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 148;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Rej {
        let (local_comm_id, remote_comm_id) = comm_ids(bytes);
        Rej {
            local_comm_id,
            remote_comm_id,
            message: Rejected(bytes[8] >> 6),
            additional_length: bytes[9] >> 1,
            reason: RejectReason(u16::from_be_bytes(get(bytes, 10))),
            additional: get(bytes, 12),
            private_data: get(bytes, 84),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put_comm_ids(bytes, self.local_comm_id, self.remote_comm_id);
        bytes[8] = self.message.0 << 6;
        bytes[9] = self.additional_length << 1;
        put(bytes, 10, self.reason.0.to_be_bytes());
        put(bytes, 12, self.additional);
        put(bytes, 84, self.private_data);
    }

    /// The part of `additional` that counts.
    pub fn additional(&self) -> &[u8] {
        &self.additional[..usize::from(self.additional_length).min(Rej::ADDITIONAL)]
    }
}

/// "Ready to use."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rtu {
    /// The sender's id.
    pub local_comm_id: CommId,
    /// The receiver's id.
    pub remote_comm_id: CommId,
    /// Private data.
    pub private_data: [u8; Rtu::PRIVATE_DATA],
}

impl Rtu {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x14;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 224;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Rtu {
        let (local_comm_id, remote_comm_id) = comm_ids(bytes);
        Rtu {
            local_comm_id,
            remote_comm_id,
            private_data: get(bytes, 8),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put_comm_ids(bytes, self.local_comm_id, self.remote_comm_id);
        put(bytes, 8, self.private_data);
    }
}

/// "I want the connection to end."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dreq {
    /// The sender's id.
    pub local_comm_id: CommId,
    /// The receiver's id.
    pub remote_comm_id: CommId,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// Private data.
    pub private_data: [u8; Dreq::PRIVATE_DATA],
}

impl Dreq {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x15;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 220;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Dreq {
        let (local_comm_id, remote_comm_id) = comm_ids(bytes);
        Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: Qpn::new(get_24_8(bytes, 8).0),
            private_data: get(bytes, 12),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put_comm_ids(bytes, self.local_comm_id, self.remote_comm_id);
        put_24_8(bytes, 8, self.remote_qpn.get(), 0);
        put(bytes, 12, self.private_data);
    }
}

/// "It has ended."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drep {
    /// The sender's id.
    pub local_comm_id: CommId,
    /// The receiver's id.
    pub remote_comm_id: CommId,
    /// Private data.
    pub private_data: [u8; Drep::PRIVATE_DATA],
}

impl Drep {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x16;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 224;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Drep {
        let (local_comm_id, remote_comm_id) = comm_ids(bytes);
        Drep {
            local_comm_id,
            remote_comm_id,
            private_data: get(bytes, 8),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put_comm_ids(bytes, self.local_comm_id, self.remote_comm_id);
        put(bytes, 8, self.private_data);
    }
}
