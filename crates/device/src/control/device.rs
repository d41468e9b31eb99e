//! The device and its port.

use serde::{Deserialize, Serialize};

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

/// One entry of the port's GID table, RoCEv2 all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Gid {
    /// Network byte order; an IPv4 address is mapped (`::ffff:a.b.c.d`).
    pub gid: [u8; 16],
    /// The network interface's index.
    pub ifindex: u32,
}
