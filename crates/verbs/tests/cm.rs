//! Channels of rdma_cm at a real RNIC: when they are readable, who waits, what they keep from moving, and their end.

mod support;

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{Agent, Nic};
use verbatim_channel::{Answer, CM_CONTEXT, ClaimedContext, Order, Scope};
use verbatim_device::control::{Reply, Request, VERSION};
use verbatim_seqpacket::{Carried, Socket};
use verbatim_verbs::dump::{Owner, QpUser};
use verbatim_verbs::{CmChannel, CmParameters, CmReply, CmRequest, Cq, Process, Qp, Srq};

const TCP: u16 = 0x0106;
const RC: u8 = 2;
const ADDR_RESOLVED: u32 = 0;
const ROUTE_RESOLVED: u32 = 2;

#[test]
#[ignore = "an RNIC for the others"]
fn rnic() {
    support::nic::be_an_rnic();
}

/// A program that has nothing to say.
struct Silent;

impl Owner for Silent {
    fn cq(&self, _: &Cq) -> u64 {
        0
    }
    fn srq(&self, _: &Srq) -> u64 {
        0
    }
    fn qp(&self, _: &Qp) -> QpUser {
        QpUser::default()
    }
}

fn is_readable(channel: &CmChannel) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(channel.fd(), PollFlags::IN)];
    let now = Timespec::try_from(Duration::ZERO).unwrap();
    poll(&mut fds, Some(&now)).unwrap() > 0
}

fn id(channel: &CmChannel, uid: u64) -> u32 {
    channel.create_id(uid, TCP, RC).unwrap()
}

fn resolve(nic: &Nic, channel: &CmChannel, id: u32) {
    let request = CmRequest::ResolveAddress {
        id,
        source: None,
        destination: (nic.address, 7).into(),
        timeout_ms: 1,
    };
    channel.call_done(request).unwrap();
}

#[test]
fn a_channel_is_readable_while_it_has_events() {
    let nic = Nic::start([127, 0, 82, 1]);
    let process = Process::new(nic.path());
    let channel = CmChannel::open(&process).unwrap().unwrap();
    let ids = [id(&channel, 1), id(&channel, 2)];
    assert!(!is_readable(&channel));
    resolve(&nic, &channel, ids[0]);
    resolve(&nic, &channel, ids[1]);
    assert!(is_readable(&channel));
    let first = channel.next_event().unwrap();
    assert_eq!((first.uid, first.event), (1, ADDR_RESOLVED));
    assert!(is_readable(&channel), "one is left");
    // It goes with its id, and nobody was told of it.
    let gone = CmRequest::DestroyId { id: ids[1] };
    assert_eq!(channel.call_reported(gone).unwrap(), 0);
    assert!(!is_readable(&channel));
    rustix::io::ioctl_fionbio(channel.fd(), true).unwrap();
    assert_eq!(channel.next_event().unwrap_err().errno(), libc::EAGAIN);

    rustix::io::ioctl_fionbio(channel.fd(), false).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| channel.next_event().unwrap().event);
        let request = CmRequest::ResolveRoute {
            id: ids[0],
            timeout_ms: 1,
        };
        channel.call_done(request).unwrap();
        assert_eq!(waits.join().unwrap(), ROUTE_RESOLVED);
    });
}

/// What the RNIC says that its ids need elsewhere, if it has any.
fn described(agent: &Agent) -> Option<Vec<u8>> {
    match agent.order(&Order::DescribeCm) {
        Answer::CmDescribed(needs) => needs,
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_a_channel_with_ids_has_a_context_which_is_not_dumped() {
    let nic = Nic::start([127, 0, 82, 2]);
    let mut agent = Agent::new(&nic);
    let process = Process::new(nic.path());
    let context = process.open("verbatim0").unwrap();
    assert!(!agent.accept());
    let first = CmChannel::open(&process).unwrap().unwrap();
    let second = CmChannel::open(&process).unwrap().unwrap();
    assert_eq!(described(&agent), None, "it is the process's own affair");
    context.dump(&Silent).unwrap();
    context.go_on().unwrap();
    id(&first, 1);
    assert!(described(&agent).is_some());
    let refused = context.dump(&Silent).unwrap_err();
    assert_eq!(refused.errno(), libc::EOPNOTSUPP);
    assert!(refused.to_string().contains("rdma_cm"), "{refused}");
    drop(second);
    assert!(described(&agent).is_some());
    drop(first);
    assert_eq!(described(&agent), None);
}

#[test]
fn a_channel_whose_rnic_is_gone_says_so() {
    let mut nic = Nic::start_process([127, 0, 82, 3], "rnic");
    let process = Process::new(nic.path());
    let channel = CmChannel::open(&process).unwrap().unwrap();
    id(&channel, 1);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| channel.next_event().unwrap_err().errno());
        nic.kill();
        assert_eq!(waits.join().unwrap(), libc::ENODEV);
    });
    assert!(is_readable(&channel), "hung up");
    assert!(channel.call(CmRequest::Query { id: 1 }).is_err());
}

const CONNECT_REQUEST: u32 = 4;

fn done(channel: &CmChannel, request: CmRequest) {
    channel.call_done(request).unwrap();
}

