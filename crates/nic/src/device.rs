//! What the RNIC tells about itself.

use std::net::IpAddr;

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
    /// What is registered, and queues, stay in memory.
    pub locked: bool,
    pub attr: DeviceAttr,
    pub port: PortAttr,
}

impl Device {
    /// `gids` are the interface's addresses that the RNIC has sockets for.
    pub fn new(config: &NicConfig, interface: Interface, gids: &[IpAddr]) -> Self {
        let limits = config.limits.clone();
        let one = &limits.per_program;
        let share = |all: u32| limits.tenants.share(all.into()) as u32;
        Self {
            attr: DeviceAttr {
                name: config.name.clone(),
                fw_ver: env!("CARGO_PKG_VERSION").to_owned(),
                node_guid: guid(interface.address()),
                max_mr_size: MAX_MR_BYTES,
                max_qp: one.max_qp.min(share(limits.max_qp)),
                max_qp_wr: limits.max_qp_wr,
                max_sge: MAX_SGE as u32,
                max_inline_data: MAX_INLINE as u32,
                max_cq: one.max_cq.min(share(limits.max_cq)),
                max_cqe: u64::from(limits.max_cqe).min(one.max_cqes) as u32,
                max_mr: one.max_mr.min(share(limits.max_mr)),
                max_pd: one.max_pd.min(share(limits.max_pd)),
                max_qp_rd_atom: limits.max_rd_atomic,
                max_qp_init_rd_atom: limits.max_rd_atomic,
                max_srq: one.max_srq.min(share(limits.max_srq)),
                max_srq_wr: limits.max_qp_wr,
                max_srq_sge: MAX_SGE as u32,
                max_ah: one.max_ah.min(share(limits.max_ah)),
                max_mw: one.max_mw.min(share(limits.max_mw)),
                max_mcast_grp: one.max_mcast_attach.min(limits.max_mcast_grp),
                max_mcast_qp_attach: one.max_mcast_attach.min(one.max_qp).min(limits.max_qp),
                max_dm_size: limits.max_dm_bytes,
            },
            port: PortAttr {
                active_mtu: interface.active_mtu(),
                max_mtu: MTU_4096,
                gids: gids
                    .iter()
                    .map(|address| Gid {
                        gid: gid(*address),
                        ifindex: interface.index,
                    })
                    .collect(),
                netdev: interface.name.clone(),
                max_msg_bytes: MAX_MESSAGE,
            },
            interface,
            locked: config.locked,
            limits,
        }
    }
}

impl Device {
    /// Takes over what the MTU of the host's link allows now.
    pub fn follow_link(&mut self) {
        // One that has gone has none; packets say so.
        let Ok(mtu) = self.interface.mtu_now() else {
            return;
        };
        if mtu == self.interface.mtu {
            return;
        }
        self.interface.mtu = mtu;
        let (before, now) = (self.port.active_mtu, self.interface.active_mtu());
        self.port.active_mtu = now;
        let interface = &self.interface.name;
        match now < before {
            true => tracing::warn!(
                interface,
                mtu,
                active_mtu = 128 << now,
                before = 128 << before,
                "the MTU of the link has fallen, and active_mtu with it: packets of queue pairs with a larger path MTU do not leave"
            ),
            false => tracing::info!(
                interface,
                mtu,
                active_mtu = 128 << now,
                "the MTU of the link is another"
            ),
        }
    }
}

/// An address as a GID: IPv6, or IPv4 mapped into it.
pub fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// A locally administered EUI-64 (IEEE 802, bit 1 of the first octet) made of the address.
fn guid(address: IpAddr) -> [u8; 8] {
    let [.., a, b, c, d] = gid(address);
    [0x02, 0, a, b, 0xff, 0xfe, c, d]
}
