//! Service ID resolution (IBA §12.11.1 and 2, tables 119 and 120).
//!
//! ```text
//! SIDR_REQ   0..4 request ID   4..6 partition key   8..16 service ID   16..232 private data
//! SIDR_REP   0..4 request ID   4 status   5 length of additional information   8..11 QPN
//!            12..20 service ID   20..24 Q_Key   24..96 additional information   96..232 private data
//! ```

use super::data::{MESSAGE_BYTES, get, get_24_8, put, put_24_8};
use super::reason::SidrStatus;
use crate::num::{CommId, ServiceId};
use verbatim_roce::Qpn;

/// "Which queue pair is behind this service?"
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidrReq {
    /// The sender's id.
    pub request_id: CommId,
    /// Partition key.
    pub pkey: u16,
    /// The service.
    pub service: ServiceId,
    /// Private data.
    pub private_data: [u8; SidrReq::PRIVATE_DATA],
}

impl SidrReq {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x17;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 216;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> SidrReq {
        SidrReq {
            request_id: CommId(u32::from_be_bytes(get(bytes, 0))),
            pkey: u16::from_be_bytes(get(bytes, 4)),
            service: ServiceId(u64::from_be_bytes(get(bytes, 8))),
            private_data: get(bytes, 16),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put(bytes, 0, self.request_id.0.to_be_bytes());
        put(bytes, 4, self.pkey.to_be_bytes());
        put(bytes, 8, self.service.0.to_be_bytes());
        put(bytes, 16, self.private_data);
    }
}

/// "This one."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SidrRep {
    /// The receiver's id.
    pub request_id: CommId,
    /// Is there one?
    pub status: SidrStatus,
    /// How many bytes of `additional` count.
    pub additional_length: u8,
    /// The queue pair.
    pub qpn: Qpn,
    /// The service.
    pub service: ServiceId,
    /// Queue key.
    pub qkey: u32,
    /// What the status needs to be understood.
    pub additional: [u8; SidrRep::ADDITIONAL],
    /// Private data.
    pub private_data: [u8; SidrRep::PRIVATE_DATA],
}

impl SidrRep {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x18;
    /// Bytes of additional information.
    pub const ADDITIONAL: usize = 72;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 136;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> SidrRep {
        SidrRep {
            request_id: CommId(u32::from_be_bytes(get(bytes, 0))),
            status: SidrStatus(bytes[4]),
            additional_length: bytes[5],
            qpn: Qpn::new(get_24_8(bytes, 8).0),
            service: ServiceId(u64::from_be_bytes(get(bytes, 12))),
            qkey: u32::from_be_bytes(get(bytes, 20)),
            additional: get(bytes, 24),
            private_data: get(bytes, 96),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put(bytes, 0, self.request_id.0.to_be_bytes());
        bytes[4] = self.status.0;
        bytes[5] = self.additional_length;
        put_24_8(bytes, 8, self.qpn.get(), 0);
        put(bytes, 12, self.service.0.to_be_bytes());
        put(bytes, 20, self.qkey.to_be_bytes());
        put(bytes, 24, self.additional);
        put(bytes, 96, self.private_data);
    }

    /// The part of `additional` that counts.
    pub fn additional(&self) -> &[u8] {
        &self.additional[..usize::from(self.additional_length).min(SidrRep::ADDITIONAL)]
    }
}
