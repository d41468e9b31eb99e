//! Reply to request for communication (IBA §12.6.8, table 110).
//!
//! ```text
//!   0..4   local comm ID      24      responder resources
//!   4..8   remote comm ID     25      initiator depth
//!   8..12  local Q_Key        26      target ACK delay:5 failover accepted:2 flow control:1
//!  12..15  local QPN          27      RNR retry count:3 SRQ:1 reserved:4
//!  16..19  local EECN         28..36  local CA GUID
//!  20..23  starting PSN       36..232 private data
//! ```

use super::data::{MESSAGE_BYTES, get, get_24_8, put, put_24_8};
use crate::num::CommId;
use verbatim_roce::{Psn, Qpn};

/// "You may have it."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rep {
    /// The sender's id.
    pub local_comm_id: CommId,
    /// The receiver's id.
    pub remote_comm_id: CommId,
    /// Queue key, of reliable datagrams only.
    pub qkey: u32,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// From which PSN on the receiver is to send.
    pub starting_psn: Psn,
    /// READs and atomics that the sender takes at once.
    pub responder_resources: u8,
    /// READs and atomics that the sender has under way at once.
    pub initiator_depth: u8,
    /// How long the sender's RNIC takes to acknowledge, 5 bits.
    pub target_ack_delay: u8,
    /// The alternate path: 0 is accepted, 1 not supported, 2 rejected; 2 bits.
    pub failover_accepted: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries after RNR NAKs, 3 bits.
    pub rnr_retry_count: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// The sender's RNIC.
    pub local_guid: u64,
    /// Private data.
    pub private_data: [u8; Rep::PRIVATE_DATA],
}

impl Rep {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x13;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 196;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Rep {
        Rep {
            local_comm_id: CommId(u32::from_be_bytes(get(bytes, 0))),
            remote_comm_id: CommId(u32::from_be_bytes(get(bytes, 4))),
            qkey: u32::from_be_bytes(get(bytes, 8)),
            qpn: Qpn::new(get_24_8(bytes, 12).0),
            starting_psn: Psn::new(get_24_8(bytes, 20).0),
            responder_resources: bytes[24],
            initiator_depth: bytes[25],
            target_ack_delay: bytes[26] >> 3,
            failover_accepted: bytes[26] >> 1 & 3,
            flow_control: bytes[26] & 1 != 0,
            rnr_retry_count: bytes[27] >> 5,
            srq: bytes[27] & 0x10 != 0,
            local_guid: u64::from_be_bytes(get(bytes, 28)),
            private_data: get(bytes, 36),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put(bytes, 0, self.local_comm_id.0.to_be_bytes());
        put(bytes, 4, self.remote_comm_id.0.to_be_bytes());
        put(bytes, 8, self.qkey.to_be_bytes());
        put_24_8(bytes, 12, self.qpn.get(), 0);
        put_24_8(bytes, 20, self.starting_psn.get(), 0);
        bytes[24] = self.responder_resources;
        bytes[25] = self.initiator_depth;
        bytes[26] =
            self.target_ack_delay << 3 | (self.failover_accepted & 3) << 1 | u8::from(self.flow_control);
        bytes[27] = self.rnr_retry_count << 5 | u8::from(self.srq) << 4;
        put(bytes, 28, self.local_guid.to_be_bytes());
        put(bytes, 36, self.private_data);
    }
}
