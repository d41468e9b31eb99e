//! Requests of the control path and their answers.
//!
//! Strictly one answer per request, in order. Errors carry an errno as the verbs return it. The numbers of enumerations
//! and bit masks are those of `<infiniband/verbs.h>`, since both sides are asked in these terms.

use bitflags::bitflags;
use serde::{Deserialize, Serialize};
use verbatim_seqpacket::Carried;

/// The version of this contract; both sides refuse another one.
pub const VERSION: u32 = 10;

/// The most queue pairs in one request; more are `EINVAL`. The RNIC does nothing else meanwhile.
pub const MOST_QPS: usize = 1024;

/// From here on queue pair numbers are not the RNIC's to give, asked for or not: they are for queue pairs that programs which
/// have moved away make elsewhere, under the GID of this host.
pub const FIRST_PUBLISHED_QPN: u32 = 1 << 23;

/// Hosts have numbers from 0 to one less than this. What an RNIC gives unasked begins in the part of its host, so that an
/// object which goes to another RNIC with its number and keys rarely finds them taken there:
///
/// | | part of host N begins at | the RNIC begins at a random place in the first half | can be asked for |
/// | --- | --- | --- | --- |
/// | queue pair number | N × [`QPNS_PER_HOST`] | of 65,536 | 2 to [`FIRST_PUBLISHED_QPN`] - 1 |
/// | memory key (its upper 24 bits) | N × [`KEYS_PER_HOST`] | of 131,072 | all but 0 |
///
/// An RNIC with more objects than the other half has room for goes on into the parts behind: limits do not depend on this.
pub const HOST_NUMBERS: u8 = 120;

/// See [`HOST_NUMBERS`].
pub const QPNS_PER_HOST: u32 = 1 << 16;

/// See [`HOST_NUMBERS`].
pub const KEYS_PER_HOST: u32 = 1 << 17;

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
        /// `IBV_ACCESS_MW_BIND`
        const MW_BIND = 1 << 4;
        /// `IBV_ACCESS_ZERO_BASED`, of a memory window: remote addresses are offsets from its start. A region with it is
        /// registered with `iova` 0.
        const ZERO_BASED = 1 << 5;
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
    /// `IBV_QPT_UC`
    Uc = 3,
    /// `IBV_QPT_UD`
    Ud = 4,
}

/// `enum ibv_mw_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum MwType {
    /// `IBV_MW_TYPE_1`: bound by `ibv_bind_mw`, to any queue pair of the protection domain.
    One = 1,
    /// `IBV_MW_TYPE_2`, as type 2B: belongs to the queue pair that bound it (IBA Vol 1 §10.6.7.2.3).
    Two = 2,
}

/// How a memory window is: what a bind has made of it, or an invalidation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MwState {
    /// Its remote key, with the tag of the last bind.
    pub rkey: u32,
    /// What it opens; `None`: nothing.
    pub bound: Option<MwBound>,
}

/// What a bound window opens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MwBound {
    /// The region behind it.
    pub lkey: u32,
    /// Start, in the terms of the region.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// What partners may do, and [`Access::ZERO_BASED`] if their addresses are offsets.
    pub access: Access,
    /// Of type 2: the only queue pair that it lets in.
    pub qpn: Option<u32>,
}

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

/// What the RNIC sends on the descriptor that came with [`Request::OpenContext`], one message per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AsyncEvent {
    /// What happened.
    pub event: AsyncEventType,
    /// To which object: the number of the CQ, QP or SRQ, or the port.
    pub object: u32,
}

/// What the RNIC sends on the descriptor that came with [`Request::CreateCompChannel`], one message per event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CompletionEvent {
    /// Which completion queue has new entries: its [`Request::CreateCq::event`].
    pub cq: u32,
}

