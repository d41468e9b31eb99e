//! Contexts that their process makes again where it has moved to.

use verbatim_channel::{Answer, Order};
use verbatim_device::control::{QpAttr, QpAttrMask, QpState, QpType};

use crate::testing::{Pair, Shape, outcomes, wr_ids};
use crate::{SendOpcode, WC_WR_FLUSH_ERR};

const SEND: SendOpcode = SendOpcode::SendWithImm;

const MADE_AGAIN: Shape = Shape {
    made_again: true,
    ..Shape::PLAIN
};

#[test]
fn a_process_takes_its_requests_and_recvs_to_what_it_has_made() {
    let mut pair = Pair::with(MADE_AGAIN);
    for wr_id in 0..8 {
        pair.ends[1].recv(100 + wr_id).unwrap();
        pair.ends[0].recv(200 + wr_id).unwrap();
    }
    let known = [0, 1].map(|end: usize| (pair.ends[end].qp.number(), pair.ends[end].mr.lkey()));
    // To and fro, both ends, so that what one host gave is translated at the next.
    for (round, mover) in (0..).zip([0, 1, 0, 0, 1]) {
        pair.ends[0].send(10 * round, SEND, true, false).unwrap();
        let mut migration = pair.begin(mover);
        pair.suspend(&mut migration);
        pair.ends[0].send(10 * round + 1, SEND, true, false).unwrap();
        assert!(pair.drain(&mut migration, 1000));
        pair.quiesce(&mut migration);
        assert!(migration.parked.is_empty(), "nobody is given its connection");
        pair.claim(&mut migration);
        pair.switch(&mut migration);
        pair.resume(migration);
        pair.wire.settle();
        let sent = wr_ids(&pair.ends[0].poll());
        assert_eq!(sent, [u64::from(10 * round), u64::from(10 * round + 1)]);
        let received = pair.ends[1].poll();
        assert_eq!(received.len(), 2);
        assert!(received.iter().all(|wc| wc.qp_num == known[1].0));
        assert_ne!(pair.ends[mover].qp.control.lock().physical_qpn(), 0);
        for wr_id in 0..2 {
            pair.ends[1].recv(300 + wr_id).unwrap();
        }
    }
    let now = [0, 1].map(|end: usize| (pair.ends[end].qp.number(), pair.ends[end].mr.lkey()));
    assert_eq!(known, now, "what the program knows does not change");
}

#[test]
fn what_has_failed_is_made_again_as_failed_and_takes_nothing_else_along() {
    let mut pair = Pair::with(MADE_AGAIN);
    let failed = QpAttr {
        state: QpState::Err,
        ..QpAttr::default()
    };
    pair.ends[0].qp.modify(QpAttrMask::STATE, &failed).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    let session = migration.session;
    let told = pair.ends[0].order(Order::MakeAgain { session });
    assert!(
        matches!(&told, Answer::Made { lost, .. } if lost.is_empty()),
        "{told:?}"
    );
    pair.claim(&mut migration);
    pair.switch(&mut migration);
    pair.resume(migration);
    assert!(!pair.ends[0].context.is_dead());
    assert_eq!(pair.ends[0].qp.query().unwrap().0.state, QpState::Err);
    pair.ends[0].send(1, SEND, true, false).unwrap();
    pair.wire.settle();
    assert_eq!(outcomes(&pair.ends[0].poll()), [(1, WC_WR_FLUSH_ERR)]);
}

#[test]
fn a_question_for_the_way_that_is_lost_does_not_lose_the_connection() {
    let mut pair = Pair::with(MADE_AGAIN);
    pair.ends[1].recv(7).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[0].send(1, SEND, true, false).unwrap();
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.wire.answer_late(3);
    pair.claim(&mut migration);
    pair.wire.answer_late(2);
    pair.switch(&mut migration);
    pair.resume(migration);
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [1]);
    assert_eq!(wr_ids(&pair.ends[1].poll()), [7]);
}

#[test]
fn taken_back_it_goes_on_with_what_it_had() {
    let mut pair = Pair::with(MADE_AGAIN);
    let before = pair.ends[0].qp.control.lock().physical_qpn();
    pair.ends[1].recv(7).unwrap();
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    pair.ends[0].send(1, SEND, true, false).unwrap();
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.take_back(migration);
    assert_eq!(pair.ends[0].qp.control.lock().physical_qpn(), before);
    pair.wire.settle();
    assert_eq!(wr_ids(&pair.ends[0].poll()), [1]);
    assert_eq!(wr_ids(&pair.ends[1].poll()), [7]);
}

