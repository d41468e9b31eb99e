//! The RoCEv2 transport: wire formats, the reliable connection (RC), the unreliable one (UC) and the datagram (UD).
//!
//! No socket, no clock, no thread: packets, work requests and the time go in; packets, completions, events and the
//! next deadline come out. A NIC process drives it over UDP port 4791, a test drives two of them in memory with loss,
//! duplication and reordering. Sources: InfiniBand Architecture Specification Vol. 1 ("IBA"), chapters 9 (transport
//! layer), 10 and 11 (verbs), and its annex A17 (RoCEv2).
//!
//! Where to start:
//!
//! - [`Qp`] is a queue pair of any type: [`RcQp`], [`UcQp`] or [`UdQp`]. The documentation of [`RcQp`] sorts the methods
//!   into commands, arrivals and polls and gives the order in which to call them.
//! - [`Host`] is what a queue pair sees of its surroundings: memory, keys, rings, completion queues.
//! - [`TxBatch`] collects finished packets, ready for one UDP send with generic segmentation offload (GSO).
//! - [`Packet::parse`] and [`Flow::verify`] turn a received datagram into something for [`Qp::handle_packet`].
//! - [`RcQp::halt`], [`RcQp::save`], [`RcQp::restore`] and [`RcQp::resume`]: a connection stops in the middle of its requests and
//!   goes on elsewhere; [`Forwarding`] passes on what looks for it where it was. On the wire: `docs/wire-extension.md`.
//! - [`transition`] is the table of queue pair states (IBA §10.3.1), for whoever checks `ibv_modify_qp`.
//!
//! What is left out on purpose: automatic path migration and FLUSH (a peer's request is answered with NAK "invalid
//! request"); the sending of congestion notifications (those that arrive narrow the window); and end-to-end credits are
//! sent as "unlimited" and only counted on arrival: a missing RECV is reported by RNR NAK (IBA §9.7.7.2).

#![forbid(unsafe_code)]

mod config;
mod counters;
mod forwarding;
mod gather;
mod held;
mod host;
mod link;
mod location;
mod management;
mod num;
mod qp;
mod queue_pair;
mod rc;
mod receive;
mod shell;
mod time;
mod tx;
mod uc;
mod ud;
mod verbs;
pub mod wire;

pub use config::QpConfig;
pub use counters::{Counters, MigrationCounters};
pub use forwarding::{Forwarded, Forwarding};
pub use held::HoldBudget;
pub use host::{AccessError, Event, Host, Key, LocalAccess, RemoteAccess};
pub use location::Location;
pub use management::Datagram;
pub use num::{InvalidMtu, Lkey, Mtu, Pd, Psn, Qpn, Rkey};
pub use qp::{
    AccessFlags, AddressVector, AttrMask, ModifyError, QpAttributes, QpState, QpType, Transition, transition,
};
pub use queue_pair::Qp;
pub use rc::{IMAGE_VERSION, ImageError, Outstanding, Position, RcImage, RcQp, Secret, SecretEnd, Standing};
pub use time::Time;
pub use tx::{Transmit, TxBatch};
pub use uc::UcQp;
pub use ud::UdQp;
pub use verbs::{
    AtomicOp, BadRequest, Bind, Completion, Destination, Immediate, MAX_INLINE, MAX_MESSAGE, MAX_SGE,
    Operation, Path, Queue, ReceiveRequest, SendData, SendRequest, Sge, SgeList, Traffic, VENDOR_ERR_PAUSED,
    VENDOR_ERR_RESUMING, WcFlags, WcOpcode, WcStatus,
};
pub use wire::icrc::{self, Flow, Verdict};
pub use wire::packet::{Packet, ParseError};

/// The UDP destination port of RoCEv2 (IBA annex A17.9.2).
pub const UDP_PORT: u16 = 4791;