/// One entry of the port's GID table, RoCEv2 all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Gid {
    /// Network byte order; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub gid: [u8; 16],
    /// The network interface's index.
    pub ifindex: u32,
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
    /// Report [`AsyncEventType::SqDrained`] (with SQD).
    pub en_sqd_async_notify: bool,
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
            en_sqd_async_notify: false,
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
            STATE => state; CUR_STATE => cur_state; EN_SQD_ASYNC_NOTIFY => en_sqd_async_notify; ACCESS_FLAGS => access; PKEY_INDEX => pkey_index;
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
    /// The RNIC reads and writes the process's memory through `/proc/PID/mem`.
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

/// Memory of a region, see [`Request::RegMr`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Translation {
    /// Start in the program's address space.
    pub address: u64,
    /// Length in bytes.
    pub length: u64,
    /// The address that keys refer to.
    pub iova: u64,
    /// Where the bytes are.
    pub segments: Vec<Segment>,
}

/// `struct ibv_srq_attr`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct SrqAttr {
    /// Requests that can be outstanding.
    pub max_wr: u32,
    /// Scatter/gather entries of a request.
    pub max_sge: u32,
    /// The limit that is armed, 0 if none is.
    pub limit: u32,
}

/// One packet, see [`Request::StartCapture`].
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

/// A queue pair's counters, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpStatistics {
    /// Its number.
    pub qpn: u32,
    /// The name that its context was opened with.
    pub context: String,
    /// The process that opened or attached the context, in the RNIC's PID namespace; 0 if it cannot be told.
    pub pid: i32,
    /// The transport.
    pub qp_type: QpType,
    /// Its state.
    pub state: QpState,
    /// The other end, if it is connected.
    pub remote: Option<([u8; 16], u32)>,
    /// Names and values, names as in `rdma statistic` where it has one.
    pub counters: Vec<(String, u64)>,
}

