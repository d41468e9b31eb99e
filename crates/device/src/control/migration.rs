//! Connections that are stopped, and go on here or elsewhere.

use serde::{Deserialize, Serialize};

use super::QpState;

/// A queue pair that is given the state of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoredQp {
    /// Which.
    pub qpn: u32,
    /// How long its image is.
    pub image_bytes: u32,
    /// Index of its GID on this RNIC; the image has that of another.
    pub sgid_index: u8,
}

/// A queue pair that goes on at another RNIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForwardedQp {
    /// Which.
    pub qpn: u32,
    /// The GID of the other RNIC.
    pub to_gid: [u8; 16],
    /// The number there.
    pub to_qpn: u32,
}

/// A secret that the RNICs at both ends of a connection share.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpSecret {
    /// Random bytes, for this connection alone.
    pub key: [u8; 32],
    /// Is this the end that has made it? The other end says no.
    pub first: bool,
}

impl std::fmt::Debug for QpSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QpSecret {{ first: {} }}", self.first)
    }
}

/// Where a reliable connection stands at one end, to the packet. Of one in RESET, INIT or ERR only what it says of the
/// partner's requests counts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpPosition {
    /// Its state.
    pub state: QpState,
    /// The oldest PSN without an answer.
    pub acknowledged_psn: u32,
    /// The first PSN that was never sent.
    pub sent_psn: u32,
    /// The requests that the RNIC has taken off the ring and not completed, oldest first. Those behind them in the ring
    /// were never looked at.
    pub requests: Vec<OutstandingRequest>,
    /// The PSN that must come next from the partner: all before it is executed, and nothing else is.
    pub expected_psn: u32,
    /// The partner's latest atomics, oldest first, as many as may be outstanding: PSN, and what was in memory before;
    /// nothing is said of that for an atomic WRITE. Two may have the same PSN, since those go round: the later one counts.
    pub atomics: Vec<(u32, Option<u64>)>,
    /// The `wr_id` of the RECV that was taken for a message of which only a part has come.
    pub receive: Option<u64>,
}

/// A request that is not complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutstandingRequest {
    /// [`crate::layout::SendWqe::wr_id`].
    pub wr_id: u64,
    /// Its first PSN.
    pub first_psn: u32,
    /// How many PSNs it has; of a READ, those of its answer; none if it happens here.
    pub packets: u32,
    /// It happens here, and has happened.
    pub executed: bool,
}
