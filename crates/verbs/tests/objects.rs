//! Everything but reliable connections and their plain requests, between two RNICs on the standard's wire.

mod support;

use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::end::{CAP, STEPS, connection_attr};
use support::{End, Nic};
use verbatim_verbs::{
    Access, AddressVector, AsyncEventType, AsyncObject, Body, CompChannel, Cq, MrChange, MwBind, MwRange,
    MwType, Qp, QpAttrMask, QpClass, QpInit, QpState, QpType, RecvWr, SEND_SIGNALED, SendOpcode, SendWr, Sge,
    Srq, SrqAttr, UdAddress, VerbsError, WC_SUCCESS, Wc,
};

/// `IBV_WC_REM_ACCESS_ERR`
const REMOTE_ACCESS: u32 = 10;
/// `IBV_WC_GRH`
const WITH_GRH: u32 = 1;
const QKEY: u32 = 0x1234;
const ALL: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND);

struct Scene {
    ends: [End; 2],
    nics: [Nic; 2],
}

impl Scene {
    fn new(subnet: u8) -> Self {
        let nics = [Nic::start([127, 0, subnet, 1]), Nic::start([127, 0, subnet, 2])];
        let ends = [End::new(&nics[0]), End::new(&nics[1])];
        ends[0].connect(&nics[1], &ends[1]);
        ends[1].connect(&nics[0], &ends[0]);
        Self { ends, nics }
    }

    /// One more queue pair at each end, connected to each other.
    fn connected(&self, inits: [&QpInit; 2]) -> [Arc<Qp>; 2] {
        let qps = [0, 1].map(|end| self.ends[end].pd.create_qp(inits[end]).unwrap());
        for end in [0, 1] {
            let (gid, qpn) = (self.nics[1 - end].gid(), qps[1 - end].number());
            for (state, mask) in steps(qps[end].qp_type()) {
                let mut attr = connection_attr(state, gid, qpn, 0, 0);
                attr.access = ALL - Access::LOCAL_WRITE - Access::MW_BIND;
                attr.qkey = QKEY;
                qps[end].modify(mask, &attr).unwrap();
            }
        }
        qps
    }
}

fn steps(qp_type: QpType) -> [(QpState, QpAttrMask); 3] {
    let [(init, to_init), (rtr, to_rtr), (rts, to_rts)] = STEPS;
    let reliable = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
    let state = QpAttrMask::STATE;
    match qp_type {
        QpType::Rc => [(init, to_init), (rtr, to_rtr), (rts, to_rts)],
        QpType::Uc => [
            (init, to_init),
            (rtr, to_rtr - reliable),
            (rts, state | QpAttrMask::SQ_PSN),
        ],
        QpType::Ud => [
            (init, (to_init - QpAttrMask::ACCESS_FLAGS) | QpAttrMask::QKEY),
            (rtr, state),
            (rts, state | QpAttrMask::SQ_PSN),
        ],
    }
}

fn init(cq: &Arc<Cq>, qp_type: QpType, srq: Option<&Arc<Srq>>) -> QpInit {
    QpInit {
        send_cq: cq.clone(),
        recv_cq: cq.clone(),
        qp_type,
        cap: CAP,
        signal_all: false,
        srq: srq.cloned(),
    }
}

fn sge(end: &End, index: usize, length: u32) -> Sge {
    Sge {
        address: end.memory.address() + 8 * index as u64,
        length,
        lkey: end.mr.lkey(),
    }
}

fn post(qp: &Qp, request: SendWr<'_>) {
    qp.post_send([request]).unwrap();
}

/// A request of 8 bytes from (or to) index 0.
fn request<'a>(opcode: SendOpcode, sges: &'a [Sge], remote_address: u64, rkey: u32) -> SendWr<'a> {
    SendWr {
        wr_id: 7,
        opcode,
        flags: SEND_SIGNALED,
        imm: 0,
        remote_address,
        rkey,
        compare_add: 0,
        swap: 0,
        ud: UdAddress::default(),
        body: Body::Sges(sges),
    }
}

fn wait(cq: &Cq) -> Wc {
    let start = std::time::Instant::now();
    loop {
        if let Some(completion) = cq.poll_one() {
            return completion.wc;
        }
        assert!(start.elapsed().as_secs() < 20, "waited too long for a completion");
    }
}