#[test]
fn whoever_asks_again_gets_the_same_answer() {
    let mut pair = Pair::with(MADE_AGAIN);
    let mut migration = pair.begin(0);
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    let session = migration.session;
    pair.make_again(&mut migration);
    let again = pair.ends[0].order(Order::MakeAgain { session });
    let Answer::Made { contexts, .. } = again else {
        panic!("{again:?}")
    };
    assert_eq!(contexts, migration.made);
    let qps = pair.wire.qpns(3).len();
    pair.claim(&mut migration);
    assert_eq!(pair.wire.qpns(3).len(), qps, "nothing is made twice");
    // The agent that claimed has died, and the next one does not know what became of it.
    let again = pair.ends[0].order(Order::MakeAgain { session });
    assert!(matches!(again, Answer::Made { contexts, .. } if contexts == migration.made));
    let peers = Vec::new();
    pair.ends[0].order(Order::ConnectMade { session, peers });
    pair.switch(&mut migration);
    pair.resume(migration);
}

#[test]
fn without_a_device_there_the_program_loses_what_it_had_and_nothing_else() {
    let mut pair = Pair::with(MADE_AGAIN);
    let mut migration = pair.begin(0);
    pair.ends[0].recv(5).unwrap();
    pair.suspend(&mut migration);
    assert!(pair.drain(&mut migration, 1000));
    pair.quiesce(&mut migration);
    pair.wire.makes_again(1, None);
    let session = migration.session;
    let Answer::Made { contexts, lost } = pair.ends[0].order(Order::MakeAgain { session }) else {
        panic!("no answer")
    };
    assert!(contexts.is_empty());
    assert!(lost[0].contains("no such device here"), "{lost:?}");
    let (contexts, key_tables) = (Vec::new(), Vec::new());
    pair.ends[0].order(Order::Claim {
        session,
        contexts,
        key_tables,
    });
    pair.ends[0].order(Order::Resume { session });
    assert!(pair.ends[0].context.is_dead());
    assert_eq!(outcomes(&pair.ends[0].poll()), [(5, WC_WR_FLUSH_ERR)]);
    assert!(matches!(pair.ends[0].send(1, SEND, true, false), Ok(())));
    assert_eq!(pair.ends[0].poll()[0].status, WC_WR_FLUSH_ERR);
}

#[test]
fn what_is_asleep_on_its_channel_wakes_for_the_new_one() {
    let mut pair = Pair::with(Shape {
        channel: true,
        ..MADE_AGAIN
    });
    pair.ends[1].recv(1).unwrap();
    pair.ends[1].cq.arm(false);
    pair.migrate(1);
    pair.ends[0].send(1, SEND, true, false).unwrap();
    pair.wire.settle();
    let channel = pair.ends[1].cq.channel().unwrap().clone();
    assert_eq!(channel.get_event().unwrap().number(), pair.ends[1].cq.number());
}

#[test]
fn datagrams_find_it() {
    let mut pair = Pair::with(Shape {
        qp_type: QpType::Ud,
        ..MADE_AGAIN
    });
    pair.ends[1].recv(1).unwrap();
    pair.ends[1].recv(2).unwrap();
    let way = pair.ends[0].handle_to(&pair.ends[1]);
    pair.ends[0].send_datagram(1, &way, &pair.ends[1]);
    pair.wire.settle();
    pair.migrate(1);
    pair.ends[0].send_datagram(2, &way, &pair.ends[1]);
    pair.wire.settle();
    let received: Vec<u32> = pair.ends[1].poll().iter().map(|wc| wc.imm).collect();
    assert_eq!(received, [1, 2]);
}

#[test]
fn an_agent_of_an_earlier_release_is_told_that_it_cannot_move_it() {
    let mut pair = Pair::with(MADE_AGAIN);
    let Answer::Described(old) = pair.ends[0].order(Order::Describe) else {
        panic!("no road map")
    };
    assert!(
        old.blockers[0].contains("upgrade the agent"),
        "{:?}",
        old.blockers
    );
    let Answer::DescribedAll { road_map, made_again } = pair.ends[0].order(Order::DescribeAll) else {
        panic!("no road map")
    };
    assert!(road_map.blockers.is_empty());
    assert_eq!((made_again[0].id, &*made_again[0].device), (0, "wire1"));
}
