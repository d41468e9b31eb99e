//! Requests of the control path and their answers.
//!
//! Strictly one answer per request, in order. Errors carry an errno as the verbs return it. The numbers of enumerations
//! and bit masks are those of `<infiniband/verbs.h>`, since both sides are asked in these terms.

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

/// The version of this contract; both sides refuse another one.
pub const VERSION: u32 = 1;

/// The control socket's name in a runtime folder.
pub const SOCKET_NAME: &str = "nic.sock";

bitflags! {
    /// `enum ibv_access_flags`, as far as the device knows them.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
    pub struct Access: u32 {
        /// `IBV_ACCESS_LOCAL_WRITE`
        const LOCAL_WRITE = 1;
        /// `IBV_ACCESS_REMOTE_WRITE`
        const REMOTE_WRITE = 1 << 1;
        /// `IBV_ACCESS_REMOTE_READ`
        const REMOTE_READ = 1 << 2;
        /// `IBV_ACCESS_REMOTE_ATOMIC`
        const REMOTE_ATOMIC = 1 << 3;
    }

    /// `enum ibv_qp_attr_mask`: which fields of [`QpAttr`] are set.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
    pub struct QpAttrMask: u32 {
        /// `IBV_QP_STATE`
        const STATE = 1;
        /// `IBV_QP_CUR_STATE`
        const CUR_STATE = 1 << 1;
        /// `IBV_QP_EN_SQD_ASYNC_NOTIFY`
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `IBV_QP_ACCESS_FLAGS`
        const ACCESS_FLAGS = 1 << 3;
        /// `IBV_QP_PKEY_INDEX`
        const PKEY_INDEX = 1 << 4;
        /// `IBV_QP_PORT`
        const PORT = 1 << 5;
        /// `IBV_QP_QKEY`
        const QKEY = 1 << 6;
        /// `IBV_QP_AV`
        const AV = 1 << 7;
        /// `IBV_QP_PATH_MTU`
        const PATH_MTU = 1 << 8;
        /// `IBV_QP_TIMEOUT`
        const TIMEOUT = 1 << 9;
        /// `IBV_QP_RETRY_CNT`
        const RETRY_CNT = 1 << 10;
        /// `IBV_QP_RNR_RETRY`
        const RNR_RETRY = 1 << 11;
        /// `IBV_QP_RQ_PSN`
        const RQ_PSN = 1 << 12;
        /// `IBV_QP_MAX_QP_RD_ATOMIC`
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `IBV_QP_ALT_PATH`
        const ALT_PATH = 1 << 14;
        /// `IBV_QP_MIN_RNR_TIMER`
        const MIN_RNR_TIMER = 1 << 15;
        /// `IBV_QP_SQ_PSN`
        const SQ_PSN = 1 << 16;
        /// `IBV_QP_MAX_DEST_RD_ATOMIC`
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `IBV_QP_PATH_MIG_STATE`
        const PATH_MIG_STATE = 1 << 18;
        /// `IBV_QP_CAP`
        const CAP = 1 << 19;
        /// `IBV_QP_DEST_QPN`
        const DEST_QPN = 1 << 20;
    }
}

/// `enum ibv_qp_state`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum QpState {
    /// `IBV_QPS_RESET`
    Reset = 0,
    /// `IBV_QPS_INIT`
    Init = 1,
    /// `IBV_QPS_RTR`
    Rtr = 2,
    /// `IBV_QPS_RTS`
    Rts = 3,
    /// `IBV_QPS_SQD`
    Sqd = 4,
    /// `IBV_QPS_SQE`
    Sqe = 5,
    /// `IBV_QPS_ERR`
    Err = 6,
}

impl QpState {
    /// The state of that number.
    pub fn from_raw(raw: u32) -> Option<Self> {
        use QpState::*;
        [Reset, Init, Rtr, Rts, Sqd, Sqe, Err]
            .into_iter()
            .find(|state| *state as u32 == raw)
    }
}

/// `enum ibv_qp_type`, as far as the device has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum QpType {
    /// `IBV_QPT_RC`
    Rc = 2,
}

/// `struct ibv_qp_cap`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct QpCap {
    /// Send requests that can be outstanding.
    pub max_send_wr: u32,
    /// Receive requests that can be outstanding.
    pub max_recv_wr: u32,
    /// Scatter/gather entries of a send request.
    pub max_send_sge: u32,
    /// Scatter/gather entries of a receive request.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

