//! The attributes of a queue pair (`struct ibv_qp_attr`).

use serde::{Deserialize, Serialize};

use super::{AccessFlags, AttrMask, ModifyError, QpState};
use crate::{Mtu, Psn, Qpn};

/// `struct ibv_ah_attr`, as far as RoCEv2 uses it. The transport keeps it for [`crate::RcQp::query`]; who turns it into
/// addresses and a [`crate::TxBatch`] is the NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressVector {
    /// The partner's GID: an IPv6 address, or an IPv4 one mapped into it.
    pub dgid: [u8; 16],
    /// Index of the own GID.
    pub sgid_index: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// IP time to live.
    pub hop_limit: u8,
    /// IP type of service.
    pub traffic_class: u8,
    /// Service level.
    pub sl: u8,
    /// Local port, from 1.
    pub port_num: u8,
}

/// What a modify sets, or a query gives: the mask follows from what is there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpAttributes {
    /// The state to go to; where it is absent, the state stays (`IBV_QP_STATE`).
    pub state: Option<QpState>,
    /// The state that the caller believes the queue pair to be in.
    pub cur_state: Option<QpState>,
    /// Report [`crate::Event::SendQueueDrained`] (with SQD).
    pub en_sqd_async_notify: Option<bool>,
    /// Which remote operations the queue pair lets in.
    pub access_flags: Option<AccessFlags>,
    /// Index of the partition key.
    pub pkey_index: Option<u16>,
    /// Local port, from 1.
    pub port_num: Option<u8>,
    /// Queue key of a datagram queue pair.
    pub qkey: Option<u32>,
    /// The way to the partner.
    pub av: Option<AddressVector>,
    /// Path MTU.
    pub path_mtu: Option<Mtu>,
    /// Local ACK timeout code: 4.096 µs × 2^code, 0 is never; at most 31.
    pub timeout: Option<u8>,
    /// Retries without an answer before the queue pair gives up; at most 7.
    pub retry_cnt: Option<u8>,
    /// Retries after RNR NAK, 7 is without end.
    pub rnr_retry: Option<u8>,
    /// The first PSN that the partner will send.
    pub rq_psn: Option<Psn>,
    /// READs and atomics outstanding at a time, as requester.
    pub max_rd_atomic: Option<u8>,
    /// The code in RNR NAKs that this side sends; at most 31.
    pub min_rnr_timer: Option<u8>,
    /// The first PSN to send.
    pub sq_psn: Option<Psn>,
    /// READs and atomics outstanding at a time, as responder.
    pub max_dest_rd_atomic: Option<u8>,
    /// The partner's queue pair.
    pub dest_qpn: Option<Qpn>,
}

impl QpAttributes {
    /// Which attributes are there.
    pub fn mask(&self) -> AttrMask {
        let bits = [
            (self.state.is_some(), AttrMask::STATE),
            (self.cur_state.is_some(), AttrMask::CUR_STATE),
            (self.en_sqd_async_notify.is_some(), AttrMask::EN_SQD_ASYNC_NOTIFY),
            (self.access_flags.is_some(), AttrMask::ACCESS_FLAGS),
            (self.pkey_index.is_some(), AttrMask::PKEY_INDEX),
            (self.port_num.is_some(), AttrMask::PORT),
            (self.qkey.is_some(), AttrMask::QKEY),
            (self.av.is_some(), AttrMask::AV),
            (self.path_mtu.is_some(), AttrMask::PATH_MTU),
            (self.timeout.is_some(), AttrMask::TIMEOUT),
            (self.retry_cnt.is_some(), AttrMask::RETRY_CNT),
            (self.rnr_retry.is_some(), AttrMask::RNR_RETRY),
            (self.rq_psn.is_some(), AttrMask::RQ_PSN),
            (self.max_rd_atomic.is_some(), AttrMask::MAX_QP_RD_ATOMIC),
            (self.min_rnr_timer.is_some(), AttrMask::MIN_RNR_TIMER),
            (self.sq_psn.is_some(), AttrMask::SQ_PSN),
            (self.max_dest_rd_atomic.is_some(), AttrMask::MAX_DEST_RD_ATOMIC),
            (self.dest_qpn.is_some(), AttrMask::DEST_QPN),
        ];
        bits.into_iter()
            .filter(|(there, _)| *there)
            .fold(AttrMask::empty(), |mask, (_, bit)| mask | bit)
    }

    /// Are the values in the ranges of their fields?
    pub fn check_values(&self) -> Result<(), ModifyError> {
        let limits = [
            (self.timeout, AttrMask::TIMEOUT, 31),
            (self.retry_cnt, AttrMask::RETRY_CNT, 7),
            (self.rnr_retry, AttrMask::RNR_RETRY, 7),
            (self.min_rnr_timer, AttrMask::MIN_RNR_TIMER, 31),
        ];
        for (value, attribute, max) in limits {
            match value {
                Some(value) if value > max => {
                    let (value, max) = (u32::from(value), u32::from(max));
                    return Err(ModifyError::ValueTooLarge {
                        attribute,
                        value,
                        max,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes over what `change` sets.
    pub(crate) fn merge(&mut self, change: &QpAttributes) {
        fn set<T: Copy>(to: &mut Option<T>, from: Option<T>) {
            *to = from.or(*to);
        }
        set(&mut self.access_flags, change.access_flags);
        set(&mut self.pkey_index, change.pkey_index);
        set(&mut self.port_num, change.port_num);
        set(&mut self.qkey, change.qkey);
        set(&mut self.av, change.av);
        set(&mut self.path_mtu, change.path_mtu);
        set(&mut self.timeout, change.timeout);
        set(&mut self.retry_cnt, change.retry_cnt);
        set(&mut self.rnr_retry, change.rnr_retry);
        set(&mut self.rq_psn, change.rq_psn);
        set(&mut self.max_rd_atomic, change.max_rd_atomic);
        set(&mut self.min_rnr_timer, change.min_rnr_timer);
        set(&mut self.sq_psn, change.sq_psn);
        set(&mut self.max_dest_rd_atomic, change.max_dest_rd_atomic);
        set(&mut self.dest_qpn, change.dest_qpn);
        set(&mut self.en_sqd_async_notify, change.en_sqd_async_notify);
    }
}
