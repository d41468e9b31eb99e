//! Stories: atomics, keys that end, windows that are bound, and what waits for what.

mod pair;

use pair::{By, Pair, SEND, Setup, Side, compare_swap, fetch_add, read, sge, write};
use verbatim_roce::wire::opcode::{Kind, Opcode};
use verbatim_roce::{
    AccessFlags, Bind, Event, Lkey, ModifyError, Operation, Packet, QpAttributes, QpConfig, QpState, Queue,
    Rkey, SendData, WcFlags, WcOpcode, WcStatus,
};

/// Key 1 at A; key 2 at B, which starts with the number 5.
fn pair_with(setup: Setup) -> Pair {
    let mut pair = Pair::new(setup);
    pair.a.host.register(1, 0x10000, vec![0xaa; 0x10000]);
    let mut memory = vec![0xbb; 0x10000];
    memory[..8].copy_from_slice(&5u64.to_ne_bytes());
    pair.b.host.register(2, 0x20000, memory);
    pair
}

fn pair() -> Pair {
    pair_with(Setup::default())
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_ne_bytes(bytes[..8].try_into().unwrap())
}

fn bind(rkey: u32) -> Bind {
    Bind {
        window: Rkey(0),
        rkey: Rkey(rkey),
        lkey: Lkey(1),
        addr: 0x10000,
        len: 64,
        access: AccessFlags::REMOTE_READ,
    }
}

#[test]
fn atomics_give_the_old_value() {
    let mut pair = pair();
    let target = |i: u64| [sge(1, 0x10000 + 8 * i, 8)];
    pair.a.host.post(0, fetch_add(0x20000, 2, 10), &target(0));
    pair.a.host.post(1, compare_swap(0x20000, 2, 15, 99), &target(1));
    pair.a.host.post(2, compare_swap(0x20000, 2, 15, 7), &target(2));
    pair.a.host.post(3, fetch_add(0x20000, 2, u64::MAX), &target(3));
    pair.run();
    let memory = pair.a.host.bytes(1);
    let old: Vec<u64> = (0..4).map(|i| number(&memory[8 * i..])).collect();
    assert_eq!(old, [5, 15, 99, 99]);
    assert_eq!(number(pair.b.host.bytes(2)), 98);
    let done: Vec<_> = pair
        .a
        .host
        .completions
        .iter()
        .map(|done| (done.opcode, done.byte_len))
        .collect();
    let (add, swap) = ((WcOpcode::FetchAdd, 8), (WcOpcode::CompSwap, 8));
    assert_eq!(done, [add, swap, swap, add]);
    assert_eq!(pair.b.qp.counters().rcvd_atomics, 4);
}

#[test]
fn a_lost_answer_is_given_again_and_the_operation_not_done_again() {
    let mut pair = pair();
    let mut lost = 3;
    pair.link.filter = Some(Box::new(move |to, _| {
        let hit = to == Side::A && lost > 0;
        lost -= u32::from(hit);
        !hit
    }));
    for i in 0..4 {
        pair.a
            .host
            .post(i, fetch_add(0x20000, 2, 1), &[sge(1, 0x10000 + 8 * i, 8)]);
    }
    pair.run();
    assert_eq!(number(pair.b.host.bytes(2)), 9);
    let memory = pair.a.host.bytes(1);
    let old: Vec<u64> = (0..4).map(|i| number(&memory[8 * i..])).collect();
    assert_eq!(old, [5, 6, 7, 8]);
    assert!(pair.b.qp.counters().duplicate_request > 0);
    assert_eq!(pair.b.host.atomics.len(), 4);
}

#[test]
fn atomic_write_is_answered_and_done_once() {
    let mut pair = pair();
    let mut lost = 1;
    pair.link.filter = Some(Box::new(move |to, _| {
        let hit = to == Side::A && lost > 0;
        lost -= u32::from(hit);
        !hit
    }));
    let operation = |remote_addr| Operation::AtomicWrite {
        remote_addr,
        rkey: Rkey(2),
    };
    pair.a.host.post(0, operation(0x20008), &[sge(1, 0x10000, 8)]);
    let inline = SendData::inline(&7u64.to_ne_bytes()).unwrap();
    pair.a.host.post_with(1, operation(0x20010), inline, |_| {});
    pair.run();
    let good = |wr_id| (wr_id, WcStatus::Success);
    assert_eq!(pair.a.host.outcomes(Queue::Send), [good(0), good(1)]);
    assert_eq!(pair.a.host.completions[0].opcode, WcOpcode::AtomicWrite);
    assert_eq!(pair.b.host.bytes(2)[8..16], [0xaa; 8]);
    assert_eq!(number(&pair.b.host.bytes(2)[16..]), 7);
    assert_eq!(pair.b.qp.counters().rcvd_atomics, 2);
    assert!(pair.b.qp.counters().duplicate_request > 0);

    pair.a.host.post(2, operation(0x20004), &[sge(1, 0x10000, 8)]);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send)[2], (2, WcStatus::RemInvReqErr));
}

