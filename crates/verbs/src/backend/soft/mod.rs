//! The software RNIC: a connection for the control path, an arena of shared memory for the queues, a socket for
//! asynchronous events and one for each completion channel.

pub(crate) mod events;
pub(crate) mod map;
mod numbers;
pub(crate) mod rings;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use verbatim_channel::SegmentRecord;
use verbatim_device::Connection;
use verbatim_device::control::{
    AddressVector, AsyncEvent, Backing, CLASS_VERSION, CM_VERSION, CmReply, CmRequest, DeviceAttr,
    MOST_CM_BYTES, MOST_QPS, MwState, MwType, PortAttr, QpAttr, QpAttrMask, QpClass, QpPosition, QpSecret,
    QpState, Reply, Request, SOCKET_NAME, Segment, SrqAttr, Translation,
};
use verbatim_device::image::{self, QpImage, Restoring};
use verbatim_seqpacket::{Received, Socket};

use self::events::{Events, SoftChannel};
use self::map::Arena;
pub(super) use self::rings::{SoftCompletions, SoftRecvs, SoftSends};
use super::{
    CompletionRing, CqPlace, Device, EventChannel, Parked, PhysicalMemory, PhysicalMrChange, PhysicalMrInit,
    PhysicalQpInit, Provider, QpEnds, QpPlace, RecvRing, SrqPlace, TakenUp, Watched,
};
use crate::backend::DeviceInfo;
use crate::error::VerbsError;
use crate::held;

/// The software RNIC whose socket is in a runtime folder.
#[derive(Debug)]
pub struct SoftProvider {
    runtime: PathBuf,
    /// As it said when it was first asked: a program may list devices often.
    known: Mutex<Vec<DeviceInfo>>,
}

impl SoftProvider {
    pub fn new(runtime: &Path) -> Self {
        Self {
            runtime: runtime.to_owned(),
            known: Mutex::default(),
        }
    }
}

impl Provider for SoftProvider {
    fn devices(&self) -> Vec<DeviceInfo> {
        let mut known = self.known.lock();
        if known.is_empty()
            && let Ok(device) = open(&self.runtime)
        {
            let (attr, _) = device.attributes();
            known.push(DeviceInfo {
                name: attr.name.clone(),
                guid: attr.node_guid,
            });
        }
        known.clone()
    }

    fn open(&self, _name: &str) -> Result<Arc<dyn Device>, VerbsError> {
        open(&self.runtime)
    }

    fn has_cm(&self) -> bool {
        self.runtime.join(SOCKET_NAME).exists()
    }
}

/// An opened context.
#[derive(Debug)]
pub struct SoftDevice {
    /// A child of this process shall not hold the connection. Forgotten before it goes.
    _held: [held::Held; 2],
    /// One request, one answer.
    connection: Mutex<Connection>,
    /// The same connection, for who only wants to know whether it is still there.
    hangup: OwnedFd,
    arena: Arc<Arena>,
    events: Events,
    device_attr: DeviceAttr,
    port_attr: PortAttr,
}

/// Opens a new context at the RNIC of this runtime folder.
fn open(runtime: &Path) -> Result<Arc<dyn Device>, VerbsError> {
    let connection = Socket::connect(&runtime.join(SOCKET_NAME)).map_err(no_answer("open_device"))?;
    let request = |version| Request::OpenContext {
        version,
        name: program_name(),
    };
    Ok(Arc::new(SoftDevice::start(connection, "open_device", request)?))
}

/// The program's name, for the RNIC's statistics.
pub fn program_name() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

fn no_answer(verb: &'static str) -> impl Fn(verbatim_seqpacket::Error) -> VerbsError {
    move |source| VerbsError::Channel {
        verb,
        peer: "software RNIC",
        source,
    }
}

/// What all requests of rdma_cm are called.
const CM: &str = "rdma_cm";