fn readable(fd: std::os::fd::BorrowedFd<'_>) {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let limit = Timespec::try_from(Duration::from_secs(10)).unwrap();
    assert_eq!(poll(&mut fds, Some(&limit)).unwrap(), 1, "an event within time");
}

fn event(channel: &CompChannel) -> Arc<Cq> {
    readable(channel.fd());
    channel.get_event().unwrap()
}

#[test]
fn a_shared_queue_serves_two_queue_pairs_and_events_tell_of_it() {
    let scene = Scene::new(75);
    let [sender, receiver] = &scene.ends;
    let channel = receiver.context.create_comp_channel().unwrap();
    let cq = receiver.context.create_cq(16, Some(&channel)).unwrap();
    let attr = SrqAttr {
        max_wr: 8,
        max_sge: 1,
        limit: 0,
    };
    let srq = receiver.pd.create_srq(&attr).unwrap();
    let inits = [
        init(&sender.cq, QpType::Rc, None),
        init(&cq, QpType::Rc, Some(&srq)),
    ];
    let pairs = [0, 1].map(|_| scene.connected([&inits[0], &inits[1]]));
    for wr_id in 0..4 {
        let sges = [sge(receiver, 100 + wr_id as usize, 8)];
        srq.post_recv([RecvWr { wr_id, sges: &sges }]).unwrap();
    }
    srq.modify_limit(3).unwrap();
    assert_eq!(srq.query().unwrap().limit, 3);
    for (message, pair) in [(0, 1), (1, 0)] {
        cq.arm(false);
        sender.memory.write_u64(0, 500 + message);
        let sges = [sge(sender, 0, 8)];
        post(&pairs[pair][0], request(SendOpcode::Send, &sges, 0, 0));
        assert_eq!(sender.wait().status, WC_SUCCESS);
        assert!(Arc::ptr_eq(&event(&channel), &cq));
        let wc = wait(&cq);
        assert_eq!(
            (wc.status, wc.wr_id, wc.qp_num),
            (WC_SUCCESS, message, pairs[pair][1].number())
        );
        assert_eq!(receiver.memory.read_u64(100 + message as usize), 500 + message);
    }
    cq.ack_events(2);
    readable(receiver.context.async_fd());
    let told = receiver.context.get_async_event().unwrap();
    assert_eq!(told.event, AsyncEventType::SrqLimitReached);
    assert!(matches!(&told.object, AsyncObject::Srq(named) if Arc::ptr_eq(named, &srq)));
    srq.ack_async_event();
    assert_eq!(srq.query().unwrap().limit, 0, "once");
    for [_, qp] in &pairs {
        qp.destroy().unwrap();
    }
    srq.destroy().unwrap();
    cq.destroy().unwrap();
    channel.destroy().unwrap();
}

#[test]
fn windows_open_a_part_of_a_region_and_are_closed_again() {
    let scene = Scene::new(76);
    let [user, owner] = &scene.ends;
    let inits = [
        init(&user.cq, QpType::Rc, None),
        init(&owner.cq, QpType::Rc, None),
    ];
    let mr = owner.pd.reg_mr(
        owner.memory.address(),
        4096,
        owner.memory.address(),
        Access::LOCAL_WRITE | Access::MW_BIND,
    );
    let mr = mr.unwrap();
    for mw_type in [MwType::One, MwType::Two] {
        let [qp, peer] = scene.connected([&inits[0], &inits[1]]);
        let mw = owner.pd.alloc_mw(mw_type).unwrap();
        let address = owner.memory.address() + 8 * 8;
        let range = MwRange {
            mr: Some(&mr),
            address,
            length: 8,
            access: Access::REMOTE_WRITE,
        };
        let rkey = match mw_type {
            MwType::One => peer.bind_mw(&mw, 1, SEND_SIGNALED, &range).unwrap(),
            MwType::Two => {
                let bind = MwBind {
                    mw_rkey: mw.rkey(),
                    new_rkey: mw.rkey() ^ 0x55,
                    lkey: mr.lkey(),
                    address,
                    length: 8,
                    access: Access::REMOTE_WRITE,
                };
                post(&peer, SendWr::bind(1, SEND_SIGNALED, &bind));
                bind.new_rkey
            }
        };
        let wc = owner.wait();
        assert_eq!((wc.status, wc.opcode), (WC_SUCCESS, 5), "{mw_type:?}");
        user.memory.write_u64(0, 42);
        let sges = [sge(user, 0, 8)];
        post(&qp, request(SendOpcode::Write, &sges, address, rkey));
        assert_eq!(user.wait().status, WC_SUCCESS, "{mw_type:?}");
        assert_eq!(owner.memory.read_u64(8), 42);
        // Closed: type 1 by a bind of nothing, type 2 by an invalidation.
        match mw_type {
            MwType::One => {
                let nothing = MwRange {
                    mr: None,
                    length: 0,
                    ..range
                };
                peer.bind_mw(&mw, 2, SEND_SIGNALED, &nothing).unwrap();
            }
            MwType::Two => post(&peer, SendWr::local_invalidate(2, SEND_SIGNALED, rkey)),
        }
        assert_eq!(owner.wait().status, WC_SUCCESS, "{mw_type:?}");
        post(&qp, request(SendOpcode::Write, &sges, address, rkey));
        assert_eq!(user.wait().status, REMOTE_ACCESS, "{mw_type:?}");
        qp.destroy().unwrap();
        peer.destroy().unwrap();
        mw.dealloc().unwrap();
    }
    mr.dereg().unwrap();
}

