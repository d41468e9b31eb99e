//! Between the header's structures and the core's.

use std::ffi::c_int;

use verbatim_verbs::{Access, AddressVector, DeviceAttr, PortAttr, QpAttr, QpAttrMask, QpCap, QpState};

use crate::abi::*;
use crate::ffi::{Errno, fill, unsupported};

/// Numbers that the header has as `int`; what does not fit is "very many".
fn int(value: u32) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

/// `ibv_query_device`.
pub fn device_attr(device: &DeviceAttr) -> ibv_device_attr {
    let mut attr = ibv_device_attr {
        fw_ver: [0; 64],
        node_guid: u64::from_ne_bytes(device.node_guid),
        sys_image_guid: u64::from_ne_bytes(device.node_guid),
        max_mr_size: device.max_mr_size,
        page_size_cap: 4096,
        // We are nobody's hardware. Programs that tune by these numbers take their defaults.
        vendor_id: 0,
        vendor_part_id: 0,
        hw_ver: 0,
        max_qp: int(device.max_qp),
        max_qp_wr: int(device.max_qp_wr),
        device_cap_flags: IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_RC_RNR_NAK_GEN,
        max_sge: int(device.max_sge),
        max_sge_rd: int(device.max_sge),
        max_cq: int(device.max_cq),
        max_cqe: int(device.max_cqe),
        max_mr: int(device.max_mr),
        max_pd: int(device.max_pd),
        max_qp_rd_atom: device.max_qp_rd_atom.into(),
        max_ee_rd_atom: 0,
        max_res_rd_atom: int(u32::from(device.max_qp_rd_atom).saturating_mul(device.max_qp)),
        max_qp_init_rd_atom: device.max_qp_init_rd_atom.into(),
        max_ee_init_rd_atom: 0,
        atomic_cap: 0,
        max_ee: 0,
        max_rdd: 0,
        max_mw: 0,
        max_raw_ipv6_qp: 0,
        max_raw_ethy_qp: 0,
        max_mcast_grp: 0,
        max_mcast_qp_attach: 0,
        max_total_mcast_qp_attach: 0,
        max_ah: 0,
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: 0,
        max_srq_wr: 0,
        max_srq_sge: 0,
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
    };
    fill(&mut attr.fw_ver, &device.fw_ver);
    attr
}

/// `ibv_query_device_ex`: the same, and that there is nothing beyond it.
pub fn device_attr_ex(device: &DeviceAttr) -> ibv_device_attr_ex {
    ibv_device_attr_ex {
        orig_attr: device_attr(device),
        comp_mask: 0,
        odp_caps: ibv_odp_caps {
            general_caps: 0,
            per_transport_caps: [0; 3],
        },
        completion_timestamp_mask: 0,
        hca_core_clock: 0,
        device_cap_flags_ex: u64::from(IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_RC_RNR_NAK_GEN),
        tso_caps: ibv_tso_caps {
            max_tso: 0,
            supported_qpts: 0,
        },
        rss_caps: ibv_rss_caps {
            supported_qpts: 0,
            max_rwq_indirection_tables: 0,
            max_rwq_indirection_table_size: 0,
            rx_hash_fields_mask: 0,
            rx_hash_function: 0,
        },
        max_wq_type_rq: 0,
        packet_pacing_caps: ibv_packet_pacing_caps {
            qp_rate_limit_min: 0,
            qp_rate_limit_max: 0,
            supported_qpts: 0,
        },
        raw_packet_caps: 0,
        tm_caps: ibv_tm_caps {
            max_rndv_hdr_size: 0,
            max_num_tags: 0,
            flags: 0,
            max_ops: 0,
            max_sge: 0,
        },
        cq_mod_caps: ibv_cq_moderation_caps {
            max_cq_count: 0,
            max_cq_period: 0,
        },
        max_dm_size: 0,
        pci_atomic_caps: ibv_pci_atomic_caps {
            fetch_add: 0,
            swap: 0,
            compare_swap: 0,
        },
        xrc_odp_caps: 0,
        phys_port_cnt_ex: 1,
    }
}

/// `ibv_query_port`.
pub fn port_attr(port: &PortAttr) -> ibv_port_attr {
    ibv_port_attr {
        state: IBV_PORT_ACTIVE,
        max_mtu: port.max_mtu.into(),
        active_mtu: port.active_mtu.into(),
        gid_tbl_len: port.gids.len().try_into().unwrap_or(c_int::MAX),
        port_cap_flags: IBV_PORT_IP_BASED_GIDS,
        max_msg_sz: port.max_msg_bytes,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        // 4X EDR, 100 Gbit/s: there is no wire, and programs divide by it
        active_width: 2,
        active_speed: 32,
        phys_state: PHYS_STATE_LINK_UP,
        link_layer: IBV_LINK_LAYER_ETHERNET,
        flags: 0,
        port_cap_flags2: 0,
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

/// What a key may allow. Hints (`IBV_ACCESS_OPTIONAL_RANGE`, relaxed ordering among them) may be ignored by their
/// definition; other flags that we do not know are refused.
pub fn access_from_c(access: u32) -> Result<Access, Errno> {
    let access = access & !IBV_ACCESS_OPTIONAL_RANGE;
    Access::from_bits(access).ok_or_else(|| unsupported("access flags beyond LOCAL_WRITE and REMOTE_*"))
}

/// What `ibv_modify_qp` is told.
pub fn modification(attr: &ibv_qp_attr, mask: c_int) -> Result<(QpAttrMask, QpAttr), Errno> {
    let mask = QpAttrMask::from_bits(mask as u32).ok_or(Errno::INVALID)?;
    let refused =
        QpAttrMask::ALT_PATH | QpAttrMask::PATH_MIG_STATE | QpAttrMask::CAP | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    if mask.intersects(refused) {
        return Err(unsupported("alternate paths, resizing and SQD events"));
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
        access_from_c(attr.qp_access_flags)?
    } else {
        Access::empty()
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
            av: address_from_c(&attr.ah_attr),
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

fn address_from_c(ah: &ibv_ah_attr) -> AddressVector {
    AddressVector {
        dgid: ah.grh.dgid.raw,
        sgid_index: ah.grh.sgid_index,
        hop_limit: ah.grh.hop_limit,
        traffic_class: ah.grh.traffic_class,
        flow_label: ah.grh.flow_label,
        sl: ah.sl,
        port_num: ah.port_num,
    }
}

fn address_to_c(av: &AddressVector) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: av.dgid },
            flow_label: av.flow_label,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        dlid: 0,
        sl: av.sl,
        src_path_bits: 0,
        static_rate: 0,
        is_global: 1,
        port_num: av.port_num,
    }
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
        en_sqd_async_notify: 0,
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
