//! Contexts that their process makes again where it has moved to.

use verbatim_channel::{Answer, Order};

use crate::testing::{Shape, Story};
use crate::{SendOpcode, WC_WR_FLUSH_ERR};

const SEND: SendOpcode = SendOpcode::SendWithImm;

const MADE_AGAIN: Shape = Shape {
    srq: false,
    channel: false,
    unreliable: false,
    datagrams: false,
    made_again: true,
};

fn wr_ids(completions: &[crate::Wc]) -> Vec<u64> {
    completions.iter().map(|wc| wc.wr_id).collect()
}

#[test]
fn a_process_takes_its_requests_and_recvs_to_what_it_has_made() {
    let mut story = Story::with(MADE_AGAIN);
    for wr_id in 0..8 {
        story.ends[1].recv(100 + wr_id).unwrap();
        story.ends[0].recv(200 + wr_id).unwrap();
    }
    let known = [0, 1].map(|end: usize| (story.ends[end].qp.number(), story.ends[end].mr.lkey()));
    // To and fro, both ends, so that what one host gave is translated at the next.
    for (round, mover) in (0..).zip([0, 1, 0, 0, 1]) {
        story.ends[0].send(10 * round, SEND, true, false).unwrap();
        let mut migration = story.pre_setup(mover);
        story.suspend(&mut migration);
        story.ends[0].send(10 * round + 1, SEND, true, false).unwrap();
        assert!(story.drain(&migration, 1000));
        story.quiesce(&mut migration);
        assert!(migration.parked().is_empty(), "nobody is given its connection");
        story.claim(&mut migration);
        story.switch(&migration);
        story.resume(&migration);
        story.settle();
        let sent = wr_ids(&story.ends[0].poll());
        assert_eq!(sent, [u64::from(10 * round), u64::from(10 * round + 1)]);
        let received = story.ends[1].poll();
        assert_eq!(received.len(), 2);
        assert!(received.iter().all(|wc| wc.qp_num == known[1].0));
        assert_ne!(story.ends[mover].qp.control.lock().physical_qpn(), 0);
        for wr_id in 0..2 {
            story.ends[1].recv(300 + wr_id).unwrap();
        }
    }
    let now = [0, 1].map(|end: usize| (story.ends[end].qp.number(), story.ends[end].mr.lkey()));
    assert_eq!(known, now, "what the program knows does not change");
}

#[test]
fn taken_back_it_goes_on_with_what_it_had() {
    let mut story = Story::with(MADE_AGAIN);
    let before = story.ends[0].qp.control.lock().physical_qpn();
    story.ends[1].recv(7).unwrap();
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    story.ends[0].send(1, SEND, true, false).unwrap();
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    story.roll_back(migration);
    assert_eq!(story.ends[0].qp.control.lock().physical_qpn(), before);
    story.settle();
    assert_eq!(wr_ids(&story.ends[0].poll()), [1]);
    assert_eq!(wr_ids(&story.ends[1].poll()), [7]);
}

#[test]
fn whoever_asks_again_gets_the_same_answer() {
    let mut story = Story::with(MADE_AGAIN);
    let mut migration = story.pre_setup(0);
    story.suspend(&mut migration);
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    let session = migration.session;
    story.make_again(&mut migration);
    let again = story.ends[0].order(Order::MakeAgain { session });
    let Answer::Made { contexts, .. } = again else {
        panic!("{again:?}")
    };
    assert_eq!(contexts, migration.made());
    let qps = story.world.qpns(3).len();
    story.claim(&mut migration);
    assert_eq!(story.world.qpns(3).len(), qps, "nothing is made twice");
    // The agent that claimed has died, and the next one does not know what became of it.
    let again = story.ends[0].order(Order::MakeAgain { session });
    assert!(matches!(again, Answer::Made { contexts, .. } if contexts == migration.made()));
    let peers = Vec::new();
    story.ends[0].order(Order::ConnectMade { session, peers });
    story.switch(&migration);
    story.resume(&migration);
}

#[test]
fn without_a_device_there_the_program_loses_what_it_had_and_nothing_else() {
    let mut story = Story::with(MADE_AGAIN);
    let mut migration = story.pre_setup(0);
    story.ends[0].recv(5).unwrap();
    story.suspend(&mut migration);
    assert!(story.drain(&migration, 1000));
    story.quiesce(&mut migration);
    story.world.makes_again(1, None);
    let session = migration.session;
    let Answer::Made { contexts, lost } = story.ends[0].order(Order::MakeAgain { session }) else {
        panic!("no answer")
    };
    assert!(contexts.is_empty());
    assert!(lost[0].contains("no such device here"), "{lost:?}");
    let (contexts, key_tables) = (Vec::new(), Vec::new());
    story.ends[0].order(Order::Claim {
        session,
        contexts,
        key_tables,
    });
    story.ends[0].order(Order::Resume { session });
    assert!(story.ends[0].context.is_dead());
    let flushed = story.ends[0].poll();
    assert_eq!(wr_ids(&flushed), [5]);
    assert_eq!(flushed[0].status, WC_WR_FLUSH_ERR);
    assert!(matches!(story.ends[0].send(1, SEND, true, false), Ok(())));
    assert_eq!(story.ends[0].poll()[0].status, WC_WR_FLUSH_ERR);
}

#[test]
fn what_is_asleep_on_its_channel_wakes_for_the_new_one() {
    let mut story = Story::with(Shape {
        channel: true,
        ..MADE_AGAIN
    });
    story.ends[1].recv(1).unwrap();
    story.ends[1].cq.arm(false);
    story.migrate(1);
    story.ends[0].send(1, SEND, true, false).unwrap();
    story.settle();
    let channel = story.ends[1].cq.channel().unwrap().clone();
    assert_eq!(channel.get_event().unwrap().number(), story.ends[1].cq.number());
}

#[test]
fn datagrams_find_it() {
    let mut story = Story::with(Shape {
        datagrams: true,
        ..MADE_AGAIN
    });
    story.ends[1].recv(1).unwrap();
    story.ends[1].recv(2).unwrap();
    let way = story.ends[0].handle_to(&story.ends[1]);
    story.ends[0].send_datagram(1, &way, &story.ends[1]);
    story.settle();
    story.migrate_datagrams(1);
    story.ends[0].send_datagram(2, &way, &story.ends[1]);
    story.settle();
    let received: Vec<u32> = story.ends[1].poll().iter().map(|wc| wc.imm).collect();
    assert_eq!(received, [1, 2]);
}

#[test]
fn an_agent_of_an_earlier_release_is_told_that_it_cannot_move_it() {
    let mut story = Story::with(MADE_AGAIN);
    let Answer::Described(old) = story.ends[0].order(Order::Describe) else {
        panic!("no road map")
    };
    assert!(
        old.blockers[0].contains("upgrade the agent"),
        "{:?}",
        old.blockers
    );
    let Answer::DescribedAll { road_map, made_again } = story.ends[0].order(Order::DescribeAll) else {
        panic!("no road map")
    };
    assert!(road_map.blockers.is_empty());
    assert_eq!((made_again[0].id, &*made_again[0].device), (0, "fake1"));
}
