//! Stories and properties of UC and UD.

mod pair;

use pair::{Faults, Pair, SEND, Setup, Side, destination, read, send_imm, sge, write, write_imm};
use proptest::prelude::*;
use verbatim_roce::wire::grh::{GRH_BYTES, from_flow};
use verbatim_roce::{
    AccessFlags, Destination, Event, Flow, Mtu, Packet, QpAttributes, QpConfig, QpState, QpType, Qpn, Queue,
    SendData, SgeList, Traffic, Transmit, TxBatch, WcFlags, WcOpcode, WcStatus,
};

fn pair(qp_type: QpType, setup: Setup) -> Pair {
    let mut pair = Pair::new(Setup { qp_type, ..setup });
    pair.a
        .host
        .register(1, 0x10000, (0..=255).cycle().take(0x10000).collect());
    pair.b.host.register(2, 0x20000, vec![0xbb; 0x10000]);
    pair
}

fn uc() -> Pair {
    pair(QpType::Uc, Setup::default())
}

fn ud() -> Pair {
    pair(QpType::Ud, Setup::default())
}

fn post_datagram(pair: &mut Pair, wr_id: u64, len: u32) {
    let data = SendData::Sges(SgeList::new(&[sge(1, 0x10000, len)]).unwrap());
    pair.a
        .host
        .post_with(wr_id, send_imm([1, 2, 3, 4]), data, |request| {
            request.destination = Some(destination(Side::B));
        });
}

fn to(state: QpState) -> QpAttributes {
    QpAttributes {
        state: Some(state),
        ..QpAttributes::default()
    }
}

/// Queue pairs 0 and 1 are the hosts' own: a program that could send to them would speak in its host's name.
#[test]
fn nothing_is_sent_to_the_management_queue_pairs() {
    let mut pair = ud();
    for (wr_id, number) in [(0, 0), (1, 1), (2, 2)] {
        let data = SendData::Sges(SgeList::new(&[sge(1, 0x10000, 100)]).unwrap());
        pair.a.host.post_with(wr_id, SEND, data, |request| {
            request.destination = Some(Destination {
                qpn: Qpn::new(number),
                qkey: 1 << 31,
                ..destination(Side::B)
            });
        });
    }
    pair.run();
    let sent = pair.a.host.outcomes(Queue::Send);
    assert_eq!(sent.len(), 3);
    assert!(
        sent.iter().all(|(_, status)| *status == WcStatus::Success),
        "nobody tells a sender"
    );
    assert_eq!((pair.link.sent, pair.a.qp.counters().refused_datagrams), (1, 2));
    assert_eq!(pair.a.qp.state(), QpState::Rts);
}

#[test]
fn uc_sends_and_writes_without_answers() {
    let mut pair = uc();
    pair.b.host.post_receive(0, &[sge(2, 0x20000, 5000)]);
    pair.b.host.post_receive(1, &[]);
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, 4500)]);
    pair.a.host.post(1, write(0x24000, 2), &[sge(1, 0x10001, 4096)]);
    pair.a
        .host
        .post(2, write_imm(0x28000, 2, [9; 4]), &[sge(1, 0x10002, 1)]);
    pair.run();
    assert_eq!(pair.link.sent, 5 + 4 + 1);
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 3);
    let received: Vec<_> = pair
        .b
        .host
        .completions
        .iter()
        .map(|done| (done.opcode, done.byte_len))
        .collect();
    assert_eq!(received, [(WcOpcode::Recv, 4500), (WcOpcode::RecvRdmaWithImm, 1)]);
    let (source, target) = (pair.a.host.bytes(1), pair.b.host.bytes(2));
    assert_eq!(target[..4500], source[..4500]);
    assert_eq!(target[0x4000..0x5000], source[1..0x1001]);
    assert_eq!(target[0x8000], source[2]);
}

#[test]
fn uc_drops_what_is_not_whole_and_keeps_its_receive() {
    for lost in 100..105 {
        let mut pair = uc();
        pair.link.filter = Some(Box::new(move |_, packet| packet.bth.psn.get() != lost));
        for i in 0..2 {
            pair.b.host.post_receive(i, &[sge(2, 0x20000 + 0x2000 * i, 5000)]);
            pair.a.host.post(i, SEND, &[sge(1, 0x10000, 4500)]);
        }
        pair.run();
        let (status, counters) = (pair.b.host.outcomes(Queue::Receive), pair.b.qp.counters());
        assert_eq!(
            status,
            [(0, WcStatus::Success)],
            "the second message, in the first RECV"
        );
        assert_eq!(counters.incomplete_messages, u64::from(lost != 100));
        assert!(pair.b.host.bytes(2).starts_with(&pair.a.host.bytes(1)[..4500]));
        assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 2);
        pair.b.qp.modify(&to(QpState::Err), &mut pair.b.host).unwrap();
        pair.run();
        assert_eq!(pair.b.host.outcomes(Queue::Receive)[1], (1, WcStatus::WrFlushErr));
    }
}

