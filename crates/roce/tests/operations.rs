//! Stories: each operation on a link without faults.

mod pair;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use pair::{Bottleneck, Pair, SEND, Setup, Side, read, send_imm, sge, write, write_imm};
use verbatim_roce::wire::opcode::Opcode;
use verbatim_roce::{
    AccessFlags, Completion, Event, Immediate, Mtu, QpAttributes, QpConfig, QpState, Qpn, Queue, SendData,
    WcFlags, WcOpcode, WcStatus,
};

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len)
        .map(|i| {
            (i as u8)
                .wrapping_mul(31)
                .wrapping_add((i >> 8) as u8)
                .wrapping_add(salt)
        })
        .collect()
}

/// A pair with 1 MiB of memory at each end: key 1 at A, key 2 at B.
fn pair(setup: Setup) -> Pair {
    let mut pair = Pair::new(setup);
    pair.a.host.register(1, 0x10000, pattern(1 << 20, 1));
    pair.b.host.register(2, 0x20000, pattern(1 << 20, 2));
    pair
}

const LENGTHS: [u32; 10] = [0, 1, 3, 4, 255, 256, 257, 4096, 4097, 300_001];

#[test]
fn send_of_every_length_at_every_mtu() {
    for mtu in Mtu::ALL {
        let mut pair = pair(Setup {
            mtu,
            ..Setup::default()
        });
        for (i, len) in LENGTHS.into_iter().enumerate() {
            pair.b
                .host
                .post_receive(i as u64, &[sge(2, 0x20000, 1000), sge(2, 0x30000, 400_000)]);
            pair.a.host.post(
                100 + i as u64,
                send_imm([1, 2, 3, i as u8]),
                &[sge(1, 0x10005, len)],
            );
            pair.run();
            let received = *pair.b.host.completions.last().unwrap();
            let expected = Completion {
                queue: Queue::Receive,
                wr_id: i as u64,
                status: WcStatus::Success,
                opcode: WcOpcode::Recv,
                byte_len: len,
                flags: WcFlags::WITH_IMM,
                imm: Some(Immediate([1, 2, 3, i as u8])),
                invalidated: None,
                source_qpn: Qpn::default(),
                solicited: false,
                vendor_err: 0,
            };
            assert_eq!(received, expected, "{mtu:?}");
            let sent = pair.a.host.completions.last().unwrap();
            assert_eq!((sent.wr_id, sent.status), (100 + i as u64, WcStatus::Success));
            let (source, target) = (&pair.a.host.bytes(1)[5..], pair.b.host.bytes(2));
            let (head, tail) = source[..len as usize].split_at(1000.min(len as usize));
            assert!(
                target.starts_with(head) && target[0x10000..].starts_with(tail),
                "{mtu:?} {len}"
            );
        }
        assert_eq!(pair.a.host.retired, LENGTHS.len() as u32);
        assert_eq!(pair.a.qp.counters().retransmitted_requests, 0);
    }
}

#[test]
fn write_of_every_length_at_every_mtu() {
    for mtu in Mtu::ALL {
        let mut pair = pair(Setup {
            mtu,
            ..Setup::default()
        });
        for (i, len) in LENGTHS.into_iter().enumerate() {
            let before = pair.b.host.bytes(2).to_vec();
            pair.a.host.post(
                i as u64,
                write(0x20007, 2),
                &[sge(1, 0x10001, len / 2), sge(1, 0x50000, len - len / 2)],
            );
            pair.run();
            let (source, target) = (pair.a.host.bytes(1), pair.b.host.bytes(2));
            let (half, len) = (len as usize / 2, len as usize);
            assert!(target[7..].starts_with(&source[1..1 + half]));
            assert!(target[7 + half..].starts_with(&source[0x40000..0x40000 + len - half]));
            assert_eq!(
                (&target[..7], &target[7 + len..]),
                (&before[..7], &before[7 + len..]),
                "nothing beside it"
            );
        }
        assert!(
            pair.b.host.completions.is_empty(),
            "a WRITE without immediate is not seen by the partner"
        );
        assert_eq!(pair.a.host.outcomes(Queue::Send).len(), LENGTHS.len());
    }
}

