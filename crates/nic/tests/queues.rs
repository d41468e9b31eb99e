//! Shared receive queues, and completion queues that change their size.

mod support;

use support::program::{ALL_ACCESS, CAP, send};
use support::{Events, Server, Srq, wait_for};
use verbatim_device::control::{
    AsyncEventType, QpAttr, QpAttrMask, QpState, QpType, Reply, Request, SrqAttr,
};

const SUCCESS: u32 = 0;
const RNR_RETRY_EXC_ERR: u32 = 13;

const ATTR: SrqAttr = SrqAttr {
    max_wr: 100,
    max_sge: 2,
    limit: 0,
};

#[test]
fn queue_pairs_share_receive_requests_and_the_limit_is_told_once() {
    let (a, b) = (Server::start([127, 7, 20, 1]), Server::start([127, 7, 20, 2]));
    let (receiver, events) = Events::program(&b);
    let mut queue = receiver.cq(256);
    let mut srq = Srq::new(&receiver, ATTR);
    assert_eq!((srq.attr.max_wr, srq.attr.max_sge), (100, 2));
    let into = receiver.adopted(1 << 16, ALL_ACCESS);
    let sender = support::Program::connect(&a.socket(), "sender");
    let mut sent = sender.cq(256);
    let mut from = sender.adopted(1 << 16, ALL_ACCESS);
    from.fill(|index| index as u8);

    let pairs: Vec<_> = (0..4)
        .map(|_| {
            let right = receiver.qp_with(&queue, CAP, QpType::Rc, Some(srq.srq));
            assert_eq!(right.cap.max_recv_wr, 0, "it has no receive queue of its own");
            let left = sender.qp(&sent, CAP);
            sender.connect_qp(&left, b.address, right.qpn);
            receiver.connect_qp(&right, a.address, left.qpn);
            (left, right)
        })
        .collect();
    assert_eq!(receiver.errno(Request::DestroySrq { srq: srq.srq }), libc::EBUSY);
    for wr_id in 0..10 {
        srq.post(
            wr_id,
            &[into.sge(wr_id * 100, 50), into.sge(wr_id * 100 + 50, 50)],
        );
    }
    receiver.call(Request::ModifySrq {
        srq: srq.srq,
        limit: 8,
    });
    let (mut lefts, rights): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    for n in 0..10 {
        sender.post(&mut lefts[n % 4], send(n as u64), &[from.sge(n as u64, 80)]);
        let received = queue.wait();
        assert_eq!(
            (received.wr_id, received.status, received.byte_len, received.qpn),
            (n as u64, SUCCESS, 80, rights[n % 4].qpn),
            "the oldest request, whoever needs it"
        );
        assert_eq!(into.as_slice()[n * 100..][..80], from.as_slice()[n..][..80]);
        assert_eq!(sent.wait().status, SUCCESS);
    }
    assert_eq!(events.wait(), (AsyncEventType::SrqLimitReached, srq.srq));
    assert!(events.none(), "once");
    let Reply::Srq { attr, .. } = receiver.call(Request::QuerySrq { srq: srq.srq }) else {
        panic!("no srq")
    };
    assert_eq!(attr.limit, 0, "it has to be armed again");

    // An empty queue: the sender waits, and goes on when there is a request.
    sender.post(&mut lefts[0], send(11), &[from.sge(0, 8)]);
    b.wait_for("an RNR NAK", |counters| counters.tx_rnr > 0);
    srq.post(11, &[into.sge(0, 8)]);
    assert_eq!((queue.wait().wr_id, sent.wait().status), (11, SUCCESS));

    // A queue pair in ERR takes nothing from it, and says when it has finished with it.
    srq.post(12, &[into.sge(0, 8)]);
    let to_error = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    receiver.modify(&rights[0], QpAttrMask::STATE, to_error);
    assert_eq!(events.wait(), (AsyncEventType::QpLastWqeReached, rights[0].qpn));
    sender.post(&mut lefts[1], send(12), &[from.sge(0, 8)]);
    assert_eq!((queue.wait().wr_id, sent.wait().status), (12, SUCCESS));
    for qp in &rights {
        receiver.call(Request::DestroyQp { qpn: qp.qpn });
    }
    receiver.call(Request::DestroySrq { srq: srq.srq });
    b.wait_for("the end of the queue", |counters| counters.srqs == 0);
}