#[test]
fn uc_completes_a_shared_receive_in_error() {
    let config = QpConfig {
        shared_receive_queue: true,
        ..QpConfig::default()
    };
    let mut pair = pair(
        QpType::Uc,
        Setup {
            config,
            ..Setup::default()
        },
    );
    pair.link.filter = Some(Box::new(|_, packet| packet.bth.psn.get() != 102));
    for i in 0..3 {
        pair.b
            .host
            .post_receive(i, &[sge(2, 0x20000, [5000, 5000, 10][i as usize])]);
        pair.a.host.post(i, SEND, &[sge(1, 0x10000, 4500)]);
    }
    pair.run();
    let expected = [
        (0, WcStatus::RemInvReqErr),
        (1, WcStatus::Success),
        (2, WcStatus::LocLenErr),
    ];
    assert_eq!(pair.b.host.outcomes(Queue::Receive), expected);
    assert_eq!(pair.b.qp.state(), QpState::Rts);
    pair.b.qp.modify(&to(QpState::Err), &mut pair.b.host).unwrap();
    assert_eq!(
        pair.b.host.events,
        [Event::CommunicationEstablished, Event::LastWqeReached][1..]
    );
}

#[test]
fn uc_takes_no_more_than_it_may() {
    let mut pair = uc();
    pair.b.host.post_receive(0, &[sge(2, 0x20000, 10)]);
    pair.a.host.post(0, SEND, &[sge(1, 0x10000, 11)]);
    pair.a.host.post(1, write(0x2fff0, 2), &[sge(1, 0x10000, 17)]);
    pair.a.host.post(2, write(0x20000, 3), &[sge(1, 0x10000, 5000)]);
    pair.a.host.post(3, SEND, &[sge(1, 0x10000, 10)]);
    pair.a.host.post(4, SEND, &[sge(1, 0x10000, 10)]);
    pair.run();
    assert_eq!(pair.b.host.outcomes(Queue::Receive), [(0, WcStatus::Success)]);
    let counters = pair.b.qp.counters();
    assert_eq!(counters.resp_local_length_error, 1);
    assert_eq!(counters.resp_remote_access_errors, 2);
    assert_eq!(counters.out_of_buffer, 1);
    assert_eq!(pair.b.host.bytes(2)[10..], vec![0xbb; 0x10000 - 10]);

    let mut no_right = pair::Pair::new(Setup {
        qp_type: QpType::Uc,
        access: AccessFlags::empty(),
        ..Setup::default()
    });
    no_right.b.host.register(2, 0x20000, vec![0xbb; 16]);
    let data = SendData::inline(&[1; 16]).unwrap();
    no_right.a.host.post_with(0, write(0x20000, 2), data, |_| {});
    no_right.run();
    assert_eq!(no_right.b.host.bytes(2), [0xbb; 16]);
}

#[test]
fn send_errors_lead_to_sqe_and_back() {
    for mut pair in [uc(), ud()] {
        pair.b.host.post_receive(7, &[sge(2, 0x20000, 100)]);
        pair.a.host.post_receive(7, &[sge(1, 0x10000, 100)]);
        let data = |key| SendData::Sges(SgeList::new(&[sge(key, 0x10000, 8)]).unwrap());
        let address = |request: &mut verbatim_roce::SendRequest| {
            request.destination = Some(destination(Side::B));
        };
        pair.a.host.post_with(0, SEND, data(99), address);
        pair.a.host.post_with(1, SEND, data(1), address);
        pair.run();
        let expected = [(0, WcStatus::LocProtErr), (1, WcStatus::WrFlushErr)];
        assert_eq!(pair.a.host.outcomes(Queue::Send), expected);
        assert_eq!(pair.a.qp.state(), QpState::Sqe);
        assert_eq!(pair.a.host.receives.len(), 1, "the receive queue is not touched");
        pair.a.qp.modify(&to(QpState::Rts), &mut pair.a.host).unwrap();
        pair.a.host.post_with(2, SEND, data(1), address);
        pair.run();
        assert_eq!(pair.a.host.outcomes(Queue::Send)[2], (2, WcStatus::Success));
        assert_eq!(pair.b.host.outcomes(Queue::Receive), [(7, WcStatus::Success)]);
    }
}

