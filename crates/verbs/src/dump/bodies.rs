//! What is said of each kind of object: plain values, in postcard's encoding. Objects name each other by their handles.
//!
//! Keys and numbers are those that the program knows, which here are those of the RNIC, too ([`super::take`] refuses others).

use serde::{Deserialize, Serialize};
use verbatim_channel::Endpoint;
use verbatim_device::control::{
    Access, AddressVector, AsyncEventType, MwState, MwType, QpAttr, QpCap, QpType, SrqAttr,
};
use verbatim_device::layout::{SendWqe, Sge};
use verbatim_device::ring::Body;

use super::DumpError;
use crate::qp::Copied;
use crate::work::{Completion, SendOpcode, Wc};

/// A scatter/gather entry: address, length in bytes, local key.
pub type SgeBody = (u64, u32, u32);

/// A completion channel. Handle: its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelBody {
    /// Completion queues of the events that nobody has read, oldest first.
    pub events: Vec<u32>,
}

/// A completion queue. Handle: its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CqBody {
    pub entries: u32,
    pub channel: Option<u32>,
    /// The program's `cq_context`.
    pub user: u64,
    /// It is armed; true: for solicited completions only.
    pub armed: Option<bool>,
    /// What nobody has polled, oldest first.
    pub completions: Vec<CompletionBody>,
    /// What nobody has read, oldest first; so in the others.
    pub events: Vec<AsyncEventType>,
}

/// [`Completion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompletionBody {
    wr_id: u64,
    timestamp_ns: u64,
    status: u32,
    opcode: u32,
    vendor_err: u32,
    byte_len: u32,
    imm: u32,
    qpn: u32,
    src_qpn: u32,
    wc_flags: u32,
    sl: u8,
    solicited: bool,
}

impl From<&Completion> for CompletionBody {
    fn from(completion: &Completion) -> Self {
        let wc = &completion.wc;
        Self {
            wr_id: wc.wr_id,
            timestamp_ns: completion.timestamp_ns,
            status: wc.status,
            opcode: wc.opcode,
            vendor_err: wc.vendor_err,
            byte_len: wc.byte_len,
            imm: wc.imm,
            qpn: wc.qp_num,
            src_qpn: wc.src_qp,
            wc_flags: wc.wc_flags,
            sl: wc.sl,
            solicited: completion.solicited,
        }
    }
}

impl From<&CompletionBody> for Completion {
    fn from(body: &CompletionBody) -> Self {
        Self {
            wc: Wc {
                wr_id: body.wr_id,
                status: body.status,
                opcode: body.opcode,
                vendor_err: body.vendor_err,
                byte_len: body.byte_len,
                imm: body.imm,
                qp_num: body.qpn,
                src_qp: body.src_qpn,
                wc_flags: body.wc_flags,
                sl: body.sl,
                ..Wc::default()
            },
            timestamp_ns: body.timestamp_ns,
            solicited: body.solicited,
        }
    }
}

/// A shared receive queue. Handle: its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqBody {
    pub pd: u32,
    /// The limit is the armed one.
    pub attr: SrqAttr,
    /// The program's `srq_context`.
    pub user: u64,
    /// What no message has consumed, in the order of posting.
    pub recvs: Vec<SrqRecvBody>,
    pub events: Vec<AsyncEventType>,
}

/// A RECV of a shared receive queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SrqRecvBody {
    /// By which the image of a queue pair knows it.
    pub slot: u32,
    pub wr_id: u64,
    /// It is in such an image: a message is being put into it.
    pub taken: bool,
    pub sges: Vec<SgeBody>,
}

/// A memory region. Handle: its key, local and remote.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MrBody {
    pub pd: u32,
    pub address: u64,
    pub length: u64,
    pub iova: u64,
    pub access: Access,
}

/// An address handle. Handle: its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AhBody {
    pub pd: u32,
    pub av: AddressVector,
}

/// A memory window. Handle: its remote key as the program knows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MwBody {
    pub pd: u32,
    pub mw_type: MwType,
    /// With the tag of the last bind that was executed.
    pub state: MwState,
}

/// A queue pair. Handle: its number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpBody {
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub srq: Option<u32>,
    pub qp_type: QpType,
    pub cap: QpCap,
    pub signal_all: bool,
    /// The program's `qp_context`.
    pub user: u64,
    /// Made with `send_ops_flags`.
    pub extended: bool,
    /// In the state in which the RNIC has it.
    pub attr: QpAttr,
    /// Where the other end is.
    pub remote: Option<Endpoint>,
    /// Multicast groups that it is in.
    pub groups: Vec<[u8; 16]>,
    pub send: SendBody,
    pub recv: RecvBody,
    /// Messages received since creation or RESET.
    pub received: u64,
    pub events: Vec<AsyncEventType>,
    /// Of a reliable connection that was live: all of its protocol's state (`roce::RcImage`).
    pub image: Option<Vec<u8>>,
}

