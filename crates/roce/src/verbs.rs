//! Work requests and completions, as plain values.
//!
//! The numbers of each enum are those of `infiniband/verbs.h`, so that rings shared with a program can hold them as
//! they are. A request holds its scatter/gather list or its inline bytes itself: taking one allocates nothing.

use std::fmt;

use crate::{Lkey, Rkey};

/// The most scatter/gather elements that a request has.
pub const MAX_SGE: usize = 16;
/// The most inline bytes that a request carries.
pub const MAX_INLINE: usize = 256;
/// The longest message, in bytes (IBA §9.7.7.2 allows 2^31).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// One piece of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sge {
    /// Where it starts.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
    /// The key of the region that it lies in.
    pub lkey: Lkey,
}

/// Up to [`MAX_SGE`] pieces of local memory.
#[derive(Clone, Copy, Default)]
pub struct SgeList {
    items: [Sge; MAX_SGE],
    count: u8,
}

impl SgeList {
    /// The list of `items`; `None` if there are more than [`MAX_SGE`].
    pub fn new(items: &[Sge]) -> Option<SgeList> {
        let mut list = SgeList::default();
        items.iter().all(|sge| list.push(*sge)).then_some(list)
    }

    /// Adds a piece; says whether there was room.
    #[must_use]
    pub fn push(&mut self, sge: Sge) -> bool {
        let Some(slot) = self.items.get_mut(usize::from(self.count)) else {
            return false;
        };
        *slot = sge;
        self.count += 1;
        true
    }

    /// The pieces.
    pub fn as_slice(&self) -> &[Sge] {
        &self.items[..usize::from(self.count)]
    }

    /// Sum of the lengths, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.as_slice().iter().map(|sge| u64::from(sge.len)).sum()
    }

    /// Calls `each` with the part of every piece that falls into the `len` bytes from `offset` on, in order, with its
    /// position in those `len` bytes; stops at the first error.
    pub(crate) fn for_range<E>(
        &self,
        offset: u32,
        len: u32,
        mut each: impl FnMut(Sge, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut skip = offset;
        let mut done = 0;
        for sge in self.as_slice() {
            if done == len {
                break;
            }
            if skip >= sge.len {
                skip -= sge.len;
                continue;
            }
            let part = (sge.len - skip).min(len - done);
            let addr = sge.addr.wrapping_add(u64::from(skip));
            each(
                Sge {
                    addr,
                    len: part,
                    lkey: sge.lkey,
                },
                done as usize,
            )?;
            done += part;
            skip = 0;
        }
        Ok(())
    }
}

impl fmt::Debug for SgeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

/// Immediate data: four bytes as the program gave them (`__be32 imm_data`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Immediate(pub [u8; 4]);

/// What a send request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `IBV_WR_SEND` or `IBV_WR_SEND_WITH_IMM`.
    Send {
        /// Immediate data, if any.
        imm: Option<Immediate>,
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
}

impl Operation {
    /// The opcode of this operation's completion.
    pub fn wc_opcode(&self) -> WcOpcode {
        match self {
            Operation::Send { .. } => WcOpcode::Send,
            Operation::Write { .. } => WcOpcode::RdmaWrite,
            Operation::Read { .. } => WcOpcode::RdmaRead,
        }
    }

    pub(crate) fn is_read(&self) -> bool {
        matches!(self, Operation::Read { .. })
    }

    pub(crate) fn imm(&self) -> Option<Immediate> {
        match self {
            Operation::Send { imm } | Operation::Write { imm, .. } => *imm,
            Operation::Read { .. } => None,
        }
    }
}

/// The local side of a send request.
#[derive(Clone, Copy)]
pub enum SendData {
    /// Memory: gathered from for SEND and WRITE, scattered to for READ.
    Sges(SgeList),
    /// Bytes that were copied when the request was posted (`IBV_SEND_INLINE`). Not for READ.
    Inline {
        /// The bytes, and then some.
        bytes: [u8; MAX_INLINE],
        /// How many of them count.
        len: u16,
    },
}

