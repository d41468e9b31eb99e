//! Queue pairs: states, attributes, counters.

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

use super::Access;

bitflags! {
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

/// Who goes first when several queue pairs of an RNIC have something to send. A queue pair begins as a user's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum QpClass {
    /// A program's.
    #[default]
    User,
    /// It sends, requests and answers alike, while no user's has anything to send; and a little every few milliseconds, so that
    /// its connection does not fail.
    Background,
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
    /// Report [`AsyncEventType::SqDrained`](super::AsyncEventType::SqDrained) (with SQD).
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
