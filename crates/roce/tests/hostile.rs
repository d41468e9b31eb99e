//! A partner that sends anything: packets of random bytes, and good packets with some bytes changed and a right ICRC.
//! Nothing panics, no memory is touched that was not granted (the test's host asserts that), and every request still
//! completes once.

mod pair;

use pair::{Pair, SEND, Setup, Side, destination, fetch_add, read, sge, write, write_imm};
use proptest::prelude::*;
use verbatim_roce::wire::bth::{BTH_BYTES, Bth};
use verbatim_roce::wire::opcode::Opcode;
use verbatim_roce::{AccessFlags, Packet, Psn, QpType, Qpn, Queue, SendData};

const GUARD: u8 = 0x5a;

/// A pair with requests under way in both directions; key 3 at each end is memory that nobody may write from outside.
fn busy_pair(qp_type: QpType, seed: u64) -> Pair {
    let mut pair = Pair::new(Setup {
        qp_type,
        seed,
        rnr_retry: 1,
        ..Setup::default()
    });
    for side in [Side::A, Side::B] {
        if let Some(connection) = pair.end(side).qp.as_rc_mut() {
            connection.set_secret(Some(pair::world::secret(side)));
        }
        let host = &mut pair.end(side).host;
        host.register(1, 0x10000, vec![1; 0x8000]);
        host.register(3, 0x18000, vec![GUARD; 0x8000]);
        host.region(3).access = AccessFlags::empty();
        for i in 0..4 {
            host.post_receive(i, &[sge(1, 0x10000, 3000)]);
            if qp_type == QpType::Ud {
                for wr_id in 4 * i..4 * i + 4 {
                    let data = SendData::inline(&[7; 60]).expect("it is short");
                    host.post_with(wr_id, SEND, data, |request| {
                        request.destination = Some(destination(side.other()));
                    });
                }
                continue;
            }
            if qp_type == QpType::Uc {
                for wr_id in 4 * i..4 * i + 4 {
                    host.post(wr_id, write_imm(0x11000, 1, [1; 4]), &[sge(1, 0x10000, 3000)]);
                }
                continue;
            }
            host.post(4 * i, SEND, &[sge(1, 0x10000, 2500)]);
            host.post(4 * i + 1, write(0x11000, 1), &[sge(1, 0x10000, 5000)]);
            host.post(4 * i + 2, read(0x12000, 1), &[sge(1, 0x14000, 5000)]);
            if i == 1 {
                host.post(4 * i + 3, fetch_add(0x12000, 1, 3), &[sge(1, 0x14000, 8)]);
            } else {
                host.post(4 * i + 3, write_imm(0x11000, 1, [1; 4]), &[sge(1, 0x10000, 10)]);
            }
        }
    }
    pair
}

/// A packet that gets through the first checks: a known opcode, the right queue pair and partition, a near PSN.
fn plausible() -> impl Strategy<Value = Vec<u8>> {
    let psn = prop_oneof![80u32..300, any::<u32>()];
    (
        prop_oneof![
            0u8..0x20,
            0x20u8..0x2c,
            0x64u8..0x66,
            Just(0x81),
            Just(0xd0),
            any::<u8>()
        ],
        psn,
        0u8..4,
        any::<bool>(),
        prop::collection::vec(any::<u8>(), 0..1100),
    )
        .prop_map(|(opcode, psn, pad_count, ack_request, mut rest)| {
            let mut bth = [0; BTH_BYTES];
            Bth {
                opcode: Opcode(opcode),
                solicited: false,
                migrated: true,
                pad_count,
                version: 0,
                pkey: 0xffff,
                fecn: false,
                becn: false,
                dest_qpn: pair::qpn(Side::A),
                ack_request,
                psn: Psn::new(psn),
            }
            .emit(&mut bth);
            // Sometimes an RDMA header that points near the memory that there is.
            if rest.len() >= 16 && rest[0] & 1 == 0 {
                let addr = 0x10000 + u64::from(rest[1]) * 0x100;
                let len = u32::from(rest[2]) * 60;
                let key = 1 + 2 * u32::from(rest[3] & 1);
                rest[..8].copy_from_slice(&addr.to_be_bytes());
                rest[8..12].copy_from_slice(&key.to_be_bytes());
                rest[12..16].copy_from_slice(&len.to_be_bytes());
            }
            // Sometimes a queue key that is right.
            if opcode >= 0x60 && rest.len() >= 4 && rest[0] & 2 == 0 {
                rest[..4].copy_from_slice(&pair::qkey(Side::A).to_be_bytes());
            }
            rest.truncate(rest.len() / 4 * 4);
            [&bth[..], &rest, &[0; 4]].concat()
        })
}

