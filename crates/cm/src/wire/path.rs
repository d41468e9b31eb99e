//! A path in a REQ (IBA §12.6.5, table 106): 44 bytes, the first path of a message at its byte 52, the alternate one at 96.
//!
//! ```text
//!  0..2   local LID        36..40  flow label:20 reserved:6 packet rate:6
//!  2..4   remote LID       40      traffic class
//!  4..20  local GID        41      hop limit
//! 20..36  remote GID       42      SL:4 subnet local:1 reserved:3
//!                          43      local ACK timeout:5 reserved:3
//! ```

use super::data::{get, put};
use crate::num::Gid;

pub const PATH_BYTES: usize = 44;

/// A path, seen from the sender.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WirePath {
    /// InfiniBand's address of the sender's port: none on RoCE, where it is 0xffff as for any path through a router.
    pub local_lid: u16,
    /// That of the receiver's.
    pub remote_lid: u16,
    /// The sender's GID.
    pub local_gid: Gid,
    /// The receiver's GID.
    pub remote_gid: Gid,
    /// 20 bits.
    pub flow_label: u32,
    /// 6 bits.
    pub rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub sl: u8,
    /// No router is on the path.
    pub subnet_local: bool,
    /// How long the sender waits for acknowledgements, 5 bits.
    pub ack_timeout: u8,
}

impl WirePath {
    pub(super) fn parse(bytes: &[u8]) -> WirePath {
        let word = u32::from_be_bytes(get(bytes, 36));
        WirePath {
            local_lid: u16::from_be_bytes(get(bytes, 0)),
            remote_lid: u16::from_be_bytes(get(bytes, 2)),
            local_gid: Gid(get(bytes, 4)),
            remote_gid: Gid(get(bytes, 20)),
            flow_label: word >> 12,
            rate: word as u8 & 0x3f,
            traffic_class: bytes[40],
            hop_limit: bytes[41],
            sl: bytes[42] >> 4,
            subnet_local: bytes[42] & 0x08 != 0,
            ack_timeout: bytes[43] >> 3,
        }
    }

    pub(super) fn emit(&self, bytes: &mut [u8]) {
        put(bytes, 0, self.local_lid.to_be_bytes());
        put(bytes, 2, self.remote_lid.to_be_bytes());
        put(bytes, 4, self.local_gid.0);
        put(bytes, 20, self.remote_gid.0);
        put(
            bytes,
            36,
            (self.flow_label << 12 | u32::from(self.rate & 0x3f)).to_be_bytes(),
        );
        bytes[40] = self.traffic_class;
        bytes[41] = self.hop_limit;
        bytes[42] = self.sl << 4 | u8::from(self.subnet_local) << 3;
        bytes[43] = self.ack_timeout << 3;
    }
}
