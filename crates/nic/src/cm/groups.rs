//! Memberships of multicast groups, which say to programs what to attach their queue pairs to.

use std::net::IpAddr;

use verbatim_device::control::{CmDatagrams, CmDetails, CmEvent, CmReply};

use super::Manager;
use super::channels::Waiting;
use super::ids::Membership;
use super::notices::{address_vector, event};
use super::programs::Kind;
use super::requests::Asking;
use crate::error::Refused;
use crate::multicast::group_address;

/// The queue pair number of a multicast group (IBA Vol 1 §10.5).
const MULTICAST_QPN: u32 = 0xff_ffff;

impl Manager {
    /// Joins a group: the program attaches its queue pair to it when it is told (`ibv_attach_mcast`).
    pub fn join(
        &mut self,
        id: u32,
        uid: u64,
        address: IpAddr,
        asking: &Asking<'_>,
    ) -> Result<CmReply, Refused> {
        let gids = self.ways(asking).gids();
        let known = self.own_id(id, asking.context)?;
        let mgid = verbatim_cm::Gid::from(address);
        let Some(group) = group_address(mgid.0) else {
            return Err(Refused::invalid(format!(
                "{address} is not the address of a multicast group"
            )));
        };
        let (Some(path), true) = (known.path, known.is_datagrams()) else {
            return Err(Refused::invalid(
                "only an id of datagrams that has an address of the RNIC joins a group",
            ));
        };
        if path.local.ip().is_ipv4() != group.is_ipv4() {
            return Err(Refused::invalid(
                "the group is of another family than the id's address",
            ));
        }
        let way = verbatim_cm::Path { remote: mgid, ..path };
        let (channel, qkey) = (known.channel, known.qkey);
        let name = self.programs.free_name(asking.context, Kind::Membership);
        let membership = Membership {
            context: asking.context,
            name,
            id,
            reported: 0,
        };
        let number = self
            .memberships
            .insert_with(|_, _| membership)
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no membership of a group is left"))?;
        self.programs.name(asking.context, Kind::Membership, name, number);
        let known = self.own_id(id, asking.context)?;
        known.memberships.push(number);
        let id_name = known.name;
        let waiting = Waiting {
            id,
            counts: id,
            membership: Some(number),
            request: None,
            event: CmEvent {
                uid,
                id: id_name,
                event: event::MULTICAST_JOIN,
                status: 0,
                details: CmDetails::Datagrams(CmDatagrams {
                    qp_num: MULTICAST_QPN,
                    qkey,
                    av: address_vector(&way, &gids),
                    private_data: Vec::new(),
                }),
            },
        };
        self.tell(channel, waiting);
        Ok(CmReply::Id { id: name })
    }

    /// Leaves it.
    pub fn leave(&mut self, number: u32, context: u32) -> Result<CmReply, Refused> {
        let known = self
            .memberships
            .get(number)
            .filter(|known| known.context == context);
        let id = known
            .ok_or_else(|| Refused::new(libc::ENOENT, format!("there is no membership {number}")))?
            .id;
        let events = self
            .remove_membership(number)
            .map_or(0, |membership| membership.reported);
        let known = self.own_id(id, context)?;
        known.memberships.retain(|membership| *membership != number);
        let channel = known.channel;
        let channel = self.own_channel(channel, context)?;
        let (_, quiet) = channel.take_out(|waiting| waiting.membership == Some(number));
        Ok(CmReply::Reported { events, quiet })
    }
}
