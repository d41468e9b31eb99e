//! Programs that answer each other's messages: acknowledgements travel with the answers.

mod pair;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use pair::{Pair, Setup, Side, sge, write};
use verbatim_roce::{QpConfig, Queue, WcStatus};

const PATIENCE: Duration = Duration::from_micros(100);
/// How long a program takes to see a message and answer it.
const THINKING: Duration = Duration::from_micros(5);

/// A pair whose ends keep memory under keys 1 and 2, and how many acknowledgements they have sent.
fn pair(ack_delay: Duration) -> (Pair, Rc<Cell<u32>>) {
    let setup = Setup::default();
    let mut pair = Pair::new(Setup {
        config: QpConfig {
            ack_delay,
            ..setup.config
        },
        ..setup
    });
    pair.a.host.register(1, 0x10000, vec![0; 4096]);
    pair.b.host.register(2, 0x20000, vec![0; 4096]);
    let acknowledgements = Rc::new(Cell::new(0));
    let count = acknowledgements.clone();
    pair.link.filter = Some(Box::new(move |_, packet| {
        count.set(count.get() + u32::from(packet.aeth.is_some()));
        true
    }));
    (pair, acknowledgements)
}

/// One side writes its round's number into the other's memory, and thinks when it has come.
fn say(pair: &mut Pair, from: Side, round: u64) {
    let (own, theirs, remote) = match from {
        Side::A => (1, 2, 0x20000),
        Side::B => (2, 1, 0x10000),
    };
    let text = round.to_le_bytes();
    let own_base = if from == Side::A { 0x10000 } else { 0x20000 };
    pair.end(from).host.region(own).bytes[8..16].copy_from_slice(&text);
    pair.end(from)
        .host
        .post(round, write(remote, theirs), &[sge(own, own_base + 8, 8)]);
    pair.transmit(from);
    // Only until the message is there: what waits for its deadline waits on.
    while pair.end(from.other()).host.bytes(theirs)[..8] != text {
        pair.transmit(from.other());
        let next = pair.link.next_due().expect("the message is on its way");
        pair.go_to(next);
    }
    pair.transmit(from.other());
    pair.now = pair.now + THINKING;
}

fn dialogue(pair: &mut Pair, rounds: u64) {
    for round in 1..=rounds {
        say(pair, Side::A, round);
        say(pair, Side::B, round);
    }
}

fn all_done(pair: &Pair, rounds: u64) {
    for end in [&pair.a, &pair.b] {
        let expected: Vec<_> = (1..=rounds).map(|round| (round, WcStatus::Success)).collect();
        assert_eq!(end.host.outcomes(Queue::Send), expected);
    }
}

#[test]
fn without_patience_no_acknowledgement_waits() {
    let (mut pair, acknowledgements) = pair(Duration::ZERO);
    dialogue(&mut pair, 50);
    pair.run();
    all_done(&pair, 50);
    assert_eq!(acknowledgements.get(), 100);
    assert_eq!(pair.a.qp.ack_deadline(), None);
}

#[test]
fn acknowledgements_wait_for_the_answer_and_the_last_for_its_deadline() {
    let (mut pair, acknowledgements) = pair(PATIENCE);
    dialogue(&mut pair, 50);
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 50, "with the answers");
    assert_eq!(
        pair.b.host.outcomes(Queue::Send).len(),
        49,
        "nobody answers the last"
    );
    let deadline = pair.a.qp.ack_deadline().expect("the last one waits");
    assert!(deadline > pair.now && deadline <= pair.now + PATIENCE);
    pair.run();
    all_done(&pair, 50);
    assert!(
        pair.now < deadline + Duration::from_millis(1),
        "nobody had to ask"
    );
    assert_eq!(pair.b.qp.counters().retransmitted_requests, 0);
    assert_eq!(acknowledgements.get(), 100);
}

#[test]
fn who_takes_the_queue_pair_away_has_it_acknowledged_first() {
    let (mut pair, _) = pair(PATIENCE);
    dialogue(&mut pair, 20);
    assert!(pair.a.qp.ack_deadline().is_some());
    pair.a.qp.send_acknowledgement();
    assert_eq!(pair.a.qp.ack_deadline(), None);
    pair.transmit(Side::A);
    while let Some(next) = pair.link.next_due() {
        pair.go_to(next);
    }
    all_done(&pair, 20);
}
