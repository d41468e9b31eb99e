//! The communication manager of InfiniBand and RoCE (IBA Vol. 1, chapter 12, and annex A11, the IP CM service): what Linux has in
//! ib_cm, and below the addresses in rdma_cm.
//!
//! No socket, no clock, no thread: management datagrams (MADs), commands of programs and the time go in; MADs, events and the next
//! deadline come out. The RNIC drives it over queue pair 1 (Q_Key [`QP1_QKEY`]), a test drives two of them in memory with loss,
//! duplication and reordering. What the wire shows, the states and the timers: `docs/rdma-cm.md`.
//!
//! Where to start:
//!
//! - [`Cm`] is the manager of one RNIC. Its documentation sorts the methods into commands, arrivals and polls.
//! - [`Event`] is what owners of ids are told, [`Connection`] what a queue pair needs to know of one.
//! - [`wire`] has the messages.
//! - [`Cm::take`], [`IdImage`] and [`Cm::adopt`]: an id goes on at another RNIC, in the middle of a handshake if it must;
//!   [`Outcome::Away`] names those whose messages still come to the old place.
//!
//! What is left out on purpose: alternate paths (LAP and APR are dropped, a REP says that failover is not supported), reliable
//! datagrams, XRC, redirection.

#![forbid(unsafe_code)]

mod away;
mod cm;
mod command;
mod config;
mod counters;
mod error;
mod event;
mod image;
mod messages;
mod num;
mod state;
mod table;
mod talk;
pub mod wire;

pub use cm::{Cm, DropReason, Outcome, QueuePairs, Transmit};
pub use command::{Accept, Accepts, Answer, Connect, Listen, ListenAddress, Path, Resolve};
pub use config::{Config, Limits, MAX_CM_RETRIES, MRA_SERVICE_TIMEOUT, PACKET_LIFETIME, RESPONSE_TIMEOUT};
pub use counters::Counters;
pub use error::{AdoptError, Error};
pub use event::{ConnectRequest, ConnectResponse, Event, Notice, ResolveRequest, ResolveResponse};
pub use image::{IMAGE_VERSION, IdImage};
pub use num::{CommId, Gid, Owner, PortSpace, ServiceId, Transport, field_time};
pub use state::{Connection, State};
pub use verbatim_roce::{Mtu, Psn, Qpn, Time};

/// The queue key of queue pair 1 (IBA §10.2.5).
pub const QP1_QKEY: u32 = 0x8001_0000;
