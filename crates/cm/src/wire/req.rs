//! Request for communication (IBA §12.6.5, table 106).
//!
//! ```text
//!   0..4   local comm ID           43      remote response timeout:5 transport:2 flow control:1
//!   8..16  service ID              44..47  starting PSN
//!  16..24  local CA GUID           47      local response timeout:5 retry count:3
//!  28..32  local Q_Key             48..50  partition key
//!  32..35  local QPN               50      path MTU:4 RDC exists:1 RNR retry count:3
//!  35      responder resources     51      max CM retries:4 SRQ:1 extended transport:3
//!  36..39  local EECN              52..96  primary path
//!  39      initiator depth         96..140 alternate path
//!  40..43  remote EECN            140..232 private data
//! ```

use super::data::{MESSAGE_BYTES, get, get_24_8, put, put_24_8};
use super::path::{PATH_BYTES, WirePath};
use crate::num::{CommId, ServiceId};
use verbatim_roce::{Psn, Qpn};

/// "I want a connection."
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Req {
    /// The sender's id.
    pub local_comm_id: CommId,
    /// What it wants to be connected to.
    pub service: ServiceId,
    /// The sender's RNIC.
    pub local_guid: u64,
    /// Queue key, of reliable datagrams only.
    pub qkey: u32,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// READs and atomics that the sender takes at once.
    pub responder_resources: u8,
    /// READs and atomics that the sender has under way at once.
    pub initiator_depth: u8,
    /// How long the receiver may take to answer, 5 bits.
    pub remote_response_timeout: u8,
    /// 0 is RC, 1 UC, 2 RD, 3 one of `extended_transport`; 2 bits.
    pub transport: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// From which PSN on the receiver is to send.
    pub starting_psn: Psn,
    /// How long the sender takes to answer, 5 bits.
    pub local_response_timeout: u8,
    /// Retries of the transport, 3 bits.
    pub retry_count: u8,
    /// Partition key.
    pub pkey: u16,
    /// Path MTU as in `enum ibv_mtu`, 4 bits.
    pub mtu: u8,
    /// Retries after RNR NAKs, 3 bits.
    pub rnr_retry_count: u8,
    /// How often a message is sent again, 4 bits.
    pub max_cm_retries: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// 1 is XRC, 3 bits.
    pub extended_transport: u8,
    /// The way.
    pub primary: WirePath,
    /// Another way: none if its local LID is 0.
    pub alternate: WirePath,
    /// Private data.
    pub private_data: [u8; Req::PRIVATE_DATA],
}

impl Req {
    /// Attribute ID.
    pub const ATTRIBUTE: u16 = 0x10;
    /// Bytes of private data.
    pub const PRIVATE_DATA: usize = 92;

    /// Reads the message.
    pub fn parse(bytes: &[u8; MESSAGE_BYTES]) -> Req {
        let (qpn, responder_resources) = get_24_8(bytes, 32);
        let (starting_psn, last) = get_24_8(bytes, 44);
        Req {
            local_comm_id: CommId(u32::from_be_bytes(get(bytes, 0))),
            service: ServiceId(u64::from_be_bytes(get(bytes, 8))),
            local_guid: u64::from_be_bytes(get(bytes, 16)),
            qkey: u32::from_be_bytes(get(bytes, 28)),
            qpn: Qpn::new(qpn),
            responder_resources,
            initiator_depth: bytes[39],
            remote_response_timeout: bytes[43] >> 3,
            transport: bytes[43] >> 1 & 3,
            flow_control: bytes[43] & 1 != 0,
            starting_psn: Psn::new(starting_psn),
            local_response_timeout: last >> 3,
            retry_count: last & 7,
            pkey: u16::from_be_bytes(get(bytes, 48)),
            mtu: bytes[50] >> 4,
            rnr_retry_count: bytes[50] & 7,
            max_cm_retries: bytes[51] >> 4,
            srq: bytes[51] & 0x08 != 0,
            extended_transport: bytes[51] & 7,
            primary: WirePath::parse(&bytes[52..52 + PATH_BYTES]),
            alternate: WirePath::parse(&bytes[96..96 + PATH_BYTES]),
            private_data: get(bytes, 140),
        }
    }

    /// Writes the message over zeros.
    pub fn emit(&self, bytes: &mut [u8; MESSAGE_BYTES]) {
        put(bytes, 0, self.local_comm_id.0.to_be_bytes());
        put(bytes, 8, self.service.0.to_be_bytes());
        put(bytes, 16, self.local_guid.to_be_bytes());
        put(bytes, 28, self.qkey.to_be_bytes());
        put_24_8(bytes, 32, self.qpn.get(), self.responder_resources);
        bytes[39] = self.initiator_depth;
        bytes[43] =
            self.remote_response_timeout << 3 | (self.transport & 3) << 1 | u8::from(self.flow_control);
        let last = self.local_response_timeout << 3 | self.retry_count & 7;
        put_24_8(bytes, 44, self.starting_psn.get(), last);
        put(bytes, 48, self.pkey.to_be_bytes());
        bytes[50] = self.mtu << 4 | self.rnr_retry_count & 7;
        bytes[51] = self.max_cm_retries << 4 | u8::from(self.srq) << 3 | self.extended_transport & 7;
        self.primary.emit(&mut bytes[52..52 + PATH_BYTES]);
        self.alternate.emit(&mut bytes[96..96 + PATH_BYTES]);
        put(bytes, 140, self.private_data);
    }
}