/// A request to the RNIC. Handles are the RNIC's numbers, unique within the context for PDs and CQs, within the RNIC
/// for QPs and memory keys.
///
/// Queue pair numbers and memory keys, which peers know, can be asked for: by root, over the RNIC's own control socket, until
/// the context is attached to (an agent makes objects for a program that comes). Otherwise it is refused with `EPERM`; with
/// `EEXIST` if another object has the number or a key with the same upper 24 bits, with `EINVAL` if none can have it. What
/// was destroyed can be asked for at once, though it is not given unasked for long.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Request {
    /// The first request on a connection: makes a context. Answered by [`Reply::Context`] with two descriptors: the
    /// arena (a sealed memfd) and the doorbell (an eventfd that wakes the RNIC).
    ///
    /// One descriptor may come with it: a `SOCK_SEQPACKET` Unix socket on which the RNIC sends [`AsyncEvent`]s, never
    /// waiting for room. Without it nobody is told.
    OpenContext {
        /// [`VERSION`] of the asking side.
        version: u32,
        /// A name for statistics and logs: the program's, or the instance's.
        name: String,
    },
    /// On a connection that was handed over: answered as `OpenContext` was, and from now on [`Backing::Process`] means
    /// the memory of the process that sent this request. A descriptor is as with `OpenContext`, in the place of the
    /// earlier one.
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
        /// The key that is asked for, local and remote.
        key: Option<u32>,
    },
    /// Answered by [`Reply::Done`].
    DeregMr {
        /// The region's local key.
        lkey: u32,
    },
    /// Changes a region under its keys (`ibv_rereg_mr`). Answered by [`Reply::Mr`] with the same keys. Descriptors as
    /// with `RegMr`, if `translation` is there.
    ReregMr {
        /// The region's local key.
        lkey: u32,
        /// Another protection domain.
        pd: Option<u32>,
        /// Other rights.
        access: Option<Access>,
        /// Other memory.
        translation: Option<Translation>,
    },
    /// Answered by [`Reply::Mw`]. A type 1 window starts unbound and invalid.
    AllocMw {
        /// The protection domain.
        pd: u32,
        /// Its type.
        mw_type: MwType,
        /// The remote key that is asked for; its low eight bits change with each bind.
        rkey: Option<u32>,
    },
    /// Answered by [`Reply::Done`], bound or not.
    DeallocMw {
        /// The window's remote key; its low eight bits do not count, since the last bind may have failed or not.
        rkey: u32,
    },
    /// Answered by [`Reply::MwState`].
    QueryMw {
        /// The window's remote key; its low eight bits do not count.
        rkey: u32,
    },
    /// Makes a window what another one was, whatever it is now; for a program that has moved. All that a bind is refused for
    /// this is refused for. Answered by [`Reply::Done`].
    RestoreMw {
        /// With the window's index and the other's tag in its key.
        state: MwState,
    },
    /// Comes with one descriptor: a `SOCK_SEQPACKET` Unix socket on which the RNIC sends [`CompletionEvent`]s; it never
    /// waits for room: what does not fit it sends later. Answered by [`Reply::CompChannel`].
    CreateCompChannel,
    /// On a connection that was handed over: from now on the channel's events go to the descriptor that comes with it. Answered
    /// by [`Reply::Done`].
    AttachCompChannel {
        /// Which.
        channel: u32,
    },
    /// Answered by [`Reply::Done`]; `EBUSY` while a CQ uses it.
    DestroyCompChannel {
        /// Which.
        channel: u32,
    },
    /// Answered by [`Reply::Cq`].
    CreateCq {
        /// The least number of entries.
        entries: u32,
        /// Where its events go, if it is ever armed ([`crate::layout::CqHeader::armed`]).
        channel: Option<u32>,
        /// What its events say in the place of its number: the program's own, which it keeps when the queue is made again
        /// elsewhere.
        event: Option<u32>,
    },
    /// Answered by [`Reply::Cq`] with a new place, where the entries that nobody has read are, in order, from counter 0
    /// on. The caller reads nothing from the queue meanwhile. `EINVAL` if the entries would not fit.
    ResizeCq {
        /// Which.
        cq: u32,
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
        /// The shared receive queue in place of an own one; `cap.max_recv_wr` and `cap.max_recv_sge` do not count.
        srq: Option<u32>,
        /// The number that is asked for.
        qpn: Option<u32>,
    },
    /// Answered by [`Reply::Srq`].
    CreateSrq {
        /// The protection domain.
        pd: u32,
        /// What is asked for, its limit included; the answer tells what was given.
        attr: SrqAttr,
    },
    /// Arms the limit (`IBV_SRQ_LIMIT`). Answered by [`Reply::Done`].
    ModifySrq {
        /// Which.
        srq: u32,
        /// When so few requests are left, [`AsyncEventType::SrqLimitReached`] is sent, once. 0 disarms.
        limit: u32,
    },
    /// Answered by [`Reply::Srq`].
    QuerySrq {
        /// Which.
        srq: u32,
    },
    /// Answered by [`Reply::Done`]; `EBUSY` while a QP uses it.
    DestroySrq {
        /// Which.
        srq: u32,
    },
    /// Answered by [`Reply::Ah`].
    CreateAh {
        /// The protection domain.
        pd: u32,
        /// The way.
        av: AddressVector,
    },
    /// Answered by [`Reply::Done`]. Requests that were posted with it before may fail.
    DestroyAh {
        /// Which.
        ah: u32,
    },
    /// Lets a UD queue pair receive what is sent to a multicast group. Answered by [`Reply::Done`].
    AttachMcast {
        /// Which queue pair.
        qpn: u32,
        /// The group, network byte order.
        gid: [u8; 16],
    },
    /// Undoes `AttachMcast`. Answered by [`Reply::Done`].
    DetachMcast {
        /// Which queue pair.
        qpn: u32,
        /// The group, network byte order.
        gid: [u8; 16],
    },
    /// As the first and only request on a connection, or on any connection with a context: the counters. Answered by
    /// [`Reply::Statistics`]. Root sees all queue pairs, others those of processes of their own user.
    QueryStatistics {
        /// Queue pairs with at least this number.
        from_qpn: u32,
    },
    /// From root only, as the first and only request on a connection: from now on the RNIC sends a copy of every packet
    /// that it sends or takes in, as [`Captured`], on this connection, until that is closed. It never waits for room: what does
    /// not fit is counted. Answered by [`Reply::Done`].
    StartCapture {
        /// Bytes of each packet, from its IP header on; at least 64.
        snap_bytes: u32,
        /// Only packets of this queue pair.
        qpn: Option<u32>,
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
    /// The states of queue pairs, all of the same moment. Answered by [`Reply::QpStates`], or by the first error.
    QueryQps {
        /// Which, at most [`MOST_QPS`].
        qpns: Vec<u32>,
    },
    /// From now on, until `RestartQp`, a reliable connection neither sends nor takes packets, and completes nothing: what
    /// comes for it is lost, as on any link. One in ERR stays as it is. Answered by [`Reply::QpStopped`]; asked again, it
    /// answers the same. `EINVAL` for other transports.
    StopQp {
        /// Which.
        qpn: u32,
    },
    /// Goes on after `StopQp`, as if what was under way then had been lost. Answered by [`Reply::Done`].
    RestartQp {
        /// Which.
        qpn: u32,
    },
    /// The secret that this RNIC shares with the partner's, for pause and resume: the partner's RNIC is given the same key, and
    /// the other `first`. Without one nothing of that is sent. It ends with the connection (RESET), and moves with an image.
    /// Answered by [`Reply::Done`]; `EINVAL` for other transports than the reliable connection.
    SetQpSecret {
        /// Which.
        qpn: u32,
        /// The secret; `None` takes it away.
        secret: Option<QpSecret>,
    },
    /// From now on, until `ResumeQps`, reliable connections stand still (MigrOS §3.2), all at the same moment: they take nothing
    /// in, complete nothing, and tell their partners, if there is a secret, that they are stopped: those then wait. Unlike after
    /// `StopQp`, a connection may go on at another RNIC. It does so even if the context is parked. Answered by [`Reply::Done`],
    /// also for what was paused already; else by the first error, `EINVAL` for other transports, and in a state in which nothing
    /// can be sent or received, when all the others have been paused.
    PauseQps {
        /// Which, at most [`MOST_QPS`].
        qpns: Vec<u32>,
        /// After so many seconds from now each goes on by itself, as by `ResumeQps`. The latest request counts.
        limit_s: Option<u32>,
    },
    /// The whole states of connections that `PauseQps` has stopped. Answered by [`Reply::QpImages`], with a descriptor if they
    /// are long; else by the first error, `EBUSY` if one runs.
    DumpQps {
        /// Which, at most [`MOST_QPS`].
        qpns: Vec<u32>,
    },
    /// Gives reliable connections in RESET the states of images. They are then paused, as those were that the images are of.
    ///
    /// The rings of each must hold, oldest first, the requests that the [`QpImage`](crate::image::QpImage) names (`requests` in the send ring; `receive` in
    /// its own receive ring) and behind them those that were not taken: the RNIC takes the named ones off, and only looks
    /// at their `wr_id`s. Answered by [`Reply::QpsRestored`]: one is refused with `EINVAL` for an image that is damaged, or does
    /// not fit the queue pair, its rings or this RNIC: then nothing has changed of it. `EINVAL` for all if the lengths are wrong.
    RestoreQps {
        /// Which, at most [`MOST_QPS`].
        qps: Vec<RestoredQp>,
        /// [`QpImage::image`](crate::image::QpImage::image) of each, one behind the other. A descriptor may bring that of one that
        /// is too long for a message, and of one only ([`crate::image`]).
        images: Carried,
    },
    /// They go on after `PauseQps` or `RestoreQps`, all at the same moment: with a secret, as soon as the partner has acknowledged
    /// where. Answered by [`Reply::Done`] at once; else by the first error, when all the others go on.
    ResumeQps {
        /// Which, at most [`MOST_QPS`].
        qpns: Vec<u32>,
    },
    /// Paused connections go on at another RNIC: what the partner of one says of its own new place, if that has moved at the same
    /// time, is passed on there, also when the queue pair is destroyed. Answered by [`Reply::Done`]; else by the first error,
    /// `EBUSY` if one is not paused, `ENOMEM` if there are too many such entries, when all the others have theirs.
    ForwardQps {
        /// Which, at most [`MOST_QPS`].
        qps: Vec<ForwardedQp>,
        /// For how long.
        seconds: u32,
    },
    /// Answered by [`Reply::Done`]. Its completions that are still in the ring stay there.
    DestroyQp {
        /// Which.
        qpn: u32,
    },
    /// From root only, as the first and only request on a connection to the RNIC's own control socket: whose queue pairs
    /// are these? Answered by [`Reply::Owners`].
    QueryOwners {
        /// At most [`MAX_OWNERS`].
        qpns: Vec<u32>,
    },
}