fn empty(id: u32) -> ClaimedContext {
    ClaimedContext {
        id,
        pds: Vec::new(),
        mrs: Vec::new(),
        mws: Vec::new(),
        channels: Vec::new(),
        cqs: Vec::new(),
        srqs: Vec::new(),
        qps: Vec::new(),
    }
}

/// Suspends, drains and quiesces a process: the connection of its line.
fn quiesce(agent: &mut Agent, session: u64) -> Vec<OwnedFd> {
    let scope = Scope::All;
    agent.order(&Order::Suspend { session, scope });
    agent.order(&Order::Drain {
        session,
        expected: Vec::new(),
        timeout_ms: 1000,
        sends_only: false,
    });
    let (answer, fds) = agent.order_with(&Order::Quiesce { session }, &[]);
    assert!(matches!(answer, Answer::Quiesced));
    agent.wait_for_end();
    fds
}

fn claim(agent: &mut Agent, session: u64, contexts: Vec<ClaimedContext>, fds: &[OwnedFd]) {
    agent.gate.open_up().unwrap();
    assert!(agent.accept(), "quiesced");
    let claim = Order::Claim {
        session,
        contexts,
        key_tables: Vec::new(),
    };
    agent.order_with(&claim, fds);
    agent.order(&Order::Resume { session });
}

/// An agent's context at another RNIC, with what the ids need.
fn standby(nic: &Nic, needs: Vec<u8>, from: &Nic) -> OwnedFd {
    let socket = Socket::connect(&nic.path().join(verbatim_device::control::SOCKET_NAME)).unwrap();
    let open = Request::OpenContext {
        version: VERSION,
        name: "standby".to_owned(),
    };
    let needs = Carried::Here(needs);
    let reserve = Request::Cm(CmRequest::Reserve {
        needs,
        from: from.gid(),
    });
    for request in [open, reserve, Request::ParkContext] {
        let reply = socket.call::<_, Reply>(&request, &[]).unwrap().message;
        assert!(!matches!(reply, Reply::Error { .. }), "{reply:?}");
    }
    socket.into_fd()
}

/// A program that waits for connections, and has an event that nobody has taken, goes back and goes on; then it goes elsewhere.
#[test]
fn ids_go_where_their_program_goes() {
    let [home, away, other] = [4, 5, 6].map(|host| Nic::start([127, 0, 82, host]));
    let mut agent = Agent::new(&home);
    let process = Process::new(home.path());
    let channel = CmChannel::open(&process).unwrap().unwrap();
    let quiet = CmChannel::open(&process).unwrap().unwrap();
    let listener = id(&channel, 1);
    assert!(!agent.accept());
    let address = (home.address, 7471).into();
    done(
        &channel,
        CmRequest::Bind {
            id: listener,
            address,
        },
    );
    let backlog = 5;
    done(
        &channel,
        CmRequest::Listen {
            id: listener,
            backlog,
        },
    );
    let resolving = id(&channel, 2);
    resolve(&home, &channel, resolving);

    let peer = Process::new(other.path());
    let asker = CmChannel::open(&peer).unwrap().unwrap();
    let connects = |uid: u64| {
        let asking = id(&asker, uid);
        let destination = (home.address, 7471).into();
        done(
            &asker,
            CmRequest::ResolveAddress {
                id: asking,
                source: None,
                destination,
                timeout_ms: 1,
            },
        );
        assert_eq!(asker.next_event().unwrap().event, ADDR_RESOLVED);
        done(
            &asker,
            CmRequest::ResolveRoute {
                id: asking,
                timeout_ms: 1,
            },
        );
        assert_eq!(asker.next_event().unwrap().event, ROUTE_RESOLVED);
        let parameters = CmParameters {
            qp_num: uid as u32,
            ..CmParameters::default()
        };
        done(
            &asker,
            CmRequest::Connect {
                id: asking,
                parameters,
            },
        );
    };

    let parked = quiesce(&mut agent, 1);
    assert_eq!(parked.len(), 1);
    claim(&mut agent, 1, Vec::new(), &parked);
    drop(parked);
    assert!(is_readable(&channel) && !is_readable(&quiet));
    connects(10);
    assert_eq!(channel.next_event().unwrap().uid, 2);
    let asked = channel.next_event().unwrap();
    assert_eq!((asked.event, asked.uid), (CONNECT_REQUEST, 1));
    resolve(&home, &channel, id(&channel, 3));

    let there = standby(&away, described(&agent).unwrap(), &home);
    let parked = quiesce(&mut agent, 2);
    let old = Socket::from_fd(parked.into_iter().next().unwrap());
    let send_on = Request::Cm(CmRequest::SendOn { to: away.gid() });
    let reply = old.call::<_, Reply>(&send_on, &[]).unwrap().message;
    assert!(matches!(reply, Reply::Cm(CmReply::Done)), "{reply:?}");
    std::thread::scope(|scope| {
        // Whoever calls meanwhile waits.
        let waits = scope.spawn(|| channel.next_event().unwrap().uid);
        claim(&mut agent, 2, vec![empty(CM_CONTEXT)], &[there]);
        assert_eq!(waits.join().unwrap(), 3);
    });
    assert!(!is_readable(&channel) && !is_readable(&quiet));
    drop(old);
    connects(11);
    let asked = channel.next_event().unwrap();
    assert_eq!((asked.event, asked.uid), (CONNECT_REQUEST, 1));
    assert!(id(&quiet, 9) != listener);
}
