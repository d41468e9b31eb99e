//! Attributes, from the contract's terms to the library's and back. Numbers and bit masks are the same on both sides.

use std::ffi::{CStr, c_char};

use verbatim_device::control::{
    Access, AddressVector, AsyncEventType, DeviceAttr, QpAttr, QpAttrMask, QpCap, QpState, SrqAttr,
};

use super::ffi;

/// The most scatter/gather entries that are offered: as many as the objects above have room for.
const MAX_SGE: u32 = crate::work::MAX_SGE as u32;

/// A number of which the header says that it is not negative.
fn count(number: i32) -> u32 {
    number.try_into().unwrap_or(0)
}

fn small(number: i32) -> u8 {
    number.clamp(0, u8::MAX.into()) as u8
}

/// A C string in a field of fixed length.
pub fn text(field: &[c_char]) -> String {
    let bytes: Vec<u8> = field.iter().map(|byte| *byte as u8).collect();
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

pub fn device_attr(name: &str, attr: &ffi::ibv_device_attr) -> DeviceAttr {
    DeviceAttr {
        name: name.to_owned(),
        fw_ver: text(&attr.fw_ver),
        node_guid: attr.node_guid,
        max_mr_size: attr.max_mr_size,
        max_qp: count(attr.max_qp),
        max_qp_wr: count(attr.max_qp_wr),
        max_sge: count(attr.max_sge).min(MAX_SGE),
        // Verbs tell it of a queue pair only, when it is made.
        max_inline_data: u32::MAX,
        max_cq: count(attr.max_cq),
        max_cqe: count(attr.max_cqe),
        max_mr: count(attr.max_mr),
        max_pd: count(attr.max_pd),
        max_qp_rd_atom: small(attr.max_qp_rd_atom),
        max_qp_init_rd_atom: small(attr.max_qp_init_rd_atom),
        max_srq: count(attr.max_srq),
        max_srq_wr: count(attr.max_srq_wr),
        max_srq_sge: count(attr.max_srq_sge).min(MAX_SGE),
        max_ah: count(attr.max_ah),
        max_mw: count(attr.max_mw),
        max_mcast_grp: count(attr.max_mcast_grp),
        max_mcast_qp_attach: count(attr.max_mcast_qp_attach),
        // What the objects above call on-chip memory is the host's, which is not what an RNIC offers under that name.
        max_dm_size: 0,
    }
}

pub fn cap_to_c(cap: &QpCap) -> ffi::ibv_qp_cap {
    ffi::ibv_qp_cap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge,
        max_recv_sge: cap.max_recv_sge,
        max_inline_data: cap.max_inline_data,
    }
}

/// What was given. A library may round scatter/gather entries up beyond what the objects above have room for.
pub fn cap_from_c(cap: &ffi::ibv_qp_cap) -> QpCap {
    QpCap {
        max_send_wr: cap.max_send_wr,
        max_recv_wr: cap.max_recv_wr,
        max_send_sge: cap.max_send_sge.min(MAX_SGE),
        max_recv_sge: cap.max_recv_sge.min(MAX_SGE),
        max_inline_data: cap.max_inline_data,
    }
}

pub fn srq_attr_to_c(attr: &SrqAttr) -> ffi::ibv_srq_attr {
    ffi::ibv_srq_attr {
        max_wr: attr.max_wr,
        max_sge: attr.max_sge,
        srq_limit: attr.limit,
    }
}

pub fn srq_attr_from_c(attr: &ffi::ibv_srq_attr) -> SrqAttr {
    SrqAttr {
        max_wr: attr.max_wr,
        max_sge: attr.max_sge.min(MAX_SGE),
        limit: attr.srq_limit,
    }
}