/// How many queue pairs one [`Request::QueryOwners`] can name.
pub const MAX_OWNERS: usize = 8192;

/// Whose a queue pair is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum QpOwner {
    /// There is no such queue pair.
    None,
    /// The process that opened or attached its context has ended, or cannot be seen by the RNIC.
    Unknown,
    /// This process, in the RNIC's PID namespace. It runs.
    Process(i32),
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
        /// How many entries it has: what was asked for. Its ring has the next power of two.
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
    /// A shared receive queue.
    Srq {
        /// Its number.
        srq: u32,
        /// What was given, at least what was asked for; from a query, the limit as it is now.
        attr: SrqAttr,
        /// Where in the arena it is, see [`crate::layout::RecvLayout::shared`].
        offset: u64,
    },
    /// An address handle.
    Ah {
        /// Its number, for [`crate::layout::SendWqe::ah`].
        ah: u32,
    },
    /// A memory window.
    Mw {
        /// Its remote key, which allows nothing before the window is bound.
        rkey: u32,
    },
    /// How a memory window is.
    MwState(MwState),
    /// A completion channel.
    CompChannel {
        /// Its number.
        channel: u32,
    },
    /// Counters.
    Statistics {
        /// The device's.
        device: Vec<(String, u64)>,
        /// Queue pairs, by number.
        qps: Vec<QpStatistics>,
        /// Ask again from this number on.
        next: Option<u32>,
    },
    /// A queue pair's attributes.
    QpAttr {
        /// All of them.
        attr: QpAttr,
        /// Its limits.
        cap: QpCap,
        /// [`Request::PauseQps`] has stopped it.
        paused: bool,
    },
    /// The states of queue pairs, in the order asked for.
    QpStates(Vec<QpState>),
    /// Whose the queue pairs are, in the order asked for.
    Owners(Vec<QpOwner>),
    /// Where a queue pair stands.
    QpStopped(QpPosition),
    /// [`QpImage`](crate::image::QpImage)s, in the order asked for, encoded ([`crate::image`]). They are those of the first ones: at
    /// least one, and all unless they are long.
    QpImages(Carried),
    /// All but these were given the states of their images.
    QpsRestored {
        /// By their places in the request, with an errno.
        refused: Vec<(u32, i32)>,
        /// Why the first was.
        message: String,
    },
}

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
    /// The partner's latest atomics, as many as may be outstanding: PSN, and what was in memory before; nothing is said
    /// of that for an atomic WRITE.
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

/// The device: what `ibv_query_device` tells, as far as it is not a constant of the guest library.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
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
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_ah: u32,
    pub max_mw: u32,
    pub max_mcast_grp: u32,
    pub max_mcast_qp_attach: u32,
    /// Bytes of on-chip memory that a program can have (`ibv_alloc_dm`).
    pub max_dm_size: u64,
}

/// The port: what `ibv_query_port` and `ibv_query_gid` tell.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PortAttr {
    /// `enum ibv_mtu` of the link.
    pub active_mtu: u8,
    /// `enum ibv_mtu`, the most.
    pub max_mtu: u8,
    /// The GID table. Its first entry is the address that the RNIC was started with.
    pub gids: Vec<Gid>,
    /// The network interface's name.
    pub netdev: String,
    /// The longest message in bytes.
    pub max_msg_bytes: u32,
}

impl PortAttr {
    /// The addresses of the GID table, by index.
    pub fn gid_table(&self) -> Vec<[u8; 16]> {
        self.gids.iter().map(|entry| entry.gid).collect()
    }
}
