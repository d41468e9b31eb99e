//! Queue pairs that are stopped in the middle of their requests: what they say of it, and how they go on.

mod pair;

use std::time::Duration;

use pair::{Pair, SEND, Setup, Side, fetch_add, read, sge, write, write_imm};
use verbatim_roce::{Operation, Position, Psn, QpState, Queue, SendData, SgeList, WcOpcode, WcStatus};

const LEN: u32 = 5_000;

/// Requests of every kind in both directions, a few packets at a time.
fn pair() -> Pair {
    let mut pair = Pair::new(Setup {
        budget: 1,
        psn: [0xff_fffd, 200],
        ..Setup::default()
    });
    for (side, key) in [(Side::A, 1), (Side::B, 2)] {
        let own = u64::from(key) << 16;
        let (other, there) = (3 - key, u64::from(3 - key) << 16);
        let host = &mut pair.end(side).host;
        let bytes = (0..1u32 << 16).map(|at| (at % 251) as u8 ^ key as u8);
        host.register(key, own, bytes.collect());
        for wr_id in 0..2 {
            host.post_receive(wr_id, &[sge(key, own + 0x4000 + wr_id * 0x2000, LEN)]);
        }
        host.post(0, SEND, &[sge(key, own, LEN)]);
        host.post(
            1,
            fetch_add(there + 0x8000, other, 5),
            &[sge(key, own + 0x9000, 8)],
        );
        host.post(2, read(there, other), &[sge(key, own + 0xa000, LEN)]);
        host.post(3, write(there + 0xc000, other), &[sge(key, own, LEN)]);
        host.post(
            4,
            fetch_add(there + 0x8000, other, 5),
            &[sge(key, own + 0x9008, 8)],
        );
        host.post(5, write_imm(there + 0xe000, other, [9; 4]), &[sge(key, own, LEN)]);
    }
    pair
}

/// A packet of each side, or more where time has to pass. Says whether there was anything to do.
fn step(pair: &mut Pair) -> bool {
    let more = [Side::A, Side::B].map(|side| pair.transmit(side));
    let now = pair.now;
    match pair.next_event() {
        Some(next) if more == [false; 2] => pair.go_to(next),
        Some(_) => pair.go_to(now + Duration::from_micros(3)),
        None => return more != [false; 2],
    }
    true
}

fn finish(pair: &mut Pair) -> [Vec<u8>; 2] {
    pair.run();
    for end in [&pair.a, &pair.b] {
        let sent: Vec<_> = (0..6).map(|wr_id| (wr_id, WcStatus::Success)).collect();
        assert_eq!(end.host.outcomes(Queue::Send), sent);
        assert_eq!(end.host.outcomes(Queue::Receive), sent[..2]);
        assert_eq!(end.host.atomics.len(), 2, "each once");
    }
    [pair.a.host.bytes(1).to_vec(), pair.b.host.bytes(2).to_vec()]
}

fn stop(pair: &mut Pair) -> [Position; 2] {
    let of = |end: &mut pair::End| end.qp.stop(&mut end.host).expect("a reliable connection");
    [of(&mut pair.a), of(&mut pair.b)]
}

/// What one end has under way fits what the other has executed, to the packet.
fn fits(own: &Position, other: &Position) {
    let executed = other.expected.offset_from(own.acknowledged);
    let sent = own.sent.offset_from(own.acknowledged);
    assert!(executed <= sent && sent < 1000, "{own:?} {other:?}");
    let mut next = None;
    for request in &own.requests {
        assert_eq!(request.first, next.unwrap_or(request.first), "{own:?}");
        next = Some(request.first.add(request.packets));
    }
    for (wr_ids, request) in own.requests.windows(2).map(|pair| (pair[0].wr_id, pair[1])) {
        assert_eq!(request.wr_id, wr_ids + 1);
    }
}