#[test]
fn regions_change_under_their_keys_and_lie_in_on_chip_memory() {
    let scene = Scene::new(77);
    let [user, owner] = &scene.ends;
    let inits = [
        init(&user.cq, QpType::Rc, None),
        init(&owner.cq, QpType::Rc, None),
    ];
    let [qp, _peer] = scene.connected([&inits[0], &inits[1]]);
    let write = |value, address, rkey| {
        user.memory.write_u64(0, value);
        let sges = [sge(user, 0, 8)];
        post(&qp, request(SendOpcode::Write, &sges, address, rkey));
        assert_eq!(user.wait().status, WC_SUCCESS);
    };
    let start = owner.memory.address();
    let mr = owner.pd.reg_mr(start, 4096, 0, ALL | Access::ZERO_BASED).unwrap();
    write(11, 16, mr.rkey());
    assert_eq!(owner.memory.read_u64(2), 11);
    let change = MrChange {
        memory: Some((start + 8192, 8192)),
        ..MrChange::default()
    };
    mr.rereg(&change).unwrap();
    assert_eq!((mr.address(), mr.length()), (start + 8192, 8192));
    write(12, 8000, mr.rkey());
    assert_eq!(owner.memory.read_u64(1024 + 1000), 12);
    assert_eq!(owner.memory.read_u64(2), 11, "it left, as it was");
    mr.dereg().unwrap();
    assert_eq!(owner.memory.read_u64(1024 + 1000), 12);

    let dm = owner.context.alloc_dm(4096, 3).unwrap();
    let mr = owner.pd.reg_dm_mr(&dm, 1000, 64, ALL).unwrap();
    write(13, 8, mr.rkey());
    let mut bytes = [0; 8];
    dm.copy_from(1008, &mut bytes).unwrap();
    assert_eq!(u64::from_ne_bytes(bytes), 13);
    mr.dereg().unwrap();
    dm.free().unwrap();
}

#[test]
fn a_queue_changes_its_size_with_completions_in_it() {
    let scene = Scene::new(78);
    let [sender, receiver] = &scene.ends;
    let send = |message: u32| {
        receiver.recv(message.into()).unwrap();
        sender.send(message, true).unwrap();
        // Acknowledged: the other end has its completion, and has not read it.
        assert_eq!(sender.wait().status, WC_SUCCESS);
    };
    (0..9).for_each(send);
    assert_eq!(receiver.cq.resize(2).unwrap_err().errno(), libc::EINVAL);
    receiver.cq.resize(1000).unwrap();
    assert!(receiver.cq.entries() >= 1000);
    (9..16).for_each(send);
    for wr_id in 0..16 {
        assert_eq!(receiver.wait().wr_id, wr_id);
    }
    receiver.cq.resize(16).unwrap();
    assert!(receiver.cq.entries() < 1000);
    send(16);
    assert_eq!(receiver.wait().wr_id, 16);
}