impl SendData {
    /// Inline data; `None` if it is longer than [`MAX_INLINE`].
    pub fn inline(data: &[u8]) -> Option<SendData> {
        let mut bytes = [0; MAX_INLINE];
        bytes.get_mut(..data.len())?.copy_from_slice(data);
        Some(SendData::Inline {
            bytes,
            len: data.len() as u16,
        })
    }

    /// The length of the message in bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            SendData::Sges(list) => list.len_bytes(),
            SendData::Inline { len, .. } => u64::from(*len),
        }
    }
}

impl fmt::Debug for SendData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SendData::Sges(list) => list.fmt(f),
            SendData::Inline { len, .. } => write!(f, "inline, {len} bytes"),
        }
    }
}

/// A send work request, copied out of the ring.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest {
    /// The program's name for it.
    pub wr_id: u64,
    /// What to do.
    pub operation: Operation,
    /// With which local data.
    pub data: SendData,
    /// `IBV_SEND_SIGNALED`, or the queue signals all: success gives a completion. An error always does.
    pub signaled: bool,
    /// `IBV_SEND_FENCE`: not before all earlier READs are complete.
    pub fence: bool,
    /// `IBV_SEND_SOLICITED`: the completion at the receiver is a solicited one.
    pub solicited: bool,
}

/// A send work request that makes no sense (unknown opcode, too many pieces, …): completes with
/// [`WcStatus::LocQpOpErr`] in its turn.
#[derive(Clone, Copy, Debug)]
pub struct BadRequest {
    /// The program's name for it.
    pub wr_id: u64,
    /// The opcode for its completion, as far as it could be told.
    pub opcode: WcOpcode,
}

/// A receive work request, copied out of the ring.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveRequest {
    /// The program's name for it.
    pub wr_id: u64,
    /// Where a message goes.
    pub sges: SgeList,
}

/// Which of a queue pair's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// The send queue.
    Send,
    /// The receive queue, or the shared one in its place.
    Receive,
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
    /// Bytes received (RECV, RECV of a WRITE with immediate) or read (READ); the message length for SEND and WRITE.
    pub byte_len: u32,
    /// `IBV_WC_WITH_IMM` and the data.
    pub imm: Option<Immediate>,
    /// The sender asked for a solicited event.
    pub solicited: bool,
}

/// `enum ibv_wc_status`, those that a reliable connection reports (IBA §11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
    /// The partner answered with something that does not answer the request.
    BadRespErr = 7,
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

/// `enum ibv_wc_opcode`, those that a reliable connection reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum WcOpcode {
    /// A SEND, with or without immediate.
    Send = 0,
    /// An RDMA WRITE, with or without immediate.
    RdmaWrite = 1,
    /// An RDMA READ.
    RdmaRead = 2,
    /// A message received into a RECV.
    Recv = 128,
    /// A RECV consumed by a WRITE with immediate.
    RecvRdmaWithImm = 129,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_crosses_pieces() {
        let sge = |addr, len| Sge {
            addr,
            len,
            lkey: Lkey(1),
        };
        let list = SgeList::new(&[sge(100, 3), sge(0, 0), sge(200, 5), sge(300, 2)]).unwrap();
        let mut seen = vec![];
        list.for_range::<()>(2, 7, |part, at| {
            seen.push((part.addr, part.len, at));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [(102, 1, 0), (200, 5, 1), (300, 1, 6)]);
        assert_eq!(list.len_bytes(), 10);
    }

    #[test]
    fn lists_are_bounded() {
        assert!(SgeList::new(&[Sge::default(); MAX_SGE]).is_some());
        assert!(SgeList::new(&[Sge::default(); MAX_SGE + 1]).is_none());
        assert!(SendData::inline(&[0; MAX_INLINE]).is_some());
        assert!(SendData::inline(&[0; MAX_INLINE + 1]).is_none());
    }
}
