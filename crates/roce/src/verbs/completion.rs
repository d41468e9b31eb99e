//! Completions.

use bitflags::bitflags;

use serde::{Deserialize, Serialize};

use super::Immediate;
use crate::{Qpn, Rkey};

/// Which of a queue pair's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue.
    Send,
    /// The receive queue, or the shared one in its place.
    Receive,
}

bitflags! {
    /// `enum ibv_wc_flags`.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct WcFlags: u32 {
        /// The first 40 bytes of the RECV are the global route header's.
        const GRH = 1 << 0;
        /// There is immediate data.
        const WITH_IMM = 1 << 1;
        /// A key was invalidated.
        const WITH_INV = 1 << 3;
    }
}

/// One entry for a completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Whose completion queue it goes to.
    pub queue: Queue,
    /// The request's `wr_id`.
    pub wr_id: u64,
    /// How it went.
    pub status: WcStatus,
    /// What it was. Valid for errors too, though verbs does not promise it.
    pub opcode: WcOpcode,
    /// Bytes received (RECV, RECV of a WRITE with immediate) or read (READ, atomics); the message length for SEND and
    /// WRITE. For a datagram, with the 40 bytes of the global route header.
    pub byte_len: u32,
    /// `wc_flags`.
    pub flags: WcFlags,
    /// The data of [`WcFlags::WITH_IMM`].
    pub imm: Option<Immediate>,
    /// The key of [`WcFlags::WITH_INV`].
    pub invalidated: Option<Rkey>,
    /// The sender of a datagram; zero for others.
    pub source_qpn: Qpn,
    /// The sender asked for a solicited event.
    pub solicited: bool,
    /// Of an error, why exactly; zero where the status says it all.
    pub vendor_err: u32,
}

/// With [`WcStatus::RetryExcErr`]: the partner said that it is stopped, and did not go on for [`crate::QpConfig::pause_limit`].
pub const VENDOR_ERR_PAUSED: u32 = 0x5641_0001;
/// With [`WcStatus::RetryExcErr`]: this end has gone on at its place, and the partner did not acknowledge that for
/// [`crate::QpConfig::pause_limit`].
pub const VENDOR_ERR_RESUMING: u32 = 0x5641_0002;

impl Completion {
    /// A completion that says how a request went and nothing more.
    pub(crate) fn new(
        queue: Queue,
        wr_id: u64,
        status: WcStatus,
        opcode: WcOpcode,
        byte_len: u32,
    ) -> Completion {
        Completion {
            queue,
            wr_id,
            status,
            opcode,
            byte_len,
            flags: WcFlags::empty(),
            imm: None,
            invalidated: None,
            source_qpn: Qpn::default(),
            solicited: false,
            vendor_err: 0,
        }
    }

    /// The union of `struct ibv_wc`: immediate data as it lies in memory, or the invalidated key as a number.
    pub fn imm_data(&self) -> u32 {
        match (self.imm, self.invalidated) {
            (Some(imm), _) => u32::from_ne_bytes(imm.0),
            (None, key) => key.map_or(0, |rkey| rkey.0),
        }
    }
}

/// `enum ibv_wc_status`, those that are reported (IBA §11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum WcStatus {
    /// Done.
    Success = 0,
    /// The message is longer than the RECV, or than a message may be.
    LocLenErr = 1,
    /// The request makes no sense.
    LocQpOpErr = 2,
    /// A local piece is not covered by its key.
    LocProtErr = 4,
    /// Not executed, because the queue pair was or went into the error state.
    WrFlushErr = 5,
    /// A memory window could not be bound.
    MwBindErr = 6,
    /// The partner answered with something that does not answer the request.
    BadRespErr = 7,
    /// The memory of an incoming request is not accessible.
    LocAccessErr = 8,
    /// The partner found the request invalid.
    RemInvReqErr = 9,
    /// The partner refused access to its memory.
    RemAccessErr = 10,
    /// The partner could not complete the request.
    RemOpErr = 11,
    /// No answer after all retries.
    RetryExcErr = 12,
    /// The partner had no RECV after all RNR retries.
    RnrRetryExcErr = 13,
}

/// `enum ibv_wc_opcode`, those that are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum WcOpcode {
    /// A SEND, with or without immediate or invalidation.
    Send = 0,
    /// An RDMA WRITE, with or without immediate.
    RdmaWrite = 1,
    /// An RDMA READ.
    RdmaRead = 2,
    /// A compare-and-swap.
    CompSwap = 3,
    /// A fetch-and-add.
    FetchAdd = 4,
    /// A memory window was bound.
    BindMw = 5,
    /// A key was invalidated here.
    LocalInv = 6,
    /// An atomic write.
    AtomicWrite = 9,
    /// A message received into a RECV.
    Recv = 128,
    /// A RECV consumed by a WRITE with immediate.
    RecvRdmaWithImm = 129,
}
