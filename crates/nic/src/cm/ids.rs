//! Ids of programs (`struct rdma_cm_id`), and memberships of multicast groups.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use verbatim_cm::{CommId, Path, PortSpace};
use verbatim_device::control::QpType;
use verbatim_roce::{Psn, Time};

use super::Manager;
use super::channels::Waiting;
use super::ports::{Holder, Sharing};
use super::programs::Kind;
use crate::error::Refused;

/// How far an id is, as far as the communication manager does not know (`enum rdma_cm_state`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    Idle,
    Bound,
    AddressResolved,
    RouteResolved,
    Listening,
    /// It asks a peer, or a peer has asked: the rest is the communication manager's.
    Connecting,
}

/// An id.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Id {
    pub context: u32,
    /// What its program calls it.
    pub name: u32,
    pub channel: u32,
    pub uid: u64,
    pub space: PortSpace,
    pub qp_type: QpType,
    pub stage: Stage,
    pub source: Option<SocketAddr>,
    pub destination: Option<SocketAddr>,
    /// It has this port: those that peers have asked for have none of their own.
    pub port: Option<u16>,
    pub sharing: Sharing,
    pub traffic_class: u8,
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`.
    pub ack_timeout: Option<u8>,
    /// The way as the program knows it, once the id belongs to the device.
    pub path: Option<Path>,
    /// From which PSN the peer is to send.
    pub psn: Psn,
    /// The queue key of datagrams.
    pub qkey: u32,
    pub comm: Option<CommId>,
    /// A peer has asked for it.
    pub is_asked: bool,
    /// Events that the program was told.
    pub reported: u32,
    pub memberships: Vec<u32>,
}

/// A membership of a multicast group.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Membership {
    pub context: u32,
    /// What its program calls it.
    pub name: u32,
    pub id: u32,
    pub reported: u32,
}

/// `RDMA_UDP_QKEY`: the queue key where a program names none.
pub const DEFAULT_QKEY: u32 = 0x0123_4567;

impl Id {
    pub fn new(context: u32, channel: u32, uid: u64, space: PortSpace, qp_type: QpType) -> Self {
        Self {
            context,
            name: 0,
            channel,
            uid,
            space,
            qp_type,
            stage: Stage::Idle,
            source: None,
            destination: None,
            port: None,
            sharing: Sharing::default(),
            traffic_class: 0,
            ack_timeout: None,
            path: None,
            psn: Psn::new(rand::random()),
            qkey: DEFAULT_QKEY,
            comm: None,
            is_asked: false,
            reported: 0,
            memberships: Vec::new(),
        }
    }

    pub fn is_datagrams(&self) -> bool {
        self.qp_type == QpType::Ud
    }
}

impl Manager {
    /// An id of this context.
    pub fn own_id(&mut self, id: u32, context: u32) -> Result<&mut Id, Refused> {
        let known = self.ids.get_mut(id).filter(|known| known.context == context);
        // The kernel's errno for numbers that are no ids.
        known.ok_or_else(|| Refused::new(libc::ENOENT, format!("this context has no rdma_cm id {id}")))
    }

    /// The machine's id of it.
    pub fn own_comm(&mut self, id: u32, context: u32) -> Result<CommId, Refused> {
        let comm = self.own_id(id, context)?.comm;
        comm.ok_or_else(|| {
            Refused::invalid(format!(
                "rdma_cm id {id} asks nobody, and nobody has asked for it"
            ))
        })
    }

    /// Removes an id and all that belongs to it. Gives how many events the program was told of it, and whether its channel has
    /// become quiet by that.
    pub fn remove_id(&mut self, now: Time, number: u32) -> (u32, bool) {
        let Some(id) = self.ids.remove(number) else {
            return (0, false);
        };
        if let Some(comm) = id.comm {
            self.by_comm.remove(&comm);
            // It has gone by itself, at worst.
            let _ = self.machine.destroy(now, comm);
        }
        if let Some(port) = id.port {
            self.ports.release(id.space, Holder::Id(number), port);
        }
        for membership in &id.memberships {
            self.remove_membership(*membership);
        }
        self.programs.forget(id.context, Kind::Id, id.name);
        let Some(channel) = self.channels.get_mut(id.channel) else {
            return (id.reported, false);
        };
        channel.ids.remove(&number);
        let (gone, quiet) = channel.take_out(|waiting| waiting.counts == number || waiting.id == number);
        self.remove_requests(now, number, gone);
        (id.reported, quiet)
    }

    /// What peers have asked for and no program knows of goes with the events that would have told it.
    fn remove_requests(&mut self, now: Time, listener: u32, events: Vec<Waiting>) {
        for event in events {
            if event.request.is_some() && event.id != listener {
                self.remove_id(now, event.id);
            }
        }
    }

    /// Adds an id to its channel, under a name that its program has no other id under; `ENOMEM` if there are as many as there may
    /// be.
    pub fn add_id(&mut self, mut id: Id) -> Result<u32, Refused> {
        let context = id.context;
        let have = self.programs.count(context);
        if have >= self.most_of_context {
            return Err(Refused::new(
                libc::ENOMEM,
                format!("this program has {have} rdma_cm ids, and may have no more"),
            ));
        }
        if id.name == 0 {
            id.name = self.programs.free_name(context, Kind::Id);
        }
        let (name, channel) = (id.name, id.channel);
        let number = self
            .ids
            .insert_with(|_, _| id)
            .ok_or_else(|| Refused::new(libc::ENOMEM, "no rdma_cm id is left"))?;
        self.programs.name(context, Kind::Id, name, number);
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.ids.insert(number);
        }
        Ok(number)
    }

    /// What an id's program calls it.
    pub fn name_of(&self, id: u32) -> u32 {
        self.ids.get(id).map_or(0, |id| id.name)
    }

    /// Removes a membership; what it was.
    pub fn remove_membership(&mut self, number: u32) -> Option<Membership> {
        let membership = self.memberships.remove(number)?;
        let Membership { context, name, .. } = membership;
        self.programs.forget(context, Kind::Membership, name);
        Some(membership)
    }

    /// Removes a channel and its ids.
    pub fn remove_channel(&mut self, now: Time, number: u32) {
        let Some(channel) = self.channels.get_mut(number) else {
            return;
        };
        for id in std::mem::take(&mut channel.ids) {
            self.remove_id(now, id);
        }
        self.channels.remove(number);
    }
}