fn qp_type() -> impl Strategy<Value = QpType> {
    prop::sample::select(vec![QpType::Rc, QpType::Uc, QpType::Ud])
}

fn inject(pair: &mut Pair, bytes: &[u8]) {
    if let Ok(packet) = Packet::parse(bytes) {
        let now = pair.now;
        pair.a.qp.handle_packet(now, &packet, &mut pair.a.host);
    }
}

fn finish(mut pair: Pair) -> Result<(), TestCaseError> {
    for _ in 0..100_000 {
        if !pair.step() {
            break;
        }
    }
    for side in [Side::A, Side::B] {
        let end = pair.end(side);
        prop_assert!(end.host.bytes(3).iter().all(|byte| *byte == GUARD));
        let sent = end.host.outcomes(Queue::Send);
        prop_assert!(
            sent.iter().map(|(wr_id, _)| *wr_id).eq(0..16),
            "{:?} {:?}",
            sent,
            end.qp
        );
        let received = end.host.outcomes(Queue::Receive);
        prop_assert!(
            received
                .iter()
                .map(|(wr_id, _)| *wr_id)
                .eq(0..received.len() as u64)
        );
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn invented_packets(
        seed: u64,
        qp_type in qp_type(),
        packets in prop::collection::vec((plausible(), 0usize..3), 1..40),
    ) {
        let mut pair = busy_pair(qp_type, seed);
        for (bytes, steps) in packets {
            inject(&mut pair, &bytes);
            for _ in 0..steps {
                pair.step();
            }
        }
        finish(pair)?;
    }

    #[test]
    fn changed_packets(
        seed: u64,
        qp_type in qp_type(),
        changes in prop::collection::vec((0usize..40, any::<u8>(), 0usize..4), 1..60),
    ) {
        let mut pair = busy_pair(qp_type, seed);
        for (at, value, pick) in changes {
            for side in [Side::A, Side::B] {
                while pair.transmit(side) {}
            }
            let Some(due) = pair.link.next_due() else { break };
            pair.now = pair.now.max(due);
            for turn in 0..=pick {
                let Some((side, mut bytes, _)) = pair.link.pop_due(due) else { break };
                if turn == pick && at < bytes.len() {
                    bytes[at] = value;
                }
                let now = pair.now;
                let end = pair.end(side);
                if let Ok(packet) = Packet::parse(&bytes) {
                    end.qp.handle_packet(now, &packet, &mut end.host);
                }
            }
        }
        finish(pair)?;
    }
}

#[test]
fn packets_for_others_are_dropped() {
    let mut pair = busy_pair(QpType::Rc, 0);
    while pair.transmit(Side::B) {}
    pair.now = pair.link.next_due().unwrap();
    let now = pair.now;
    let (_, bytes, _) = pair.link.pop_due(now).unwrap();
    for change in [
        |bth: &mut Bth| bth.dest_qpn = Qpn::new(7),
        |bth: &mut Bth| bth.pkey = 0x8001,
    ] {
        let mut packet = Packet::parse(&bytes).unwrap();
        change(&mut packet.bth);
        pair.a.qp.handle_packet(now, &packet, &mut pair.a.host);
    }
    let mut packet = Packet::parse(&bytes).unwrap();
    packet.info = Opcode(0x24).info().unwrap();
    pair.a.qp.handle_packet(now, &packet, &mut pair.a.host);
    let counters = pair.a.qp.counters();
    assert_eq!((counters.dropped_wrong_qpn, counters.bad_pkey), (1, 1));
    assert_eq!((counters.dropped_wrong_service, counters.dropped_packets), (1, 3));
    assert_eq!(pair.a.qp.counters().rcvd_requests, 0);
}
