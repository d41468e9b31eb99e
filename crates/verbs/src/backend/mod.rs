//! What an RNIC must be able to do for the objects above it.
//!
//! Numbers and keys here are *physical*, chosen by the backend. The control path ([`Device`]) is called without any
//! queue's lock held, but for [`Device::resize_cq`]; the ring ends are owned by the queue that they serve and are called
//! under its lock. Each end keeps the memory that it lies in mapped, so that letting go of an RNIC is: drop every end,
//! then [`Device::park`].
//!
//! A backend is a [`Provider`]; [`providers`] lists them.

mod choice;
mod ends;
pub(crate) mod rdma_core;
pub(crate) mod soft;

use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use verbatim_device::control::{
    Access, AddressVector, AsyncEvent, CmReply, CmRequest, DeviceAttr, MwState, MwType, PortAttr, QpAttr,
    QpAttrMask, QpCap, QpClass, QpPosition, QpSecret, QpState, QpType, SrqAttr,
};
use verbatim_device::image::QpImage;
use verbatim_device::layout::{Cqe, SendWqe, Sge};
use verbatim_device::ring::{Armed, Body};

pub use choice::providers;
pub use ends::{Completions, Recvs, Sends};

use crate::error::VerbsError;

/// A device that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, `verbatim0`.
    pub name: String,
    /// Its GUID in network byte order.
    pub guid: [u8; 8],
}

/// A kind of RNIC.
pub trait Provider: Send + Sync + std::fmt::Debug {
    /// Those that there are now.
    fn devices(&self) -> Vec<DeviceInfo>;
    /// Opens the one of that name.
    fn open(&self, name: &str) -> Result<Arc<dyn Device>, VerbsError>;
    /// Whether there is a device here that answers [`Device::cm`]: the only one, whatever name it is opened by.
    fn has_cm(&self) -> bool {
        false
    }
}

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

/// Where a shared receive queue is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SrqPlace {
    /// Number.
    pub srq: u32,
    /// What was given.
    pub attr: SrqAttr,
    /// Offset in the arena.
    pub offset: u64,
}

/// What a new queue pair is made of.
#[derive(Debug, Clone, Copy)]
pub struct PhysicalQpInit {
    pub pd: u32,
    pub send_cq: u32,
    pub recv_cq: u32,
    pub srq: Option<u32>,
    pub qp_type: QpType,
    pub cap: QpCap,
}

/// Memory of a region. Segments with an offset lie in `file`.
#[derive(Debug)]
pub struct PhysicalMemory<'a> {
    pub address: u64,
    pub length: u64,
    pub iova: u64,
    pub segments: &'a [verbatim_channel::SegmentRecord],
    pub file: Option<BorrowedFd<'a>>,
}

/// A memory region to be registered.
#[derive(Debug)]
pub struct PhysicalMrInit<'a> {
    pub pd: u32,
    pub access: Access,
    pub memory: PhysicalMemory<'a>,
}

/// What is to change in a memory region.
#[derive(Debug)]
pub struct PhysicalMrChange<'a> {
    pub pd: Option<u32>,
    pub access: Option<Access>,
    pub memory: Option<PhysicalMemory<'a>>,
}

/// By what a process finds the device that takes the place of one that it had at another host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeAgainBy {
    /// Its name.
    pub name: String,
    /// The name of its kernel driver, if the kernel says it.
    pub driver: Option<String>,
}

/// What the helper thread sleeps on for a device, besides the agent.
#[derive(Debug, Clone, Copy, Default)]
pub struct Watched<'a> {
    /// Hung up: [`Device::is_gone`] is asked. That it is readable does not count.
    pub connection: Option<BorrowedFd<'a>>,
    /// Readable: [`Device::next_async_event`] is asked, until it has no more.
    pub events: Option<BorrowedFd<'a>>,
}

/// What a backend answers that has not got a verb.
fn unsupported<T>(verb: &'static str) -> Result<T, VerbsError> {
    Err(VerbsError::Unsupported(format!("this device has no {verb}")))
}

