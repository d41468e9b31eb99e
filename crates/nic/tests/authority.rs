//! Who may send which request: every kind of request from every kind of caller, over real sockets.

mod support;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, UCred};
use rustix::process::{Gid, Pid, Uid};
use strum::IntoEnumIterator;
use support::objects::av;
use support::program::CAP;
use support::{Program, Qp, Queue, Server};
use verbatim_device::control::{
    Access, Backing, CmRequest, ForwardedQp, MOST_QPS, MwState, MwType, QpAttr, QpAttrMask, QpClass, QpState,
    QpType, Reply, Request, RequestKind, Segment, SrqAttr, VERSION,
};
use verbatim_seqpacket::{Carried, Listener, Socket};

/// What the RNIC says to each caller, and must say: `+` the request is answered, `P` it is refused with `EPERM`, `-` it is refused
/// with `EINVAL`, since it has no meaning on such a connection.
///
/// Columns: root over the RNIC's own control socket, root over an instance's, another user over the one, and over the other; of
/// each a connection without a context, one whose context the caller has opened, one whose context another process has opened,
/// and one that the caller has attached to.
///
/// A new request needs a sample in [`samples`] and a line here, which a person writes who has thought about who may send it.
const EXPECTED: &str = "
OpenContext                  +--- +--- +--- +---
AttachContext                -+++ -+++ -+++ -+++
ParkContext                  -+++ -+++ -+++ -+++
AddListener                  +-PP PPPP PPPP PPPP
AllocPd                      -+++ -+++ -+++ -+++
DeallocPd                    -+++ -+++ -+++ -+++
RegMr                        -+++ -+++ -+++ -+++
RegMr of a chosen key        -+PP PPPP PPPP PPPP
DeregMr                      -+++ -+++ -+++ -+++
ReregMr                      -+++ -+++ -+++ -+++
AllocMw                      -+++ -+++ -+++ -+++
AllocMw of a chosen key      -+PP PPPP PPPP PPPP
DeallocMw                    -+++ -+++ -+++ -+++
QueryMw                      -+++ -+++ -+++ -+++
RestoreMw                    -+++ -+++ -+++ -+++
CreateCompChannel            -+++ -+++ -+++ -+++
AttachCompChannel            -+++ -+++ -+++ -+++
DestroyCompChannel           -+++ -+++ -+++ -+++
CreateCq                     -+++ -+++ -+++ -+++
ResizeCq                     -+++ -+++ -+++ -+++
DestroyCq                    -+++ -+++ -+++ -+++
CreateQp                     -+++ -+++ -+++ -+++
CreateQp of a chosen number  -+PP PPPP PPPP PPPP
CreateSrq                    -+++ -+++ -+++ -+++
ModifySrq                    -+++ -+++ -+++ -+++
QuerySrq                     -+++ -+++ -+++ -+++
DestroySrq                   -+++ -+++ -+++ -+++
CreateAh                     -+++ -+++ -+++ -+++
DestroyAh                    -+++ -+++ -+++ -+++
AttachMcast                  -+++ -+++ -+++ -+++
DetachMcast                  -+++ -+++ -+++ -+++
QueryStatistics              ++PP PPPP ++PP PPPP
StartCapture                 +-PP PPPP PPPP PPPP
ModifyQp                     -+++ -+++ -+++ -+++
QueryQp                      -+++ -+++ -+++ -+++
QueryQps                     -+++ -+++ -+++ -+++
StopQp                       -+++ -+++ -+++ -+++
RestartQp                    -+++ -+++ -+++ -+++
SetQpSecret                  -+++ -+++ -+++ -+++
PauseQps                     -+++ -+++ -+++ -+++
DumpQps                      -+++ -+++ -+++ -+++
RestoreQps                   -+++ -+++ -+++ -+++
ResumeQps                    -+++ -+++ -+++ -+++
ForwardQps                   -+++ -+++ -+++ -+++
DestroyQp                    -+++ -+++ -+++ -+++
QueryOwners                  +-PP PPPP PPPP PPPP
RemoveListener               +-PP PPPP PPPP PPPP
QueryListeners               +-PP PPPP PPPP PPPP
SetQpClass                   -+++ -+++ -+++ -+++
Cm                           -+++ -+++ -+++ -+++
Cm of a chosen port          -+PP PPPP PPPP PPPP
TakePeerQuestions            +-PP PPPP PPPP PPPP
AnswerPeerQuestions          +-PP PPPP PPPP PPPP
MeetPeers                    +-PP PPPP PPPP PPPP
ServeHost                    -+PP PPPP PPPP PPPP
PeersGone                    +-PP PPPP PPPP PPPP
PeersHeard                   +-PP PPPP PPPP PPPP
";

