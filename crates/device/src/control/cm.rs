//! What a program's librdmacm asks of the kernel, asked of the RNIC: connections by address and port.
//!
//! These are the commands of `<rdma/rdma_user_cm.h>` without their memory layouts, which the guest library knows. Numbers of
//! events, options and port spaces are those of that header and of `<rdma/rdma_cma.h>`. Errors carry the errno that the
//! kernel gives.
//!
//! A *channel* is what a program has as an open `/dev/infiniband/rdma_cm`; an *id* belongs to one channel. Events wait in
//! the RNIC. While there are some, one message, [`CmNews`], lies in the channel's socket, so that its descriptor is readable: an
//! answer that says [`quiet`](CmReply::Event::quiet) has taken the last event away, and whoever gets it takes one message out.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use verbatim_seqpacket::Carried;

use super::{AddressVector, QpAttr, QpAttrMask, QpState};

/// The first version with [`Request::Cm`](super::Request::Cm).
pub const CM_VERSION: u32 = 12;

/// The most bytes of private data in a request or an event.
pub const CM_MAX_PRIVATE_DATA: usize = 256;

/// The most bytes of [`CmReply::Bytes`] and of what requests carry in the same way.
pub const MOST_CM_BYTES: u64 = 64 << 20;

/// More of them than so many come in a descriptor.
pub const MOST_CM_BYTES_HERE: usize = 16 << 10;

/// A request of a program's librdmacm, or of one that moves with what it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmRequest {
    /// Comes with one descriptor: a `SOCK_SEQPACKET` Unix socket for [`CmNews`]. Answered by [`CmReply::Channel`].
    CreateChannel,
    /// All its ids go, their connections with them. Answered by [`CmReply::Done`].
    DestroyChannel {
        /// Which.
        channel: u32,
    },
    /// The oldest event of a channel. Answered by [`CmReply::Event`]; `EAGAIN` if there is none.
    GetEvent {
        /// Which channel.
        channel: u32,
    },
    /// Answered by [`CmReply::Id`].
    CreateId {
        /// Where its events go.
        channel: u32,
        /// What its events say.
        uid: u64,
        /// `enum rdma_ucm_port_space`.
        port_space: u16,
        /// `enum ibv_qp_type`.
        qp_type: u8,
    },
    /// Answered by [`CmReply::Reported`]; events that nobody has taken are left out.
    DestroyId {
        /// Which.
        id: u32,
    },
    /// Gives an id its own address and port; port 0 is one that the RNIC chooses. Answered by [`CmReply::Done`].
    Bind {
        /// Which.
        id: u32,
        /// Own address of the RNIC, or the unspecified one.
        address: SocketAddr,
    },
    /// Finds the way to an address. Answered by [`CmReply::Done`], and an event later.
    ResolveAddress {
        /// Which.
        id: u32,
        /// Own address, of an id that was not bound.
        source: Option<SocketAddr>,
        /// The other end.
        destination: SocketAddr,
        /// For how long to try.
        timeout_ms: u32,
    },
    /// Answered by [`CmReply::Done`], and an event later.
    ResolveRoute {
        /// Which.
        id: u32,
        /// For how long to try.
        timeout_ms: u32,
    },
    /// Answered by [`CmReply::Route`].
    Query {
        /// Which.
        id: u32,
    },
    /// Answered by [`CmReply::Done`].
    Listen {
        /// Which.
        id: u32,
        /// Connections that may wait to be accepted.
        backlog: u32,
    },
    /// Answered by [`CmReply::Done`], and an event later.
    Connect {
        /// Which.
        id: u32,
        /// The connection.
        parameters: CmParameters,
    },
    /// Answered by [`CmReply::Done`].
    Accept {
        /// Which.
        id: u32,
        /// What its events say from now on, if the program knows the id only now.
        uid: u64,
        /// The connection; none from the side that has connected.
        parameters: Option<CmParameters>,
    },
    /// Answered by [`CmReply::Done`].
    Reject {
        /// Which.
        id: u32,
        /// Why (IBA Vol 1 table 111); 0 is 28, "consumer reject".
        reason: u8,
        /// For the other side.
        private_data: Vec<u8>,
    },
    /// Answered by [`CmReply::Done`], and events later.
    Disconnect {
        /// Which.
        id: u32,
    },
    /// What to modify a queue pair with, to bring it into a state. Answered by [`CmReply::QpAttr`].
    InitQpAttr {
        /// Which.
        id: u32,
        /// The state.
        state: QpState,
    },
    /// Answered by [`CmReply::Done`].
    SetOption {
        /// Which.
        id: u32,
        /// `RDMA_OPTION_ID` or another.
        level: u32,
        /// Which option of that level.
        name: u32,
        /// Its value as the program wrote it.
        value: Vec<u8>,
    },
    /// Something has happened to the id's queue pair, `IBV_EVENT_COMM_EST`. Answered by [`CmReply::Done`].
    Notify {
        /// Which.
        id: u32,
        /// `enum ibv_event_type`.
        event: u32,
    },
    /// Joins a multicast group. Answered by [`CmReply::Id`], the membership's, and an event later.
    JoinMulticast {
        /// Which.
        id: u32,
        /// What the event says.
        uid: u64,
        /// The group.
        address: SocketAddr,
    },
    /// Answered by [`CmReply::Reported`].
    LeaveMulticast {
        /// The membership.
        membership: u32,
    },
    /// An id and its events go to another channel. Answered by [`CmReply::Reported`], of the channel where it was.
    MigrateId {
        /// Which.
        id: u32,
        /// Where to.
        channel: u32,
    },
    /// Before the first id of a program that has moved: the RNIC that it knows. It goes on under that one's addresses. Answered by
    /// [`CmReply::Done`].
    Know {
        /// That RNIC's.
        node_guid: [u8; 8],
        /// Its GID table.
        gids: Vec<[u8; 16]>,
    },
    /// What the ids of this context need at another RNIC, to go on there: for [`CmRequest::Reserve`]. Answered by
    /// [`CmReply::Bytes`].
    Describe,
    /// From root of the host, on a new context for a program that comes: keeps free what its ids need. Answered by
    /// [`CmReply::Done`]; `EADDRNOTAVAIL` or `EADDRINUSE` if that is somebody else's here, `ENOMEM` if there is no room.
    Reserve {
        /// What [`CmRequest::Describe`] says where the program is.
        needs: Carried,
        /// The GID of that host: what comes there for the ids it may pass on.
        from: [u8; 16],
    },
    /// All ids of a parked context, with their events. Answered by [`CmReply::Bytes`]; `EBUSY` if it is not parked.
    Dump,
    /// On a context with a reservation: the ids of [`CmRequest::Dump`] go on here. Answered by [`CmReply::Adopted`].
    Adopt {
        /// The bytes.
        image: Carried,
    },
    /// Comes with one descriptor, as [`CmRequest::CreateChannel`]: the end of a channel that has come by [`CmRequest::Adopt`]. Nothing
    /// is sent for events that it has already. Answered by [`CmReply::Attached`].
    AttachChannel {
        /// Which.
        channel: u32,
    },
    /// Of a parked context: once it is gone without having been attached again, what comes for its ids is passed on to this host.
    /// Answered by [`CmReply::Done`].
    SendOn {
        /// The host's GID.
        to: [u8; 16],
    },
}

