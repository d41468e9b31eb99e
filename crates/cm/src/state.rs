//! How far an id is.

use std::fmt;

use serde::{Deserialize, Serialize};
use verbatim_roce::{Psn, Qpn};

use crate::command::Path;
use crate::num::{CommId, ServiceId, Transport};

/// The states of an id (IBA §12.9.7; `enum ib_cm_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum State {
    /// Takes requests.
    Listening,
    /// REQ sent.
    ReqSent,
    /// REQ sent, and the peer has said that it takes a while.
    MraReqReceived,
    /// REQ received.
    ReqReceived,
    /// REQ received, and the peer told that it takes a while.
    MraReqSent,
    /// REP sent.
    RepSent,
    /// REP sent, and the peer has said that it takes a while.
    MraRepReceived,
    /// REP received.
    RepReceived,
    /// REP received, and the peer told that it takes a while.
    MraRepSent,
    /// The connection stands.
    Established,
    /// DREQ sent.
    DreqSent,
    /// The connection has ended, and what is left of it on the wire is waited for.
    TimeWait,
    /// SIDR_REQ sent.
    SidrReqSent,
    /// SIDR_REQ received.
    SidrReqReceived,
    /// Over, well or not: only [`crate::Cm::destroy`] is left.
    Closed,
}

impl State {
    /// A request was sent, and nothing has come for it.
    pub(crate) fn asks(self) -> bool {
        matches!(self, Self::ReqSent | Self::SidrReqSent)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// What the queue pair of a connection is to be set to (`ib_cm_init_qp_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    /// How far it is. What came from the peer is known from [`State::ReqReceived`] or [`State::RepReceived`] on.
    pub state: State,
    /// What it was asked for.
    pub service: ServiceId,
    /// What is connected.
    pub transport: Transport,
    /// The way.
    pub path: Path,
    /// The peer's id.
    pub remote_comm_id: Option<CommId>,
    /// The peer's RNIC.
    pub remote_guid: u64,
    /// The own queue pair.
    pub local_qpn: Qpn,
    /// The peer's (`IBV_QP_DEST_QPN`).
    pub remote_qpn: Qpn,
    /// The first PSN that comes (`IBV_QP_RQ_PSN`).
    pub receive_psn: Psn,
    /// The first PSN to send (`IBV_QP_SQ_PSN`).
    pub send_psn: Psn,
    /// `IBV_QP_MAX_DEST_RD_ATOMIC`.
    pub responder_resources: u8,
    /// `IBV_QP_MAX_QP_RD_ATOMIC`.
    pub initiator_depth: u8,
    /// `IBV_QP_RETRY_CNT`.
    pub retry_count: u8,
    /// `IBV_QP_RNR_RETRY`.
    pub rnr_retry_count: u8,
    /// `IBV_QP_TIMEOUT`.
    pub ack_timeout: u8,
}