#[test]
fn operations_that_there_are_not() {
    for mut pair in [uc(), ud()] {
        pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, 8)]);
        pair.run();
        assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, WcStatus::LocQpOpErr)]);
        assert_eq!(pair.link.sent, 0);
    }
    let mut nowhere = ud();
    nowhere.a.host.post(0, SEND, &[]);
    nowhere.run();
    assert_eq!(nowhere.a.host.outcomes(Queue::Send), [(0, WcStatus::LocQpOpErr)]);
}

#[test]
fn datagram_arrives_behind_the_header() {
    let mut pair = ud();
    pair.b
        .host
        .post_receive(7, &[sge(2, 0x20000, 30), sge(2, 0x21000, 1000)]);
    post_datagram(&mut pair, 0, 100);
    pair.transmit(Side::A);
    let due = pair.link.next_due().unwrap();
    let (_, bytes, _) = pair.link.pop_due(due).unwrap();
    let flow = Flow::new(pair::address(Side::A), pair::address(Side::B)).unwrap();
    let grh = from_flow(&flow, bytes.len(), Traffic::default());
    let mut packet = Packet::parse(&bytes).unwrap();
    packet.grh = Some(&grh);
    pair.b.qp.handle_packet(due, &packet, &mut pair.b.host);

    let done = pair.b.host.completions[0];
    assert_eq!(
        (done.wr_id, done.status, done.byte_len),
        (7, WcStatus::Success, 140)
    );
    assert_eq!(done.flags, WcFlags::GRH | WcFlags::WITH_IMM);
    assert_eq!(done.source_qpn, pair::qpn(Side::A));
    let memory = pair.b.host.bytes(2);
    let received = [&memory[..30], &memory[0x1000..0x1000 + 110]].concat();
    assert_eq!(received[..GRH_BYTES], grh);
    assert_eq!(received[GRH_BYTES..], pair.a.host.bytes(1)[..100]);
}

#[test]
fn datagrams_that_are_dropped() {
    let mut pair = ud();
    // No RECV, then one that is too short for all but the last.
    post_datagram(&mut pair, 0, 10);
    pair.run();
    assert_eq!(pair.b.qp.counters().out_of_buffer, 1);
    pair.b.host.post_receive(1, &[sge(2, 0x20000, 50)]);
    post_datagram(&mut pair, 1, 11);
    post_datagram(&mut pair, 2, 10);
    // Another queue key, and the queue pair's own one, which is not the receiver's.
    for qkey in [5, 1 << 31] {
        pair.a
            .host
            .post_with(3, SEND, SendData::inline(&[]).unwrap(), |request| {
                request.destination = Some(verbatim_roce::Destination {
                    qkey,
                    ..destination(Side::B)
                });
            });
    }
    pair.run();
    let counters = pair.b.qp.counters();
    assert_eq!((counters.resp_local_length_error, counters.bad_qkey), (1, 2));
    assert_eq!(pair.b.host.outcomes(Queue::Receive), [(1, WcStatus::Success)]);
    assert_eq!(
        pair.a.host.outcomes(Queue::Send).len(),
        5,
        "the sender sees nothing of it"
    );
    let own = QpAttributes {
        qkey: Some(pair::qkey(Side::A)),
        ..QpAttributes::default()
    };
    pair.b.qp.modify(&own, &mut pair.b.host).unwrap();
    pair.b.host.post_receive(2, &[sge(2, 0x20000, 50)]);
    pair.a
        .host
        .post_with(9, SEND, SendData::inline(&[]).unwrap(), |request| {
            request.destination = Some(verbatim_roce::Destination {
                qkey: 1 << 31,
                ..destination(Side::B)
            });
        });
    pair.run();
    assert_eq!(pair.b.host.outcomes(Queue::Receive).len(), 2);
}

#[test]
fn datagrams_longer_than_the_mtu_are_not_sent() {
    let mut pair = ud();
    post_datagram(&mut pair, 0, Mtu::default().bytes());
    post_datagram(&mut pair, 1, Mtu::default().bytes() + 1);
    pair.run();
    assert_eq!(pair.link.sent, 1);
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 2);
    assert_eq!(pair.a.qp.counters().overlong_datagrams, 1);
}