#[test]
fn atomics_that_are_refused() {
    let no_right = Setup {
        access: AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE,
        ..Setup::default()
    };
    let invalid = (WcStatus::RemInvReqErr, Event::InvalidRequest);
    let denied = (WcStatus::RemAccessErr, Event::AccessError);
    for (setup, addr, rkey, (status, event)) in [
        (Setup::default(), 0x20004, 2, invalid),
        (no_right, 0x20000, 2, invalid),
        (Setup::default(), 0x30000, 2, denied),
        (Setup::default(), 0x20000, 3, denied),
    ] {
        let mut pair = pair_with(setup);
        pair.a
            .host
            .post(0, fetch_add(addr, rkey, 1), &[sge(1, 0x10000, 8)]);
        pair.run();
        assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, status)]);
        assert_eq!(pair.b.host.events, [event]);
        assert!(pair.b.host.atomics.is_empty());
    }
    for (data, status) in [
        (SendData::inline(&[0; 8]).unwrap(), WcStatus::LocQpOpErr),
        (
            SendData::Sges(verbatim_roce::SgeList::new(&[sge(1, 0x10000, 7)]).unwrap()),
            WcStatus::LocLenErr,
        ),
    ] {
        let mut pair = pair();
        pair.a.host.post_with(0, fetch_add(0x20000, 2, 1), data, |_| {});
        pair.run();
        assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, status)]);
    }
}

#[test]
fn atomics_outstanding_are_bounded_together_with_reads() {
    let mut pair = pair_with(Setup {
        max_rd_atomic: 2,
        ..Setup::default()
    });
    for i in 0..3 {
        pair.a
            .host
            .post(2 * i, fetch_add(0x20000, 2, 1), &[sge(1, 0x10000, 8)]);
        pair.a
            .host
            .post(2 * i + 1, read(0x20000, 2), &[sge(1, 0x10100, 64)]);
    }
    while pair.transmit(Side::A) {}
    assert_eq!(pair.link.sent, 2);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 6);
    assert_eq!(pair.a.qp.state(), QpState::Rts);
}

#[test]
fn a_fence_waits_for_atomics() {
    let mut pair = pair();
    pair.a
        .host
        .post(0, fetch_add(0x20000, 2, 1), &[sge(1, 0x10000, 8)]);
    let data = SendData::inline(&[0xee; 8]).unwrap();
    pair.a
        .host
        .post_with(1, write(0x20000, 2), data, |request| request.fence = true);
    while pair.transmit(Side::A) {}
    assert_eq!(pair.link.sent, 1, "only the atomic is under way");
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 2);
}

#[test]
fn send_with_invalidate_ends_a_key_and_says_so() {
    let mut pair = pair();
    pair.b.host.register(7, 0, vec![0; 8]);
    pair.b.host.post_receive(0, &[sge(2, 0x20000, 5000)]);
    pair.a.host.post(
        0,
        Operation::SendInvalidate { rkey: Rkey(7) },
        &[sge(1, 0x10000, 3000)],
    );
    pair.run();
    assert_eq!(pair.b.host.invalidated, [(Rkey(7), By::Partner)]);
    let received = pair.b.host.completions[0];
    assert_eq!(
        (received.flags, received.invalidated),
        (WcFlags::WITH_INV, Some(Rkey(7)))
    );
    assert_eq!((received.byte_len, received.imm_data()), (3000, 7));

    // A key that is not there ends the connection.
    pair.b.host.post_receive(1, &[sge(2, 0x20000, 5000)]);
    pair.a
        .host
        .post(1, Operation::SendInvalidate { rkey: Rkey(7) }, &[]);
    pair.run();
    assert_eq!(
        pair.b.host.outcomes(Queue::Receive)[1],
        (1, WcStatus::RemInvReqErr)
    );
    assert_eq!(pair.a.host.outcomes(Queue::Send)[1], (1, WcStatus::RemAccessErr));
}

#[test]
fn local_invalidate_waits_for_everything_before_it() {
    let mut pair = pair();
    pair.a.host.register(3, 0x30000, vec![3; 64]);
    pair.a.host.post(0, write(0x20000, 2), &[sge(3, 0x30000, 64)]);
    pair.a
        .host
        .post(1, Operation::LocalInvalidate { rkey: Rkey(3) }, &[]);
    pair.a.host.post(2, write(0x20000, 2), &[sge(1, 0x10000, 8)]);
    // What was lost is made again from memory that the key must still reach.
    let mut first = true;
    pair.link.filter = Some(Box::new(move |to, _| {
        to == Side::A || !std::mem::take(&mut first)
    }));
    while pair.transmit(Side::A) {}
    assert!(pair.a.host.invalidated.is_empty());
    pair.run();
    let good = |wr_id| (wr_id, WcStatus::Success);
    assert_eq!(pair.a.host.outcomes(Queue::Send), [good(0), good(1), good(2)]);
    assert_eq!(pair.a.host.completions[1].opcode, WcOpcode::LocalInv);
    assert_eq!(pair.a.host.invalidated, [(Rkey(3), By::Program)]);
    assert_eq!(pair.a.host.retired, 3);
}