#[test]
fn write_with_immediate_consumes_a_receive() {
    let mut pair = pair(Setup::default());
    for (i, len) in [0, 10, 5000].into_iter().enumerate() {
        pair.b.host.post_receive(7 + i as u64, &[]);
        pair.a
            .host
            .post(i as u64, write_imm(0x20000, 2, [9; 4]), &[sge(1, 0x10000, len)]);
        pair.run();
        let received = pair.b.host.completions.last().unwrap();
        assert_eq!(
            (received.wr_id, received.opcode),
            (7 + i as u64, WcOpcode::RecvRdmaWithImm)
        );
        assert_eq!((received.byte_len, received.imm), (len, Some(Immediate([9; 4]))));
        assert!(
            pair.b
                .host
                .bytes(2)
                .starts_with(&pair.a.host.bytes(1)[..len as usize])
        );
    }
}

#[test]
fn read_of_every_length_at_every_mtu() {
    for mtu in Mtu::ALL {
        for max_rd_atomic in [1, 2, 16, 128] {
            let mut pair = pair(Setup {
                mtu,
                max_rd_atomic,
                ..Setup::default()
            });
            for (i, len) in LENGTHS.into_iter().enumerate() {
                pair.a.host.post(
                    i as u64,
                    read(0x20003, 2),
                    &[sge(1, 0x10000, len / 3), sge(1, 0x60000, len - len / 3)],
                );
                pair.run();
                let done = pair.a.host.completions.last().unwrap();
                assert_eq!(
                    (done.wr_id, done.status, done.byte_len),
                    (i as u64, WcStatus::Success, len)
                );
                let (target, source) = (pair.a.host.bytes(1), &pair.b.host.bytes(2)[3..]);
                let (third, len) = (len as usize / 3, len as usize);
                assert_eq!(target[..third], source[..third]);
                assert_eq!(target[0x50000..0x50000 + len - third], source[third..len]);
            }
            assert_eq!(pair.a.qp.counters().retransmitted_requests, 0);
            assert_eq!(pair.a.qp.counters().stale_responses, 0);
        }
    }
}

/// With a window of 64 packets of 4,096 bytes.
fn wide_pair(max_rd_atomic: u8) -> Pair {
    pair(Setup {
        mtu: Mtu::Mtu4096,
        max_rd_atomic,
        config: QpConfig {
            window_packets: 64,
            ..Setup::default().config
        },
        ..Setup::default()
    })
}

/// How long the packets are, behind the base transport header, in which a READ of 300,000 bytes comes.
fn response_packets(max_rd_atomic: u8) -> Vec<usize> {
    let mut pair = wide_pair(max_rd_atomic);
    let seen = Rc::new(RefCell::new(Vec::new()));
    let packets = Rc::clone(&seen);
    pair.link.filter = Some(Box::new(move |_, packet| {
        if !packet.payload.is_empty() {
            let acknowledges = if packet.aeth.is_some() { 4 } else { 0 };
            packets.borrow_mut().push(packet.payload.len() + acknowledges);
        }
        true
    }));
    pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, 300_000)]);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, WcStatus::Success)]);
    drop(pair);
    Rc::into_inner(seen).expect("the link is gone").into_inner()
}

#[test]
fn a_read_comes_in_packets_of_one_size_if_enough_may_be_asked_for() {
    let (last, others) = response_packets(16)
        .split_last()
        .map(|(last, others)| (*last, others.to_vec()))
        .unwrap();
    assert_eq!((last, others), (300_000 - 73 * 4096 + 4, vec![4096 + 4; 73]));
    let long = response_packets(4);
    assert!(long.contains(&4096) && long.len() == 74, "{long:?}");
}

#[test]
fn a_read_is_asked_for_in_long_pieces_after_a_loss() {
    let requests = |loss: bool| {
        let mut pair = wide_pair(16);
        let seen = Rc::new(Cell::new(0));
        let (count, mut lose) = (Rc::clone(&seen), loss);
        pair.link.filter = Some(Box::new(move |_, packet| {
            count.set(count.get() + u32::from(packet.bth.opcode == Opcode::RC_READ_REQUEST));
            let middle = packet.bth.opcode == Opcode::RC_WRITE_MIDDLE;
            !(middle && std::mem::take(&mut lose))
        }));
        pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 20_000)]);
        pair.run();
        pair.a.host.post(1, read(0x20000, 2), &[sge(1, 0x40000, 65_536)]);
        pair.run();
        assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 2);
        assert_eq!(pair.a.qp.counters().packet_seq_err, u64::from(loss));
        seen.get()
    };
    assert_eq!((requests(false), requests(true)), (8, 1));
}

