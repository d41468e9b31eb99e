//! Completion channels, asynchronous events, shared receive queues, and an RNIC that dies; on devices of the test's own.

use std::path::Path;
use std::sync::Arc;

use verbatim_channel::{Answer, Order, Scope};
use verbatim_device::control::AsyncEvent as PhysicalEvent;

use crate::testing::{Story, World, buffer};
use crate::{
    Access, AsyncEventType, AsyncObject, CompChannel, Context, Cq, PostError, Process, Qp, QpAttr,
    QpAttrMask, QpCap, QpInit, QpState, QpType, RecvWr, SendOpcode, SendWr, Sge, SrqAttr, WC_SUCCESS,
    WC_WR_FLUSH_ERR, Wc,
};

const SEND: SendOpcode = SendOpcode::SendWithImm;

fn nonblocking(channel: &CompChannel) {
    rustix::io::ioctl_fionbio(channel.fd(), true).unwrap();
}

fn no_event(channel: &CompChannel) {
    assert_eq!(channel.get_event().unwrap_err().errno(), libc::EAGAIN);
}

fn poll_all(cq: &Cq) -> Vec<Wc> {
    std::iter::from_fn(|| cq.poll_one())
        .map(|completion| completion.wc)
        .collect()
}

/// A device with a channel and queue pairs on one completion queue that uses it; each is connected to the next.
struct Ring {
    world: World,
    process: Arc<Process>,
    context: Arc<Context>,
    channel: Arc<CompChannel>,
    cq: Arc<Cq>,
    qps: Vec<Arc<Qp>>,
    lkey: u32,
}

impl Ring {
    fn new(srq: Option<&SrqAttr>) -> Self {
        let world = World::default();
        let process = Process::new(Path::new("/proc/none"));
        let context = process.open_on(|| Ok(world.device(1))).unwrap();
        let channel = context.create_comp_channel().unwrap();
        nonblocking(&channel);
        let cq = context.create_cq(64, Some(&channel)).unwrap();
        let pd = context.alloc_pd().unwrap();
        let mr = pd.reg_mr(buffer(), 64, buffer(), Access::LOCAL_WRITE).unwrap();
        let init = QpInit {
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: 4,
                max_recv_wr: 4,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            signal_all: true,
            srq: srq.map(|attr| pd.create_srq(attr).unwrap()),
        };
        let qps: Vec<_> = (0..2).map(|_| pd.create_qp(&init).unwrap()).collect();
        for (qp, peer) in [(0, 1), (1, 0)] {
            let mut attr = QpAttr {
                dest_qpn: qps[peer].number(),
                ..QpAttr::default()
            };
            attr.av.dgid[15] = 1;
            for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
                attr.state = state;
                let address = match state {
                    QpState::Rtr => QpAttrMask::AV | QpAttrMask::DEST_QPN,
                    _ => QpAttrMask::empty(),
                };
                qps[qp].modify(QpAttrMask::STATE | address, &attr).unwrap();
            }
        }
        Self {
            world,
            process,
            context,
            channel,
            cq,
            qps,
            lkey: mr.lkey(),
        }
    }

    fn sge(&self) -> Sge {
        Sge {
            address: buffer(),
            length: 8,
            lkey: self.lkey,
        }
    }

    fn send(&self, qp: usize, wr_id: u64, flags: u32) {
        let sges = [self.sge()];
        let mut request = SendWr::local_invalidate(wr_id, flags, 0);
        request.opcode = SEND;
        request.imm = wr_id as u32;
        request.body = crate::Body::Sges(&sges);
        self.qps[qp].post_send([request]).unwrap();
    }

    fn recv(&self, qp: usize, wr_id: u64) {
        let sges = [self.sge()];
        let request = RecvWr { wr_id, sges: &sges };
        self.qps[qp].post_recv([request]).unwrap();
    }

    fn settle(&self) {
        while self.world.step() {}
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.process.cleanup();
    }
}

#[test]
fn an_armed_queue_tells_once_and_only_what_was_asked_for() {
    let ring = Ring::new(None);
    ring.recv(1, 10);
    ring.recv(1, 11);
    ring.send(0, 0, 0);
    ring.settle();
    no_event(&ring.channel);
    assert_eq!(poll_all(&ring.cq).len(), 2);

    ring.cq.arm(true);
    ring.send(0, 1, 0);
    ring.settle();
    no_event(&ring.channel);
    ring.recv(1, 12);
    ring.send(0, 2, crate::SEND_SOLICITED);
    ring.settle();
    assert!(Arc::ptr_eq(&ring.channel.get_event().unwrap(), &ring.cq));
    no_event(&ring.channel);
    ring.cq.ack_events(1);
}