#[test]
fn bind_happens_in_its_turn_and_completes_in_order() {
    let mut pair = pair();
    pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10100, 64)]);
    pair.a.host.post(1, Operation::Bind(bind(8)), &[]);
    while pair.transmit(Side::A) {}
    assert_eq!(pair.a.host.binds.len(), 1, "there is nothing to wait for");
    assert!(pair.a.host.completions.is_empty(), "but the READ completes first");
    pair.a.host.post(2, read(0x20000, 2), &[sge(1, 0x10100, 64)]);
    let data = || SendData::inline(&[]).unwrap();
    pair.a
        .host
        .post_with(3, Operation::Bind(bind(9)), data(), |request| {
            request.fence = true
        });
    while pair.transmit(Side::A) {}
    assert_eq!(pair.a.host.binds.len(), 1, "a fence waits for READs");
    pair.run();
    let opcodes: Vec<_> = pair.a.host.completions.iter().map(|done| done.opcode).collect();
    let (read, bind) = (WcOpcode::RdmaRead, WcOpcode::BindMw);
    assert_eq!(opcodes, [read, bind, read, bind]);
}

#[test]
fn local_requests_that_fail() {
    for (operation, status) in [
        (
            Operation::LocalInvalidate { rkey: Rkey(77) },
            WcStatus::LocQpOpErr,
        ),
        (
            Operation::Bind(Bind {
                lkey: Lkey(77),
                ..bind(8)
            }),
            WcStatus::MwBindErr,
        ),
    ] {
        let mut pair = pair();
        pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 5000)]);
        pair.a.host.post(1, operation, &[]);
        pair.a.host.post(2, SEND, &[]);
        pair.run();
        let expected = [(0, WcStatus::Success), (1, status), (2, WcStatus::WrFlushErr)];
        assert_eq!(pair.a.host.outcomes(Queue::Send), expected);
        assert_eq!(pair.a.qp.state(), QpState::Err);
    }
}

#[test]
fn nothing_but_the_end_is_possible_before_the_queue_is_drained() {
    let mut pair = pair();
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 5000)]);
    while pair.transmit(Side::A) {}
    let to = |state| QpAttributes {
        state: Some(state),
        ..QpAttributes::default()
    };
    pair.a.qp.modify(&to(QpState::Sqd), &mut pair.a.host).unwrap();
    for state in [QpState::Rts, QpState::Sqd] {
        assert_eq!(
            pair.a.qp.modify(&to(state), &mut pair.a.host),
            Err(ModifyError::Draining { to: state })
        );
    }
    pair.run();
    pair.a.qp.modify(&to(QpState::Rts), &mut pair.a.host).unwrap();
    assert!(
        pair.a.host.events.is_empty(),
        "the program did not ask for the event"
    );
}

#[test]
fn opcodes_that_do_not_exist_are_invalid_requests() {
    for code in [0x15, 0x18, 0x1f] {
        let mut pair = pair();
        pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 8)]);
        pair.transmit(Side::A);
        let due = pair.link.next_due().unwrap();
        let (_, mut bytes, _) = pair.link.pop_due(due).unwrap();
        bytes[0] = code;
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!(packet.info.kind, Kind::Reserved);
        pair.b.qp.handle_packet(due, &packet, &mut pair.b.host);
        pair.run();
        assert_eq!(pair.b.qp.counters().bad_opcode, 1);
        assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, WcStatus::RemInvReqErr)]);
    }
    assert!(Opcode(0x2c).info().is_none(), "UC gives no answers");
}

#[test]
fn window_and_bytes_under_way() {
    let mut pair = pair();
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 10_000)]);
    pair.a.host.post(1, read(0x20000, 2), &[sge(1, 0x14000, 3_000)]);
    pair.a.qp.set_window(4 * 1024);
    while pair.transmit(Side::A) {}
    assert_eq!(pair.a.qp.in_flight_bytes(), 4 * 1024);
    pair.a.qp.set_window(512 * 1024);
    while pair.transmit(Side::A) {}
    assert_eq!(pair.a.qp.in_flight_bytes(), 13_000);
    pair.run();
    assert_eq!(pair.a.qp.in_flight_bytes(), 0);
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 2);
    assert_eq!(QpConfig::default().window_bytes, 512 * 1024);
}

/// What a queue pair costs the RNIC, beside what is under way. An idle one has freed what a burst needed.
#[test]
fn a_queue_pair_is_small() {
    assert!(
        size_of::<verbatim_roce::Qp>() < 3 << 10,
        "{}",
        size_of::<verbatim_roce::Qp>()
    );
    println!(
        "Qp {}, RcQp {}, UcQp {}, UdQp {}, SendRequest {}",
        size_of::<verbatim_roce::Qp>(),
        size_of::<verbatim_roce::RcQp>(),
        size_of::<verbatim_roce::UcQp>(),
        size_of::<verbatim_roce::UdQp>(),
        size_of::<verbatim_roce::SendRequest>(),
    );
}