/// Where a connection's packets go: the part of `struct ibv_ah_attr` that RoCEv2 uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct AddressVector {
    /// The remote GID in network byte order; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub dgid: [u8; 16],
    /// Index of the local GID.
    pub sgid_index: u8,
    /// Time to live.
    pub hop_limit: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// Flow label.
    pub flow_label: u32,
    /// Service level.
    pub sl: u8,
    /// Physical port, 1.
    pub port_num: u8,
}

/// `struct ibv_qp_attr` without what no transport here uses. Only the fields that a [`QpAttrMask`] names count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(
    missing_docs,
    reason = "the names and meanings are those of struct ibv_qp_attr"
)]
pub struct QpAttr {
    pub state: QpState,
    pub cur_state: QpState,
    /// `enum ibv_mtu`: 1 (256 bytes) to 5 (4096).
    pub path_mtu: u8,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qpn: u32,
    pub access: Access,
    pub av: AddressVector,
    pub pkey_index: u16,
    pub port_num: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
}

impl Default for QpAttr {
    fn default() -> Self {
        Self {
            state: QpState::Reset,
            cur_state: QpState::Reset,
            path_mtu: 1,
            qkey: 0,
            rq_psn: 0,
            sq_psn: 0,
            dest_qpn: 0,
            access: Access::empty(),
            av: AddressVector::default(),
            pkey_index: 0,
            port_num: 0,
            max_rd_atomic: 0,
            max_dest_rd_atomic: 0,
            min_rnr_timer: 0,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
        }
    }
}

impl QpAttr {
    /// Takes over the fields of `other` that `mask` names.
    pub fn merge(&mut self, other: &Self, mask: QpAttrMask) {
        macro_rules! take {
            ($($flag:ident => $($field:ident),+;)*) => {
                $(if mask.contains(QpAttrMask::$flag) { $(self.$field = other.$field;)+ })*
            };
        }
        take! {
            STATE => state; CUR_STATE => cur_state; ACCESS_FLAGS => access; PKEY_INDEX => pkey_index;
            PORT => port_num; QKEY => qkey; AV => av; PATH_MTU => path_mtu; TIMEOUT => timeout;
            RETRY_CNT => retry_cnt; RNR_RETRY => rnr_retry; RQ_PSN => rq_psn; SQ_PSN => sq_psn;
            MAX_QP_RD_ATOMIC => max_rd_atomic; MAX_DEST_RD_ATOMIC => max_dest_rd_atomic;
            MIN_RNR_TIMER => min_rnr_timer; DEST_QPN => dest_qpn;
        }
    }
}

/// How the RNIC reaches a stretch of a memory region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// The pages are part of a file that both sides map (adopted memory).
    File {
        /// Which of the descriptors sent with the request.
        fd_index: u32,
        /// Where in the file the segment starts, page aligned.
        offset: u64,
    },
    /// The RNIC reads and writes the process's memory with `process_vm_readv` and `process_vm_writev`.
    Process,
}

/// A stretch of a memory region in the program's address space. A region's segments are contiguous and in order; the
/// first may start before the region and the last end after it, at page boundaries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// Virtual address in the program.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// How to reach it.
    pub backing: Backing,
}