#[test]
fn what_was_swept_into_the_fake_queue_fires_at_once() {
    let ring = Ring::new(None);
    ring.recv(1, 10);
    ring.send(0, 0, 0);
    ring.settle();
    assert_eq!(ring.cq.queue.lock().sweep(), 2);
    ring.cq.arm(true);
    no_event(&ring.channel);
    ring.cq.arm(false);
    ring.channel.get_event().unwrap();
    assert_eq!(poll_all(&ring.cq).len(), 2);
    ring.cq.ack_events(1);
    ring.cq.arm(false);
    no_event(&ring.channel);
}

#[test]
fn a_queue_lives_until_its_events_are_acknowledged_and_later_ones_are_nobodys() {
    let ring = Ring::new(None);
    assert_eq!(ring.channel.destroy().unwrap_err().errno(), libc::EBUSY);
    let other = ring.context.create_cq(4, Some(&ring.channel)).unwrap();
    ring.channel.inject(&other);
    ring.channel.inject(&other);
    ring.channel.get_event().unwrap();
    std::thread::scope(|scope| {
        let destroyer = scope.spawn(|| other.destroy());
        while !ring
            .context
            .objects
            .lock()
            .cqs
            .values()
            .all(|cq| !Arc::ptr_eq(cq, &other))
        {
            std::thread::yield_now();
        }
        assert!(!destroyer.is_finished());
        other.ack_events(1);
        destroyer.join().unwrap().unwrap();
    });
    no_event(&ring.channel);
}

#[test]
fn receives_of_a_shared_queue_complete_in_any_order_and_their_slots_come_back() {
    let ring = Ring::new(Some(&SrqAttr {
        max_wr: 2,
        max_sge: 1,
        limit: 0,
    }));
    let srq = ring.qps[0].srq().unwrap().clone();
    let sges = [ring.sge()];
    let post = |wr_id| srq.post_recv([RecvWr { wr_id, sges: &sges }]);
    assert_eq!(
        ring.qps[0].post_recv([RecvWr {
            wr_id: 0,
            sges: &sges
        }]),
        Err((0, PostError::Invalid))
    );
    for round in 0..10 {
        let first = 100 + 2 * round;
        post(first).unwrap();
        post(first + 1).unwrap();
        assert_eq!(post(0), Err((0, PostError::Full)));
        // The second queue pair's message comes first.
        ring.send(0, 1, 0);
        ring.settle();
        ring.send(1, 2, 0);
        ring.settle();
        let received: Vec<_> = poll_all(&ring.cq)
            .into_iter()
            .filter(|wc| wc.opcode == 128)
            .map(|wc| (wc.wr_id, wc.qp_num))
            .collect();
        let [a, b] = [ring.qps[0].number(), ring.qps[1].number()];
        assert_eq!(received, [(first, b), (first + 1, a)]);
    }
    assert_eq!(srq.destroy().unwrap_err().errno(), libc::EBUSY);
    for qp in &ring.qps {
        qp.destroy().unwrap();
    }
    srq.destroy().unwrap();
    assert_eq!(post(1), Err((0, PostError::Gone)));
}

#[test]
fn asynchronous_events_name_the_programs_objects() {
    let ring = Ring::new(None);
    let event = PhysicalEvent {
        event: AsyncEventType::SqDrained,
        object: ring.qps[1].number(),
    };
    ring.world.tell(
        1,
        PhysicalEvent {
            object: 9999,
            ..event
        },
    );
    ring.world.tell(1, event);
    let told = ring.context.get_async_event().unwrap();
    let AsyncObject::Qp(qp) = &told.object else {
        panic!("{told:?}")
    };
    assert!(told.event == AsyncEventType::SqDrained && Arc::ptr_eq(qp, &ring.qps[1]));
    std::thread::scope(|scope| {
        let destroyer = scope.spawn(|| ring.qps[1].destroy());
        while ring.process.qp(ring.qps[1].number()).is_some() {
            std::thread::yield_now();
        }
        assert!(!destroyer.is_finished());
        qp.ack_async_event();
        destroyer.join().unwrap().unwrap();
    });
    rustix::io::ioctl_fionbio(ring.context.async_fd(), true).unwrap();
    assert_eq!(ring.context.get_async_event().unwrap_err().errno(), libc::EAGAIN);
}

