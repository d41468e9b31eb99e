//! An opened context: the control path.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use verbatim_device::Connection;
use verbatim_device::control::{
    AddressVector, AsyncEvent, CmReply, CmRequest, DeviceAttr, MOST_CM_BYTES, MOST_QPS, MwState, MwType,
    PortAttr, QpAttr, QpAttrMask, QpClass, QpPosition, QpSecret, QpState, Reply, Request, SrqAttr,
    Translation,
};
use verbatim_device::image::QpImage;
use verbatim_seqpacket::Socket;

use super::control::{CM, Control, no_answer, unless_refused, wrong};
use super::events::{Events, SoftChannel};
use super::map::Arena;
use super::numbers::segments;
use super::rings::{SoftCompletions, SoftRecvs, SoftSends};
use crate::backend::{
    CompletionRing, CqPlace, Device, EventChannel, Parked, PhysicalMrChange, PhysicalMrInit, PhysicalQpInit,
    QpEnds, QpPlace, RecvRing, SrqPlace, TakenUp, Watched,
};
use crate::error::VerbsError;
use crate::held;

/// An opened context.
#[derive(Debug)]
pub struct SoftDevice {
    /// A child of this process shall not hold the connection. Forgotten before it goes.
    _held: [held::Held; 2],
    pub(super) control: Control,
    /// The same connection, for who only wants to know whether it is still there.
    hangup: OwnedFd,
    arena: Arc<Arena>,
    events: Events,
    device_attr: DeviceAttr,
    port_attr: PortAttr,
}

impl SoftDevice {
    pub fn start(
        connection: Socket,
        verb: &'static str,
        request: impl Fn(u32) -> Request,
    ) -> Result<Self, VerbsError> {
        let (events, theirs) = Events::pair()?;
        let begun = Connection::begin(connection, request, &[theirs.as_fd()]);
        let (connection, received) = begun.map_err(no_answer(verb))?;
        let received = unless_refused(verb, received)?;
        let Reply::Context {
            device,
            port,
            arena_bytes,
        } = received.message
        else {
            return wrong(verb, received.message);
        };
        let fds: Result<[OwnedFd; 2], _> = received.fds.try_into();
        let [memory, doorbell] = fds.map_err(|fds| {
            VerbsError::Invalid(format!("the RNIC sent {} descriptors in place of two", fds.len()))
        })?;
        let arena = Arena::map(&memory, arena_bytes, doorbell)
            .map_err(|source| VerbsError::Os { call: "mmap", source })?;
        let hangup = connection.socket().as_fd().try_clone_to_owned();
        let hangup = hangup.map_err(|source| VerbsError::Os { call: "dup", source })?;
        Ok(Self {
            _held: [
                held::hold_fd(connection.socket().as_fd()),
                held::hold_fd(hangup.as_fd()),
            ],
            hangup,
            control: Control::new(connection),
            arena: Arc::new(arena),
            events,
            device_attr: device,
            port_attr: port,
        })
    }

    /// The host's own services use it: the RNIC asks nobody about the other ends of its connections. One of an earlier release never
    /// does, and refuses; who is not root of the host is refused, and is asked about like any other.
    pub fn serve_host(&self) {
        let _ = self.control.call_done("open_device", &Request::ServeHost);
    }
}

impl Device for SoftDevice {
    fn attributes(&self) -> (&DeviceAttr, &PortAttr) {
        (&self.device_attr, &self.port_attr)
    }

