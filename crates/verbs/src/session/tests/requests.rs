//! Send requests: what is intercepted, and in which order all of them complete.

use verbatim_device::control::{QpAttrMask, QpState};

use super::SEND;
use crate::testing::{Pair, outcomes, wr_ids};
use crate::{Body, PostError, QpAttr, SEND_SIGNALED, SendOpcode, SendWr, WC_WR_FLUSH_ERR};

/// `IBV_WC_REM_ACCESS_ERR`
const WC_REM_ACCESS_ERR: u32 = 10;

#[test]
fn completions_of_before_during_and_after_come_in_order() {
    let mut pair = Pair::new();
    for wr_id in 0..8 {
        pair.ends[1].recv(100 + wr_id).unwrap();
    }
    pair.ends[0].send(0, SEND, true, false).unwrap();
    pair.ends[0].send(1, SEND, true, true).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[0].send(2, SEND, true, true).unwrap();
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.ends[0].send(3, SEND, true, false).unwrap();
    assert_eq!(
        wr_ids(&pair.ends[0].poll()),
        [0, 1],
        "from the fake queue, without an RNIC"
    );
    assert_eq!(pair.claim(&mut migration), 0);
    assert_eq!(
        pair.switch(&mut migration),
        6,
        "RECVs that no message has consumed"
    );
    assert_eq!(pair.resume(migration), [2, 0]);
    pair.ends[0].send(4, SEND, true, false).unwrap();
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [2, 3, 4]);
    let received = pair.ends[1].poll();
    assert_eq!(wr_ids(&received), [100, 101, 102, 103, 104]);
    let messages: Vec<u32> = received.iter().map(|wc| wc.imm).collect();
    assert_eq!(messages, [0, 1, 2, 3, 4]);
    let number = pair.ends[1].qp.number();
    assert!(
        received.iter().all(|wc| wc.qp_num == number),
        "numbers stay virtual"
    );
}

#[test]
fn unsignaled_requests_at_the_end_are_waited_for_and_their_room_comes_back() {
    let mut pair = Pair::new();
    for n in 0..4 {
        pair.ends[0].send(n, SendOpcode::Write, false, false).unwrap();
    }
    assert_eq!(
        pair.ends[0].send(9, SendOpcode::Write, false, false),
        Err(PostError::Full)
    );
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.wire.unfinished() > 0);
    assert!(pair.drain(&mut migration, 1000));
    assert_eq!(pair.wire.unfinished(), 0);
    pair.quiesce(&mut migration);
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    pair.resume(migration);
    for n in 0..4 {
        pair.ends[0].send(n, SendOpcode::Write, n == 3, false).unwrap();
    }
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [3]);
}

#[test]
fn interception_holds_no_more_than_the_queue_would() {
    let mut pair = Pair::new();
    pair.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    for n in 1..4 {
        pair.ends[0].send(n, SendOpcode::Write, true, false).unwrap();
    }
    assert_eq!(
        pair.ends[0].send(4, SendOpcode::Write, true, false),
        Err(PostError::Full)
    );
    assert!(pair.drain(&mut migration, 1000));
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0]);
    pair.ends[0].send(4, SendOpcode::Write, true, false).unwrap();
    pair.abort(migration);
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [1, 2, 3, 4]);
}

#[test]
fn a_batch_is_taken_back_as_a_whole_whether_suspended_or_not() {
    let mut pair = Pair::new();
    let push = |pair: &Pair| {
        let sges = [pair.ends[0].sge(0, 8)];
        let mut batch = pair.ends[0].qp.owned_batch();
        let request = SendWr {
            body: Body::Sges(&sges),
            ..pair.ends[0].request(7, SendOpcode::Write, SEND_SIGNALED)
        };
        batch.push(&request).unwrap();
        batch.push(&request).unwrap();
        batch
    };
    push(&pair).abort();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    push(&pair).abort();
    push(&pair).complete().unwrap();
    pair.abort(migration);
    push(&pair).complete().unwrap();
    pair.wire.settle();
    assert_eq!(pair.ends[0].poll().len(), 4);
    drop(push(&pair));
    pair.wire.settle();
    assert_eq!(pair.ends[0].poll().len(), 0);
}

#[test]
fn requests_that_were_posted_in_sqd_wait_there_and_move() {
    let mut pair = Pair::new();
    let set = |pair: &Pair, state| {
        let attr = QpAttr {
            state,
            ..QpAttr::default()
        };
        pair.ends[0].qp.modify(QpAttrMask::STATE, &attr).unwrap();
    };
    set(&pair, QpState::Sqd);
    pair.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    pair.ends[0].send(1, SendOpcode::Write, true, true).unwrap();
    pair.wire.settle();
    assert!(pair.ends[0].poll().is_empty());
    pair.migrate(0);
    pair.wire.settle();
    assert!(pair.ends[0].poll().is_empty(), "still in SQD");
    assert_eq!(pair.ends[0].qp.query().unwrap().0.state, QpState::Sqd);
    set(&pair, QpState::Rts);
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [0, 1]);
}

#[test]
fn a_failed_queue_pair_is_still_failed_on_its_new_device() {
    let mut pair = Pair::new();
    pair.ends[0].recv(1).unwrap();
    let mut migration = pair.begin(0);
    // The other end writes where it may not.
    let bad = SendWr {
        rkey: 0xdead_be00,
        ..pair.ends[1].request(0, SendOpcode::Write, SEND_SIGNALED)
    };
    pair.ends[1].qp.post_send([bad]).unwrap();
    pair.wire.settle();
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.ends[0].recv(2).unwrap();
    pair.ends[0].send(3, SendOpcode::Write, false, false).unwrap();
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    pair.resume(migration);
    assert_eq!(pair.ends[0].qp.query().unwrap().0.state, QpState::Err);
    pair.wire.settle();
    // Each queue in its order.
    let mut flushed = outcomes(&pair.ends[0].poll());
    flushed.sort_by_key(|(wr_id, _)| *wr_id == 3);
    assert_eq!(flushed, [1, 2, 3].map(|wr_id| (wr_id, WC_WR_FLUSH_ERR)));
    assert_eq!(outcomes(&pair.ends[1].poll()), [(0, WC_REM_ACCESS_ERR)]);
}

#[test]
fn a_slot_that_is_freed_late_delays_and_loses_nothing() {
    let pair = Pair::new();
    pair.wire.free_slots_late(1000);
    pair.ends[0].send(0, SendOpcode::Write, true, false).unwrap();
    pair.ends[0].send(1, SendOpcode::Write, true, false).unwrap();
    pair.wire.free_slots_late(0);
    let mut done = pair.ends[0].poll();
    pair.wire.settle();
    done.extend(pair.ends[0].poll());
    assert_eq!(wr_ids(&done), [0, 1]);
}

#[test]
fn a_reset_forgets_everything() {
    let pair = Pair::new();
    let end = &pair.ends[0];
    end.recv(5).unwrap();
    end.send(0, SendOpcode::Write, true, false).unwrap();
    pair.wire.settle();
    let reset = QpAttr::default();
    end.qp.modify(QpAttrMask::STATE, &reset).unwrap();
    assert!(end.poll().is_empty());
    assert_eq!(
        end.send(1, SendOpcode::Write, true, false),
        Err(PostError::State(QpState::Reset))
    );
    assert_eq!(end.recv(6), Err(PostError::State(QpState::Reset)));
}
