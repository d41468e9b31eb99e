//! Channels of rdma_cm at a real RNIC: when they are readable, who waits, what they keep from moving, and their end.

mod support;

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{Agent, Nic};
use verbatim_channel::{Answer, Order};
use verbatim_verbs::dump::{Owner, QpUser};
use verbatim_verbs::{CmChannel, CmReply, CmRequest, Cq, Process, Qp, Srq};

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
    let request = CmRequest::CreateId {
        channel: channel.number(),
        uid,
        port_space: TCP,
        qp_type: RC,
    };
    match channel.call(request).unwrap() {
        CmReply::Id { id } => id,
        other => panic!("{other:?}"),
    }
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

fn blockers(agent: &Agent) -> String {
    match agent.order(&Order::Describe) {
        Answer::Described(road_map) => road_map.blockers.join("; "),
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_has_a_channel_is_not_moved_and_not_dumped() {
    let nic = Nic::start([127, 0, 82, 2]);
    let mut agent = Agent::new(&nic);
    let process = Process::new(nic.path());
    // The agent must hear of a program that has opened no device.
    let first = CmChannel::open(&process).unwrap().unwrap();
    assert!(!agent.accept());
    let context = process.open("verbatim0").unwrap();
    let second = CmChannel::open(&process).unwrap().unwrap();
    let blockers = blockers(&agent);
    assert!(
        blockers.contains("rdma_cm") && blockers.contains("2 channels"),
        "{blockers}"
    );
    let refused = context.dump(&Silent).unwrap_err();
    assert_eq!(refused.errno(), libc::EOPNOTSUPP);
    assert!(refused.to_string().contains("rdma_cm"), "{refused}");
    drop((first, second));
    assert_eq!(self::blockers(&agent), "");
    context.dump(&Silent).unwrap();
}

#[test]
fn a_channel_whose_rnic_is_gone_says_so() {
    let mut nic = Nic::start_process([127, 0, 82, 3], "rnic");
    let process = Process::new(nic.path());
    let channel = CmChannel::open(&process).unwrap().unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| channel.next_event().unwrap_err().errno());
        nic.kill();
        assert_eq!(waits.join().unwrap(), libc::ENODEV);
    });
    assert!(is_readable(&channel), "hung up");
    assert!(channel.call(CmRequest::Query { id: 1 }).is_err());
}
