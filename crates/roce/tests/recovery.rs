//! Stories: one certain packet is lost, doubled or late.

mod pair;

use pair::{Bottleneck, Faults, Pair, SEND, Setup, Side, read, sge, write};
use verbatim_roce::wire::opcode::{Kind, Opcode};
use verbatim_roce::{
    AccessFlags, Bind, HoldBudget, Lkey, Mtu, Operation, Packet, QpAttributes, QpState, Queue, Rkey, WcStatus,
};

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
    let counters = pair.a.qp.counters();
    assert!((1..=2).contains(&counters.early_retransmits), "{counters:?}");
    assert_eq!(counters.local_ack_timeout_err, 0);
    assert!(
        counters.retransmitted_requests <= 2,
        "one to ask, and what was lost"
    );
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
fn data_that_wait_for_missing_ones_are_paid_for_and_given_back() {
    const BYTES: usize = 6000;
    for fails in [false, true] {
        let mut pair = pair();
        let budget = HoldBudget::new(BYTES);
        pair.a.host.hold_budget = Some(budget.clone());
        lose(&mut pair, Side::A, 1, |packet| packet.bth.psn.get() == 100);
        pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
        while budget.left_bytes() > BYTES / 4 {
            assert!(pair.step(), "packets of more than that come early");
        }
        if fails {
            let to_error = QpAttributes {
                state: Some(QpState::Err),
                ..QpAttributes::default()
            };
            pair.a.qp.modify(&to_error, &mut pair.a.host).unwrap();
        } else {
            succeed(&mut pair, 1);
            assert_eq!(pair.a.host.bytes(1)[..LEN as usize], vec![0xbb; LEN as usize]);
        }
        assert_eq!(budget.left_bytes(), BYTES);
    }
}

/// The answer to what was sent before a timeout comes late, and what goes on is not what stands behind a failed request.
#[test]
fn nothing_is_sent_behind_a_request_that_failed_here() {
    let mut pair = pair();
    lose(&mut pair, Side::A, u32::MAX, |_| true);
    for wr_id in 0..4 {
        pair.a
            .host
            .post(wr_id, write(0x20000, 2), &[sge(1, 0x10000, 100)]);
    }
    let bind = Bind {
        window: Rkey(0x900),
        rkey: Rkey(0x901),
        lkey: Lkey(77),
        addr: 0,
        len: 8,
        access: AccessFlags::empty(),
    };
    pair.a.host.post(4, Operation::Bind(bind), &[]);
    pair.a.host.post(5, write(0x28000, 2), &[sge(1, 0x10000, 100)]);
    // Timeouts that only ask, and one that begins again.
    while pair.a.qp.counters().local_ack_timeout_err == 0 && pair.a.qp.counters().early_retransmits < 3 {
        assert!(pair.step());
    }
    // Everything up to PSN 101: the second of four.
    let mut late = [0; 20];
    late[..12].copy_from_slice(&[0x11, 0x40, 0xff, 0xff, 0, 0, 0, 0x11, 0, 0, 0, 101]);
    late[12..16].copy_from_slice(&[0x1f, 0, 0, 2]);
    let late = Packet::parse(&late).unwrap();
    pair.a.qp.handle_packet(pair.now, &late, &mut pair.a.host);
    assert_eq!(pair.a.qp.counters().spurious_retransmits, 1);
    pair.link.filter = None;
    pair.transmit(Side::A);
    pair.run();
    let outcomes = pair.a.host.outcomes(Queue::Send);
    let failed = [(4, WcStatus::MwBindErr), (5, WcStatus::WrFlushErr)];
    assert_eq!(outcomes[4..], failed, "{outcomes:?}");
    assert!(pair.b.host.bytes(2)[0x8000..].iter().all(|byte| *byte == 0xbb));
}

