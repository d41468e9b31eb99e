//! Completion channels, asynchronous events, shared receive queues, and an RNIC that dies; on devices of the test's own.

use std::sync::Arc;

use verbatim_channel::{Answer, Endpoint, Order, Scope};
use verbatim_device::control::AsyncEvent as PhysicalEvent;

use crate::testing::{End, Pair, Shape, Wire, connect, outcomes};
use crate::{
    Access, AsyncEventType, AsyncObject, Body, CompChannel, PostError, Qp, RecvWr, SEND_SIGNALED, SendOpcode,
    SendWr, WC_SUCCESS, WC_WR_FLUSH_ERR,
};

const SEND: SendOpcode = SendOpcode::SendWithImm;

fn no_event(channel: &CompChannel) {
    assert_eq!(channel.get_event().unwrap_err().errno(), libc::EAGAIN);
}

/// A device with a channel and two queue pairs on one completion queue that uses it; they are connected to each other.
struct Ring {
    wire: Wire,
    end: End,
    channel: Arc<CompChannel>,
    qps: [Arc<Qp>; 2],
}

impl Ring {
    fn new(srq: Option<u32>) -> Self {
        let wire = Wire::new();
        let shape = Shape {
            channel: true,
            srq,
            ..Shape::PLAIN
        };
        let end = End::new(&wire, 0, shape);
        let other = end.pd.create_qp(&end.qp.init_attr()).unwrap();
        let qps = [end.qp.clone(), other];
        let gid = end.endpoint().gid;
        for (qp, peer) in [(0, 1), (1, 0)] {
            let qpn = qps[peer].number();
            connect(&qps[qp], Endpoint { gid, qpn }, [1, 1], 7);
        }
        Self {
            channel: end.cq.channel().unwrap().clone(),
            wire,
            end,
            qps,
        }
    }

    fn send(&self, qp: usize, wr_id: u64, flags: u32) {
        let sges = [self.end.sge(0, 8)];
        let request = SendWr {
            body: Body::Sges(&sges),
            ..self.end.request(wr_id as u32, SEND, flags | SEND_SIGNALED)
        };
        self.qps[qp].post_send([request]).unwrap();
    }

    fn recv(&self, qp: usize, wr_id: u64) {
        let sges = [self.end.sge(0, 8)];
        let request = RecvWr { wr_id, sges: &sges };
        self.qps[qp].post_recv([request]).unwrap();
    }
}

#[test]
fn an_armed_queue_tells_once_and_only_what_was_asked_for() {
    let ring = Ring::new(None);
    ring.recv(1, 10);
    ring.recv(1, 11);
    ring.send(0, 0, 0);
    ring.wire.settle();
    no_event(&ring.channel);
    assert_eq!(ring.end.poll().len(), 2);

    ring.end.cq.arm(true);
    ring.send(0, 1, 0);
    ring.wire.settle();
    no_event(&ring.channel);
    ring.recv(1, 12);
    ring.send(0, 2, crate::SEND_SOLICITED);
    ring.wire.settle();
    assert!(Arc::ptr_eq(&ring.channel.get_event().unwrap(), &ring.end.cq));
    no_event(&ring.channel);
    ring.end.cq.ack_events(1);
}

#[test]
fn what_was_swept_into_the_fake_queue_fires_at_once() {
    let ring = Ring::new(None);
    ring.recv(1, 10);
    ring.send(0, 0, 0);
    ring.wire.settle();
    assert_eq!(ring.end.cq.queue.lock().sweep(), 2);
    ring.end.cq.arm(true);
    no_event(&ring.channel);
    ring.end.cq.arm(false);
    ring.channel.get_event().unwrap();
    assert_eq!(ring.end.poll().len(), 2);
    ring.end.cq.ack_events(1);
    ring.end.cq.arm(false);
    no_event(&ring.channel);
}