    fn watch(&self) -> Watched<'_> {
        Watched {
            connection: Some(self.hangup.as_fd()),
            events: Some(self.events.fd()),
        }
    }

    fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.hangup, PollFlags::empty())];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut fds, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    fn next_async_event(&self) -> Option<AsyncEvent> {
        self.events.next()
    }

    fn alloc_pd(&self) -> Result<u32, VerbsError> {
        match self.control.call("alloc_pd", &Request::AllocPd)? {
            Reply::Pd { pd } => Ok(pd),
            reply => wrong("alloc_pd", reply),
        }
    }

    fn dealloc_pd(&self, pd: u32) -> Result<(), VerbsError> {
        self.control.call_done("dealloc_pd", &Request::DeallocPd { pd })
    }

    fn reg_mr(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        self.register(init, None)
    }

    fn reg_mr_as(&self, init: &PhysicalMrInit<'_>, key: u32) -> Result<(), VerbsError> {
        self.register(init, Some(key)).map(drop)
    }

    fn rereg_mr(&self, lkey: u32, change: &PhysicalMrChange<'_>) -> Result<(), VerbsError> {
        let request = Request::ReregMr {
            lkey,
            pd: change.pd,
            access: change.access,
            translation: change.memory.as_ref().map(|memory| Translation {
                address: memory.address,
                length: memory.length,
                iova: memory.iova,
                segments: segments(memory),
            }),
        };
        let file = change.memory.as_ref().and_then(|memory| memory.file);
        let file: Vec<_> = file.into_iter().collect();
        match self.control.call_with("rereg_mr", &request, &file)? {
            Reply::Mr { .. } => Ok(()),
            reply => wrong("rereg_mr", reply),
        }
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        self.control.call_done("dereg_mr", &Request::DeregMr { lkey })
    }

    fn alloc_mw(&self, pd: u32, mw_type: MwType) -> Result<u32, VerbsError> {
        self.make_window(pd, mw_type, None)
    }

    fn alloc_mw_as(&self, pd: u32, mw_type: MwType, rkey: u32) -> Result<(), VerbsError> {
        self.make_window(pd, mw_type, Some(rkey)).map(drop)
    }

    fn dealloc_mw(&self, rkey: u32) -> Result<(), VerbsError> {
        self.control.call_done("dealloc_mw", &Request::DeallocMw { rkey })
    }

    fn query_mw(&self, rkey: u32) -> Result<MwState, VerbsError> {
        match self.control.call("query_mw", &Request::QueryMw { rkey })? {
            Reply::MwState(state) => Ok(state),
            reply => wrong("query_mw", reply),
        }
    }

    fn restore_mw(&self, state: &MwState) -> Result<(), VerbsError> {
        self.control
            .call_done("restore_mw", &Request::RestoreMw { state: *state })
    }

    fn create_comp_channel(&self) -> Result<Arc<dyn EventChannel>, VerbsError> {
        const VERB: &str = "create_comp_channel";
        let (ours, theirs) = SoftChannel::pair()?;
        match self
            .control
            .call_with(VERB, &Request::CreateCompChannel, &[theirs.as_fd()])?
        {
            Reply::CompChannel { channel } => Ok(Arc::new(SoftChannel::new(channel, ours, theirs))),
            reply => wrong(VERB, reply),
        }
    }

    fn attach_comp_channel(&self, number: u32, channel: &dyn EventChannel) -> Result<(), VerbsError> {
        const VERB: &str = "attach_comp_channel";
        let line: Vec<_> = channel.line().into_iter().collect();
        match self
            .control
            .call_with(VERB, &Request::AttachCompChannel { channel: number }, &line)?
        {
            Reply::Done => Ok(()),
            reply => wrong(VERB, reply),
        }
    }

    fn destroy_comp_channel(&self, channel: u32) -> Result<(), VerbsError> {
        self.control
            .call_done("destroy_comp_channel", &Request::DestroyCompChannel { channel })
    }

    fn create_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        let (channel, event) = channel.unzip();
        let request = Request::CreateCq {
            entries,
            channel,
            event,
        };
        match self.control.call("create_cq", &request)? {
            Reply::Cq { cq, entries, offset } => Ok(CqPlace { cq, entries, offset }),
            reply => wrong("create_cq", reply),
        }
    }

    fn resize_cq(&self, cq: u32, entries: u32) -> Result<CqPlace, VerbsError> {
        match self
            .control
            .call("resize_cq", &Request::ResizeCq { cq, entries })?
        {
            Reply::Cq { cq, entries, offset } => Ok(CqPlace { cq, entries, offset }),
            reply => wrong("resize_cq", reply),
        }
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.control.call_done("destroy_cq", &Request::DestroyCq { cq })
    }

    fn create_qp(&self, init: &PhysicalQpInit) -> Result<QpPlace, VerbsError> {
        self.make_qp(init, None)
    }

    fn create_qp_as(&self, init: &PhysicalQpInit, qpn: u32) -> Result<QpPlace, VerbsError> {
        self.make_qp(init, Some(qpn))
    }

    fn modify_qp(&self, qpn: u32, mask: QpAttrMask, attr: &QpAttr) -> Result<(), VerbsError> {
        let request = Request::ModifyQp {
            qpn,
            mask,
            attr: *attr,
        };
        self.control.call_done("modify_qp", &request)
    }

    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError> {
        match self.control.call("query_qp", &Request::QueryQp { qpn })? {
            Reply::QpAttr { attr, .. } => Ok(attr),
            reply => wrong("query_qp", reply),
        }
    }

    fn qp_states(&self, qpns: &[u32]) -> Result<Vec<QpState>, VerbsError> {
        let requests = qpns
            .chunks(MOST_QPS)
            .map(|qpns| Request::QueryQps { qpns: qpns.to_vec() });
        let states = self.control.call_all("query_qp", requests, |reply| match reply {
            Reply::QpStates(states) => Ok(states),
            reply => wrong("query_qp", reply),
        })?;
        Ok(states.into_iter().flatten().collect())
    }

    fn destroy_qps(&self, qpns: &[u32]) -> Result<(), VerbsError> {
        let requests = qpns.iter().map(|qpn| Request::DestroyQp { qpn: *qpn });
        self.control.call_all_done("destroy_qp", requests)
    }

    fn stop_qp(&self, qpn: u32) -> Result<QpPosition, VerbsError> {
        match self.control.call("stop_qp", &Request::StopQp { qpn })? {
            Reply::QpStopped(position) => Ok(position),
            reply => wrong("stop_qp", reply),
        }
    }

    fn restart_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        self.control.call_done("restart_qp", &Request::RestartQp { qpn })
    }

    fn set_qp_secret(&self, qpn: u32, secret: Option<QpSecret>) -> Result<(), VerbsError> {
        self.control
            .call_done("set_qp_secret", &Request::SetQpSecret { qpn, secret })
    }

    fn set_qp_class(&self, qpn: u32, class: QpClass) -> Result<(), VerbsError> {
        self.control.check_classes()?;
        self.control
            .call_done("set_qp_class", &Request::SetQpClass { qpn, class })
    }

    fn pause_qps(&self, qpns: &[u32], limit_s: Option<u32>) -> Result<(), VerbsError> {
        let requests = qpns.chunks(MOST_QPS).map(|qpns| Request::PauseQps {
            qpns: qpns.to_vec(),
            limit_s,
        });
        self.control.call_all_done("pause_qp", requests)
    }

    fn dump_qps(&self, qpns: &[u32]) -> Result<Vec<QpImage>, VerbsError> {
        self.control.dump_qps(qpns)
    }

    fn restore_qps(&self, images: &[TakenUp<'_>]) -> Result<Vec<Result<(), VerbsError>>, VerbsError> {
        self.control.restore_qps(images)
    }

    fn resume_qps(&self, qpns: &[u32]) -> Result<(), VerbsError> {
        let requests = qpns
            .chunks(MOST_QPS)
            .map(|qpns| Request::ResumeQps { qpns: qpns.to_vec() });
        self.control.call_all_done("resume_qp", requests)
    }

    fn is_paused(&self, qpn: u32) -> Result<bool, VerbsError> {
        match self.control.call("query_qp", &Request::QueryQp { qpn })? {
            Reply::QpAttr { paused, .. } => Ok(paused),
            reply => wrong("query_qp", reply),
        }
    }

    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        self.control.call_done("destroy_qp", &Request::DestroyQp { qpn })
    }

    fn attach_mcast(&self, qpn: u32, gid: [u8; 16]) -> Result<(), VerbsError> {
        self.control
            .call_done("attach_mcast", &Request::AttachMcast { qpn, gid })
    }

    fn detach_mcast(&self, qpn: u32, gid: [u8; 16]) -> Result<(), VerbsError> {
        self.control
            .call_done("detach_mcast", &Request::DetachMcast { qpn, gid })
    }

    fn create_srq(&self, pd: u32, attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        match self
            .control
            .call("create_srq", &Request::CreateSrq { pd, attr: *attr })?
        {
            Reply::Srq { srq, attr, offset } => Ok(SrqPlace { srq, attr, offset }),
            reply => wrong("create_srq", reply),
        }
    }

    fn modify_srq(&self, srq: u32, limit: u32) -> Result<(), VerbsError> {
        self.control
            .call_done("modify_srq", &Request::ModifySrq { srq, limit })
    }

    fn query_srq(&self, srq: u32) -> Result<SrqAttr, VerbsError> {
        match self.control.call("query_srq", &Request::QuerySrq { srq })? {
            Reply::Srq { attr, .. } => Ok(attr),
            reply => wrong("query_srq", reply),
        }
    }

    fn destroy_srq(&self, srq: u32) -> Result<(), VerbsError> {
        self.control
            .call_done("destroy_srq", &Request::DestroySrq { srq })
    }

    fn create_ah(&self, pd: u32, av: &AddressVector) -> Result<u32, VerbsError> {
        match self
            .control
            .call("create_ah", &Request::CreateAh { pd, av: *av })?
        {
            Reply::Ah { ah } => Ok(ah),
            reply => wrong("create_ah", reply),
        }
    }

    fn destroy_ah(&self, ah: u32) -> Result<(), VerbsError> {
        self.control.call_done("destroy_ah", &Request::DestroyAh { ah })
    }

    fn cm(&self, request: CmRequest, fd: Option<BorrowedFd<'_>>) -> Result<CmReply, VerbsError> {
        Ok(self.control.call_cm(request, fd)?.0)
    }

    fn cm_bytes(&self, request: CmRequest) -> Result<Vec<u8>, VerbsError> {
        match self.control.call_cm(request, None)? {
            (CmReply::Bytes(bytes), mut fds) => bytes.take(&mut fds, MOST_CM_BYTES).map_err(no_answer(CM)),
            (reply, _) => wrong(CM, Reply::Cm(reply)),
        }
    }

    fn qp_ends(&self, place: &QpPlace) -> Result<QpEnds, VerbsError> {
        let (send, recv) = self.arena.qp_ends(place).ok_or_else(|| outside(place.offset))?;
        Ok(QpEnds {
            send: Box::new(SoftSends::new(self.arena.clone(), send, place.slot)),
            recv: Box::new(SoftRecvs::new(self.arena.clone(), recv)),
        })
    }

    fn cq_end(&self, place: &CqPlace) -> Result<Box<dyn CompletionRing>, VerbsError> {
        let end = self.arena.cq_end(place).ok_or_else(|| outside(place.offset))?;
        Ok(Box::new(SoftCompletions::new(self.arena.clone(), end)))
    }

    fn srq_end(&self, place: &SrqPlace) -> Result<Box<dyn RecvRing>, VerbsError> {
        let end = self.arena.srq_end(place).ok_or_else(|| outside(place.offset))?;
        Ok(Box::new(SoftRecvs::new(self.arena.clone(), end)))
    }

    fn deafen(&self) -> Result<(), VerbsError> {
        self.control.call_done("park_context", &Request::ParkContext)
    }

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        let held = |object: &str, users: usize| VerbsError::Busy {
            object: object.to_owned(),
            users,
        };
        let device =
            Arc::try_unwrap(self).map_err(|device| held("the device", Arc::strong_count(&device)))?;
        device.deafen()?;
        let Self { control, arena, .. } = device;
        // Unmapped here and now, or not parked: the caller freezes the process next.
        Arc::try_unwrap(arena).map_err(|arena| held("the RNIC's memory", Arc::strong_count(&arena)))?;
        Ok(Parked {
            kept: None,
            connection: control.into_inner().into_socket().into_fd(),
            reopen: Box::new(attach),
        })
    }
}

/// Opens a connection that was parked, or prepared by an agent.
fn attach(connection: OwnedFd) -> Result<Arc<dyn Device>, VerbsError> {
    let request = |version| Request::AttachContext { version };
    let device = SoftDevice::start(Socket::from_fd(connection), "attach_context", request)?;
    Ok(Arc::new(device))
}

fn outside(offset: u64) -> VerbsError {
    VerbsError::Invalid(format!(
        "the RNIC put a queue at {offset:#x}, outside of its memory"
    ))
}
