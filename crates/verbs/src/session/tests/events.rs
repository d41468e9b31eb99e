//! Completion events and who waits for them.

use verbatim_device::control::{AsyncEvent, AsyncEventType};

use super::SEND;
use crate::testing::{Pair, Shape, wr_ids};

const WITH_EVENTS: Shape = Shape {
    channel: true,
    ..Shape::PLAIN
};

/// Whether there is an event of an end's completion queue; it is acknowledged.
fn event(pair: &Pair, end: usize) -> bool {
    let cq = &pair.ends[end].cq;
    match cq.channel().unwrap().get_event() {
        Ok(told) => {
            assert!(std::sync::Arc::ptr_eq(&told, cq));
            cq.ack_events(1);
            true
        }
        Err(error) => {
            assert_eq!(error.errno(), libc::EAGAIN);
            false
        }
    }
}

#[test]
fn an_armed_queue_is_armed_where_it_goes() {
    for solicited_only in [false, true] {
        let mut pair = Pair::with(WITH_EVENTS);
        for end in 0..2 {
            pair.ends[end].cq.arm(solicited_only);
            pair.ends[end].recv(end as u64).unwrap();
        }
        pair.migrate(0);
        pair.migrate(1);
        assert!(!event(&pair, 0) && !event(&pair, 1));
        pair.ends[1].send(7, SEND, false, false).unwrap();
        pair.wire.settle();
        assert_eq!(event(&pair, 0), !solicited_only);
        assert!(!event(&pair, 1));
        assert_eq!(wr_ids(&pair.ends[0].poll()), [0]);
    }
}

#[test]
fn events_that_nobody_has_read_and_completions_that_nobody_was_told_of_come_after_the_move() {
    let mut pair = Pair::with(WITH_EVENTS);
    pair.ends[0].recv(0).unwrap();
    pair.ends[0].cq.arm(false);
    pair.ends[1].send(0, SEND, true, false).unwrap();
    pair.wire.settle();
    // The event lies in the channel while it moves, twice.
    pair.migrate(0);
    pair.migrate(0);
    assert!(event(&pair, 0) && !event(&pair, 0));
    pair.ends[0].recv(1).unwrap();
    pair.ends[1].send(1, SEND, true, false).unwrap();
    pair.wire.settle();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    // Without an RNIC: what has come already fires at once, what is still to come when there is one again.
    pair.ends[0].cq.arm(false);
    assert!(event(&pair, 0) && !event(&pair, 0));
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0, 1]);
    pair.ends[0].cq.arm(false);
    assert!(!event(&pair, 0));
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    pair.resume(migration);
    assert!(!event(&pair, 0));
    pair.ends[0].recv(2).unwrap();
    pair.ends[1].send(2, SEND, true, false).unwrap();
    pair.wire.settle();
    assert!(event(&pair, 0) && !event(&pair, 0));
}

#[test]
fn who_waits_for_an_event_while_it_is_moved_gets_it() {
    let mut pair = Pair::with(WITH_EVENTS);
    pair.ends[0].recv(0).unwrap();
    let (cq, context) = (pair.ends[0].cq.clone(), pair.ends[0].context.clone());
    let channel = cq.channel().unwrap().clone();
    rustix::io::ioctl_fionbio(channel.fd(), false).unwrap();
    cq.arm(false);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| channel.get_event().map(|_| ()));
        let other = scope.spawn(|| context.get_async_event().map(|event| event.event));
        pair.migrate(0);
        pair.migrate(0);
        assert!(!waiter.is_finished() && !other.is_finished());
        pair.ends[1].send(0, SEND, true, false).unwrap();
        pair.wire.settle();
        waiter.join().unwrap().unwrap();
        let physical = pair.ends[0].endpoint().qpn;
        let device = pair.ends[0].device;
        let event = AsyncEvent {
            event: AsyncEventType::SqDrained,
            object: physical,
        };
        pair.wire.tell(device, event);
        context.process().look_after_devices();
        assert_eq!(other.join().unwrap().unwrap(), AsyncEventType::SqDrained);
    });
    cq.ack_events(1);
    pair.ends[0].qp.ack_async_event();
}