const USERS: [u32; 2] = [0, 1000];

/// How a caller came to its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    NoContext,
    Opened,
    /// Another process has opened the context and handed the connection over.
    HandedOver,
    /// The same, and the caller has attached to it.
    Attached,
}

const STAGES: [Stage; 4] = [
    Stage::NoContext,
    Stage::Opened,
    Stage::HandedOver,
    Stage::Attached,
];

#[test]
fn every_request_is_answered_to_whom_it_may_be() {
    assert!(
        rustix::process::geteuid().is_root(),
        "this test speaks as several users, which only root can"
    );
    let server = Server::start([127, 7, 96, 1]);
    let instance = InstanceSocket::new(&server);
    let others = USERS.map(OtherProcess::start);
    let mut found = String::from("\n");
    for kind in RequestKind::iter() {
        for sample in samples(kind) {
            found += &format!("{:<28}", sample.name);
            for other in &others {
                for path in [&server.socket(), &instance.path] {
                    let answers = STAGES.map(|stage| sample.answer(path, &server, stage, other));
                    found += &format!(" {}", answers.concat());
                }
            }
            found += "\n";
        }
    }
    assert!(
        found == EXPECTED,
        "the RNIC answers otherwise than expected:{}",
        differences(&found)
    );
}

fn differences(found: &str) -> String {
    let known: Vec<_> = EXPECTED.lines().collect();
    let new = found.lines().filter(|line| !known.contains(line));
    let new: String = new.map(|line| format!("\n{line}")).collect();
    format!("{new}\n\nThe whole table is:\n{found}")
}

/// A listener of an instance, which is all that a container sees of the RNIC.
struct InstanceSocket {
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl InstanceSocket {
    fn new(server: &Server) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("nic.sock");
        let listener = Listener::bind(&path).expect("a socket");
        let socket = Socket::connect(&server.socket()).expect("the RNIC listens");
        let added = socket.call::<_, Reply>(
            &Request::AddListener {
                instance: "web".to_owned(),
            },
            &[listener.as_fd()],
        );
        assert!(matches!(added.expect("an answer").message, Reply::Done));
        Self {
            path,
            _folder: folder,
        }
    }
}

/// A process that a connection is handed over to; it only lends its number.
struct OtherProcess {
    uid: u32,
    child: Child,
    _input: ChildStdin,
}

