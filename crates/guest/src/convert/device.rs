//! What the device and its port tell.

use std::ffi::{c_int, c_uint};

use verbatim_verbs::{DeviceAttr, PortAttr};

use crate::abi::*;
use crate::ffi::fill;

/// `vendor_id` of a device without a vendor.
const NO_VENDOR: u32 = 0xff_ffff;

/// Timestamps are nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

/// Entries that the GID table has at least, most of them empty: addresses come and go.
const GID_TABLE_ENTRIES: usize = 16;

/// What the RNIC can do, and nothing else. `MEM_MGT_EXTENSIONS` stands for local and remote invalidation and windows of
/// type 2.
fn capabilities(device: &DeviceAttr) -> c_uint {
    let always = IBV_DEVICE_CURR_QP_STATE_MOD | IBV_DEVICE_SYS_IMAGE_GUID | IBV_DEVICE_RC_RNR_NAK_GEN;
    let windows = IBV_DEVICE_MEM_WINDOW | IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    if device.max_mw > 0 {
        always | windows
    } else {
        always
    }
}

/// `gid_tbl_len`.
pub fn gid_table_entries(port: &PortAttr) -> usize {
    port.gids.len().max(GID_TABLE_ENTRIES)
}

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
        // We are nobody's hardware. The number is the kernel's for its own software RNIC, since some programs take 0 for
        // an error; those that tune by it take their defaults.
        vendor_id: NO_VENDOR,
        vendor_part_id: 0,
        hw_ver: 0,
        max_qp: int(device.max_qp),
        max_qp_wr: int(device.max_qp_wr),
        device_cap_flags: capabilities(device),
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
        atomic_cap: IBV_ATOMIC_HCA,
        max_ee: 0,
        max_rdd: 0,
        max_mw: int(device.max_mw),
        max_raw_ipv6_qp: 0,
        max_raw_ethy_qp: 0,
        max_mcast_grp: int(device.max_mcast_grp),
        max_mcast_qp_attach: int(device.max_mcast_qp_attach),
        max_total_mcast_qp_attach: int(device.max_mcast_grp.saturating_mul(device.max_mcast_qp_attach)),
        max_ah: int(device.max_ah),
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: int(device.max_srq),
        max_srq_wr: int(device.max_srq_wr),
        max_srq_sge: int(device.max_srq_sge),
        max_pkeys: 1,
        local_ca_ack_delay: 15,
        phys_port_cnt: 1,
    };
    fill(&mut attr.fw_ver, &device.fw_ver);
    attr
}

/// `ibv_query_device_ex`: the same, the clock of timestamps, on-chip memory, and that there is nothing beyond them.
pub fn device_attr_ex(device: &DeviceAttr) -> ibv_device_attr_ex {
    ibv_device_attr_ex {
        orig_attr: device_attr(device),
        comp_mask: 0,
        odp_caps: ibv_odp_caps {
            general_caps: 0,
            per_transport_caps: [0; 3],
        },
        completion_timestamp_mask: u64::MAX,
        hca_core_clock: CLOCK_KHZ,
        device_cap_flags_ex: u64::from(capabilities(device)) | IBV_DEVICE_ATOMIC_WRITE,
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
        max_dm_size: device.max_dm_size,
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
        gid_tbl_len: gid_table_entries(port).try_into().unwrap_or(c_int::MAX),
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
        flags: IBV_QPF_GRH_REQUIRED,
        port_cap_flags2: 0,
    }
}
