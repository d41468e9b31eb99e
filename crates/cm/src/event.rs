//! What the owner of an id is told.

use serde::{Deserialize, Serialize};
use verbatim_roce::{Psn, Qpn};

use crate::command::Path;
use crate::num::{CommId, Gid, Owner, ServiceId, Transport};
use crate::wire::{IpHeader, RejectReason, SidrStatus};

/// One thing that has happened, in the order of happening for each id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// To which id. For a request it is the new id, which belongs to the listener's owner.
    pub id: CommId,
    /// Whose the id is.
    pub owner: Owner,
    /// What.
    pub event: Event,
}

/// As rdma_cm has them. Private data is always as long as the message has room: the wire does not say how much of it the
/// peer's program gave.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// A REQ has come. Answer with [`crate::Cm::accept`], [`crate::Cm::reject`] or [`crate::Cm::destroy`].
    ConnectRequest(Box<ConnectRequest>),
    /// A REP has come. Go on with [`crate::Cm::establish`], [`crate::Cm::reject`] or [`crate::Cm::destroy`].
    ConnectResponse(Box<ConnectResponse>),
    /// The peer knows that the connection stands: its RTU has come, with private data, or its traffic
    /// ([`crate::Cm::notify_established`]), without.
    Established {
        /// 224 bytes, or none.
        private_data: Vec<u8>,
    },
    /// The peer does not want the connection. Nothing comes after it but [`Event::TimeWaitExit`], where there was something to
    /// wait for.
    Rejected {
        /// Why.
        reason: RejectReason,
        /// What the reason needs to be understood.
        additional: Vec<u8>,
        /// 148 bytes.
        private_data: Vec<u8>,
    },
    /// No answer to a REQ, REP or SIDR_REQ, however often it was sent.
    Unreachable,
    /// The connection has ended, by either side. Comes once; [`Event::TimeWaitExit`] comes later.
    Disconnected {
        /// 220 bytes of a DREQ, 224 of a DREP, or none.
        private_data: Vec<u8>,
        /// The peer has not answered the DREQ.
        timed_out: bool,
    },
    /// The queue pair's number may be used again: nothing of the old connection is on the wire any more.
    TimeWaitExit,
    /// A SIDR_REQ has come. Answer with [`crate::Cm::answer`] or [`crate::Cm::destroy`].
    ResolveRequest(Box<ResolveRequest>),
    /// A SIDR_REP has come.
    ResolveResponse(Box<ResolveResponse>),
}

/// What a REQ says. Everything is seen from this end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectRequest {
    /// Who took it.
    pub listener: CommId,
    /// What was asked for.
    pub service: ServiceId,
    /// The addresses of the peer's program, of a service of the IP CM service.
    pub ip: Option<IpHeader>,
    /// The peer's RNIC.
    pub remote_guid: u64,
    /// The way to the peer.
    pub path: Path,
    /// What is connected.
    pub transport: Transport,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// From which PSN on this end is to send.
    pub starting_psn: Psn,
    /// READs and atomics that the peer wants to have under way at once: what the own queue pair would have to take.
    pub responder_resources: u8,
    /// READs and atomics that the peer takes at once: what the own queue pair may have under way.
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries of the transport.
    pub retry_count: u8,
    /// Retries after RNR NAKs.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// 92 bytes; 56 where there are addresses.
    pub private_data: Vec<u8>,
}

/// What a REP says. Everything is seen from this end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectResponse {
    /// The peer's RNIC.
    pub remote_guid: u64,
    /// The peer's queue pair.
    pub remote_qpn: Qpn,
    /// From which PSN on this end is to send.
    pub starting_psn: Psn,
    /// What the own queue pair has to take at once.
    pub responder_resources: u8,
    /// What the own queue pair may have under way at once.
    pub initiator_depth: u8,
    /// How long the peer's RNIC takes to acknowledge, as an exponent.
    pub target_ack_delay: u8,
    /// 0 if an alternate path was accepted.
    pub failover_accepted: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Retries after RNR NAKs.
    pub rnr_retry_count: u8,
    /// The peer's queue pair has a shared receive queue.
    pub srq: bool,
    /// 196 bytes.
    pub private_data: Vec<u8>,
}

/// What a SIDR_REQ says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolveRequest {
    /// Who took it.
    pub listener: CommId,
    /// What was asked for.
    pub service: ServiceId,
    /// The addresses of the peer's program.
    pub ip: Option<IpHeader>,
    /// The GID to which it came.
    pub local: Gid,
    /// The GID from which it came.
    pub remote: Gid,
    /// Partition key.
    pub pkey: u16,
    /// 216 bytes; 180 where there are addresses.
    pub private_data: Vec<u8>,
}

/// What a SIDR_REP says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResolveResponse {
    /// [`SidrStatus::VALID`], or why there is no answer.
    pub status: SidrStatus,
    /// The queue pair.
    pub qpn: Qpn,
    /// Its queue key.
    pub qkey: u32,
    /// What the status needs to be understood.
    pub additional: Vec<u8>,
    /// 136 bytes.
    pub private_data: Vec<u8>,
}