#[test]
fn a_window_that_opens_in_small_steps_is_filled_in_large_ones() {
    let mut pair = wide_pair(16);
    pair.setup.budget = 64;
    // Packets arrive one by one, and acknowledgements so too: for every 16th, and for each message of 14.
    pair.link.bottlenecks[Side::B as usize] = Some(Bottleneck::new(10_000_000_000, 1 << 20));
    for i in 0..40 {
        pair.a
            .host
            .post(i, write(0x20000, 2), &[sge(1, 0x10000, 14 * 4096)]);
    }
    let mut bursts = Vec::new();
    loop {
        let before = pair.a.qp.counters().sent_requests;
        while pair.transmit(Side::A) {}
        bursts.extend(Some(pair.a.qp.counters().sent_requests - before).filter(|packets| *packets > 0));
        if !pair.step() {
            break;
        }
    }
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 40);
    assert_eq!(bursts.iter().sum::<u64>(), 40 * 14);
    let (_, others) = bursts.split_last().unwrap();
    assert!(
        others.len() > 10 && others.iter().all(|packets| *packets >= 16),
        "{bursts:?}"
    );
}

#[test]
fn inline_data_is_that_of_the_time_of_posting() {
    let mut pair = pair(Setup::default());
    pair.b.host.post_receive(1, &[sge(2, 0x20000, 100)]);
    pair.a
        .host
        .post_with(1, SEND, SendData::inline(b"as it was").unwrap(), |request| {
            request.solicited = true
        });
    pair.run();
    assert!(pair.b.host.bytes(2).starts_with(b"as it was"));
    assert!(pair.b.host.completions[0].solicited);
}

#[test]
fn unsignaled_requests_are_retired_without_completion() {
    let mut pair = pair(Setup::default());
    for i in 0..10 {
        let data = SendData::inline(b"x").unwrap();
        pair.a
            .host
            .post_with(i, write(0x20000, 2), data, |request| request.signaled = i == 9);
    }
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send), [(9, WcStatus::Success)]);
    assert_eq!(pair.a.host.retired, 10);
}

#[test]
fn acknowledgements_are_coalesced() {
    let mut pair = pair(Setup::default());
    for i in 0..100 {
        pair.a.host.post(i, write(0x20000, 2), &[sge(1, 0x10000, 8)]);
    }
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 100);
    assert!(pair.b.qp.counters().sent_acks < 10, "{:?}", pair.b.qp.counters());
}

#[test]
fn psn_wraps() {
    let mut pair = pair(Setup {
        psn: [0xff_fff0, 0xff_fffd],
        mtu: Mtu::Mtu256,
        ..Setup::default()
    });
    for i in 0..3 {
        pair.b.host.post_receive(i, &[sge(2, 0x20000, 20_000)]);
        pair.a.host.post(i, SEND, &[sge(1, 0x10000, 20_000)]);
        pair.a
            .host
            .post(10 + i, read(0x30000, 2), &[sge(1, 0x30000, 20_000)]);
        pair.b.host.post(i, write(0x80000, 1), &[sge(2, 0x80000, 20_000)]);
    }
    pair.run();
    let expected = [0, 10, 1, 11, 2, 12].map(|wr_id| (wr_id, WcStatus::Success));
    assert_eq!(pair.a.host.outcomes(Queue::Send), expected);
    assert_eq!(pair.b.host.outcomes(Queue::Receive).len(), 3);
    assert_eq!(pair.b.host.outcomes(Queue::Send).len(), 3);
}

#[test]
fn fence_waits_for_reads_and_nothing_else_does() {
    let mut pair = pair(Setup::default());
    let inline = || SendData::inline(&[0xee; 64]).unwrap();
    pair.a.host.post(0, read(0x20000, 2), &[sge(1, 0x10000, 64)]);
    pair.a
        .host
        .post_with(1, write(0x20000, 2), inline(), |request| request.fence = true);
    pair.a.host.post_with(2, write(0x20000, 2), inline(), |_| {});
    while pair.transmit(Side::A) {}
    assert_eq!(pair.link.sent, 1, "only the READ is under way");
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 3);
    assert_ne!(pair.a.host.bytes(1)[..64], [0xee; 64]);
}

#[test]
fn reads_outstanding_are_bounded() {
    let mut pair = pair(Setup {
        max_rd_atomic: 2,
        ..Setup::default()
    });
    for i in 0..5 {
        pair.a.host.post(i, read(0x20000, 2), &[sge(1, 0x10000, 64)]);
    }
    while pair.transmit(Side::A) {}
    assert_eq!(pair.link.sent, 2);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 5);
}