#[test]
fn a_dead_rnic_leaves_no_request_without_its_completion() {
    let ring = Ring::new(None);
    ring.recv(1, 10);
    ring.send(0, 0, 0);
    ring.settle();
    ring.send(0, 1, 0);
    ring.send(0, 2, 0);
    ring.recv(0, 20);
    ring.recv(0, 21);
    ring.cq.arm(false);
    ring.world.kill(1);
    let told = ring.context.get_async_event().unwrap();
    assert!(matches!(told.object, AsyncObject::Device) && told.event == AsyncEventType::DeviceFatal);
    assert!(ring.context.is_dead());
    ring.channel.get_event().unwrap();
    ring.cq.ack_events(1);
    let done: Vec<_> = poll_all(&ring.cq)
        .iter()
        .map(|wc| (wc.wr_id, wc.status))
        .collect();
    let flushed = |wr_id| (wr_id, WC_WR_FLUSH_ERR);
    let expected = [
        (10, WC_SUCCESS),
        (0, WC_SUCCESS),
        flushed(1),
        flushed(2),
        flushed(20),
        flushed(21),
    ];
    assert_eq!(done, expected);

    // What is posted later, too, and whoever waits for it is told.
    ring.cq.arm(true);
    no_event(&ring.channel);
    ring.send(1, 30, 0);
    ring.recv(1, 31);
    ring.channel.get_event().unwrap();
    let done: Vec<_> = poll_all(&ring.cq)
        .iter()
        .map(|wc| (wc.wr_id, wc.status))
        .collect();
    assert_eq!(done, [flushed(30), flushed(31)]);
    ring.cq.ack_events(1);

    let blockers = crate::road_map::describe(&ring.process, verbatim_channel::VERSION)
        .unwrap()
        .blockers;
    assert!(
        blockers.iter().any(|blocker| blocker.contains("is gone")),
        "{blockers:?}"
    );
    for qp in &ring.qps {
        qp.destroy().unwrap();
    }
    ring.cq.destroy().unwrap();
    ring.channel.destroy().unwrap();
}

#[test]
fn requests_that_a_session_holds_are_flushed_too() {
    let mut story = Story::new();
    story.ends[0].send(0, SEND, true, false).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    story.ends[0].send(1, SEND, true, true).unwrap();
    story.world.kill(1);
    story.ends[0].context.get_async_event().unwrap();
    let done: Vec<_> = story.ends[0]
        .poll()
        .iter()
        .map(|wc| (wc.wr_id, wc.status))
        .collect();
    assert_eq!(done, [(0, WC_WR_FLUSH_ERR), (1, WC_WR_FLUSH_ERR)]);
    story.abort(&migration);
}

#[test]
fn what_cannot_be_moved_is_said_and_not_quiesced() {
    let mut story = Story::new();
    let blockers = |story: &mut Story| match story.ends[0].order(Order::Describe) {
        Answer::Described(map) => map.blockers,
        other => panic!("{other:?}"),
    };
    assert_eq!(blockers(&mut story), [""; 0]);
    // As with an RNIC whose driver is replaced under the program.
    story.world.pin(story.ends[0].device);
    let found = blockers(&mut story);
    assert!(
        found.len() == 1 && found[0].contains("cannot be moved"),
        "{found:?}"
    );
    let session = 9;
    let scope = Scope::All;
    story.ends[0].order(Order::Suspend { session, scope });
    let drain = Order::Drain {
        session,
        expected: Vec::new(),
        timeout_ms: 1000,
        sends_only: false,
    };
    story.ends[0].order(drain);
    let refused = story.ends[0].sessions.quiesce(session).unwrap_err();
    assert!(refused.to_string().contains("cannot be moved"), "{refused}");
    story.ends[0].order(Order::Abort { session });
}

#[test]
fn on_chip_memory_is_limited_and_checked() {
    let story = Story::new();
    let context = &story.ends[0].context;
    assert_eq!(context.alloc_dm(8193, 0).unwrap_err().errno(), libc::ENOMEM);
    let dm = context.alloc_dm(5000, 0).unwrap();
    assert_eq!(context.alloc_dm(5000, 0).unwrap_err().errno(), libc::ENOMEM);
    dm.copy_to(4990, b"0123456789").unwrap();
    let mut bytes = [0; 4];
    dm.copy_from(4994, &mut bytes).unwrap();
    assert_eq!(&bytes, b"4567");
    for (offset, length) in [(4991, 10), (u64::MAX, 1)] {
        assert_eq!(
            dm.copy_to(offset, &vec![0; length]).unwrap_err().errno(),
            libc::EINVAL
        );
    }
    let mr = story.ends[0]
        .pd
        .reg_dm_mr(&dm, 8, 100, Access::LOCAL_WRITE)
        .unwrap();
    assert_eq!(dm.free().unwrap_err().errno(), libc::EBUSY);
    mr.dereg().unwrap();
    dm.free().unwrap();
    context.alloc_dm(8192, 0).unwrap();
}
