//! Attributes of queue pairs.

use std::ffi::c_int;

use verbatim_verbs::{Access, AddressVector, QpAttr, QpAttrMask, QpCap, QpState, QpType};

use super::{address_from_c, address_to_c, qp_access};
use crate::abi::*;
use crate::ffi::{Errno, unsupported};

/// The transport, if it is one that the device has.
pub fn qp_type(raw: u32) -> Result<QpType, Errno> {
    match raw {
        IBV_QPT_RC => Ok(QpType::Rc),
        IBV_QPT_UC => Ok(QpType::Uc),
        IBV_QPT_UD => Ok(QpType::Ud),
        _ => Err(unsupported("a queue pair that is not RC, UC or UD")),
    }
}

/// Limits that the program asks for.
pub fn cap_from_c(cap: &ibv_qp_cap) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// Limits that it got.
pub fn cap_to_c(cap: &QpCap) -> ibv_qp_cap {
    ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// What `ibv_modify_qp` is told.
pub fn modification(attr: &ibv_qp_attr, mask: c_int) -> Result<(QpAttrMask, QpAttr), Errno> {
    let mask = QpAttrMask::from_bits(mask as u32).ok_or(Errno::INVALID)?;
    if mask.intersects(QpAttrMask::ALT_PATH | QpAttrMask::PATH_MIG_STATE | QpAttrMask::CAP) {
        return Err(unsupported("alternate paths and other limits for a queue pair"));
    }
    // Fields that the mask does not name may be anything; only named ones are looked at.
    let state = |named, raw| {
        if mask.contains(named) {
            QpState::from_raw(raw).ok_or(Errno::INVALID)
        } else {
            Ok(QpState::Reset)
        }
    };
    let byte = |named, raw: u32| {
        if mask.contains(named) {
            u8::try_from(raw).map_err(|_| Errno::INVALID)
        } else {
            Ok(0)
        }
    };
    let access = if mask.contains(QpAttrMask::ACCESS_FLAGS) {
        qp_access(attr.qp_access_flags)?
    } else {
        Access::empty()
    };
    let av = if mask.contains(QpAttrMask::AV) {
        address_from_c(&attr.ah_attr)?
    } else {
        AddressVector::default()
    };
    // IBA Vol 1 §11.2.5.2 calls them 24-bit values; programs pass random 32-bit ones and expect the device to cut them
    const PSN_MASK: u32 = 0xff_ffff;
    Ok((
        mask,
        QpAttr {
            state: state(QpAttrMask::STATE, attr.qp_state)?,
            cur_state: state(QpAttrMask::CUR_STATE, attr.cur_qp_state)?,
            en_sqd_async_notify: attr.en_sqd_async_notify != 0,
            path_mtu: byte(QpAttrMask::PATH_MTU, attr.path_mtu)?,
            qkey: attr.qkey,
            rq_psn: attr.rq_psn & PSN_MASK,
            sq_psn: attr.sq_psn & PSN_MASK,
            dest_qpn: attr.dest_qp_num,
            access,
            av,
            pkey_index: attr.pkey_index,
            port_num: attr.port_num,
            max_rd_atomic: attr.max_rd_atomic,
            max_dest_rd_atomic: attr.max_dest_rd_atomic,
            min_rnr_timer: attr.min_rnr_timer,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
        },
    ))
}

/// What `ibv_query_qp` tells.
pub fn qp_attr(attr: &QpAttr, cap: &QpCap) -> ibv_qp_attr {
    ibv_qp_attr {
        qp_state: attr.state as u32,
        cur_qp_state: attr.state as u32,
        path_mtu: attr.path_mtu.into(),
        path_mig_state: 0,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qpn,
        qp_access_flags: attr.access.bits(),
        cap: cap_to_c(cap),
        ah_attr: address_to_c(&attr.av),
        alt_ah_attr: address_to_c(&AddressVector::default()),
        pkey_index: attr.pkey_index,
        alt_pkey_index: 0,
        en_sqd_async_notify: attr.en_sqd_async_notify.into(),
        sq_draining: 0,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        alt_port_num: 0,
        alt_timeout: 0,
        rate_limit: 0,
    }
}
