//! Completion channels and asynchronous events.

mod support;

use support::program::{ALL_ACCESS, CAP, send, write};
use support::{Channel, Events, Server, pair};
use verbatim_device::control::{AsyncEventType, QpAttr, QpAttrMask, QpState, Request};
use verbatim_device::layout::{SEND_SOLICITED, SendWqe};

const SUCCESS: u32 = 0;
const REM_ACCESS_ERR: u32 = 10;

#[test]
fn an_armed_queue_gives_one_event_however_many_completions_come() {
    let (a, b) = (Server::start([127, 7, 30, 1]), Server::start([127, 7, 30, 2]));
    let (left, right) = pair(&a, &b);
    let (from, into) = (
        left.program.adopted(4096, ALL_ACCESS),
        right.program.adopted(4096, ALL_ACCESS),
    );
    let channel = Channel::new(&left.program);
    let mut queue = left.program.cq_with(64, Some(channel.channel));
    let mut qp = left.program.qp(&queue, CAP);
    let back = right.program.qp(&right.queue, CAP);
    left.program.connect_qp(&qp, b.address, back.qpn);
    right.program.connect_qp(&back, a.address, qp.qpn);
    let mut complete = |queue: &mut support::Queue, wr_id| {
        left.program
            .post(&mut qp, write(wr_id, &into, 0), &[from.sge(0, 8)]);
        assert_eq!(queue.wait().wr_id, wr_id);
    };
    complete(&mut queue, 1);
    assert!(!queue.arm(false));
    complete(&mut queue, 2);
    assert_eq!(channel.wait(), queue.cq);
    complete(&mut queue, 3);
    assert!(!queue.arm(true));
    complete(&mut queue, 4);
    complete(&mut queue, 5);
    assert!(channel.none(), "not armed, and then nothing solicited");

    let busy = Request::DestroyCompChannel {
        channel: channel.channel,
    };
    assert_eq!(left.program.errno(busy.clone()), libc::EBUSY);
    left.program.call(Request::DestroyQp { qpn: qp.qpn });
    left.program.call(Request::DestroyCq { cq: queue.cq });
    left.program.call(busy);
    let unknown = Request::CreateCq {
        entries: 8,
        channel: Some(channel.channel),
        event: None,
    };
    assert_eq!(left.program.errno(unknown), libc::EINVAL);
    assert_eq!(
        left.program.errno(Request::CreateCompChannel),
        libc::EINVAL,
        "no descriptor"
    );
}

#[test]
fn solicited_messages_and_errors_wake_who_waits_for_them_only() {
    let (a, b) = (Server::start([127, 7, 31, 1]), Server::start([127, 7, 31, 2]));
    let mut left = support::End::new(&a);
    let right = support::End::new(&b);
    let channel = Channel::new(&right.program);
    let mut queue = right.program.cq_with(64, Some(channel.channel));
    let mut qp = right.program.qp(&queue, CAP);
    left.program.connect_qp(&left.qp, b.address, qp.qpn);
    right.program.connect_qp(&qp, a.address, left.qp.qpn);
    let from = left.program.adopted(4096, ALL_ACCESS);
    let into = right.program.adopted(4096, ALL_ACCESS);
    for wr_id in 0..3 {
        right.program.post_recv(&mut qp, wr_id, &[into.sge(0, 100)]);
    }
    assert!(!queue.arm(true));
    left.program.post(&mut left.qp, send(1), &[from.sge(0, 8)]);
    assert_eq!((queue.wait().solicited, left.queue.wait().status), (0, SUCCESS));
    assert!(channel.none());
    let solicited = SendWqe {
        flags: SEND_SOLICITED,
        ..send(2)
    };
    left.program.post(&mut left.qp, solicited, &[from.sge(0, 8)]);
    assert_eq!(queue.wait().solicited, 1);
    assert_eq!(channel.wait(), queue.cq);

    assert!(!queue.arm(true));
    let to_error = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    right.program.modify(&qp, QpAttrMask::STATE, to_error);
    assert_eq!(channel.wait(), queue.cq, "a flushed request is an error");
    assert_eq!(queue.wait().status, 5);
}

