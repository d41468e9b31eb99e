//! What the RNIC tells about itself.

use verbatim_device::control::{DeviceAttr, Gid, PortAttr};
use verbatim_roce::{MAX_INLINE, MAX_MESSAGE, MAX_SGE};

use crate::config::{Limits, NicConfig};
use crate::interface::Interface;

/// The longest memory region in bytes: what fits a program's address space.
const MAX_MR_BYTES: u64 = 1 << 47;

/// The largest `enum ibv_mtu`.
const MTU_4096: u8 = 5;

/// The device and its only port.
#[derive(Debug)]
pub struct Device {
    pub interface: Interface,
    pub limits: Limits,
    pub attr: DeviceAttr,
    pub port: PortAttr,
}

impl Device {
    pub fn new(config: &NicConfig, interface: Interface) -> Self {
        let limits = config.limits.clone();
        let [a, b, c, d] = interface.address.octets();
        Self {
            attr: DeviceAttr {
                name: config.name.clone(),
                fw_ver: env!("CARGO_PKG_VERSION").to_owned(),
                // A locally administered EUI-64 (IEEE 802, bit 1 of the first octet) made of the address.
                node_guid: [0x02, 0, a, b, 0xff, 0xfe, c, d],
                max_mr_size: MAX_MR_BYTES,
                max_qp: limits.max_qp,
                max_qp_wr: limits.max_qp_wr,
                max_sge: MAX_SGE as u32,
                max_inline_data: MAX_INLINE as u32,
                max_cq: limits.max_cq,
                max_cqe: limits.max_cqe,
                max_mr: limits.max_mr,
                max_pd: limits.max_pd,
                max_qp_rd_atom: limits.max_rd_atomic,
                max_qp_init_rd_atom: limits.max_rd_atomic,
                ..DeviceAttr::default()
            },
            port: PortAttr {
                active_mtu: interface.active_mtu(),
                max_mtu: MTU_4096,
                gids: vec![Gid {
                    gid: interface.address.to_ipv6_mapped().octets(),
                    ifindex: 0,
                }],
                netdev: interface.name.clone(),
                max_msg_bytes: MAX_MESSAGE,
            },
            interface,
            limits,
        }
    }
}
