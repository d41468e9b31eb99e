//! Work requests, and whom a datagram is for.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::{Operation, SendData, SgeList, WcOpcode};
use crate::Qpn;

/// What the NIC puts into the IP header of a packet and the transport does not need to know: the ICRC does not cover it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traffic {
    /// IPv6 traffic class, IPv4 type of service.
    pub traffic_class: u8,
    /// IPv6 hop limit, IPv4 time to live.
    pub hop_limit: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
}

impl Default for Traffic {
    fn default() -> Traffic {
        Traffic {
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
        }
    }
}

/// The way of a datagram: an address handle that the NIC has resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// The NIC's own address.
    pub source: IpAddr,
    /// The receiver's, or a multicast one.
    pub destination: IpAddr,
    /// UDP source port.
    pub source_port: u16,
    /// For the IP header.
    pub traffic: Traffic,
}

/// Whom a datagram is for (`wr.ud` of `struct ibv_send_wr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Destination {
    /// The way there.
    pub path: Path,
    /// The receiver's queue pair.
    pub qpn: Qpn,
    /// Its queue key. With the top bit set, the queue pair's own one is sent instead (IBA §10.2.5).
    pub qkey: u32,
}

/// A send work request, copied out of the ring.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SendRequest {
    /// The program's name for it.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation,
    /// With which local data.
    pub data: SendData,
    /// `IBV_SEND_SIGNALED`, or the queue signals all: success gives a completion. An error always does.
    pub signaled: bool,
    /// `IBV_SEND_FENCE`: not before all earlier READs and atomics are complete.
    pub fence: bool,
    /// `IBV_SEND_SOLICITED`: the completion at the receiver is a solicited one.
    pub solicited: bool,
    /// Datagrams only, and needed there: whom it is for.
    #[serde(skip)]
    pub destination: Option<Destination>,
}

/// A send work request that makes no sense (unknown opcode, too many pieces, …): completes with
/// [`crate::WcStatus::LocQpOpErr`] in its turn.
#[derive(Clone, Copy, Debug)]
pub struct BadRequest {
    /// The program's name for it.
    pub wr_id: u64,
    /// The opcode for its completion, as far as it could be told.
    pub opcode: WcOpcode,
}

/// A receive work request, copied out of the ring.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ReceiveRequest {
    /// The program's name for it.
    pub wr_id: u64,
    /// Where a message goes.
    pub sges: SgeList,
}
