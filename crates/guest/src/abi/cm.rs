//! `<rdma/rdma_user_cm.h>`, ABI version 4: what librdmacm writes to its device. Sources: that header and `<rdma/ib_user_sa.h>`,
//! `<rdma/ib_user_verbs.h>`.
//!
//! A command is a [`rdma_ucm_cmd_hdr`] and one of the structures below; `in` and `out` are the lengths of what follows, and of what
//! may be written to where `response` points. Structures only grow at their ends.

use super::c_structs;

pub const RDMA_USER_CM_CMD_CREATE_ID: u32 = 0;
pub const RDMA_USER_CM_CMD_DESTROY_ID: u32 = 1;
pub const RDMA_USER_CM_CMD_BIND_IP: u32 = 2;
pub const RDMA_USER_CM_CMD_RESOLVE_IP: u32 = 3;
pub const RDMA_USER_CM_CMD_RESOLVE_ROUTE: u32 = 4;
pub const RDMA_USER_CM_CMD_QUERY_ROUTE: u32 = 5;
pub const RDMA_USER_CM_CMD_CONNECT: u32 = 6;
pub const RDMA_USER_CM_CMD_LISTEN: u32 = 7;
pub const RDMA_USER_CM_CMD_ACCEPT: u32 = 8;
pub const RDMA_USER_CM_CMD_REJECT: u32 = 9;
pub const RDMA_USER_CM_CMD_DISCONNECT: u32 = 10;
pub const RDMA_USER_CM_CMD_INIT_QP_ATTR: u32 = 11;
pub const RDMA_USER_CM_CMD_GET_EVENT: u32 = 12;
pub const RDMA_USER_CM_CMD_SET_OPTION: u32 = 14;
pub const RDMA_USER_CM_CMD_NOTIFY: u32 = 15;
pub const RDMA_USER_CM_CMD_JOIN_IP_MCAST: u32 = 16;
pub const RDMA_USER_CM_CMD_LEAVE_MCAST: u32 = 17;
pub const RDMA_USER_CM_CMD_MIGRATE_ID: u32 = 18;
pub const RDMA_USER_CM_CMD_QUERY: u32 = 19;
pub const RDMA_USER_CM_CMD_BIND: u32 = 20;
pub const RDMA_USER_CM_CMD_RESOLVE_ADDR: u32 = 21;
pub const RDMA_USER_CM_CMD_JOIN_MCAST: u32 = 22;

pub const RDMA_USER_CM_QUERY_ADDR: u32 = 0;
pub const RDMA_USER_CM_QUERY_PATH: u32 = 1;
pub const RDMA_USER_CM_QUERY_GID: u32 = 2;

pub const RDMA_MAX_PRIVATE_DATA: usize = 256;

/// `RDMA_MC_JOIN_FLAG_FULLMEMBER`
pub const RDMA_MC_JOIN_FLAG_FULLMEMBER: u16 = 0;

/// `AF_IB`
pub const AF_IB: u16 = 27;

/// `ib_path_rec_data` flags: the path for both directions of a primary path, and of management packets.
pub const IB_PATH_GMP: u32 = 1;
pub const IB_PATH_PRIMARY: u32 = 1 << 1;
pub const IB_PATH_OUTBOUND: u32 = 1 << 3;
pub const IB_PATH_INBOUND_REVERSE: u32 = 1 << 5;
pub const IB_PATH_BIDIRECTIONAL: u32 = IB_PATH_OUTBOUND | IB_PATH_INBOUND_REVERSE;

/// `struct sockaddr_in6`, or the beginning of a `struct __kernel_sockaddr_storage`: four-byte alignment, as there.
pub type sockaddr_bytes = [u32; 7];

/// `struct __kernel_sockaddr_storage`: eight-byte alignment, as there.
pub type storage_bytes = [u64; 16];

