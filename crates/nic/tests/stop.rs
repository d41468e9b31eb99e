//! A queue pair that is stopped in the middle of its requests.

mod support;

use std::time::Duration;

use support::program::{ALL_ACCESS, write};
use support::{End, Server, pair, wait_for};
use verbatim_device::control::{QpAttr, QpAttrMask, QpPosition, QpState, QpType, Reply, Request};
use verbatim_device::layout::{SEND_EXECUTED, SEND_SIGNALED, SendWqe};

/// `enum ibv_wr_opcode`.
const FETCH_AND_ADD: u8 = 6;
/// `enum ibv_wc_opcode`.
const WC_FETCH_ADD: u32 = 4;
const SUCCESS: u32 = 0;
const PAGES: u64 = 4 * 4096;

/// Longer than the first timeouts of a requester, which must not pass while it is stopped.
const WHILE: Duration = Duration::from_millis(30);

fn stop(end: &mut End) -> QpPosition {
    match end.program.call(Request::StopQp { qpn: end.qp.qpn }) {
        Reply::QpStopped(position) => position,
        other => panic!("{other:?}"),
    }
}

fn restart(end: &mut End) {
    let restarted = end.program.call(Request::RestartQp { qpn: end.qp.qpn });
    assert!(matches!(restarted, Reply::Done), "{restarted:?}");
}

#[test]
fn a_stopped_queue_pair_neither_sends_nor_takes_and_goes_on() {
    let (a, b) = (Server::start([127, 7, 70, 1]), Server::start([127, 7, 70, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let mut from = left.program.adopted(PAGES, ALL_ACCESS);
    from.fill(|_| 5);
    let to = right.program.adopted(PAGES, ALL_ACCESS);

    // The other end takes nothing: the request stays, and nothing of it is executed.
    let before = stop(&mut right);
    assert!(before.requests.is_empty() && before.state == QpState::Rts);
    left.program
        .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, 5000)]);
    wait_for("a packet that is lost", || {
        (b.stats.read().rx_parked > 0).then_some(())
    });
    let position = stop(&mut left);
    assert_eq!(position.requests.len(), 1);
    assert_eq!(
        (position.requests[0].wr_id, position.requests[0].executed),
        (1, false)
    );
    assert_eq!(position.requests[0].first_psn, position.acknowledged_psn);
    let after = stop(&mut right);
    assert_eq!(after, before);
    assert_eq!(after.expected_psn, position.acknowledged_psn);

    // Neither asks again, nor can it be changed.
    let sent = a.stats.read().tx_packets;
    std::thread::sleep(WHILE);
    assert_eq!(a.stats.read().tx_packets, sent);
    assert_eq!(stop(&mut left), position);
    let to_error = Request::ModifyQp {
        qpn: left.qp.qpn,
        mask: QpAttrMask::STATE,
        attr: QpAttr {
            state: QpState::Err,
            ..QpAttr::default()
        },
    };
    assert_eq!(left.program.errno(to_error), libc::EBUSY);

    restart(&mut right);
    restart(&mut left);
    let done = left.queue.wait();
    assert_eq!((done.wr_id, done.status), (1, SUCCESS));
    assert!(to.as_slice()[..5000].iter().all(|byte| *byte == 5));
    restart(&mut left);
}

#[test]
fn what_was_executed_earlier_is_completed_without_a_packet() {
    let (a, b) = (Server::start([127, 7, 71, 1]), Server::start([127, 7, 71, 2]));
    let (mut left, _right) = pair(&a, &b);
    let from = left.program.adopted(PAGES, ALL_ACCESS);
    let atomic = SendWqe {
        wr_id: 9,
        opcode: FETCH_AND_ADD,
        flags: SEND_EXECUTED | SEND_SIGNALED,
        compare_add: 77,
        ..SendWqe::default()
    };
    left.program.post(&mut left.qp, atomic, &[from.sge(64, 8)]);
    let done = left.queue.wait();
    assert_eq!(
        (done.wr_id, done.status, done.opcode, done.byte_len),
        (9, SUCCESS, WC_FETCH_ADD, 8)
    );
    assert_eq!(from.as_slice()[64..72], 77u64.to_ne_bytes());
    assert_eq!(a.stats.read().tx_packets, 0);
}

#[test]
fn only_reliable_connections_are_stopped() {
    let server = Server::start([127, 7, 72, 1]);
    for qp_type in [QpType::Uc, QpType::Ud] {
        let end = End::of_type(&server, qp_type);
        let qpn = end.qp.qpn;
        assert_eq!(end.program.errno(Request::StopQp { qpn }), libc::EINVAL);
        let unknown = Request::StopQp { qpn: qpn + 999 };
        assert_ne!(end.program.errno(unknown), 0);
    }
    let mut end = End::new(&server);
    assert_eq!(stop(&mut end).state, QpState::Reset);
}