#[test]
fn window_bounds_what_is_under_way() {
    let config = QpConfig {
        window_bytes: 10 * 1024,
        ..Setup::default().config
    };
    let mut pair = pair(Setup {
        config,
        ..Setup::default()
    });
    pair.a
        .host
        .post(0, write(0x20000, 2), &[sge(1, 0x10000, 1 << 20)]);
    while pair.transmit(Side::A) {}
    assert_eq!(pair.link.sent, 10);
    pair.run();
    assert_eq!(pair.a.host.bytes(1), pair.b.host.bytes(2));
    assert_eq!(pair.a.qp.counters().local_ack_timeout_err, 0);

    // The same for the data of a READ, which only the requester can bound.
    pair.a.host.post(1, read(0x20000, 2), &[sge(1, 0x10000, 1 << 20)]);
    while pair.transmit(Side::A) {}
    let before = pair.link.sent;
    pair.now = pair.link.next_due().unwrap();
    pair.deliver();
    while pair.transmit(Side::B) {}
    assert!(pair.link.sent - before <= 10);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send)[1], (1, WcStatus::Success));
}

#[test]
fn both_directions_at_once() {
    let mut pair = pair(Setup {
        mtu: Mtu::Mtu4096,
        ..Setup::default()
    });
    for i in 0..20 {
        pair.a.host.post(i, write(0x20000, 2), &[sge(1, 0x10000, 65536)]);
        pair.b.host.post(i, read(0x10000, 1), &[sge(2, 0x90000, 65536)]);
        pair.b
            .host
            .post(100 + i, write(0x90000, 1), &[sge(2, 0x20000, 65536)]);
    }
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 20);
    assert_eq!(pair.b.host.outcomes(Queue::Send).len(), 40);
    assert_eq!(pair.a.qp.counters().retransmitted_requests, 0);
}

#[test]
fn responder_works_in_rtr_and_says_so() {
    let mut pair = pair(Setup::default());
    let setup = pair.setup;
    let reset = QpAttributes {
        state: Some(QpState::Reset),
        ..QpAttributes::default()
    };
    pair.b.qp.modify(&reset, &mut pair.b.host).unwrap();
    for step in &pair::steps(&setup, Side::B)[..2] {
        pair.b.qp.modify(step, &mut pair.b.host).unwrap();
    }
    assert_eq!(pair.b.qp.state(), QpState::Rtr);
    pair.b.host.post(5, SEND, &[]);
    pair.a.host.post(1, write(0x20000, 2), &[sge(1, 0x10000, 5000)]);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send), [(1, WcStatus::Success)]);
    assert_eq!(pair.b.host.events, [Event::CommunicationEstablished]);
    assert_eq!(pair.b.host.sends.len(), 1, "nothing is sent in RTR");
}

#[test]
fn drain_finishes_what_was_begun() {
    let mut pair = pair(Setup::default());
    pair.a.host.post(0, write(0x20000, 2), &[sge(1, 0x10000, 5000)]);
    while pair.transmit(Side::A) {}
    let sqd = QpAttributes {
        state: Some(QpState::Sqd),
        en_sqd_async_notify: Some(true),
        ..QpAttributes::default()
    };
    pair.a.qp.modify(&sqd, &mut pair.a.host).unwrap();
    pair.a.host.post(1, write(0x20000, 2), &[sge(1, 0x10000, 10)]);
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send), [(0, WcStatus::Success)]);
    assert_eq!(pair.a.host.events, [Event::SendQueueDrained]);
    let rts = QpAttributes {
        state: Some(QpState::Rts),
        ..QpAttributes::default()
    };
    pair.a.qp.modify(&rts, &mut pair.a.host).unwrap();
    pair.run();
    assert_eq!(pair.a.host.outcomes(Queue::Send).len(), 2);
}

#[test]
fn query_tells_what_was_set() {
    let pair = pair(Setup::default());
    let attributes = pair.a.qp.query();
    assert_eq!(attributes.state, Some(QpState::Rts));
    assert_eq!(attributes.path_mtu, Some(Mtu::Mtu1024));
    assert_eq!(
        attributes.access_flags,
        Some(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC)
    );
    assert_eq!(attributes.dest_qpn, Some(pair::qpn(Side::B)));
}
