//! Virtualised verbs: the objects that a program sees, above an RNIC that can be exchanged beneath them.
//!
//! ```text
//!  program's threads                                   helper thread
//!  Context Pd Mr Cq Qp      (control verbs)            orders of the agent
//!    │        │   │ poll: fake CQ, then the ring         │ suspend, drain, quiesce, claim,
//!    │        │   │ post: ring, or interception buffer   │ switch, resume, abort (session)
//!    ▼        ▼   ▼                                      ▼
//!  backend::Device, SendRing, RecvRing, CompletionRing: physical objects of one RNIC
//! ```
//!
//! - Start at [`Context::open`]; the objects are [`Pd`], [`Mr`], [`Mw`], [`Dm`], [`CompChannel`], [`Cq`], [`Srq`], [`Ah`] and
//!   [`Qp`], each an `Arc` that lives until its explicit `destroy` or the end of the program, as in verbs.
//! - *Virtual* numbers and keys are those that the program knows. They equal the RNIC's until something has moved
//!   (`DESIGN.md` §3.1), and only then is anything translated.
//! - Every request that reaches a ring carries its *position* in the queue in the place of the program's `wr_id`, so that
//!   whoever takes the completion knows which requests are done; shadow rings hold the `wr_id`s and the RECVs
//!   ([`qp`]).
//! - [`session`] is MigrRDMA §3.4: suspension, wait-before-stop, fake CQs, replay.
//!
//! What this crate does not do: it has no C ABI (crate `guest`), writes to no standard stream, and no data verb ever
//! blocks on a socket. Locks are taken in this order: control gate, a queue pair's control, a context's objects, registry;
//! queue locks last,
//! one at a time, but for the flush of a queue pair whose RNIC is gone, which takes its completion queue's besides ([`death`]).

#![deny(unsafe_code)]

mod ah;
mod async_events;
mod backend;
mod channel;
mod cm;
mod cm_line;
mod context;
mod control_gate;
mod cq;
mod datagrams;
mod death;
mod described;
mod dm;
pub mod dump;
mod error;
#[cfg(test)]
mod event_tests;
mod fork;
mod grh;
mod held;
mod helper;
#[cfg(test)]
mod helper_tests;
mod lock;
pub mod loopback;
mod maker;
#[cfg(any(test, feature = "measure"))]
pub mod measure;
mod mr;
mod mw;
mod nap;
mod pd;
mod process;
mod qp;
mod reach;
mod retired;
mod road_map;
mod session;
mod srq;
mod sys;
mod tables;
#[cfg(test)]
mod testing;
pub mod trial;
mod unacked;
mod vain;
#[cfg(test)]
mod vain_tests;
mod watch;
mod work;

pub use ah::Ah;
pub use async_events::{AsyncEvent, AsyncObject};
pub use backend::DeviceInfo;
pub use channel::CompChannel;
pub use cm::CmChannel;
pub use context::{Context, devices};
pub use cq::Cq;
pub use dm::Dm;
pub use error::{PostError, VerbsError};
pub use fork::{after_fork_in_child, after_fork_in_parent, before_fork};
pub use mr::{Mr, MrChange};
pub use mw::{Mw, MwRange};
pub use pd::Pd;
pub use process::Process;
pub use qp::{OwnedSendBatch, Qp, QpInit, SendBatch};
pub use srq::Srq;
pub use verbatim_device::control::{
    Access, AddressVector, AsyncEventType, CM_MAX_PRIVATE_DATA, CmDatagrams, CmDetails, CmEvent,
    CmParameters, CmPath, CmReply, CmRequest, CmRoute, DeviceAttr, MwType, PortAttr, QpAttr, QpAttrMask,
    QpCap, QpClass, QpSecret, QpState, QpType, SrqAttr,
};
pub use verbatim_device::layout::Sge;
pub use work::{
    Body, Completion, MwBind, RecvWr, SEND_FENCE, SEND_INLINE, SEND_SIGNALED, SEND_SOLICITED, SendOpcode,
    SendWr, UdAddress, WC_SUCCESS, WC_WR_FLUSH_ERR, Wc,
};