#[test]
fn stopped_at_any_step_they_go_on_as_after_a_loss() {
    let mut plain = pair();
    let expected = finish(&mut plain);
    let mut steps = 0;
    let mut half_received = 0;
    loop {
        let mut pair = pair();
        if !(0..steps).all(|_| step(&mut pair)) {
            break;
        }
        let [a, b] = stop(&mut pair);
        fits(&a, &b);
        fits(&b, &a);
        half_received += usize::from(a.receive.is_some());
        pair.link.lose_all();
        let now = pair.now;
        for side in [Side::A, Side::B] {
            pair.end(side).qp.restart(now);
        }
        assert_eq!(finish(&mut pair), expected, "stopped after {steps} steps");
        steps += 1;
    }
    assert!(steps > 20 && half_received > 0, "{steps} steps, {half_received}");
}

#[test]
fn what_was_executed_earlier_only_completes_in_its_turn() {
    let mut pair = pair();
    pair.a.host.sends.clear();
    pair.b.host.sends.clear();
    let executed = |opcode, value| Operation::Executed { opcode, value };
    let host = &mut pair.a.host;
    host.post(0, read(0x20000, 2), &[sge(1, 0x1a000, LEN)]);
    host.post(1, executed(WcOpcode::Send, None), &[sge(1, 0x10000, LEN)]);
    host.post(2, executed(WcOpcode::FetchAdd, Some(77)), &[sge(1, 0x19000, 8)]);
    let unsignaled = SendData::Sges(SgeList::new(&[sge(1, 0x10000, 8)]).unwrap());
    host.post_with(3, executed(WcOpcode::RdmaWrite, None), unsignaled, |request| {
        request.signaled = false;
    });
    host.post(4, executed(WcOpcode::AtomicWrite, None), &[]);
    assert!(pair.transmit(Side::A) || pair.a.host.completions.is_empty());
    assert!(
        pair.a.host.completions.is_empty(),
        "the READ before them is not complete"
    );
    pair.run();
    let seen = pair.a.host.completions.iter();
    let seen: Vec<_> = seen
        .map(|wc| (wc.wr_id, wc.status, wc.opcode, wc.byte_len))
        .collect();
    let ok = WcStatus::Success;
    assert_eq!(
        seen,
        [
            (0, ok, WcOpcode::RdmaRead, LEN),
            (1, ok, WcOpcode::Send, LEN),
            (2, ok, WcOpcode::FetchAdd, 8),
            (4, ok, WcOpcode::AtomicWrite, 8),
        ]
    );
    assert_eq!(pair.a.host.retired, 5);
    assert_eq!(pair.a.host.bytes(1)[0x9000..0x9008], 77u64.to_ne_bytes());
    assert!(pair.b.host.completions.is_empty() && pair.b.host.atomics.is_empty());
}

/// A connection that is at its end when it is stopped has failed, and still says what was executed.
#[test]
fn what_was_refused_is_not_executed() {
    let mut pair = Pair::new(Setup::default());
    pair.a.host.register(1, 0x10000, vec![1; 100]);
    pair.b.host.register(2, 0x20000, vec![2; 100]);
    pair.a
        .host
        .post(0, fetch_add(0x20000, 2, 1), &[sge(1, 0x10000, 8)]);
    pair.a.host.post(1, write(0x20000, 3), &[sge(1, 0x10000, 8)]);
    pair.transmit(Side::A);
    let due = pair.link.next_due().expect("it has sent");
    pair.go_to(due);
    let [a, b] = stop(&mut pair);
    assert_eq!(pair.b.qp.state(), QpState::Err);
    assert_eq!(b.expected, a.requests[1].first);
    assert_eq!(b.atomics, [(Psn::new(100), Some(u64::from_ne_bytes([2; 8])))]);
    let again = pair.b.qp.stop(&mut pair.b.host).expect("a reliable connection");
    assert_eq!((again.expected, again.atomics), (b.expected, b.atomics));
}