#[test]
fn events_wait_for_a_program_that_does_not_read() {
    let (a, b) = (Server::start([127, 7, 32, 1]), Server::start([127, 7, 32, 2]));
    let (left, right) = pair(&a, &b);
    let (from, into) = (
        left.program.adopted(4096, ALL_ACCESS),
        right.program.adopted(4096, ALL_ACCESS),
    );
    let channel = Channel::new(&left.program);
    let mut queue = left.program.cq_with(64, Some(channel.channel));
    let mut qp = left.program.qp(&queue, CAP);
    let back = right.program.qp(&right.queue, CAP);
    left.program.connect_qp(&qp, b.address, back.qpn);
    right.program.connect_qp(&back, a.address, qp.qpn);
    // More than a socket holds.
    const EVENTS: u32 = 1000;
    for wr_id in 0..u64::from(EVENTS) {
        assert!(!queue.arm(false));
        left.program
            .post(&mut qp, write(wr_id, &into, 0), &[from.sge(0, 8)]);
        queue.wait();
        // The event is made after the completion, at the end of the turn.
        support::wait_for("the event's end", || queue.is_disarmed().then_some(()));
    }
    for _ in 0..EVENTS {
        assert_eq!(channel.wait(), queue.cq);
    }
    assert!(channel.none());
}

#[test]
fn asynchronous_events_name_their_objects() {
    let (a, b) = (Server::start([127, 7, 33, 1]), Server::start([127, 7, 33, 2]));
    let mut left = support::End::new(&a);
    let (program, events) = Events::program(&b);
    let queue = program.cq(16);
    let qp = program.qp(&queue, CAP);
    left.program.connect_qp(&left.qp, b.address, qp.qpn);
    program.connect_qp(&qp, a.address, left.qp.qpn);
    let (from, into) = (
        left.program.adopted(4096, ALL_ACCESS),
        program.adopted(4096, ALL_ACCESS),
    );
    let wrong_key = SendWqe {
        rkey: into.key ^ 0x100,
        ..write(1, &into, 0)
    };
    left.program.post(&mut left.qp, wrong_key, &[from.sge(0, 8)]);
    assert_eq!(left.queue.wait().status, REM_ACCESS_ERR);
    assert_eq!(events.wait(), (AsyncEventType::QpAccessErr, qp.qpn));
    assert!(events.none());
}

#[test]
fn an_overrun_is_told_for_the_queue_and_for_who_uses_it() {
    let (a, b) = (Server::start([127, 7, 34, 1]), Server::start([127, 7, 34, 2]));
    let right = support::End::new(&b);
    let (program, events) = Events::program(&a);
    let queue = program.cq(4);
    let mut qp = program.qp(&queue, CAP);
    program.connect_qp(&qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, qp.qpn);
    let (from, into) = (
        program.adopted(4096, ALL_ACCESS),
        right.program.adopted(4096, ALL_ACCESS),
    );
    for wr_id in 0..5 {
        program.post(&mut qp, write(wr_id, &into, 0), &[from.sge(0, 8)]);
    }
    let told = [events.wait(), events.wait()];
    assert!(told.contains(&(AsyncEventType::CqErr, queue.cq)), "{told:?}");
    assert!(told.contains(&(AsyncEventType::QpFatal, qp.qpn)), "{told:?}");
}

#[test]
fn a_drained_send_queue_is_told_if_it_was_asked_for() {
    let (a, b) = (Server::start([127, 7, 35, 1]), Server::start([127, 7, 35, 2]));
    let right = support::End::new(&b);
    let (program, events) = Events::program(&a);
    let queue = program.cq(16);
    let qp = program.qp(&queue, CAP);
    program.connect_qp(&qp, b.address, right.qp.qpn);
    right.program.connect_qp(&right.qp, a.address, qp.qpn);
    let attr = QpAttr {
        state: QpState::Sqd,
        en_sqd_async_notify: true,
        ..QpAttr::default()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    program.modify(&qp, mask, attr);
    assert_eq!(events.wait(), (AsyncEventType::SqDrained, qp.qpn));
}