#[test]
fn a_queue_lives_until_its_events_are_acknowledged_and_later_ones_are_nobodys() {
    let ring = Ring::new(None);
    assert_eq!(ring.channel.destroy().unwrap_err().errno(), libc::EBUSY);
    let other = ring.end.context.create_cq(4, Some(&ring.channel)).unwrap();
    ring.channel.inject(&other);
    ring.channel.inject(&other);
    ring.channel.get_event().unwrap();
    std::thread::scope(|scope| {
        let destroyer = scope.spawn(|| other.destroy());
        while !ring
            .end
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
    let ring = Ring::new(Some(2));
    let srq = ring.qps[0].srq().unwrap().clone();
    let sges = [ring.end.sge(0, 8)];
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
        ring.wire.settle();
        ring.send(1, 2, 0);
        ring.wire.settle();
        let received: Vec<_> = ring
            .end
            .poll()
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
    ring.wire.tell(
        1,
        PhysicalEvent {
            object: 9999,
            ..event
        },
    );
    ring.wire.tell(1, event);
    let told = ring.end.context.get_async_event().unwrap();
    let AsyncObject::Qp(qp) = &told.object else {
        panic!("{told:?}")
    };
    assert!(told.event == AsyncEventType::SqDrained && Arc::ptr_eq(qp, &ring.qps[1]));
    std::thread::scope(|scope| {
        let destroyer = scope.spawn(|| ring.qps[1].destroy());
        while ring.end.process.qp(ring.qps[1].number()).is_some() {
            std::thread::yield_now();
        }
        assert!(!destroyer.is_finished());
        qp.ack_async_event();
        destroyer.join().unwrap().unwrap();
    });
    rustix::io::ioctl_fionbio(ring.end.context.async_fd(), true).unwrap();
    assert_eq!(
        ring.end.context.get_async_event().unwrap_err().errno(),
        libc::EAGAIN
    );
}

#[test]
fn a_dead_rnic_leaves_no_request_without_its_completion() {
    let ring = Ring::new(None);
    ring.recv(1, 10);
    ring.send(0, 0, 0);
    ring.wire.settle();
    ring.send(0, 1, 0);
    ring.send(0, 2, 0);
    ring.recv(0, 20);
    ring.recv(0, 21);
    ring.end.cq.arm(false);
    ring.wire.kill(1);
    let told = ring.end.context.get_async_event().unwrap();
    assert!(matches!(told.object, AsyncObject::Device) && told.event == AsyncEventType::DeviceFatal);
    assert!(ring.end.context.is_dead());
    ring.channel.get_event().unwrap();
    ring.end.cq.ack_events(1);
    let done = outcomes(&ring.end.poll());
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
    ring.end.cq.arm(true);
    no_event(&ring.channel);
    ring.send(1, 30, 0);
    ring.recv(1, 31);
    ring.channel.get_event().unwrap();
    let done = outcomes(&ring.end.poll());
    assert_eq!(done, [flushed(30), flushed(31)]);
    ring.end.cq.ack_events(1);

    let blockers = crate::road_map::describe(&ring.end.process, verbatim_channel::VERSION)
        .unwrap()
        .blockers;
    assert!(
        blockers.iter().any(|blocker| blocker.contains("is gone")),
        "{blockers:?}"
    );
    for qp in &ring.qps {
        qp.destroy().unwrap();
    }
    ring.end.cq.destroy().unwrap();
    ring.channel.destroy().unwrap();
}

#[test]
fn requests_that_a_session_holds_are_flushed_too() {
    let mut pair = Pair::new();
    pair.ends[0].send(0, SEND, true, false).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[0].send(1, SEND, true, true).unwrap();
    pair.wire.kill(1);
    pair.ends[0].context.get_async_event().unwrap();
    let done = outcomes(&pair.ends[0].poll());
    assert_eq!(done, [(0, WC_WR_FLUSH_ERR), (1, WC_WR_FLUSH_ERR)]);
    pair.abort(migration);
}

#[test]
fn what_cannot_be_moved_is_said_and_not_quiesced() {
    let mut pair = Pair::new();
    let blockers = |pair: &mut Pair| match pair.ends[0].order(Order::Describe) {
        Answer::Described(map) => map.blockers,
        other => panic!("{other:?}"),
    };
    assert_eq!(blockers(&mut pair), [""; 0]);
    // As with an RNIC whose driver is replaced under the program.
    pair.wire.pin(pair.ends[0].device);
    let found = blockers(&mut pair);
    assert!(
        found.len() == 1 && found[0].contains("cannot be moved"),
        "{found:?}"
    );
    let session = 9;
    let scope = Scope::All;
    pair.ends[0].order(Order::Suspend { session, scope });
    let drain = Order::Drain {
        session,
        expected: Vec::new(),
        timeout_ms: 1000,
        sends_only: false,
    };
    pair.ends[0].order(drain);
    let refused = pair.ends[0].sessions.quiesce(session).unwrap_err();
    assert!(refused.to_string().contains("cannot be moved"), "{refused}");
    pair.ends[0].order(Order::Abort { session });
}

#[test]
fn on_chip_memory_is_limited_and_checked() {
    let pair = Pair::new();
    let context = &pair.ends[0].context;
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
    let mr = pair.ends[0]
        .pd
        .reg_dm_mr(&dm, 8, 100, Access::LOCAL_WRITE)
        .unwrap();
    assert_eq!(dm.free().unwrap_err().errno(), libc::EBUSY);
    mr.dereg().unwrap();
    dm.free().unwrap();
    context.alloc_dm(8192, 0).unwrap();
}