#[test]
fn one_late_acknowledgement_spares_the_rest_of_the_retry() {
    let mut pair = pair();
    lose(&mut pair, Side::A, 20, |packet| {
        packet.info.kind == Kind::Acknowledge
    });
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    pair.setup.budget = 1;
    while pair.a.qp.counters().early_retransmits == 0 {
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

/// A partner that needs far longer for a window than every early timeout, as the kernel's rxe does in an emulated machine:
/// nothing is lost, and little may be sent twice.
#[test]
fn a_partner_that_is_only_slow_is_not_sent_everything_again() {
    const MESSAGES: u64 = 16;
    for read_too in [false, true] {
        let mut pair = Pair::new(Setup {
            timeout: 14,
            mtu: Mtu::Mtu4096,
            ..Setup::default()
        });
        pair.link.bottlenecks[Side::B as usize] = Some(Bottleneck::new(1_500_000, 64 << 20));
        pair.a
            .host
            .register(1, 0x10000, (0..=255).cycle().take(1 << 16).collect());
        pair.b.host.register(2, 0x20000, vec![0xbb; 1 << 16]);
        for wr_id in 0..MESSAGES {
            let request = match read_too && wr_id % 4 == 3 {
                true => read(0x28000, 2),
                false => write(0x20000, 2),
            };
            let at = if read_too && wr_id % 4 == 3 {
                0x18000
            } else {
                0x10000
            };
            pair.a.host.post(wr_id, request, &[sge(1, at, LEN)]);
        }
        succeed(&mut pair, MESSAGES as usize);
        assert_eq!(
            pair.b.host.bytes(2)[..LEN as usize],
            pair.a.host.bytes(1)[..LEN as usize]
        );
        let counters = pair.a.qp.counters();
        assert!(counters.spurious_retransmits > 0, "{counters:?}");
        let needed = MESSAGES * u64::from(LEN.div_ceil(4096));
        assert!(
            counters.retransmitted_requests < needed / 2,
            "{} of {needed} packets were sent again: {counters:?}",
            counters.retransmitted_requests
        );
    }
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
            let found = counters.packet_seq_err + counters.implied_nak_seq_err + counters.early_retransmits;
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
    // Twenty packets, and the eleventh again.
    assert_eq!(pair.b.qp.counters().sent_responses, 20 + 1);
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
    assert!(nak.a.qp.counters().early_retransmits > 0);
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

/// Delivers what is under way, without anybody sending something new.
fn deliver_all(pair: &mut Pair) -> Vec<(Side, Vec<u8>)> {
    let mut seen = vec![];
    while let Some(due) = pair.link.next_due() {
        pair.now = pair.now.max(due);
        let (side, bytes, _) = pair.link.pop_due(pair.now).expect("it is due");
        let (now, end) = (pair.now, pair.end(side));
        end.qp.handle_packet(
            now,
            &Packet::parse(&bytes).expect("it was sent whole"),
            &mut end.host,
        );
        seen.push((side, bytes));
    }
    seen
}

#[test]
fn a_nak_that_comes_twice_is_one() {
    let faults = Faults {
        duplication: 100,
        ..Faults::default()
    };
    let mut pair = Pair::new(Setup {
        retry_cnt: 1,
        faults,
        ..Setup::default()
    });
    pair.a.host.register(1, 0x10000, vec![1; 1 << 16]);
    pair.b.host.register(2, 0x20000, vec![2; 1 << 16]);
    lose(&mut pair, Side::B, 1, |packet| packet.bth.psn.get() == 100);
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    succeed(&mut pair, 1);
    assert_eq!(pair.a.qp.counters().packet_seq_err, 2);
}

#[test]
fn rnr_nak_goes_back_without_a_timeout() {
    let mut pair = pair();
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, LEN)]);
    while pair.a.qp.counters().rcvd_rnr_nak == 0 {
        pair.step();
    }
    pair.b.host.post_receive(0, &[sge(2, 0x20000, LEN)]);
    succeed(&mut pair, 1);
    assert_eq!(pair.a.qp.counters().local_ack_timeout_err, 0);
    assert_eq!(pair.a.qp.counters().packet_seq_err, 0);
}

#[test]
fn read_asked_for_again_is_answered_in_place_of_the_first() {
    let mut pair = pair();
    pair.setup.budget = 4;
    pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    pair.transmit(Side::A);
    let (_, request) = deliver_all(&mut pair).remove(0);
    // The first batch is a First and a Middle: the Middle is shorter, so it ends the batch.
    pair.transmit(Side::B);
    let now = pair.now;
    pair.b
        .qp
        .handle_packet(now, &Packet::parse(&request).unwrap(), &mut pair.b.host);
    succeed(&mut pair, 1);
    assert_eq!(
        pair.b.qp.counters().sent_responses,
        2 + 20,
        "not the eighteen that were left of the first"
    );
}

#[test]
fn read_that_is_partly_a_duplicate_is_not_answered() {
    let mut pair = pair();
    pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    pair.transmit(Side::A);
    let (_, request) = deliver_all(&mut pair).remove(0);
    while pair.transmit(Side::B) {}
    let before = pair.b.qp.counters().sent_responses;
    let mut packet = Packet::parse(&request).unwrap();
    packet.bth.psn = packet.bth.psn.next();
    let now = pair.now;
    pair.b.qp.handle_packet(now, &packet, &mut pair.b.host);
    while pair.transmit(Side::B) {}
    assert_eq!(pair.b.qp.counters().sent_responses, before);
}

#[test]
fn duplicate_before_a_read_is_not_acknowledged_beyond_it() {
    let mut pair = pair();
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 10)]);
    pair.a.host.post(1, read(0x20000, 2), &[sge(1, 0x10000, LEN)]);
    let mut answers_to_lose = 21;
    lose(&mut pair, Side::A, answers_to_lose, |_| true);
    while pair.a.qp.counters().early_retransmits == 0 {
        pair.step();
        answers_to_lose -= 1;
        assert!(answers_to_lose > 0);
    }
    pair.setup.budget = 1;
    pair.transmit(Side::A);
    deliver_all(&mut pair);
    while pair.transmit(Side::B) {}
    deliver_all(&mut pair);
    assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, WcStatus::Success)]);
    succeed(&mut pair, 2);
    assert_eq!(pair.a.qp.counters().implied_nak_seq_err, 0);
}