#[test]
fn datagrams_reach_whom_their_handles_name() {
    let scene = Scene::new(79);
    let [sender, receiver] = &scene.ends;
    let inits = [
        init(&sender.cq, QpType::Ud, None),
        init(&receiver.cq, QpType::Ud, None),
    ];
    let [from, to] = scene.connected([&inits[0], &inits[1]]);
    let way = AddressVector {
        dgid: scene.nics[1].gid(),
        hop_limit: 64,
        port_num: 1,
        ..AddressVector::default()
    };
    let ah = sender.pd.create_ah(&way).unwrap();
    let sges = [sge(receiver, 100, 48)];
    to.post_recv([RecvWr {
        wr_id: 3,
        sges: &sges,
    }])
    .unwrap();
    sender.memory.write_u64(0, 77);
    let sges = [sge(sender, 0, 8)];
    let ud = UdAddress {
        ah: ah.number(),
        remote_qpn: to.number(),
        remote_qkey: QKEY,
    };
    post(
        &from,
        SendWr {
            ud,
            ..request(SendOpcode::Send, &sges, 0, 0)
        },
    );
    assert_eq!(sender.wait().status, WC_SUCCESS);
    let wc = receiver.wait();
    assert_eq!((wc.status, wc.wr_id, wc.byte_len), (WC_SUCCESS, 3, 48));
    assert_eq!((wc.src_qp, wc.wc_flags & WITH_GRH), (from.number(), WITH_GRH));
    assert_eq!(receiver.memory.read_u64(105), 77, "after 40 bytes of GRH");
    assert_eq!(sender.pd.dealloc().unwrap_err().errno(), libc::EBUSY);
    ah.destroy().unwrap();
    assert_eq!(to.attach_mcast([0; 16]).unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn unreliable_connections_and_atomics() {
    let scene = Scene::new(80);
    let [a, b] = &scene.ends;
    let uc = [init(&a.cq, QpType::Uc, None), init(&b.cq, QpType::Uc, None)];
    let [qp, _] = scene.connected([&uc[0], &uc[1]]);
    a.memory.write_u64(0, 5);
    let sges = [sge(a, 0, 8)];
    b.memory.write_u64(9, 0);
    let target = b.memory.address() + 8 * 9;
    post(&qp, request(SendOpcode::Write, &sges, target, b.mr.rkey()));
    assert_eq!(a.wait().status, WC_SUCCESS);
    let start = std::time::Instant::now();
    while b.memory.read_u64(9) != 5 {
        assert!(start.elapsed().as_secs() < 10, "nothing was lost on this link");
        std::thread::yield_now();
    }

    let rc = [init(&a.cq, QpType::Rc, None), init(&b.cq, QpType::Rc, None)];
    let [qp, _] = scene.connected([&rc[0], &rc[1]]);
    let mr =
        b.pd.reg_mr(b.memory.address(), 4096, b.memory.address(), ALL)
            .unwrap();
    let add = SendWr {
        compare_add: 3,
        ..request(SendOpcode::FetchAdd, &sges, target, mr.rkey())
    };
    post(&qp, add);
    assert_eq!(a.wait().status, WC_SUCCESS);
    let swap = SendWr {
        compare_add: 8,
        swap: 100,
        ..request(SendOpcode::CompareSwap, &sges, target, mr.rkey())
    };
    post(&qp, swap);
    assert_eq!(a.wait().status, WC_SUCCESS);
    assert_eq!((a.memory.read_u64(0), b.memory.read_u64(9)), (8, 100));
    mr.dereg().unwrap();
}

#[test]
fn a_connection_goes_to_the_background_and_back() {
    let scene = Scene::new(94);
    let [sender, receiver] = &scene.ends;
    let send = |message: u64| {
        let target = [sge(receiver, 100, 8)];
        let recv = RecvWr {
            wr_id: message,
            sges: &target,
        };
        receiver.qp.post_recv([recv]).unwrap();
        sender.memory.write_u64(0, message);
        post(&sender.qp, request(SendOpcode::Send, &[sge(sender, 0, 8)], 0, 0));
        assert_eq!(sender.wait().status, WC_SUCCESS);
        assert_eq!(
            (receiver.wait().status, receiver.memory.read_u64(100)),
            (WC_SUCCESS, message)
        );
    };
    for (message, class) in [(7, QpClass::Background), (8, QpClass::User)] {
        for end in [sender, receiver] {
            end.qp.set_class(class).unwrap();
        }
        send(message);
    }
    let datagrams = sender.pd.create_qp(&init(&sender.cq, QpType::Ud, None)).unwrap();
    let refused = datagrams.set_class(QpClass::Background).unwrap_err();
    assert_eq!(refused.errno(), libc::EINVAL);
    datagrams.destroy().unwrap();
    let gone = datagrams.set_class(QpClass::User).unwrap_err();
    assert!(matches!(gone, VerbsError::Gone { .. }), "{gone}");
}