c_structs! { LAYOUTS:
    rdma_ucm_cmd_hdr {
        cmd: u32,
        r#in: u16,
        out: u16,
    }
    rdma_ucm_create_id {
        uid: u64,
        response: u64,
        ps: u16,
        qp_type: u8,
        reserved: [u8; 5],
    }
    rdma_ucm_create_id_resp {
        id: u32,
    }
    rdma_ucm_destroy_id {
        response: u64,
        id: u32,
        reserved: u32,
    }
    rdma_ucm_destroy_id_resp {
        events_reported: u32,
    }
    rdma_ucm_bind_ip {
        response: u64,
        addr: sockaddr_bytes,
        id: u32,
    }
    rdma_ucm_bind {
        id: u32,
        addr_size: u16,
        reserved: u16,
        addr: storage_bytes,
    }
    rdma_ucm_resolve_ip {
        src_addr: sockaddr_bytes,
        dst_addr: sockaddr_bytes,
        id: u32,
        timeout_ms: u32,
    }
    rdma_ucm_resolve_addr {
        id: u32,
        timeout_ms: u32,
        src_size: u16,
        dst_size: u16,
        reserved: u32,
        src_addr: storage_bytes,
        dst_addr: storage_bytes,
    }
    rdma_ucm_resolve_route {
        id: u32,
        timeout_ms: u32,
    }
    rdma_ucm_query {
        response: u64,
        id: u32,
        option: u32,
    }
    ib_user_path_rec {
        dgid: [u8; 16],
        sgid: [u8; 16],
        dlid: u16,
        slid: u16,
        raw_traffic: u32,
        flow_label: u32,
        reversible: u32,
        mtu: u32,
        pkey: u16,
        hop_limit: u8,
        traffic_class: u8,
        numb_path: u8,
        sl: u8,
        mtu_selector: u8,
        rate_selector: u8,
        rate: u8,
        packet_life_time_selector: u8,
        packet_life_time: u8,
        preference: u8,
    }
    rdma_ucm_query_route_resp {
        node_guid: u64,
        ib_route: [ib_user_path_rec; 2],
        src_addr: sockaddr_bytes,
        dst_addr: sockaddr_bytes,
        num_paths: u32,
        port_num: u8,
        reserved: [u8; 3],
        ibdev_index: u32,
        reserved1: u32,
    }
    rdma_ucm_query_addr_resp {
        node_guid: u64,
        port_num: u8,
        reserved: u8,
        pkey: u16,
        src_size: u16,
        dst_size: u16,
        src_addr: storage_bytes,
        dst_addr: storage_bytes,
        ibdev_index: u32,
        reserved1: u32,
    }
    ib_path_rec_data {
        flags: u32,
        reserved: u32,
        path_rec: [u32; 16],
    }
    rdma_ucm_conn_param {
        qp_num: u32,
        qkey: u32,
        private_data: [u8; RDMA_MAX_PRIVATE_DATA],
        private_data_len: u8,
        srq: u8,
        responder_resources: u8,
        initiator_depth: u8,
        flow_control: u8,
        retry_count: u8,
        rnr_retry_count: u8,
        valid: u8,
    }
    ib_uverbs_global_route {
        dgid: [u8; 16],
        flow_label: u32,
        sgid_index: u8,
        hop_limit: u8,
        traffic_class: u8,
        reserved: u8,
    }
    ib_uverbs_ah_attr {
        grh: ib_uverbs_global_route,
        dlid: u16,
        sl: u8,
        src_path_bits: u8,
        static_rate: u8,
        is_global: u8,
        port_num: u8,
        reserved: u8,
    }
    rdma_ucm_ud_param {
        qp_num: u32,
        qkey: u32,
        ah_attr: ib_uverbs_ah_attr,
        private_data: [u8; RDMA_MAX_PRIVATE_DATA],
        private_data_len: u8,
        reserved: [u8; 7],
    }
    rdma_ucm_ece {
        vendor_id: u32,
        attr_mod: u32,
    }
    rdma_ucm_connect {
        conn_param: rdma_ucm_conn_param,
        id: u32,
        reserved: u32,
        ece: rdma_ucm_ece,
    }
    rdma_ucm_listen {
        id: u32,
        backlog: u32,
    }
    rdma_ucm_accept {
        uid: u64,
        conn_param: rdma_ucm_conn_param,
        id: u32,
        reserved: u32,
        ece: rdma_ucm_ece,
    }
    rdma_ucm_reject {
        id: u32,
        private_data_len: u8,
        reason: u8,
        reserved: [u8; 2],
        private_data: [u8; RDMA_MAX_PRIVATE_DATA],
    }
    rdma_ucm_disconnect {
        id: u32,
    }
    rdma_ucm_init_qp_attr {
        response: u64,
        id: u32,
        qp_state: u32,
    }
    ib_uverbs_qp_attr {
        qp_attr_mask: u32,
        qp_state: u32,
        cur_qp_state: u32,
        path_mtu: u32,
        path_mig_state: u32,
        qkey: u32,
        rq_psn: u32,
        sq_psn: u32,
        dest_qp_num: u32,
        qp_access_flags: u32,
        ah_attr: ib_uverbs_ah_attr,
        alt_ah_attr: ib_uverbs_ah_attr,
        max_send_wr: u32,
        max_recv_wr: u32,
        max_send_sge: u32,
        max_recv_sge: u32,
        max_inline_data: u32,
        pkey_index: u16,
        alt_pkey_index: u16,
        en_sqd_async_notify: u8,
        sq_draining: u8,
        max_rd_atomic: u8,
        max_dest_rd_atomic: u8,
        min_rnr_timer: u8,
        port_num: u8,
        timeout: u8,
        retry_cnt: u8,
        rnr_retry: u8,
        alt_port_num: u8,
        alt_timeout: u8,
        reserved: [u8; 5],
    }
    rdma_ucm_notify {
        id: u32,
        event: u32,
    }
    rdma_ucm_join_ip_mcast {
        response: u64,
        uid: u64,
        addr: sockaddr_bytes,
        id: u32,
    }
    rdma_ucm_join_mcast {
        response: u64,
        uid: u64,
        id: u32,
        addr_size: u16,
        join_flags: u16,
        addr: storage_bytes,
    }
    rdma_ucm_get_event {
        response: u64,
    }
    /// `param` is a union, here its longest member.
    rdma_ucm_event_resp {
        uid: u64,
        id: u32,
        event: u32,
        status: u32,
        param: rdma_ucm_ud_param,
        reserved: u32,
        ece: rdma_ucm_ece,
    }
    rdma_ucm_set_option {
        optval: u64,
        id: u32,
        level: u32,
        optname: u32,
        optlen: u32,
    }
    rdma_ucm_migrate_id {
        response: u64,
        id: u32,
        fd: u32,
    }
    rdma_ucm_migrate_resp {
        events_reported: u32,
    }
}

/// `struct rdma_ucm_query_path_resp` with the one path that there is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_ucm_query_path_resp {
    pub num_paths: u32,
    pub reserved: u32,
    pub path_data: ib_path_rec_data,
}

const _: () = {
    assert!(size_of::<rdma_ucm_event_resp>() == 336);
    assert!(size_of::<rdma_ucm_conn_param>() == 272);
    assert!(size_of::<rdma_ucm_ud_param>() == 304);
    assert!(size_of::<ib_uverbs_qp_attr>() == 144);
    assert!(size_of::<rdma_ucm_query_route_resp>() == 208);
    assert!(size_of::<rdma_ucm_query_path_resp>() == 80);
    assert!(align_of::<storage_bytes>() == 8);
};
