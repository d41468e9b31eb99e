//! What the RNIC tells without being asked.

use serde::{Deserialize, Serialize};

/// `enum ibv_event_type`, those that the RNIC reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
#[allow(
    missing_docs,
    reason = "the names and meanings are those of enum ibv_event_type"
)]
pub enum AsyncEventType {
    CqErr = 0,
    QpFatal = 1,
    QpReqErr = 2,
    QpAccessErr = 3,
    CommEst = 4,
    SqDrained = 5,
    DeviceFatal = 8,
    PortActive = 9,
    PortErr = 10,
    SrqErr = 14,
    SrqLimitReached = 15,
    QpLastWqeReached = 16,
    GidChange = 18,
}

/// What the RNIC sends on the descriptor that came with [`Request::OpenContext`](super::Request::OpenContext), one message per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AsyncEvent {
    /// What happened.
    pub event: AsyncEventType,
    /// To which object: the number of the CQ, QP or SRQ, or the port.
    pub object: u32,
}

/// What the RNIC sends on the descriptor that came with [`Request::CreateCompChannel`](super::Request::CreateCompChannel), one message per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompletionEvent {
    /// Which completion queue has new entries: its [`Request::CreateCq::event`](super::Request::CreateCq::event).
    pub cq: u32,
}

/// One packet, see [`Request::StartCapture`](super::Request::StartCapture).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Captured {
    /// `CLOCK_REALTIME` in ns.
    pub time_ns: u64,
    /// Its length from the IP header on, of which `bytes` may be the beginning.
    pub length: u32,
    /// Packets that were left out before this one, for lack of room.
    pub missed: u64,
    /// From the IP header (made up from what the RNIC knows of it) to the ICRC.
    pub bytes: Vec<u8>,
}