/// A request to the RNIC. Handles are the RNIC's numbers, unique within the context for PDs and CQs, within the RNIC
/// for QPs and memory keys.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Request {
    /// The first request on a connection: makes a context. Answered by [`Reply::Context`] with two descriptors: the
    /// arena (a sealed memfd) and the doorbell (an eventfd that wakes the RNIC).
    OpenContext {
        /// [`VERSION`] of the asking side.
        version: u32,
        /// A name for statistics and logs: the program's, or the instance's.
        name: String,
    },
    /// On a connection that was handed over: answered as `OpenContext` was, and from now on [`Backing::Process`] means
    /// the memory of the process that sent this request.
    AttachContext {
        /// [`VERSION`] of the asking side.
        version: u32,
    },
    /// From now on, until `AttachContext`, the context's queue pairs take no packet in: they are lost, as on any link. So
    /// nothing changes while nobody looks after it, whatever its peers do. Answered by [`Reply::Done`].
    ParkContext,
    /// From the agent only, as the first and only request on a connection: accept programs at this listening socket
    /// too (one descriptor), until it is shut down. Answered by [`Reply::Done`].
    AddListener,
    /// Answered by [`Reply::Pd`].
    AllocPd,
    /// Answered by [`Reply::Done`]; `EBUSY` while in use.
    DeallocPd {
        /// Which.
        pd: u32,
    },
    /// Answered by [`Reply::Mr`]. Descriptors: one per distinct file.
    RegMr {
        /// The protection domain.
        pd: u32,
        /// Start in the program's address space.
        address: u64,
        /// Length in bytes.
        length: u64,
        /// The address that keys refer to (`ibv_reg_mr_iova`); equal to `address` for `ibv_reg_mr`.
        iova: u64,
        /// What the keys allow.
        access: Access,
        /// Where the bytes are.
        segments: Vec<Segment>,
    },
    /// Answered by [`Reply::Done`].
    DeregMr {
        /// The region's local key.
        lkey: u32,
    },
    /// Answered by [`Reply::Cq`].
    CreateCq {
        /// The least number of entries.
        entries: u32,
    },
    /// Answered by [`Reply::Done`]; `EBUSY` while a QP uses it.
    DestroyCq {
        /// Which.
        cq: u32,
    },
    /// Answered by [`Reply::Qp`].
    CreateQp {
        /// The protection domain.
        pd: u32,
        /// Where send completions go.
        send_cq: u32,
        /// Where receive completions go.
        recv_cq: u32,
        /// The transport.
        qp_type: QpType,
        /// What is asked for; the answer tells what was given.
        cap: QpCap,
    },
    /// Answered by [`Reply::Done`], `EINVAL` for a transition that the standard does not allow (IBA Vol 1 §11.2.5.2).
    ModifyQp {
        /// Which.
        qpn: u32,
        /// Which fields count.
        mask: QpAttrMask,
        /// Their values.
        attr: QpAttr,
    },
    /// Answered by [`Reply::QpAttr`].
    QueryQp {
        /// Which.
        qpn: u32,
    },
    /// Answered by [`Reply::Done`]. Its completions that are still in the ring stay there.
    DestroyQp {
        /// Which.
        qpn: u32,
    },
}

/// An answer of the RNIC.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// The request failed and changed nothing.
    Error {
        /// A positive errno.
        errno: i32,
        /// What was wrong, for logs.
        message: String,
    },
    /// Nothing to say but that it is done.
    Done,
    /// A context, with the descriptors of its arena and doorbell.
    Context {
        /// What the device is and can do.
        device: DeviceAttr,
        /// Its only port.
        port: PortAttr,
        /// The arena's length in bytes.
        arena_bytes: u64,
    },
    /// A protection domain.
    Pd {
        /// Its number.
        pd: u32,
    },
    /// A memory region.
    Mr {
        /// Local key.
        lkey: u32,
        /// Remote key.
        rkey: u32,
    },
    /// A completion queue.
    Cq {
        /// Its number.
        cq: u32,
        /// How many entries it has: at least what was asked for, a power of two.
        entries: u32,
        /// Where in the arena it is, see [`crate::layout::CqLayout`].
        offset: u64,
    },
    /// A queue pair.
    Qp {
        /// Its number.
        qpn: u32,
        /// What was given: at least what was asked for.
        cap: QpCap,
        /// Its doorbell bit, see [`crate::layout::ContextPage`].
        slot: u32,
        /// Where in the arena it is, see [`crate::layout::QpLayout`].
        offset: u64,
    },
    /// A queue pair's attributes.
    QpAttr {
        /// All of them.
        attr: QpAttr,
        /// Its limits.
        cap: QpCap,
    },
}

/// The device: what `ibv_query_device` tells, as far as it is not a constant of the guest library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[allow(
    missing_docs,
    reason = "the names and meanings are those of struct ibv_device_attr"
)]
pub struct DeviceAttr {
    /// The device's name, `verbatim0`.
    pub name: String,
    pub fw_ver: String,
    /// GUID in network byte order.
    pub node_guid: [u8; 8],
    pub max_mr_size: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_inline_data: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_rd_atom: u8,
    pub max_qp_init_rd_atom: u8,
}

/// The port: what `ibv_query_port` and `ibv_query_gid` tell.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortAttr {
    /// `enum ibv_mtu` of the link.
    pub active_mtu: u8,
    /// `enum ibv_mtu`, the most.
    pub max_mtu: u8,
    /// The GID table, RoCEv2 all of it, network byte order.
    pub gids: Vec<[u8; 16]>,
    /// The network interface's name.
    pub netdev: String,
    /// The longest message in bytes.
    pub max_msg_bytes: u32,
}