impl OtherProcess {
    fn start(uid: u32) -> Self {
        let command = &mut Command::new("cat");
        let mut child = command.uid(uid).stdin(Stdio::piped()).spawn().expect("cat");
        let input = child.stdin.take().expect("its input");
        Self {
            uid,
            child,
            _input: input,
        }
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a request as somebody else would (`SCM_CREDENTIALS`, unix(7)), which root may, and gives the answer.
fn ask_as(socket: &Socket, request: &Request, fds: &[BorrowedFd<'_>], pid: u32, uid: u32) -> Reply {
    let bytes = postcard::to_stdvec(request).expect("a request");
    let sender = UCred {
        pid: Pid::from_raw(pid as i32).expect("a process"),
        uid: Uid::from_raw(uid),
        gid: Gid::from_raw(uid),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1), ScmCredentials(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmCredentials(sender)));
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(&bytes)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )
    .expect("the request can be sent");
    socket.recv::<Reply>().expect("an answer").message
}

/// A request that would be granted to who may send it.
struct Sample {
    name: String,
    make: Box<dyn Fn(&World) -> Request>,
    fd: Option<fn() -> OwnedFd>,
}

impl Sample {
    fn answer(&self, path: &Path, server: &Server, stage: Stage, other: &OtherProcess) -> String {
        let world = World::new(path, server);
        let (own, uid) = (std::process::id(), other.uid);
        let (socket, pid) = match stage {
            Stage::NoContext => (&Socket::connect(path).expect("the RNIC listens"), own),
            Stage::Opened => (&world.program.socket, own),
            Stage::HandedOver | Stage::Attached => (&world.program.socket, other.child.id()),
        };
        if stage == Stage::Attached {
            let attach = Request::AttachContext { version: VERSION };
            let reply = ask_as(socket, &attach, &[], pid, uid);
            assert!(matches!(reply, Reply::Context { .. }), "{reply:?}");
        }
        let fd = self.fd.map(|make| make());
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        match ask_as(socket, &(self.make)(&world), &fds, pid, uid) {
            Reply::Error {
                errno: libc::EPERM, ..
            } => "P".to_owned(),
            Reply::Error {
                errno: libc::EINVAL, ..
            } => "-".to_owned(),
            Reply::Error { errno, message } => format!("({errno}: {message})"),
            _ => "+".to_owned(),
        }
    }
}

/// A context with one of everything, which its opener has made.
struct World {
    program: Program,
    server: IpAddr,
    spare_pd: u32,
    /// In RTS.
    qp: Qp,
    /// In RESET.
    new_qp: Qp,
    paused: Qp,
    datagrams: Qp,
    spare_cq: Queue,
    srq: u32,
    ah: u32,
    lkey: u32,
    window: u32,
    channel: u32,
    _queue: Queue,
}

const GROUP: [u8; 16] = [0xff, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x77, 0x77];

impl World {
    fn new(path: &Path, server: &Server) -> Self {
        let program = Program::connect(path, "test");
        let Reply::Pd { pd: spare_pd } = program.call(Request::AllocPd) else {
            panic!("no protection domain")
        };
        let queue = program.cq(16);
        let (qp, paused) = (program.qp(&queue, CAP), program.qp(&queue, CAP));
        program.connect_qp(&qp, server.address, paused.qpn);
        program.connect_qp(&paused, server.address, qp.qpn);
        program.call(Request::PauseQps {
            qpns: vec![paused.qpn],
            limit_s: None,
        });
        let Reply::Srq { srq, .. } = program.call(srq_request(program.pd)) else {
            panic!("no shared receive queue")
        };
        let ah = Request::CreateAh {
            pd: program.pd,
            av: av(server.address),
        };
        let Reply::Ah { ah } = program.call(ah) else {
            panic!("no address handle")
        };
        let Reply::Mr { lkey, .. } = program.call(region(program.pd, None)) else {
            panic!("no region")
        };
        let Reply::Mw { rkey: window } = program.call(window(program.pd, None)) else {
            panic!("no window")
        };
        let reply = program.ask(&Request::CreateCompChannel, &[event_socket().as_fd()]);
        let Ok(Reply::CompChannel { channel }) = reply else {
            panic!("no channel: {reply:?}")
        };
        Self {
            server: server.address,
            spare_pd,
            new_qp: program.qp(&queue, CAP),
            datagrams: program.qp_with(&queue, CAP, QpType::Ud, None),
            spare_cq: program.cq(16),
            qp,
            paused,
            srq,
            ah,
            lkey,
            window,
            channel,
            program,
            _queue: queue,
        }
    }
}

fn region(pd: u32, key: Option<u32>) -> Request {
    Request::RegMr {
        pd,
        address: 4096,
        length: 4096,
        iova: 4096,
        access: Access::LOCAL_WRITE,
        segments: vec![Segment {
            address: 4096,
            length: 4096,
            backing: Backing::Process,
        }],
        key,
    }
}

fn window(pd: u32, rkey: Option<u32>) -> Request {
    Request::AllocMw {
        pd,
        mw_type: MwType::One,
        rkey,
    }
}

fn srq_request(pd: u32) -> Request {
    let attr = SrqAttr {
        max_wr: 4,
        max_sge: 1,
        limit: 0,
    };
    Request::CreateSrq { pd, attr }
}

fn queue_pair(world: &World, qpn: Option<u32>) -> Request {
    Request::CreateQp {
        pd: world.program.pd,
        send_cq: world.spare_cq.cq,
        recv_cq: world.spare_cq.cq,
        qp_type: QpType::Rc,
        cap: CAP,
        srq: None,
        qpn,
    }
}

fn event_socket() -> OwnedFd {
    Socket::pair().expect("sockets").1.into_fd()
}

fn listening_socket() -> OwnedFd {
    let folder = tempfile::tempdir().expect("a folder");
    let listener = Listener::bind(&folder.path().join("nic.sock")).expect("a socket");
    listener.as_fd().try_clone_to_owned().expect("a descriptor")
}

/// One request of each kind, and one more where a kind asks for more with one of its fields.
fn samples(kind: RequestKind) -> Vec<Sample> {
    use RequestKind as K;
    let name: &'static str = kind.into();
    let sample = |make: Box<dyn Fn(&World) -> Request>| Sample {
        name: name.to_owned(),
        make,
        fd: None,
    };
    let with_fd = |fd: fn() -> OwnedFd, make: Box<dyn Fn(&World) -> Request>| Sample {
        fd: Some(fd),
        ..sample(make)
    };
    let chosen = |what: &str, make: Box<dyn Fn(&World) -> Request>| Sample {
        name: format!("{name} of a chosen {what}"),
        ..sample(make)
    };
    let simple: Box<dyn Fn(&World) -> Request> = match kind {
        K::OpenContext => Box::new(|_| Request::OpenContext {
            version: VERSION,
            name: "test".to_owned(),
        }),
        K::AttachContext => Box::new(|_| Request::AttachContext { version: VERSION }),
        K::ParkContext => Box::new(|_| Request::ParkContext),
        K::AddListener => {
            let add = |_: &World| Request::AddListener {
                instance: "another".to_owned(),
            };
            return vec![with_fd(listening_socket, Box::new(add))];
        }
        K::RemoveListener => Box::new(|_| Request::RemoveListener {
            instance: "another".to_owned(),
        }),
        K::QueryListeners => Box::new(|_| Request::QueryListeners { after: None }),
        K::TakePeerQuestions => Box::new(|_| Request::TakePeerQuestions),
        K::AnswerPeerQuestions => Box::new(|_| Request::AnswerPeerQuestions { answers: Vec::new() }),
        K::MeetPeers => Box::new(|_| Request::MeetPeers { pairs: Vec::new() }),
        K::ServeHost => Box::new(|_| Request::ServeHost),
        K::PeersGone => Box::new(|_| Request::PeersGone { pairs: Vec::new() }),
        K::PeersHeard => Box::new(|_| Request::PeersHeard { pairs: Vec::new() }),
        K::AllocPd => Box::new(|_| Request::AllocPd),
        K::DeallocPd => Box::new(|world| Request::DeallocPd { pd: world.spare_pd }),
        K::RegMr => {
            return vec![
                sample(Box::new(|world| region(world.program.pd, None))),
                chosen(
                    "key",
                    Box::new(|world| region(world.program.pd, Some(0x1234_5600))),
                ),
            ];
        }
        K::DeregMr => Box::new(|world| Request::DeregMr { lkey: world.lkey }),
        K::ReregMr => Box::new(|world| Request::ReregMr {
            lkey: world.lkey,
            pd: None,
            access: Some(Access::LOCAL_WRITE | Access::REMOTE_READ),
            translation: None,
        }),
        K::AllocMw => {
            return vec![
                sample(Box::new(|world| window(world.program.pd, None))),
                chosen(
                    "key",
                    Box::new(|world| window(world.program.pd, Some(0x1234_5600))),
                ),
            ];
        }
        K::DeallocMw => Box::new(|world| Request::DeallocMw { rkey: world.window }),
        K::QueryMw => Box::new(|world| Request::QueryMw { rkey: world.window }),
        K::RestoreMw => Box::new(|world| Request::RestoreMw {
            state: MwState {
                rkey: world.window,
                bound: None,
            },
        }),
        K::CreateCompChannel => {
            return vec![with_fd(event_socket, Box::new(|_| Request::CreateCompChannel))];
        }
        K::AttachCompChannel => {
            let attach = |world: &World| Request::AttachCompChannel {
                channel: world.channel,
            };
            return vec![with_fd(event_socket, Box::new(attach))];
        }
        K::DestroyCompChannel => Box::new(|world| Request::DestroyCompChannel {
            channel: world.channel,
        }),
        K::CreateCq => Box::new(|_| Request::CreateCq {
            entries: 8,
            channel: None,
            event: None,
        }),
        K::ResizeCq => Box::new(|world| Request::ResizeCq {
            cq: world.spare_cq.cq,
            entries: 32,
        }),
        K::DestroyCq => Box::new(|world| Request::DestroyCq {
            cq: world.spare_cq.cq,
        }),
        K::CreateQp => {
            return vec![
                sample(Box::new(|world| queue_pair(world, None))),
                chosen("number", Box::new(|world| queue_pair(world, Some(0x1234)))),
            ];
        }
        K::CreateSrq => Box::new(|world| srq_request(world.program.pd)),
        K::ModifySrq => Box::new(|world| Request::ModifySrq {
            srq: world.srq,
            limit: 1,
        }),
        K::QuerySrq => Box::new(|world| Request::QuerySrq { srq: world.srq }),
        K::DestroySrq => Box::new(|world| Request::DestroySrq { srq: world.srq }),
        K::CreateAh => Box::new(|world| Request::CreateAh {
            pd: world.program.pd,
            av: av(world.server),
        }),
        K::DestroyAh => Box::new(|world| Request::DestroyAh { ah: world.ah }),
        K::AttachMcast => Box::new(|world| Request::AttachMcast {
            qpn: world.datagrams.qpn,
            gid: GROUP,
        }),
        K::DetachMcast => Box::new(|world| {
            let (qpn, gid) = (world.datagrams.qpn, GROUP);
            world.program.call(Request::AttachMcast { qpn, gid });
            Request::DetachMcast { qpn, gid }
        }),
        K::QueryStatistics => Box::new(|_| Request::QueryStatistics { from_qpn: 0 }),
        K::StartCapture => Box::new(|_| Request::StartCapture {
            snap_bytes: 64,
            qpn: None,
        }),
        K::ModifyQp => Box::new(|world| Request::ModifyQp {
            qpn: world.new_qp.qpn,
            mask: QpAttrMask::STATE,
            attr: QpAttr {
                state: QpState::Err,
                ..QpAttr::default()
            },
        }),
        K::QueryQp => Box::new(|world| Request::QueryQp { qpn: world.qp.qpn }),
        K::QueryQps => Box::new(|world| Request::QueryQps {
            qpns: vec![world.qp.qpn; MOST_QPS],
        }),
        K::StopQp => Box::new(|world| Request::StopQp { qpn: world.qp.qpn }),
        K::RestartQp => Box::new(|world| Request::RestartQp { qpn: world.qp.qpn }),
        K::SetQpSecret => Box::new(|world| Request::SetQpSecret {
            qpn: world.qp.qpn,
            secret: None,
        }),
        K::PauseQps => Box::new(|world| Request::PauseQps {
            qpns: vec![world.qp.qpn],
            limit_s: None,
        }),
        K::DumpQps => Box::new(|world| Request::DumpQps {
            qpns: vec![world.paused.qpn],
        }),
        K::RestoreQps => Box::new(|_| Request::RestoreQps {
            qps: Vec::new(),
            images: Carried::Here(Vec::new()),
        }),
        K::ResumeQps => Box::new(|world| Request::ResumeQps {
            qpns: vec![world.paused.qpn],
        }),
        K::ForwardQps => Box::new(|world| Request::ForwardQps {
            qps: vec![ForwardedQp {
                qpn: world.paused.qpn,
                to_gid: support::program::gid(IpAddr::from([127, 7, 96, 2])),
                to_qpn: 0x1234,
            }],
            seconds: 1,
        }),
        K::SetQpClass => Box::new(|world| Request::SetQpClass {
            qpn: world.qp.qpn,
            class: QpClass::Background,
        }),
        K::Cm => {
            // Version 1, and nothing.
            let needs = || Carried::Here(vec![1, 0, 0, 0]);
            let reserve = move |_: &World| {
                let (needs, from) = (needs(), [0; 16]);
                Request::Cm(CmRequest::Reserve { needs, from })
            };
            return vec![
                with_fd(event_socket, Box::new(|_| Request::Cm(CmRequest::CreateChannel))),
                chosen("port", Box::new(reserve)),
            ];
        }
        K::DestroyQp => Box::new(|world| Request::DestroyQp { qpn: world.qp.qpn }),
        K::QueryOwners => Box::new(|world| Request::QueryOwners {
            qpns: vec![world.qp.qpn],
        }),
    };
    vec![sample(simple)]
}