/// What the RNIC answers to a [`CmRequest`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmReply {
    /// It is done.
    Done,
    /// A channel.
    Channel {
        /// Its number.
        channel: u32,
    },
    /// An id or a membership.
    Id {
        /// Its number, at most 65,535.
        id: u32,
    },
    /// What is gone from a channel.
    Reported {
        /// Events of it that the program was told.
        events: u32,
        /// The channel has no more events, and had some.
        quiet: bool,
    },
    /// An event.
    Event {
        /// What happened.
        event: CmEvent,
        /// The channel has no more events.
        quiet: bool,
    },
    /// Addresses and the way.
    Route(CmRoute),
    /// For `ibv_modify_qp`.
    QpAttr {
        /// Which attributes count.
        mask: QpAttrMask,
        /// Their values.
        attr: QpAttr,
    },
    /// What only RNICs understand. If it is long, it comes in a descriptor.
    Bytes(Carried),
    /// The ids are here.
    Adopted {
        /// The channels: the number where they were, and the number here.
        channels: Vec<(u32, u32)>,
    },
    /// The channel has its end.
    Attached {
        /// It has events.
        waiting: bool,
    },
}

/// `struct rdma_conn_param`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[allow(
    missing_docs,
    reason = "the names and meanings are those of struct rdma_conn_param"
)]
pub struct CmParameters {
    pub qp_num: u32,
    pub qkey: u32,
    pub private_data: Vec<u8>,
    pub srq: bool,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
}

/// `struct rdma_ud_param`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[allow(
    missing_docs,
    reason = "the names and meanings are those of struct rdma_ud_param"
)]
pub struct CmDatagrams {
    pub qp_num: u32,
    pub qkey: u32,
    pub av: AddressVector,
    pub private_data: Vec<u8>,
}

/// What belongs to an event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CmDetails {
    /// Nothing.
    None,
    /// Of a connection.
    Connection(CmParameters),
    /// Of datagrams, or of a multicast group.
    Datagrams(CmDatagrams),
}

/// Something happened to an id.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmEvent {
    /// The id's; of a new connection, the listening id's.
    pub uid: u64,
    /// Which id; of a new connection, its own.
    pub id: u32,
    /// `enum rdma_cm_event_type`.
    pub event: u32,
    /// 0, a negative errno, or why the other side rejected.
    pub status: i32,
    /// What belongs to it.
    pub details: CmDetails,
}

/// Where an id is and leads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmRoute {
    /// Own address and port.
    pub source: Option<SocketAddr>,
    /// The other end.
    pub destination: Option<SocketAddr>,
    /// The way, once the id belongs to the device: of the address vector, all of the remote end counts only with a destination.
    pub path: Option<CmPath>,
}

/// The way of an id that belongs to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CmPath {
    /// The device's GUID.
    pub node_guid: [u8; 8],
    /// Own GID.
    pub sgid: [u8; 16],
    /// The other end's, zeroes without a destination.
    pub dgid: [u8; 16],
    /// The route is resolved.
    pub resolved: bool,
    /// `enum ibv_mtu`.
    pub mtu: u8,
    /// Of packets.
    pub hop_limit: u8,
    /// Of packets.
    pub traffic_class: u8,
}

/// A channel has events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CmNews {
    /// Which channel.
    pub channel: u32,
}
