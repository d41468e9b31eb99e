//! RECVs, of queue pairs and of shared receive queues: each is posted once, wherever it goes.

use verbatim_device::control::AsyncEventType;

use super::SEND;
use crate::PostError;
use crate::testing::{Pair, Shape, wr_ids};

const SHARED: Shape = Shape {
    srq: Some(8),
    ..Shape::PLAIN
};

#[test]
fn receives_posted_while_drained_are_posted_once_also_after_a_rollback() {
    let mut pair = Pair::new();
    for wr_id in 0..2 {
        pair.ends[0].recv(wr_id).unwrap();
    }
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[0].recv(2).unwrap();
    assert!(pair.drain(&mut migration, 1000));
    pair.ends[0].recv(3).unwrap();
    pair.quiesce(&mut migration);
    pair.ends[0].recv(4).unwrap();
    pair.take_back(migration);
    for n in 0..5 {
        pair.ends[1].send(n, SEND, n % 4 == 3, false).unwrap();
        pair.wire.settle();
        pair.ends[1].poll();
    }
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0, 1, 2, 3, 4]);
    pair.ends[1].send(5, SEND, true, false).unwrap();
    pair.wire.settle();
    assert_eq!(pair.wire.unfinished(), 1, "no RECV was posted twice");
}

#[test]
fn a_shared_receive_queue_moves_with_what_nothing_has_consumed() {
    let mut pair = Pair::with(SHARED);
    for wr_id in 0..4 {
        pair.ends[0].recv(wr_id).unwrap();
    }
    pair.ends[1].send(0, SEND, false, false).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[0].recv(4).unwrap();
    assert!(pair.drain(&mut migration, 1000));
    pair.ends[0].recv(5).unwrap();
    pair.quiesce(&mut migration);
    pair.ends[0].recv(6).unwrap();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0]);
    pair.ends[0].recv(7).unwrap();
    pair.ends[0].recv(8).unwrap();
    assert_eq!(pair.ends[0].recv(9), Err(PostError::Full));
    assert_eq!(pair.claim(&mut migration), 8, "each of them once");
    pair.switch(&mut migration);
    pair.resume(migration);
    for message in 1..9 {
        pair.ends[1].send(message, SEND, message % 4 == 0, false).unwrap();
        pair.wire.settle();
        pair.ends[1].poll();
    }
    assert_eq!(wr_ids(&pair.ends[0].poll()), [1, 2, 3, 4, 5, 6, 7, 8]);
    pair.ends[0].recv(10).unwrap();
    // The partner's queue stays where it is, below two queue pairs for a while.
    pair.ends[1].recv(20).unwrap();
    pair.migrate(0);
    pair.ends[0].send(9, SEND, true, false).unwrap();
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[1].poll()), [20]);
}

#[test]
fn the_limit_of_a_shared_receive_queue_is_armed_where_it_goes_and_fires_once() {
    let mut pair = Pair::with(SHARED);
    let srq = pair.ends[0].srq.clone().unwrap();
    for wr_id in 0..3 {
        pair.ends[0].recv(wr_id).unwrap();
    }
    srq.modify_limit(2).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    pair.resume(migration);
    assert_eq!(srq.query().unwrap().limit, 2);
    let event = |pair: &Pair| {
        let context = &pair.ends[0].context;
        context.process().look_after_devices();
        rustix::io::ioctl_fionbio(context.async_fd(), true).unwrap();
        context.get_async_event().map(|event| event.event)
    };
    for message in 0..2 {
        pair.ends[1].send(message, SEND, true, false).unwrap();
        pair.wire.settle();
    }
    // It has fired before the process is quiesced, and the helper thread has not looked yet.
    pair.migrate(0);
    assert_eq!(event(&pair).unwrap(), AsyncEventType::SrqLimitReached);
    srq.ack_async_event();
    assert_eq!(srq.query().unwrap().limit, 0);
    assert_eq!(event(&pair).unwrap_err().errno(), libc::EAGAIN);
}