fn call(
    connection: &Connection,
    verb: &'static str,
    request: &Request,
    fds: &[BorrowedFd<'_>],
) -> Result<Received<Reply>, VerbsError> {
    let received = connection.call(request, fds).map_err(no_answer(verb))?;
    unless_refused(verb, received)
}

fn unless_refused(verb: &'static str, received: Received<Reply>) -> Result<Received<Reply>, VerbsError> {
    match received.message {
        Reply::Error { errno, message } => Err(VerbsError::Refused { verb, errno, message }),
        _ => Ok(received),
    }
}

fn wrong<T>(verb: &'static str, reply: Reply) -> Result<T, VerbsError> {
    Err(VerbsError::WrongReply {
        verb,
        reply: Box::new(reply),
    })
}

fn is_done(verb: &'static str, reply: Reply) -> Result<(), VerbsError> {
    match reply {
        Reply::Done => Ok(()),
        reply => wrong(verb, reply),
    }
}

impl SoftDevice {
    fn start(
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
            connection: Mutex::new(connection),
            arena: Arc::new(arena),
            events,
            device_attr: device,
            port_attr: port,
        })
    }

    fn call_cm(
        &self,
        request: CmRequest,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(CmReply, Vec<OwnedFd>), VerbsError> {
        let connection = self.connection.lock();
        check_cm(connection.version())?;
        let fds: Vec<_> = fd.into_iter().collect();
        let received = call(&connection, CM, &Request::Cm(request), &fds)?;
        match received.message {
            Reply::Cm(reply) => Ok((reply, received.fds)),
            reply => wrong(CM, reply),
        }
    }

    fn call(&self, verb: &'static str, request: &Request) -> Result<Reply, VerbsError> {
        self.call_with(verb, request, &[])
    }

    fn call_with(
        &self,
        verb: &'static str,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Reply, VerbsError> {
        Ok(call(&self.connection.lock(), verb, request, fds)?.message)
    }

    /// As [`Self::call`], for many requests, of which some are always under way, so that the RNIC need not be woken for each.
    /// The answers come in order; an error is the first one's, and the others are made all the same.
    fn call_all<T>(
        &self,
        verb: &'static str,
        requests: impl Iterator<Item = Request>,
        take: impl Fn(Reply) -> Result<T, VerbsError>,
    ) -> Result<Vec<T>, VerbsError> {
        /// Their answers fit into the socket, whose other end does not wait for room.
        const UNDER_WAY: usize = 16;
        let connection = self.connection.lock();
        let mut answers = Vec::new();
        let mut under_way = 0;
        let answer = |answers: &mut Vec<_>| {
            let received = connection.recv().map_err(no_answer(verb))?;
            answers.push(match received.message {
                Reply::Error { errno, message } => Err(VerbsError::Refused { verb, errno, message }),
                reply => take(reply),
            });
            Ok::<(), VerbsError>(())
        };
        // Whatever goes wrong on this side, each request that was made has its answer taken.
        let mut result = Ok(());
        for request in requests {
            if under_way == UNDER_WAY {
                answer(&mut answers)?;
                under_way -= 1;
            }
            result = connection.send(&request, &[]).map_err(no_answer(verb));
            if result.is_err() {
                break;
            }
            under_way += 1;
        }
        for _ in 0..under_way {
            answer(&mut answers)?;
        }
        result?;
        answers.into_iter().collect()
    }

    fn call_all_done(
        &self,
        verb: &'static str,
        requests: impl Iterator<Item = Request>,
    ) -> Result<(), VerbsError> {
        let done = self.call_all(verb, requests, |reply| is_done(verb, reply));
        done.map(drop)
    }

    fn call_done(&self, verb: &'static str, request: &Request) -> Result<(), VerbsError> {
        is_done(verb, self.call(verb, request)?)
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
        match self.call("alloc_pd", &Request::AllocPd)? {
            Reply::Pd { pd } => Ok(pd),
            reply => wrong("alloc_pd", reply),
        }
    }

    fn dealloc_pd(&self, pd: u32) -> Result<(), VerbsError> {
        self.call_done("dealloc_pd", &Request::DeallocPd { pd })
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
        match self.call_with("rereg_mr", &request, &file)? {
            Reply::Mr { .. } => Ok(()),
            reply => wrong("rereg_mr", reply),
        }
    }

    fn dereg_mr(&self, lkey: u32) -> Result<(), VerbsError> {
        self.call_done("dereg_mr", &Request::DeregMr { lkey })
    }

    fn alloc_mw(&self, pd: u32, mw_type: MwType) -> Result<u32, VerbsError> {
        self.make_window(pd, mw_type, None)
    }

    fn alloc_mw_as(&self, pd: u32, mw_type: MwType, rkey: u32) -> Result<(), VerbsError> {
        self.make_window(pd, mw_type, Some(rkey)).map(drop)
    }

    fn dealloc_mw(&self, rkey: u32) -> Result<(), VerbsError> {
        self.call_done("dealloc_mw", &Request::DeallocMw { rkey })
    }

    fn query_mw(&self, rkey: u32) -> Result<MwState, VerbsError> {
        match self.call("query_mw", &Request::QueryMw { rkey })? {
            Reply::MwState(state) => Ok(state),
            reply => wrong("query_mw", reply),
        }
    }

    fn restore_mw(&self, state: &MwState) -> Result<(), VerbsError> {
        self.call_done("restore_mw", &Request::RestoreMw { state: *state })
    }

    fn create_comp_channel(&self) -> Result<Arc<dyn EventChannel>, VerbsError> {
        const VERB: &str = "create_comp_channel";
        let (ours, theirs) = SoftChannel::pair()?;
        match self.call_with(VERB, &Request::CreateCompChannel, &[theirs.as_fd()])? {
            Reply::CompChannel { channel } => Ok(Arc::new(SoftChannel::new(channel, ours, theirs))),
            reply => wrong(VERB, reply),
        }
    }

    fn attach_comp_channel(&self, number: u32, channel: &dyn EventChannel) -> Result<(), VerbsError> {
        const VERB: &str = "attach_comp_channel";
        let line: Vec<_> = channel.line().into_iter().collect();
        match self.call_with(VERB, &Request::AttachCompChannel { channel: number }, &line)? {
            Reply::Done => Ok(()),
            reply => wrong(VERB, reply),
        }
    }

    fn destroy_comp_channel(&self, channel: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_comp_channel", &Request::DestroyCompChannel { channel })
    }

    fn create_cq(&self, entries: u32, channel: Option<(u32, u32)>) -> Result<CqPlace, VerbsError> {
        let (channel, event) = channel.unzip();
        let request = Request::CreateCq {
            entries,
            channel,
            event,
        };
        match self.call("create_cq", &request)? {
            Reply::Cq { cq, entries, offset } => Ok(CqPlace { cq, entries, offset }),
            reply => wrong("create_cq", reply),
        }
    }

    fn resize_cq(&self, cq: u32, entries: u32) -> Result<CqPlace, VerbsError> {
        match self.call("resize_cq", &Request::ResizeCq { cq, entries })? {
            Reply::Cq { cq, entries, offset } => Ok(CqPlace { cq, entries, offset }),
            reply => wrong("resize_cq", reply),
        }
    }

    fn destroy_cq(&self, cq: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_cq", &Request::DestroyCq { cq })
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
        self.call_done("modify_qp", &request)
    }

    fn query_qp(&self, qpn: u32) -> Result<QpAttr, VerbsError> {
        match self.call("query_qp", &Request::QueryQp { qpn })? {
            Reply::QpAttr { attr, .. } => Ok(attr),
            reply => wrong("query_qp", reply),
        }
    }

    fn qp_states(&self, qpns: &[u32]) -> Result<Vec<QpState>, VerbsError> {
        let requests = qpns
            .chunks(MOST_QPS)
            .map(|qpns| Request::QueryQps { qpns: qpns.to_vec() });
        let states = self.call_all("query_qp", requests, |reply| match reply {
            Reply::QpStates(states) => Ok(states),
            reply => wrong("query_qp", reply),
        })?;
        Ok(states.into_iter().flatten().collect())
    }

    fn destroy_qps(&self, qpns: &[u32]) -> Result<(), VerbsError> {
        let requests = qpns.iter().map(|qpn| Request::DestroyQp { qpn: *qpn });
        self.call_all_done("destroy_qp", requests)
    }

    fn stop_qp(&self, qpn: u32) -> Result<QpPosition, VerbsError> {
        match self.call("stop_qp", &Request::StopQp { qpn })? {
            Reply::QpStopped(position) => Ok(position),
            reply => wrong("stop_qp", reply),
        }
    }

    fn restart_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        self.call_done("restart_qp", &Request::RestartQp { qpn })
    }

    fn set_qp_secret(&self, qpn: u32, secret: Option<QpSecret>) -> Result<(), VerbsError> {
        self.call_done("set_qp_secret", &Request::SetQpSecret { qpn, secret })
    }

    fn set_qp_class(&self, qpn: u32, class: QpClass) -> Result<(), VerbsError> {
        check_classes(self.connection.lock().version())?;
        self.call_done("set_qp_class", &Request::SetQpClass { qpn, class })
    }

    fn pause_qps(&self, qpns: &[u32], limit_s: Option<u32>) -> Result<(), VerbsError> {
        let requests = qpns.chunks(MOST_QPS).map(|qpns| Request::PauseQps {
            qpns: qpns.to_vec(),
            limit_s,
        });
        self.call_all_done("pause_qp", requests)
    }

    fn dump_qps(&self, qpns: &[u32]) -> Result<Vec<QpImage>, VerbsError> {
        const VERB: &str = "dump_qp";
        let connection = self.connection.lock();
        let mut images = Vec::new();
        while let left @ [_, ..] = &qpns[images.len()..] {
            let request = Request::DumpQps {
                qpns: left[..left.len().min(MOST_QPS)].to_vec(),
            };
            let mut received = call(&connection, VERB, &request, &[])?;
            let Reply::QpImages(carried) = received.message else {
                return wrong(VERB, received.message);
            };
            let first = image::take(carried, &mut received.fds).map_err(no_answer(VERB))?;
            if first.is_empty() || first.len() > left.len() {
                return Err(VerbsError::Invalid(format!(
                    "the RNIC sent {} images in place of {}",
                    first.len(),
                    left.len()
                )));
            }
            images.extend(first);
        }
        Ok(images)
    }

    fn restore_qps(&self, images: &[TakenUp<'_>]) -> Result<Vec<Result<(), VerbsError>>, VerbsError> {
        const VERB: &str = "restore_qp";
        let mut restoring = Restoring::default();
        for taken_up in images {
            restoring.add(taken_up.qpn, taken_up.image, taken_up.sgid_index);
        }
        let mut results: Vec<Result<(), VerbsError>> = Vec::new();
        for request in restoring.requests() {
            let (request, memory) = request.map_err(no_answer(VERB))?;
            let Request::RestoreQps { qps, .. } = &request else {
                unreachable!("that is what they are");
            };
            let first = results.len();
            results.extend(qps.iter().map(|_| Ok(())));
            let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
            match self.call_with(VERB, &request, &fds) {
                Ok(Reply::QpsRestored { refused, message }) => {
                    for (index, errno) in refused {
                        if let Some(result) = results.get_mut(first + index as usize) {
                            let message = message.clone();
                            *result = Err(VerbsError::Refused {
                                verb: VERB,
                                errno,
                                message,
                            });
                        }
                    }
                }
                Ok(reply) => return wrong(VERB, reply),
                Err(VerbsError::Refused { verb, errno, message }) => {
                    for result in &mut results[first..] {
                        let message = message.clone();
                        *result = Err(VerbsError::Refused { verb, errno, message });
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(results)
    }

    fn resume_qps(&self, qpns: &[u32]) -> Result<(), VerbsError> {
        let requests = qpns
            .chunks(MOST_QPS)
            .map(|qpns| Request::ResumeQps { qpns: qpns.to_vec() });
        self.call_all_done("resume_qp", requests)
    }

    fn is_paused(&self, qpn: u32) -> Result<bool, VerbsError> {
        match self.call("query_qp", &Request::QueryQp { qpn })? {
            Reply::QpAttr { paused, .. } => Ok(paused),
            reply => wrong("query_qp", reply),
        }
    }

    fn destroy_qp(&self, qpn: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_qp", &Request::DestroyQp { qpn })
    }

    fn attach_mcast(&self, qpn: u32, gid: [u8; 16]) -> Result<(), VerbsError> {
        self.call_done("attach_mcast", &Request::AttachMcast { qpn, gid })
    }

    fn detach_mcast(&self, qpn: u32, gid: [u8; 16]) -> Result<(), VerbsError> {
        self.call_done("detach_mcast", &Request::DetachMcast { qpn, gid })
    }

    fn create_srq(&self, pd: u32, attr: &SrqAttr) -> Result<SrqPlace, VerbsError> {
        match self.call("create_srq", &Request::CreateSrq { pd, attr: *attr })? {
            Reply::Srq { srq, attr, offset } => Ok(SrqPlace { srq, attr, offset }),
            reply => wrong("create_srq", reply),
        }
    }

    fn modify_srq(&self, srq: u32, limit: u32) -> Result<(), VerbsError> {
        self.call_done("modify_srq", &Request::ModifySrq { srq, limit })
    }

    fn query_srq(&self, srq: u32) -> Result<SrqAttr, VerbsError> {
        match self.call("query_srq", &Request::QuerySrq { srq })? {
            Reply::Srq { attr, .. } => Ok(attr),
            reply => wrong("query_srq", reply),
        }
    }

    fn destroy_srq(&self, srq: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_srq", &Request::DestroySrq { srq })
    }

    fn create_ah(&self, pd: u32, av: &AddressVector) -> Result<u32, VerbsError> {
        match self.call("create_ah", &Request::CreateAh { pd, av: *av })? {
            Reply::Ah { ah } => Ok(ah),
            reply => wrong("create_ah", reply),
        }
    }

    fn destroy_ah(&self, ah: u32) -> Result<(), VerbsError> {
        self.call_done("destroy_ah", &Request::DestroyAh { ah })
    }

    fn cm(&self, request: CmRequest, fd: Option<BorrowedFd<'_>>) -> Result<CmReply, VerbsError> {
        Ok(self.call_cm(request, fd)?.0)
    }

    fn cm_bytes(&self, request: CmRequest) -> Result<Vec<u8>, VerbsError> {
        match self.call_cm(request, None)? {
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
        self.call_done("park_context", &Request::ParkContext)
    }

    fn park(self: Arc<Self>) -> Result<Parked, VerbsError> {
        let held = |object: &str, users: usize| VerbsError::Busy {
            object: object.to_owned(),
            users,
        };
        let device =
            Arc::try_unwrap(self).map_err(|device| held("the device", Arc::strong_count(&device)))?;
        device.deafen()?;
        let Self {
            connection, arena, ..
        } = device;
        // Unmapped here and now, or not parked: the caller freezes the process next.
        Arc::try_unwrap(arena).map_err(|arena| held("the RNIC's memory", Arc::strong_count(&arena)))?;
        Ok(Parked {
            kept: None,
            connection: connection.into_inner().into_socket().into_fd(),
            reopen: Box::new(attach),
        })
    }
}

/// Whether this version of the contract has classes of queue pairs.
fn check_classes(version: u32) -> Result<(), VerbsError> {
    match version >= CLASS_VERSION {
        true => Ok(()),
        false => Err(VerbsError::Unsupported(format!(
            "the software RNIC speaks version {version} of the device contract, and classes of queue pairs came with version \
             {CLASS_VERSION}: upgrade it"
        ))),
    }
}

/// Whether this version of the contract has connections by address and port.
fn check_cm(version: u32) -> Result<(), VerbsError> {
    match version >= CM_VERSION {
        true => Ok(()),
        false => Err(VerbsError::Unsupported(format!(
            "the software RNIC speaks version {version} of the device contract, and rdma_cm came with version {CM_VERSION}: \
             upgrade it"
        ))),
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

fn segments(memory: &PhysicalMemory<'_>) -> Vec<Segment> {
    memory.segments.iter().map(segment).collect()
}

fn segment(record: &SegmentRecord) -> Segment {
    Segment {
        address: record.address,
        length: record.length,
        backing: match record.offset {
            Some(offset) => Backing::File { fd_index: 0, offset },
            None => Backing::Process,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_rnic_of_an_earlier_release_is_not_asked_to_connect() {
        check_cm(CM_VERSION).unwrap();
        let error = check_cm(CM_VERSION - 1).unwrap_err();
        assert_eq!(error.errno(), libc::EOPNOTSUPP);
        assert!(error.to_string().contains("upgrade it"), "{error}");
    }

    #[test]
    fn an_rnic_of_an_earlier_release_is_not_asked_for_classes() {
        check_classes(CLASS_VERSION).unwrap();
        let error = check_classes(CLASS_VERSION - 1).unwrap_err();
        assert_eq!(error.errno(), libc::EOPNOTSUPP);
        assert!(error.to_string().contains("upgrade it"), "{error}");
    }
}