#[test]
fn a_shared_receive_queue_without_requests_exhausts_the_retries() {
    let (a, b) = (Server::start([127, 7, 21, 1]), Server::start([127, 7, 21, 2]));
    let (mut left, right) = (support::End::new(&a), support::End::new(&b));
    let srq = Srq::new(&right.program, ATTR);
    let qp = right
        .program
        .qp_with(&right.queue, CAP, QpType::Rc, Some(srq.srq));
    left.program
        .connect_qp_with(&left.qp, b.address, qp.qpn, |attr| attr.rnr_retry = 2);
    right.program.connect_qp(&qp, a.address, left.qp.qpn);
    let from = left.program.adopted(4096, ALL_ACCESS);
    left.program.post(&mut left.qp, send(1), &[from.sge(0, 8)]);
    assert_eq!(left.queue.wait().status, RNR_RETRY_EXC_ERR);
    for wrong in [
        SrqAttr {
            max_wr: 1 << 20,
            ..ATTR
        },
        SrqAttr { max_sge: 99, ..ATTR },
        SrqAttr { limit: 129, ..ATTR },
    ] {
        let request = Request::CreateSrq {
            pd: right.program.pd,
            attr: wrong,
        };
        assert_eq!(right.program.errno(request), libc::EINVAL);
    }
}

#[test]
fn a_hostile_shared_receive_queue_costs_its_own_program_only() {
    let (a, b) = (Server::start([127, 7, 22, 1]), Server::start([127, 7, 22, 2]));
    let mut left = support::End::new(&a);
    let (program, events) = Events::program(&b);
    let queue = program.cq(16);
    let srq = Srq::new(&program, ATTR);
    let qp = program.qp_with(&queue, CAP, QpType::Rc, Some(srq.srq));
    left.program.connect_qp(&left.qp, b.address, qp.qpn);
    program.connect_qp(&qp, a.address, left.qp.qpn);
    let Reply::Srq { offset, .. } = program.call(Request::QuerySrq { srq: srq.srq }) else {
        panic!("no srq")
    };
    // SAFETY: the queue's header lies there; its second word is the producer index.
    unsafe {
        program
            .arena()
            .add(offset as usize + 4)
            .cast::<u32>()
            .write_volatile(u32::MAX)
    };
    let from = left.program.adopted(4096, ALL_ACCESS);
    left.program.post(&mut left.qp, send(1), &[from.sge(0, 8)]);
    let mut told = Vec::new();
    while told.len() < 3 {
        told.push(events.wait());
    }
    for expected in [
        (AsyncEventType::SrqErr, srq.srq),
        (AsyncEventType::QpFatal, qp.qpn),
        (AsyncEventType::QpLastWqeReached, qp.qpn),
    ] {
        assert!(told.contains(&expected), "{expected:?} in {told:?}");
    }
    assert_eq!(program.state(&qp), QpState::Err);
}

#[test]
fn a_completion_queue_grows_and_shrinks_with_what_is_in_it() {
    let (a, b) = (Server::start([127, 7, 23, 1]), Server::start([127, 7, 23, 2]));
    let (mut left, right) = support::pair(&a, &b);
    let into = right.program.adopted(1 << 16, ALL_ACCESS);
    let from = left.program.adopted(1 << 16, ALL_ACCESS);
    let mut next = 0;
    let mut write = |left: &mut support::End, count: u64| {
        for _ in 0..count {
            let request = support::program::write(next, &into, 0);
            left.program.post(&mut left.qp, request, &[from.sge(0, 8)]);
            next += 1;
        }
        let (target, completed) = (next as u32, &left.qp.send);
        wait_for("the end of all requests", || {
            (completed.completed() == target).then_some(())
        });
    };
    write(&mut left, 100);
    for expected in 0..20 {
        assert_eq!(left.queue.wait().wr_id, expected);
    }
    let refused = Request::ResizeCq {
        cq: left.queue.cq,
        entries: 64,
    };
    assert_eq!(left.program.errno(refused), libc::EINVAL, "eighty do not fit");
    let mut queue = left.program.resize(left.queue, 1000);
    assert_eq!(queue.entries, 1000);
    for expected in 20..60 {
        assert_eq!(queue.wait().wr_id, expected);
    }
    left.queue = left.program.resize(queue, 64);
    write(&mut left, 20);
    for expected in 60..120 {
        assert_eq!(left.queue.wait().wr_id, expected);
    }
    assert!(left.queue.poll().is_none());
    assert_eq!(a.stats.read().cq_overruns, 0);
    for wrong in [0, u32::MAX] {
        let request = Request::ResizeCq {
            cq: left.queue.cq,
            entries: wrong,
        };
        assert_eq!(left.program.errno(request), libc::EINVAL);
    }
    let other = Request::ResizeCq { cq: 999, entries: 10 };
    assert_eq!(left.program.errno(other), libc::EINVAL);
}
