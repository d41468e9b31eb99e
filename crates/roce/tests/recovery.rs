//! Stories: one certain packet is lost, doubled or late.

mod pair;

use pair::{Pair, SEND, Setup, Side, read, sge, write};
use verbatim_roce::wire::opcode::{Kind, Opcode};
use verbatim_roce::{Packet, Queue, WcStatus};

const LEN: u32 = 20_000;

fn pair() -> Pair {
    let mut pair = Pair::new(Setup::default());
    pair.a
        .host
        .register(1, 0x10000, (0..=255).cycle().take(1 << 16).collect());
    pair.b.host.register(2, 0x20000, vec![0xbb; 1 << 16]);
    pair
}

/// Loses the first `count` packets to a side that `condition` picks.
fn lose(pair: &mut Pair, side: Side, mut count: u32, condition: impl Fn(&Packet<'_>) -> bool + 'static) {
    pair.link.filter = Some(Box::new(move |to, packet| {
        let hit = to == side && count > 0 && condition(packet);
        count -= u32::from(hit);
        !hit
    }));
}

fn succeed(pair: &mut Pair, count: usize) {
    pair.run();
    let outcomes = pair.a.host.outcomes(Queue::Send);
    assert_eq!(outcomes.len(), count);
    assert!(
        outcomes.iter().all(|(_, status)| *status == WcStatus::Success),
        "{outcomes:?}"
    );
}

#[test]
fn lost_request_is_asked_for_by_nak() {
    let mut pair = pair();
    lose(&mut pair, Side::B, 1, |packet| packet.bth.psn.get() == 105);
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    succeed(&mut pair, 1);
    assert!(
        pair.b
            .host
            .bytes(2)
            .starts_with(&pair.a.host.bytes(1)[..LEN as usize])
    );
    let (a, b) = (pair.a.qp.counters(), pair.b.qp.counters());
    assert_eq!((a.packet_seq_err, a.local_ack_timeout_err), (1, 0));
    assert_eq!(
        b.out_of_sequence, 14,
        "of 20 packets, six came before the gap or are it"
    );
    assert_eq!(b.duplicate_request, 0);
}

#[test]
fn lost_last_request_is_found_by_timeout() {
    let mut pair = pair();
    lose(&mut pair, Side::B, 1, |packet| packet.info.ends);
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    succeed(&mut pair, 1);
    assert_eq!(pair.a.qp.counters().local_ack_timeout_err, 1);
    assert!(
        pair.b
            .host
            .bytes(2)
            .starts_with(&pair.a.host.bytes(1)[..LEN as usize])
    );
}

#[test]
fn lost_acknowledgement_leads_to_a_duplicate_that_is_not_executed() {
    let mut pair = pair();
    lose(&mut pair, Side::A, 1, |_| true);
    pair.b.host.post_receive(0, &[sge(2, 0x20000, 100)]);
    pair.b.host.post_receive(1, &[sge(2, 0x20000, 100)]);
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, 100)]);
    succeed(&mut pair, 1);
    assert_eq!(pair.b.qp.counters().duplicate_request, 1);
    assert_eq!(pair.b.host.outcomes(Queue::Receive), [(0, WcStatus::Success)]);
    assert_eq!(pair.b.host.receives.len(), 1);
}

#[test]
fn one_late_acknowledgement_spares_the_rest_of_the_retry() {
    let mut pair = pair();
    lose(&mut pair, Side::A, 20, |packet| {
        packet.info.kind == Kind::Acknowledge
    });
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    pair.setup.budget = 1;
    while pair.a.qp.counters().local_ack_timeout_err == 0 {
        pair.step();
    }
    pair.link.filter = None;
    pair.transmit(Side::A);
    while pair.a.host.completions.is_empty() {
        pair.now = pair.link.next_due().unwrap();
        pair.deliver();
        pair.transmit(Side::B);
    }
    assert_eq!(pair.a.qp.counters().retransmitted_requests, 1);
}

#[test]
fn lost_read_request_first_middle_and_last_response() {
    for opcode in [
        Opcode::RC_READ_REQUEST,
        Opcode::RC_READ_RESPONSE_FIRST,
        Opcode::RC_READ_RESPONSE_MIDDLE,
        Opcode::RC_READ_RESPONSE_LAST,
    ] {
        for followed in [false, true] {
            let mut pair = pair();
            let side = if opcode == Opcode::RC_READ_REQUEST {
                Side::B
            } else {
                Side::A
            };
            lose(&mut pair, side, 2, move |packet| packet.bth.opcode == opcode);
            pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
            if followed {
                pair.a.host.post(1, write(0x28000, 2), &[sge(1, 0x18000, LEN)]);
                pair.a.host.post(2, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
            }
            succeed(&mut pair, if followed { 3 } else { 1 });
            assert_eq!(pair.a.host.bytes(1)[..LEN as usize], vec![0xbb; LEN as usize]);
            let counters = pair.a.qp.counters();
            let found =
                counters.packet_seq_err + counters.implied_nak_seq_err + counters.local_ack_timeout_err;
            assert!(found > 0, "{opcode:?} {counters:?}");
        }
    }
}

#[test]
fn read_goes_on_where_it_stopped() {
    let mut pair = pair();
    lose(&mut pair, Side::A, 1, |packet| packet.bth.psn.get() == 110);
    pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    succeed(&mut pair, 1);
    assert_eq!(pair.a.qp.counters().implied_nak_seq_err, 1);
    // Twenty packets, and from the eleventh on again.
    assert_eq!(pair.b.qp.counters().sent_responses, 20 + 10);
}

#[test]
fn lost_rnr_nak_and_lost_nak_are_found_by_timeout() {
    let mut rnr = pair();
    lose(&mut rnr, Side::A, 1, |_| true);
    rnr.a.host.post(0, SEND, &[sge(1, 0x10000, 100)]);
    while rnr.b.qp.counters().sent_rnr_nak < 2 {
        rnr.step();
    }
    rnr.b.host.post_receive(0, &[sge(2, 0x20000, 100)]);
    succeed(&mut rnr, 1);

    let mut nak = pair();
    let mut lost_request = false;
    let mut lost_nak = false;
    nak.link.filter = Some(Box::new(move |to, packet| match to {
        Side::B if packet.bth.psn.get() == 103 => std::mem::replace(&mut lost_request, true),
        Side::A => std::mem::replace(&mut lost_nak, true),
        Side::B => true,
    }));
    nak.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    succeed(&mut nak, 1);
    assert_eq!(nak.a.qp.counters().packet_seq_err, 0);
    assert!(nak.a.qp.counters().local_ack_timeout_err > 0);
}

#[test]
fn early_timeouts_are_harmless() {
    let mut pair = pair();
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    for _ in 0..10 {
        let now = pair.now;
        pair.a.qp.handle_timeout(now, &mut pair.a.host);
        pair.transmit(Side::A);
    }
    succeed(&mut pair, 1);
    assert_eq!(pair.a.qp.counters().retransmitted_requests, 0);
}
