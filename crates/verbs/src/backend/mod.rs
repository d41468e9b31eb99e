//! What an RNIC must be able to do for the objects above it.
//!
//! Numbers and keys here are *physical*. The control path ([`Device`]) is called without any queue's lock held; the ring
//! ends are owned by the queue that they serve and are called under its lock. Each end keeps the memory that it lies in
//! mapped, so that letting go of an RNIC is: drop every end, then [`Device::park`].

pub(crate) mod soft;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use verbatim_device::control::{Access, DeviceAttr, PortAttr, QpAttr, QpAttrMask, QpCap, QpType};
use verbatim_device::layout::{Cqe, SendWqe, Sge};
use verbatim_device::ring::Body;

use crate::error::VerbsError;

/// Where a queue pair is: what its ends are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpPlace {
    /// Number.
    pub qpn: u32,
    /// What was given.
    pub cap: QpCap,
    /// Doorbell.
    pub slot: u32,
    /// Offset in the arena.
    pub offset: u64,
}

/// Where a completion queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CqPlace {
    /// Number.
    pub cq: u32,
    /// What was given.
    pub entries: u32,
    /// Offset in the arena.
    pub offset: u64,
}

/// What a new queue pair is made of.
#[derive(Debug, Clone, Copy)]
pub struct PhysicalQpInit {
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub qp_type: QpType,
    pub cap: QpCap,
}

/// A memory region to be registered. Segments with an offset lie in `file`.
#[derive(Debug)]
pub struct PhysicalMrInit<'a> {
    pub pd: u32,
    pub address: u64,
    pub length: u64,
    pub iova: u64,
    pub access: Access,
    pub segments: &'a [verbatim_channel::SegmentRecord],
    pub file: Option<&'a OwnedFd>,
}

/// One opened device: the control path.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// What it is.
    fn attributes(&self) -> (&DeviceAttr, &PortAttr);
    fn alloc_pd(&self) -> Result<u32, VerbsError>;
    fn dealloc_pd(&self, pd: u32) -> Result<(), VerbsError>;
    /// Local and remote key.
    fn reg_mr(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError>;
    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError>;
    fn create_cq(&self, entries: u32) -> Result<CqPlace, VerbsError>;
    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError>;
    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError>;
    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError>;
    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError>;
    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError>;

    /// The ends of a queue pair, going on where earlier ends of the same queues stopped.
    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError>;
    /// The end of a completion queue, likewise.
    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError>;

    /// Lets go of everything but the connection that keeps the physical objects alive, and gives that. All ends must
    /// have been dropped.
    fn park(self: Arc<Self>) -> Result<Parked, VerbsError>;
}

/// Opens a connection that was parked, or one that an agent has prepared in its place.
pub type Reopen = Box<dyn Fn(OwnedFd) -> Result<Arc<dyn Device>, VerbsError> + Send>;

/// A device that was let go.
pub struct Parked {
    /// Whoever holds it keeps the physical objects alive.
    pub connection: OwnedFd,
    /// The way back.
    pub reopen: Reopen,
}

/// The program's ends of a queue pair.
#[derive(Debug)]
pub struct QpEnds {
    pub send: Box<dyn SendRing>,
    pub recv: Box<dyn RecvRing>,
}

/// The program's end of a send queue.
pub trait SendRing: Send + std::fmt::Debug {
    /// How many more requests fit.
    fn room(&self) -> u32;
    /// Writes one, for which there is room, not yet visible to the RNIC.
    fn push(&mut self, wqe: &SendWqe, body: Body<'_>);
    /// Takes back the last `count` that were pushed and are not visible yet.
    fn unpush(&mut self, count: u32);
    /// Makes what was pushed visible and tells the RNIC.
    fn publish(&mut self);
    /// Requests that the RNIC has not finished. Completions of the others are visible at the latest when it has answered
    /// a control verb that was called after this.
    fn unfinished(&self) -> u32;
    /// Starts from zero, after the queue pair went to RESET.
    fn reset(&mut self);
}

/// The program's end of a receive queue.
pub trait RecvRing: Send + std::fmt::Debug {
    /// How many more requests fit.
    fn room(&self) -> u32;
    /// Writes one, for which there is room, not yet visible to the RNIC.
    fn push(&mut self, wr_id: u64, sges: &[Sge]);
    /// Makes what was pushed visible.
    fn publish(&mut self);
    /// As [`SendRing::reset`].
    fn reset(&mut self);
}

/// The program's end of a completion queue.
pub trait CompletionRing: Send + std::fmt::Debug {
    /// Takes the next completion.
    fn pop(&mut self) -> Option<Cqe>;
}