pub fn av_to_c(av: &AddressVector) -> ffi::ibv_ah_attr {
    ffi::ibv_ah_attr {
        grh: ffi::ibv_global_route {
            dgid: ffi::ibv_gid { raw: av.dgid },
            flow_label: av.flow_label,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        sl: av.sl,
        // On Ethernet every address is global.
        is_global: 1,
        port_num: av.port_num,
        ..ffi::ibv_ah_attr::default()
    }
}

fn av_from_c(attr: &ffi::ibv_ah_attr) -> AddressVector {
    AddressVector {
        dgid: attr.grh.dgid.raw,
        sgid_index: attr.grh.sgid_index,
        hop_limit: attr.grh.hop_limit,
        traffic_class: attr.grh.traffic_class,
        flow_label: attr.grh.flow_label,
        sl: attr.sl,
        port_num: attr.port_num,
    }
}

pub fn qp_attr_to_c(attr: &QpAttr) -> ffi::ibv_qp_attr {
    ffi::ibv_qp_attr {
        qp_state: attr.state as u32,
        cur_qp_state: attr.cur_state as u32,
        path_mtu: attr.path_mtu.into(),
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qp_num: attr.dest_qpn,
        qp_access_flags: attr.access.bits(),
        ah_attr: av_to_c(&attr.av),
        pkey_index: attr.pkey_index,
        en_sqd_async_notify: attr.en_sqd_async_notify.into(),
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        port_num: attr.port_num,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
        ..ffi::ibv_qp_attr::default()
    }
}

pub fn qp_attr_from_c(attr: &ffi::ibv_qp_attr) -> QpAttr {
    let state = |raw| QpState::from_raw(raw).unwrap_or(QpState::Err);
    QpAttr {
        state: state(attr.qp_state),
        cur_state: state(attr.cur_qp_state),
        en_sqd_async_notify: attr.en_sqd_async_notify != 0,
        path_mtu: attr.path_mtu as u8,
        qkey: attr.qkey,
        rq_psn: attr.rq_psn,
        sq_psn: attr.sq_psn,
        dest_qpn: attr.dest_qp_num,
        access: Access::from_bits_truncate(attr.qp_access_flags),
        av: av_from_c(&attr.ah_attr),
        pkey_index: attr.pkey_index,
        port_num: attr.port_num,
        max_rd_atomic: attr.max_rd_atomic,
        max_dest_rd_atomic: attr.max_dest_rd_atomic,
        min_rnr_timer: attr.min_rnr_timer,
        timeout: attr.timeout,
        retry_cnt: attr.retry_cnt,
        rnr_retry: attr.rnr_retry,
    }
}

/// Every attribute that the contract has.
pub fn every_attribute() -> i32 {
    QpAttrMask::all().bits() as i32
}

/// `None` for those that no transport here has (alternate paths, LIDs, work queues).
pub fn async_event_type(raw: i32) -> Option<AsyncEventType> {
    use AsyncEventType::*;
    [
        CqErr,
        QpFatal,
        QpReqErr,
        QpAccessErr,
        CommEst,
        SqDrained,
        DeviceFatal,
        PortActive,
        PortErr,
        SrqErr,
        SrqLimitReached,
        QpLastWqeReached,
        GidChange,
    ]
    .into_iter()
    .find(|event| *event as i32 == raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_survive_the_way_there_and_back() {
        let attr = QpAttr {
            state: QpState::Rts,
            cur_state: QpState::Sqd,
            en_sqd_async_notify: true,
            path_mtu: 5,
            qkey: 0x1122_3344,
            rq_psn: 0x00ff_fff1,
            sq_psn: 0x00ff_fff2,
            dest_qpn: 0x00ab_cdef,
            access: Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            av: AddressVector {
                dgid: *b"0123456789abcdef",
                sgid_index: 3,
                hop_limit: 64,
                traffic_class: 5,
                flow_label: 0xfffff,
                sl: 7,
                port_num: 1,
            },
            pkey_index: 9,
            port_num: 1,
            max_rd_atomic: 11,
            max_dest_rd_atomic: 12,
            min_rnr_timer: 13,
            timeout: 14,
            retry_cnt: 6,
            rnr_retry: 7,
        };
        assert_eq!(qp_attr_from_c(&qp_attr_to_c(&attr)), attr);
    }

    #[test]
    fn events_have_the_headers_numbers_and_others_are_left_out() {
        assert_eq!(async_event_type(8), Some(AsyncEventType::DeviceFatal));
        assert_eq!(async_event_type(18), Some(AsyncEventType::GidChange));
        assert_eq!(async_event_type(6), None, "path migration");
        assert_eq!(async_event_type(19), None, "work queues");
    }

    #[test]
    fn a_text_ends_at_its_first_zero() {
        let field: Vec<c_char> = b"rxe0\0junk".iter().map(|byte| *byte as c_char).collect();
        assert_eq!(text(&field), "rxe0");
        assert_eq!(text(&[1; 4]), "", "no end");
    }
}
