//! What comes out of a communication manager.

use crate::num::{CommId, Gid};
use crate::wire::{MAD_BYTES, Req, SidrReq};

/// A MAD to send from queue pair 1 to the peer's queue pair 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// From which of the RNIC's GIDs.
    pub from: Gid,
    /// To whom.
    pub to: Gid,
    /// Partition key.
    pub pkey: u16,
    /// IPv6 traffic class, IPv4 type of service.
    pub traffic_class: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// IPv6 hop limit, IPv4 time to live.
    pub hop_limit: u8,
    /// The MAD.
    pub bytes: Box<[u8; MAD_BYTES]>,
}

impl Transmit {
    /// Whether it is a request that begins something (REQ, SIDR_REQ).
    pub fn asks(&self) -> bool {
        let attribute = u16::from_be_bytes([self.bytes[16], self.bytes[17]]);
        [Req::ATTRIBUTE, SidrReq::ATTRIBUTE].contains(&attribute)
    }
}

/// What became of a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did something, or is a repetition.
    Taken,
    /// It did nothing, or was answered without any id.
    Dropped(DropReason),
    /// It is for an id that has gone from here ([`crate::Cm::take`]): pass it on to where it is now, or drop it. Nothing has
    /// been answered. For a request that a listener would have to take it names the listener.
    Away(CommId),
}

/// Why a MAD did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// It is no message, or one that is not supported.
    Malformed,
    /// It is for an id that does not exist or does not wait for it.
    Unexpected,
    /// It is a request that was rejected without asking a program.
    Rejected,
    /// The listener has as many requests waiting as it wants. The peer asks again.
    Backlog,
    /// There are as many ids as there may be. The peer asks again.
    Limits,
}