/// A send queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendBody {
    /// Requests given to the ring so far: the position of the next.
    pub posted: u64,
    /// Of them, those that consume a RECV of the other end.
    pub messages: u64,
    /// The last of them, that have no completion: what is in the image, and behind it what the RNIC has not looked at.
    pub unfinished: Vec<SendRequestBody>,
    /// Posted, and never given to the ring.
    pub waiting: Vec<SendRequestBody>,
}

/// A receive queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecvBody {
    /// The position of the first.
    pub first: u64,
    /// `wr_id` and entries of what no message has consumed, oldest first.
    pub recvs: Vec<(u64, Vec<SgeBody>)>,
}

/// A send request ([`SendWqe`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendRequestBody {
    wr_id: u64,
    opcode: u8,
    flags: u8,
    imm: u32,
    remote_address: u64,
    rkey: u32,
    compare_add: u64,
    swap: u64,
    remote_qpn: u32,
    remote_qkey: u32,
    ah: u32,
    data: DataBody,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum DataBody {
    Sges(Vec<SgeBody>),
    Inline(Vec<u8>),
}

pub fn sges_to_body(sges: &[Sge]) -> Vec<SgeBody> {
    let body = |sge: &Sge| (sge.address, sge.length, sge.lkey);
    sges.iter().map(body).collect()
}

pub fn sges_from_body(body: &[SgeBody]) -> Vec<Sge> {
    let sge = |&(address, length, lkey): &SgeBody| Sge {
        address,
        length,
        lkey,
    };
    body.iter().map(sge).collect()
}

impl From<&Copied> for SendRequestBody {
    fn from(request: &Copied) -> Self {
        let wqe = &request.wqe;
        Self {
            wr_id: wqe.wr_id,
            opcode: wqe.opcode,
            flags: wqe.flags,
            imm: wqe.imm,
            remote_address: wqe.remote_address,
            rkey: wqe.rkey,
            compare_add: wqe.compare_add,
            swap: wqe.swap,
            remote_qpn: wqe.remote_qpn,
            remote_qkey: wqe.remote_qkey,
            ah: wqe.ah,
            data: request.with_body(|_, body| match body {
                Body::Sges(sges) => DataBody::Sges(sges_to_body(sges)),
                Body::Inline(pieces) => DataBody::Inline(pieces.concat()),
            }),
        }
    }
}

impl SendRequestBody {
    /// The request, if a queue pair with these limits takes such ones.
    pub fn request(&self, cap: &QpCap) -> Result<Copied, DumpError> {
        if SendOpcode::from_raw(self.opcode.into()).is_none() {
            return Err(DumpError::Content("a request of no kind"));
        }
        let inline_bytes = match &self.data {
            DataBody::Sges(sges) if sges.len() > cap.max_send_sge as usize => {
                return Err(DumpError::Content("a request with too many entries"));
            }
            DataBody::Inline(bytes) if bytes.len() > cap.max_inline_data as usize => {
                return Err(DumpError::Content("a request with too much inline data"));
            }
            DataBody::Sges(_) => None,
            DataBody::Inline(bytes) => Some(bytes.len() as u32),
        };
        if inline_bytes.is_some() != (self.flags & verbatim_device::layout::SEND_INLINE != 0) {
            return Err(DumpError::Content("a request that is inline and is not"));
        }
        let wqe = SendWqe {
            wr_id: self.wr_id,
            opcode: self.opcode,
            flags: self.flags,
            num_sge: match &self.data {
                DataBody::Sges(sges) => sges.len() as u16,
                DataBody::Inline(_) => 0,
            },
            imm: self.imm,
            remote_address: self.remote_address,
            rkey: self.rkey,
            inline_bytes: inline_bytes.unwrap_or(0),
            compare_add: self.compare_add,
            swap: self.swap,
            remote_qpn: self.remote_qpn,
            remote_qkey: self.remote_qkey,
            ah: self.ah,
            reserved: 0,
        };
        Ok(match &self.data {
            DataBody::Sges(sges) => Copied::new(&wqe, Body::Sges(&sges_from_body(sges))),
            DataBody::Inline(bytes) => Copied::new(&wqe, Body::Inline(&[bytes])),
        })
    }
}