#[test]
fn multicast_is_for_datagram_queue_pairs() {
    for (mut pair, taken) in [(ud(), 1), (uc(), 0)] {
        pair.b.host.post_receive(0, &[sge(2, 0x20000, 100)]);
        let mut everybody = destination(Side::B);
        everybody.qpn = Qpn::new(0xff_ffff);
        pair.a
            .host
            .post_with(0, SEND, SendData::inline(&[1]).unwrap(), |request| {
                request.destination = Some(everybody);
            });
        pair.transmit(Side::A);
        let due = pair.link.next_due().unwrap();
        let (_, bytes, _) = pair.link.pop_due(due).unwrap();
        let mut packet = Packet::parse(&bytes).unwrap();
        packet.bth.dest_qpn = everybody.qpn;
        pair.b.qp.handle_packet(due, &packet, &mut pair.b.host);
        assert_eq!(pair.b.host.outcomes(Queue::Receive).len(), taken);
    }
}

#[test]
fn each_datagram_finds_a_batch_of_its_own_path() {
    let mut pair = ud();
    let elsewhere = Traffic {
        traffic_class: 4,
        ..Traffic::default()
    };
    for (wr_id, traffic) in [(0, Traffic::default()), (1, Traffic::default()), (2, elsewhere)] {
        pair.a
            .host
            .post_with(wr_id, SEND, SendData::inline(&[1]).unwrap(), |request| {
                let mut to = destination(Side::B);
                to.path.traffic = traffic;
                request.destination = Some(to);
            });
    }
    let other = Flow::new(pair::address(Side::B), pair::address(Side::A)).unwrap();
    let mut batch = TxBatch::new(other);
    let now = pair.now;
    let mut poll = |batch: &mut TxBatch| pair.a.qp.poll_transmit(now, &mut pair.a.host, batch, 16);
    assert_eq!(poll(&mut batch), Transmit::Full);
    assert_eq!((batch.segments(), batch.traffic()), (2, Traffic::default()));
    assert_eq!(batch.flow().destination(), pair::address(Side::B));
    assert_eq!(poll(&mut batch), Transmit::Full, "until it was sent");
    batch.clear();
    assert_eq!(poll(&mut batch), Transmit::Idle);
    assert_eq!((batch.segments(), batch.traffic()), (1, elsewhere));
}

/// A message of `UC` or `UD`: its bytes say which one it is, so that what arrives can be told.
fn content(number: u64, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|i| (i as u64 * 7 + number) as u8).collect();
    bytes[..8].copy_from_slice(&number.to_ne_bytes());
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// What arrives is whole and as it was sent; without reordering and duplication also in order and once.
    #[test]
    fn messages_arrive_whole_or_not_at_all(
        datagrams: bool,
        loss in 0u32..30,
        disorder in prop_oneof![Just(0u32), 0u32..10],
        corruption in 0u32..3,
        lens in prop::collection::vec(8usize..6000, 1..60),
        seed: u64,
        budget in 1usize..40,
    ) {
        let faults = Faults { loss, duplication: disorder, reordering: disorder, corruption };
        let qp_type = if datagrams { QpType::Ud } else { QpType::Uc };
        let mut pair = Pair::new(Setup { qp_type, faults, seed, budget, ..Setup::default() });
        pair.a.host.register(1, 0, vec![0; 1 << 20]);
        pair.b.host.register(2, 0, vec![0; 1 << 21]);
        let mut lens = lens;
        let mut at = 0;
        for (i, len) in lens.iter_mut().enumerate() {
            if datagrams {
                *len = (*len).min(1024);
            }
            let bytes = content(i as u64, *len);
            pair.a.host.region(1).bytes[at..at + *len].copy_from_slice(&bytes);
            let data = SendData::Sges(SgeList::new(&[sge(1, at as u64, *len as u32)]).unwrap());
            pair.a.host.post_with(i as u64, SEND, data, |request| request.destination = Some(destination(Side::B)));
            at += *len;
        }
        for i in 0..200 {
            pair.b.host.post_receive(i, &[sge(2, i * 8192, 8192)]);
        }
        pair.run();
        prop_assert_eq!(pair.a.host.outcomes(Queue::Send).len(), lens.len());
        let mut numbers = vec![];
        let skip = if datagrams { GRH_BYTES } else { 0 };
        for done in &pair.b.host.completions {
            prop_assert_eq!(done.status, WcStatus::Success);
            let bytes = &pair.b.host.bytes(2)[done.wr_id as usize * 8192..][..done.byte_len as usize][skip..];
            let number = u64::from_ne_bytes(bytes[..8].try_into().unwrap());
            prop_assert_eq!(bytes, &content(number, lens[number as usize])[..]);
            numbers.push(number);
        }
        if disorder == 0 {
            prop_assert!(numbers.is_sorted_by(|a, b| a < b));
            if loss == 0 && corruption == 0 {
                prop_assert_eq!(numbers.len(), lens.len());
            }
        }
    }
}
