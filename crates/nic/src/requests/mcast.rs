//! Multicast: attaching datagram queue pairs to groups.

use verbatim_device::control::{QpType, Reply};
use verbatim_roce::UDP_PORT;

use super::{Desk, within};
use crate::context::Context;
use crate::error::Refused;
use crate::multicast::group_address;
use crate::poller::Token;
use crate::socket::UdpPort;

fn group(gid: [u8; 16]) -> Result<std::net::IpAddr, Refused> {
    group_address(gid).ok_or_else(|| {
        let address = std::net::Ipv6Addr::from(gid);
        Refused::invalid(format!("{address} is not the gid of a multicast group"))
    })
}

impl Desk<'_> {
    pub(super) fn attach_mcast(
        &mut self,
        id: u32,
        qpn: u32,
        gid: [u8; 16],
        context: &Context,
    ) -> Result<Reply, Refused> {
        let address = group(gid)?;
        if self.own_qp(qpn, id)?.qp_type != QpType::Ud {
            return Err(Refused::invalid(
                "only datagram queue pairs can be attached to a group",
            ));
        }
        if !self.objects.groups.is_attached(qpn, address) {
            let groups = |qpn| self.objects.qps.get(qpn).map_or(0, |qp| qp.groups as usize);
            let have = context.qps().map(groups).sum();
            let most = self.device.limits.per_program.max_mcast_attach;
            within(have, most, "memberships in multicast groups")?;
        }
        let (interface, buffer_bytes) = (&self.device.interface, self.device.limits.socket_buffer_bytes);
        let over = interface
            .addresses
            .iter()
            .find(|own| own.is_ipv4() == address.is_ipv4())
            .unwrap_or(&interface.addresses[0]);
        let open = || {
            UdpPort::join(address, *over, interface.index, UDP_PORT, buffer_bytes)
                .map_err(|error| Refused::new(libc::EINVAL, format!("{address} cannot be joined: {error}")))
        };
        let (number, new) = self.objects.groups.attach(qpn, address, open)?;
        if new {
            let group = self.objects.groups.get_mut(number).expect("just attached to");
            if group.members.len() == 1
                && let Err(error) = self.poller.add(&group.socket, Token::Group(number))
            {
                self.objects.groups.detach(qpn, address);
                return Err(Refused::new(libc::ENOMEM, error.to_string()));
            }
            self.own_qp(qpn, id)?.groups += 1;
        }
        Ok(Reply::Done)
    }

    pub(super) fn detach_mcast(&mut self, id: u32, qpn: u32, gid: [u8; 16]) -> Result<Reply, Refused> {
        let address = group(gid)?;
        self.own_qp(qpn, id)?;
        if !self.objects.groups.detach(qpn, address) {
            return Err(Refused::invalid(format!(
                "queue pair {qpn:#x} is not attached to {address}"
            )));
        }
        self.own_qp(qpn, id)?.groups -= 1;
        Ok(Reply::Done)
    }
}