/// One opened device: the control path. What has a body here is optional.
pub trait Device: Send + Sync + std::fmt::Debug {
    /// What it is.
    fn attributes(&self) -> (&DeviceAttr, &PortAttr);
    /// Whether registered pages are to be moved into the memory file (`DESIGN.md` §3.2).
    fn adopts_memory(&self) -> bool {
        true
    }
    /// Whether the device finds out by itself that memory is not there. Then what cannot be adopted, for whatever reason, is
    /// registered where it is.
    fn checks_memory(&self) -> bool {
        false
    }
    /// Why a process that has this device open cannot be moved, in words for an operator.
    fn blocker(&self) -> Option<String> {
        None
    }
    /// Why no other queue pair can take the place of this one, whose peer moves, in words for an operator.
    fn keeps_queue_pair(&self, _qpn: u32) -> Option<String> {
        None
    }
    /// Of a device that nobody but this process can make ready where it moves to: by what it is found there. [`Self::park`] keeps
    /// it as it is, for a migration that is rolled back.
    fn made_again(&self) -> Option<MadeAgainBy> {
        None
    }
    /// Opens the device of this host that takes its place, of one whose process has moved here.
    fn open_again(&self) -> Result<Arc<dyn Device>, VerbsError> {
        unsupported("way to be opened at another host")
    }
    /// What to sleep on for [`Self::is_gone`] and [`Self::next_async_event`].
    fn watch(&self) -> Watched<'_> {
        Watched::default()
    }
    /// Whether the RNIC is gone for ever.
    fn is_gone(&self) -> bool {
        false
    }
    /// The next asynchronous event, if there is one now.
    fn next_async_event(&self) -> Option<AsyncEvent> {
        None
    }

    fn alloc_pd(&self) -> Result<u32, VerbsError>;
    fn dealloc_pd(&self, pd: u32) -> Result<(), VerbsError>;

    /// Local and remote key.
    fn reg_mr(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError>;
    /// As [`Device::reg_mr`], with this key, local and remote.
    fn reg_mr_as(&self, _init: &PhysicalMrInit<'_>, _key: u32) -> Result<(), VerbsError> {
        unsupported("way to ask for keys")
    }
    /// The keys stay.
    fn rereg_mr(&self, _lkey: u32, _change: &PhysicalMrChange<'_>) -> Result<(), VerbsError> {
        unsupported("rereg_mr")
    }
    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError>;
    /// Its remote key.
    fn alloc_mw(&self, _pd: u32, _mw_type: MwType) -> Result<u32, VerbsError> {
        unsupported("alloc_mw")
    }
    /// As [`Device::alloc_mw`], with this remote key.
    fn alloc_mw_as(&self, _pd: u32, _mw_type: MwType, _rkey: u32) -> Result<(), VerbsError> {
        unsupported("way to ask for keys")
    }
    fn dealloc_mw(&self, _rkey: u32) -> Result<(), VerbsError> {
        unsupported("dealloc_mw")
    }
    /// How a window is; the low eight bits of `rkey` do not count.
    fn query_mw(&self, _rkey: u32) -> Result<MwState, VerbsError> {
        unsupported("query_mw")
    }
    /// Makes a window what another one was. A device that has to post a request for that does so before its queue pairs have ends.
    fn restore_mw(&self, _state: &MwState) -> Result<(), VerbsError> {
        unsupported("restore_mw")
    }

    fn create_comp_channel(&self) -> Result<Arc<dyn EventChannel>, VerbsError> {
        unsupported("create_comp_channel")
    }
    /// From now on the events of channel `number`, which somebody else has made here, go to `channel`.
    fn attach_comp_channel(&self, _number: u32, _channel: &dyn EventChannel) -> Result<(), VerbsError> {
        unsupported("attach_comp_channel")
    }
    fn destroy_comp_channel(&self, _channel: u32) -> Result<(), VerbsError> {
        unsupported("destroy_comp_channel")
    }
    /// `channel`: its number, and what the queue's events there say.
    fn create_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError>;
    /// Called with the queue's lock held, after its end was dropped. What nobody has read is in the new one.
    fn resize_cq(&self, _cq: u32, _entries: u32) -> Result<CqPlace, VerbsError> {
        unsupported("resize_cq")
    }
    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError>;

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError>;
    /// As [`Device::create_qp`], with this number.
    fn create_qp_as(&self, _init: &PhysicalQpInit, _qpn: u32) -> Result<QpPlace, VerbsError> {
        unsupported("way to ask for queue pair numbers")
    }
    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError>;
    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError>;
    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError>;
    /// The states of many, in their order.
    fn qp_states(&self, qpns: &[u32]) -> Result<Vec<QpState>, VerbsError> {
        qpns.iter().map(|qpn| Ok(self.query_qp(*qpn)?.state)).collect()
    }
    /// Destroys many; an error is the first one's, and the others are destroyed.
    fn destroy_qps(&self, qpns: &[u32]) -> Result<(), VerbsError> {
        let destroyed: Vec<_> = qpns.iter().map(|qpn| self.destroy_qp(*qpn)).collect();
        destroyed.into_iter().collect()
    }
    /// From now on a reliable connection neither sends nor takes packets; where it stands. One in ERR stays as it is.
    fn stop_qp(&self, _qpn: u32) -> Result<QpPosition, VerbsError> {
        unsupported("way to stop a queue pair in the middle of its requests")
    }
    /// It goes on, as if what was under way when it was stopped had been lost.
    fn restart_qp(&self, _qpn: u32) -> Result<(), VerbsError> {
        unsupported("way to stop a queue pair in the middle of its requests")
    }
    /// The secret that a reliable connection's RNIC shares with that of the other end, for pause and resume.
    fn set_qp_secret(&self, _qpn: u32, _secret: Option<QpSecret>) -> Result<(), VerbsError> {
        unsupported("way to pause a queue pair")
    }
    /// Who goes first when several queue pairs have something to send. A device without classes serves all alike: who wants a
    /// reliable connection to yield must then send at a pace of its own.
    fn set_qp_class(&self, _qpn: u32, _class: QpClass) -> Result<(), VerbsError> {
        unsupported("classes of queue pairs")
    }
    /// From now on reliable connections stand still, until [`Device::resume_qps`], or for so many seconds. An error is the first
    /// one's, and the others stand still all the same.
    fn pause_qps(&self, _qpns: &[u32], _limit_s: Option<u32>) -> Result<(), VerbsError> {
        unsupported("way to pause a queue pair")
    }
    /// They go on. An error is the first one's, and the others go on.
    fn resume_qps(&self, _qpns: &[u32]) -> Result<(), VerbsError> {
        unsupported("way to pause a queue pair")
    }
    /// Whether it stands still.
    fn is_paused(&self, _qpn: u32) -> Result<bool, VerbsError> {
        Ok(false)
    }
    /// The whole states of connections that are paused.
    fn dump_qps(&self, _qpns: &[u32]) -> Result<Vec<QpImage>, VerbsError> {
        unsupported("way to pause a queue pair")
    }
    /// Gives queue pairs in RESET, whose rings hold what the images name, the states of the images: they are paused. The answer is
    /// each one's; an error beside that is the connection's.
    fn restore_qps(&self, _images: &[TakenUp<'_>]) -> Result<Vec<Result<(), VerbsError>>, VerbsError> {
        unsupported("way to pause a queue pair")
    }
    fn attach_mcast(&self, _qpn: u32, _gid: [u8; 16]) -> Result<(), VerbsError> {
        unsupported("attach_mcast")
    }
    fn detach_mcast(&self, _qpn: u32, _gid: [u8; 16]) -> Result<(), VerbsError> {
        unsupported("detach_mcast")
    }

    fn create_srq(&self, _pd: u32, _attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        unsupported("create_srq")
    }
    fn modify_srq(&self, _srq: u32, _limit: u32) -> Result<(), VerbsError> {
        unsupported("modify_srq")
    }
    fn query_srq(&self, _srq: u32) -> Result<SrqAttr, VerbsError> {
        unsupported("query_srq")
    }
    fn destroy_srq(&self, _srq: u32) -> Result<(), VerbsError> {
        unsupported("destroy_srq")
    }

    /// Its number, for [`SendWqe::ah`].
    fn create_ah(&self, _pd: u32, _av: &AddressVector) -> Result<u32, VerbsError> {
        unsupported("create_ah")
    }
    fn destroy_ah(&self, _ah: u32) -> Result<(), VerbsError> {
        unsupported("destroy_ah")
    }

    /// Connections by address and port; `fd` is what comes with [`CmRequest::CreateChannel`] and others.
    fn cm(&self, _request: CmRequest, _fd: Option<BorrowedFd<'_>>) -> Result<CmReply, VerbsError> {
        unsupported("way to connect by rdma_cm")
    }

    /// Those that are answered by [`CmReply::Bytes`].
    fn cm_bytes(&self, _request: CmRequest) -> Result<Vec<u8>, VerbsError> {
        unsupported("way to connect by rdma_cm")
    }

    /// The ends of a queue pair, going on where earlier ends of the same queues stopped. The receive end of one that has
    /// a shared receive queue is not used.
    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError>;
    /// The end of a completion queue, likewise.
    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError>;
    /// The end of a shared receive queue, likewise.
    fn srq_end(&self, _place: &SrqPlace) -> Result<Box<dyn RecvRing>, VerbsError> {
        unsupported("create_srq")
    }

    /// From now on the RNIC takes no packet in, and completes nothing that has not arrived: what can be seen now is all that
    /// there will be before [`Self::park`].
    fn deafen(&self) -> Result<(), VerbsError> {
        Ok(())
    }
    /// Lets go of everything but the connection that keeps the physical objects alive, and gives that. All ends must
    /// have been dropped.
    fn park(self: Arc<Self>) -> Result<Parked, VerbsError>;
    /// Of a device that was parked and taken up again: numbers of queue pairs that have none of the RECVs any more that were
    /// posted to their own queues.
    fn lost_recvs(&self) -> Vec<u32> {
        Vec::new()
    }
    /// The process goes on where this device is not, and its descriptors and mappings are of something else by now. Lets go of
    /// all that is left of it here, and tells nobody. All ends must have been dropped. `dead`: a descriptor on which every command fails
    /// with `EIO` ([`verbatim_channel::hung_up_terminal`]), if the caller has one.
    fn abandon(self: Arc<Self>, dead: Option<BorrowedFd<'_>>) {
        let _ = dead;
    }
}

/// Opens a connection that was parked, or one that an agent has prepared in its place.
pub type Reopen = Box<dyn Fn(OwnedFd) -> Result<Arc<dyn Device>, VerbsError> + Send>;

/// A device that was let go.
pub struct Parked {
    /// Whoever holds it keeps the physical objects alive.
    pub connection: OwnedFd,
    /// The way back.
    pub reopen: Reopen,
    /// The device, where it is kept: elsewhere, it is to be abandoned ([`Device::abandon`]).
    pub kept: Option<Arc<dyn Device>>,
}

/// Where the events of completion queues come out.
pub trait EventChannel: Any + Send + Sync + std::fmt::Debug {
    /// The physical number that it was made with.
    fn number(&self) -> u32;
    /// What the program waits on.
    fn fd(&self) -> BorrowedFd<'_>;
    /// The next event: what [`Device::create_cq`] was told that a queue's events say. Waits, unless the descriptor is non-blocking; a signal
    /// that is handled ends the wait (`EINTR`).
    fn next(&self) -> Result<u32, VerbsError>;
    /// Makes an event as if the RNIC had.
    fn inject(&self, event: u32);
    /// The events that nobody has read, oldest first; they stay. Who reads meanwhile may see them in another order.
    fn unread(&self) -> Result<Vec<u32>, VerbsError> {
        unsupported("way to look at unread events")
    }
    /// What RNICs write to, to be given to another one.
    fn line(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The program's ends of a queue pair.
#[derive(Debug)]
pub struct QpEnds {
    pub send: Box<dyn SendRing>,
    pub recv: Box<dyn RecvRing>,
}

/// A queue pair that is given the state of an image.
#[derive(Debug, Clone, Copy)]
pub struct TakenUp<'a> {
    /// Its number.
    pub qpn: u32,
    /// [`QpImage::image`].
    pub image: &'a [u8],
    /// Index of its GID at this RNIC; the image has that of another.
    pub sgid_index: u8,
}

/// Requests that an RNIC's library did not take when they were to be published: the last `count`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    pub count: u32,
    /// How many of them would have consumed a RECV of the other end.
    pub messages: u32,
    /// Why the first was not taken.
    pub errno: i32,
}

/// The program's end of a send queue.
pub trait SendRing: Any + Send + std::fmt::Debug {
    /// How many more requests fit.
    fn room(&self) -> u32;
    /// Writes one, for which there is room, not yet visible to the RNIC.
    fn push(&mut self, wqe: &SendWqe, body: Body<'_>);
    /// As [`Self::push`], if there is room; false if there is none.
    #[inline]
    fn try_push(&mut self, wqe: &SendWqe, body: Body<'_>) -> bool {
        let fits = self.room() > 0;
        if fits {
            self.push(wqe, body);
        }
        fits
    }
    /// Takes back the last `count` that were pushed and are not visible yet.
    fn unpush(&mut self, count: u32);
    /// Makes what was pushed visible and tells the RNIC. What is refused is forgotten.
    fn publish(&mut self) -> Result<(), Refused>;
    /// Gives `take` the requests that the RNIC has not finished, oldest first, as they were pushed. Only of a queue pair that
    /// [`Device::stop_qp`] has stopped; a device that stops none has nothing to give.
    fn for_each_unfinished(&self, _take: &mut dyn FnMut(&SendWqe, Body<'_>)) {}
    /// Requests that the RNIC has not finished. Completions of the others are visible at the latest when it has answered
    /// a control verb that was called after this.
    fn unfinished(&self) -> u32;
    /// Sees to it that [`Self::unfinished`] comes to 0 also where the program has not asked for the completion of its last
    /// requests. To be called again and again until it has: it may have to wait for room. False: it cannot be, since the
    /// queue pair has failed. The other end of a connection must have said that it may ([`crate::qp::Qp::allow_markers`]).
    fn mark(&mut self) -> bool {
        true
    }
    /// Starts from zero, after the queue pair went to RESET.
    fn reset(&mut self);
}

/// The program's end of a receive queue, a queue pair's own or a shared one.
pub trait RecvRing: Any + Send + std::fmt::Debug {
    /// How many more requests fit.
    fn room(&self) -> u32;
    /// Writes one, for which there is room, not yet visible to the RNIC.
    fn push(&mut self, wr_id: u64, sges: &[Sge]);
    /// Makes what was pushed visible. What is refused is forgotten.
    fn publish(&mut self) -> Result<(), Refused>;
    /// As [`SendRing::reset`].
    fn reset(&mut self);
}

/// The program's end of a completion queue.
pub trait CompletionRing: Any + Send + std::fmt::Debug {
    /// Takes the next completion.
    fn pop(&mut self) -> Option<Cqe>;
    /// Asks for one event on the queue's channel, at the next completion, or at the next that is solicited or an error.
    /// True: something is in the queue already, for which an event may never come.
    fn arm(&mut self, solicited_only: bool) -> bool;
    /// Takes that back: what was asked for, if no event was made for it.
    fn disarm(&mut self) -> Option<Armed>;
    /// Whether its RNIC says that it has to wait for a core: one of hardware has its own.
    fn is_starved(&self) -> bool {
        false
    }
}
