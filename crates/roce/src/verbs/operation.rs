//! What a send request asks for.

use serde::{Deserialize, Serialize};

use super::{Immediate, WcOpcode};
use crate::{AccessFlags, Lkey, Rkey};

/// An atomic operation on eight bytes of the partner's memory, which are a number in the partner's byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AtomicOp {
    /// `IBV_WR_ATOMIC_CMP_AND_SWP`: stores `swap` if `compare` was there.
    CompareSwap {
        /// What must be there.
        compare: u64,
        /// What is stored then.
        swap: u64,
    },
    /// `IBV_WR_ATOMIC_FETCH_AND_ADD`: adds, without a carry beyond 64 bits.
    FetchAdd {
        /// What is added.
        add: u64,
    },
}

impl AtomicOp {
    /// What is in memory afterwards, if `old` was there.
    pub fn apply(self, old: u64) -> u64 {
        match self {
            AtomicOp::CompareSwap { compare, swap } if old == compare => swap,
            AtomicOp::CompareSwap { .. } => old,
            AtomicOp::FetchAdd { add } => old.wrapping_add(add),
        }
    }
}

/// What `IBV_WR_BIND_MW` asks for (`struct ibv_mw_bind_info`, and the keys). The NIC checks all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    /// The window, by the key that it has now.
    pub window: Rkey,
    /// The key that it gets.
    pub rkey: Rkey,
    /// The region that it opens.
    pub lkey: Lkey,
    /// Where it starts.
    pub addr: u64,
    /// Its length in bytes; zero closes it.
    pub len: u64,
    /// What it lets partners do.
    pub access: AccessFlags,
}

/// What a send request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// `IBV_WR_SEND` or `IBV_WR_SEND_WITH_IMM`.
    Send {
        /// Immediate data, if any.
        imm: Option<Immediate>,
    },
    /// `IBV_WR_SEND_WITH_INV`.
    SendInvalidate {
        /// The partner's key that ends with this message.
        rkey: Rkey,
    },
    /// `IBV_WR_RDMA_WRITE` or `IBV_WR_RDMA_WRITE_WITH_IMM`.
    Write {
        /// Where the data goes in the partner's memory.
        remote_addr: u64,
        /// The partner's key.
        rkey: Rkey,
        /// Immediate data, if any.
        imm: Option<Immediate>,
    },
    /// `IBV_WR_RDMA_READ`.
    Read {
        /// Where the data comes from in the partner's memory.
        remote_addr: u64,
        /// The partner's key.
        rkey: Rkey,
    },
    /// `IBV_WR_ATOMIC_CMP_AND_SWP` or `IBV_WR_ATOMIC_FETCH_AND_ADD`; the old value goes to the local memory.
    Atomic {
        /// Where the number is in the partner's memory: a multiple of eight.
        remote_addr: u64,
        /// The partner's key.
        rkey: Rkey,
        /// What happens to it.
        op: AtomicOp,
    },
    /// `IBV_WR_ATOMIC_WRITE`: eight bytes that nobody sees half written.
    AtomicWrite {
        /// Where they go in the partner's memory: a multiple of eight.
        remote_addr: u64,
        /// The partner's key.
        rkey: Rkey,
    },
    /// `IBV_WR_LOCAL_INV`.
    LocalInvalidate {
        /// The key that ends.
        rkey: Rkey,
    },
    /// `IBV_WR_BIND_MW`.
    Bind(Bind),
    /// What an earlier queue pair of the connection has executed, and not completed: it completes here, in its turn, and
    /// nothing else happens.
    Executed {
        /// The opcode of the completion.
        opcode: WcOpcode,
        /// Of an atomic operation, what was there before it: goes to the local memory.
        value: Option<u64>,
    },
}

impl Operation {
    /// The opcode of this operation's completion.
    pub fn wc_opcode(&self) -> WcOpcode {
        match self {
            Operation::Send { .. } | Operation::SendInvalidate { .. } => WcOpcode::Send,
            Operation::Write { .. } => WcOpcode::RdmaWrite,
            Operation::Read { .. } => WcOpcode::RdmaRead,
            Operation::Atomic {
                op: AtomicOp::CompareSwap { .. },
                ..
            } => WcOpcode::CompSwap,
            Operation::Atomic {
                op: AtomicOp::FetchAdd { .. },
                ..
            } => WcOpcode::FetchAdd,
            Operation::AtomicWrite { .. } => WcOpcode::AtomicWrite,
            Operation::LocalInvalidate { .. } => WcOpcode::LocalInv,
            Operation::Bind(_) => WcOpcode::BindMw,
            Operation::Executed { opcode, .. } => *opcode,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        matches!(self, Operation::Read { .. })
    }

    /// Ends with an answer of its own: limited by `max_rd_atomic`, and what a fence waits for (IBA §10.8.3.3).
    pub(crate) fn is_read_or_atomic(&self) -> bool {
        matches!(
            self,
            Operation::Read { .. } | Operation::Atomic { .. } | Operation::AtomicWrite { .. }
        )
    }

    /// Happens here, without a packet.
    pub(crate) fn is_local(&self) -> bool {
        matches!(
            self,
            Operation::LocalInvalidate { .. } | Operation::Bind(_) | Operation::Executed { .. }
        )
    }

    pub(crate) fn imm(&self) -> Option<Immediate> {
        match self {
            Operation::Send { imm } | Operation::Write { imm, .. } => *imm,
            _ => None,
        }
    }

    pub(crate) fn invalidates(&self) -> Option<Rkey> {
        match self {
            Operation::SendInvalidate { rkey } => Some(*rkey),
            _ => None,
        }
    }
}
