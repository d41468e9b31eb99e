//! A third host that sends packets with the partner's address. It knows the queue pair number and everything else but the
//! PSN. Its packets come early; none is kept, none is executed in the place of the partner's own, none ends the connection,
//! and the connection is about as fast as without them.
//!
//! The border: left out are packets whose PSN is the expected one. Those are executed, by hardware, too.

mod pair;

use std::time::Duration;

use pair::{Bottleneck, Pair, SEND, Setup, Side, read, sge, write};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use verbatim_roce::wire::bth::{BTH_BYTES, Bth};
use verbatim_roce::wire::opcode::Opcode;
use verbatim_roce::{HoldBudget, Packet, Psn, QpState, Queue, WcStatus};

const LEN: u32 = 100;
const FORGED: u8 = 0xee;
/// How far ahead a packet may be to be answered with a NAK at once.
const NEAR: u32 = 32;
/// How far ahead a forger aims that knows about where the connection is.
const AIM: u32 = 2048;
const PSNS: u32 = 1 << 24;
const FIRST_PSN: u32 = 100;
const SLOTS: u64 = 0x1000_0000;

const REQUESTS: [Opcode; 8] = [
    Opcode::RC_SEND_ONLY,
    Opcode(0x00),
    Opcode(0x01),
    Opcode(0x02),
    Opcode(0x07),
    Opcode(0x0a),
    Opcode::RC_READ_REQUEST,
    Opcode::RC_FETCH_ADD,
];

fn forged(to: Side, opcode: Opcode, psn: u32, payload: usize) -> Vec<u8> {
    let mut bytes = vec![0; BTH_BYTES];
    let bth = Bth {
        opcode,
        solicited: false,
        migrated: true,
        pad_count: 0,
        version: 0,
        pkey: 0xffff,
        fecn: false,
        becn: false,
        dest_qpn: pair::qpn(to),
        ack_request: true,
        psn: Psn::new(psn),
    };
    bth.emit(bytes.first_chunk_mut().expect("as long as a BTH"));
    let info = opcode.info().expect("it is defined");
    bytes.resize(BTH_BYTES + info.headers.bytes(), 0);
    if info.has_payload {
        bytes.resize(bytes.len() + payload, FORGED);
    }
    bytes.extend([0; 4]);
    bytes
}

fn inject(pair: &mut Pair, to: Side, bytes: &[u8]) {
    let packet = Packet::parse(bytes).expect("it is a packet");
    let (now, end) = (pair.now, pair.end(to));
    end.qp.handle_packet(now, &packet, &mut end.host);
}

/// The PSN that B waits for.
fn expected(pair: &mut Pair) -> u32 {
    let connection = pair.b.qp.as_rc_mut().expect("it is a connection");
    connection.position().expected.get()
}

/// A sends messages of one packet to B, each to a slot of its own.
fn sends(messages: u64, setup: Setup) -> Pair {
    let mut pair = Pair::new(setup);
    pair.a.host.register(1, 0x10000, vec![0x11; LEN as usize]);
    let bytes = messages as usize * LEN as usize;
    pair.b.host.register(2, SLOTS, vec![0; bytes]);
    for wr_id in 0..messages {
        let at = SLOTS + wr_id * u64::from(LEN);
        pair.b.host.post_receive(wr_id, &[sge(2, at, LEN)]);
        pair.a.host.post(wr_id, SEND, &[sge(1, 0x10000, LEN)]);
    }
    pair
}

/// All messages have come once, with the partner's content, and the connection lives.
fn assert_genuine(pair: &mut Pair, messages: u64) {
    let all = |outcomes: Vec<(u64, WcStatus)>| {
        let good = outcomes.iter().all(|(_, status)| *status == WcStatus::Success);
        assert!(good && outcomes.iter().map(|(wr_id, _)| *wr_id).eq(0..messages));
    };
    all(pair.a.host.outcomes(Queue::Send));
    all(pair.b.host.outcomes(Queue::Receive));
    let slots = pair.b.host.bytes(2);
    let foreign = slots.iter().position(|byte| *byte != 0x11);
    assert_eq!(foreign, None, "seed {}", pair.setup.seed);
    for side in [Side::A, Side::B] {
        assert_eq!(pair.end(side).qp.state(), QpState::Rts);
    }
}

#[test]
fn one_packet_ahead_is_never_executed() {
    const MESSAGES: u64 = 6000;
    for ahead in [1, 2, 3, 20, NEAR, NEAR + 1, 1000, 5000, PSNS / 4, PSNS / 2 - 1] {
        let mut pair = sends(MESSAGES, Setup::default());
        let budget = HoldBudget::new(1 << 20);
        pair.b.host.hold_budget = Some(budget.clone());
        let bytes = forged(Side::B, Opcode::RC_SEND_ONLY, FIRST_PSN + ahead, LEN as usize);
        inject(&mut pair, Side::B, &bytes);
        assert_eq!(budget.left_bytes(), 1 << 20, "{ahead} ahead: it is kept");
        pair.run();
        assert_genuine(&mut pair, MESSAGES);
        let (a, b) = (*pair.a.qp.counters(), *pair.b.qp.counters());
        let naks = u64::from(ahead <= NEAR);
        assert!(a.packet_seq_err <= naks, "{ahead} ahead: {a:?}");
        assert_eq!(b.out_of_sequence, 1, "{ahead} ahead: {b:?}");
        assert!(b.duplicate_request <= 256 * naks, "{ahead} ahead: {b:?}");
    }
}

#[test]
fn a_row_of_packets_ahead_is_never_executed() {
    const MESSAGES: u64 = 3000;
    for ahead in [1, 2, 3, 7, 64, 1000, PSNS / 4] {
        for row in [2, 8, 100] {
            let mut pair = sends(MESSAGES, Setup::default());
            for psn in ahead..ahead + row {
                let bytes = forged(Side::B, Opcode::RC_SEND_ONLY, FIRST_PSN + psn, LEN as usize);
                inject(&mut pair, Side::B, &bytes);
            }
            pair.run();
            assert_genuine(&mut pair, MESSAGES);
        }
    }
}

/// One packet is lost, and the partner has sent all that it may when the row comes: what comes next is what was lost.
#[test]
fn a_row_is_not_executed_wherever_it_begins_while_a_packet_is_missing() {
    const MESSAGES: u64 = 60;
    const LOST: u32 = FIRST_PSN + 5;
    const WINDOW: u32 = 16;
    for row in [1, 2, 4, 16] {
        for ahead in 1..=WINDOW + 4 {
            for steps in 0..30 {
                let mut setup = Setup::default();
                setup.config.window_packets = WINDOW;
                let mut pair = sends(MESSAGES, setup);
                let mut lost = false;
                pair.link.filter = Some(Box::new(move |to, packet| {
                    to != Side::B || packet.bth.psn.get() != LOST || std::mem::replace(&mut lost, true)
                }));
                for _ in 0..steps {
                    pair.step();
                }
                let first = expected(&mut pair) + ahead;
                for psn in first..first + row {
                    let bytes = forged(Side::B, Opcode::RC_SEND_ONLY, psn, LEN as usize);
                    inject(&mut pair, Side::B, &bytes);
                }
                pair.run();
                assert_genuine(&mut pair, MESSAGES);
            }
        }
    }
}

#[test]
fn packets_inside_a_message_of_many_do_not_end_the_connection() {
    const MESSAGE: u32 = 64 << 10;
    for opcode in REQUESTS {
        for ahead in [1, 2, 3, 17, 63, 64, 100] {
            for (operation, received) in [(write(SLOTS, 2), 0), (SEND, 4)] {
                let mut pair = Pair::new(Setup::default());
                pair.a.host.register(1, 0x10000, vec![0x11; MESSAGE as usize]);
                pair.b.host.register(2, SLOTS, vec![0; MESSAGE as usize]);
                for wr_id in 0..4 {
                    pair.b.host.post_receive(wr_id, &[sge(2, SLOTS, MESSAGE)]);
                    pair.a.host.post(wr_id, operation, &[sge(1, 0x10000, MESSAGE)]);
                }
                inject(
                    &mut pair,
                    Side::B,
                    &forged(Side::B, opcode, FIRST_PSN + ahead, 1024),
                );
                pair.run();
                let sent = pair.a.host.outcomes(Queue::Send);
                assert!(sent.iter().all(|(_, status)| *status == WcStatus::Success));
                assert_eq!(sent.len(), 4, "{opcode:?} {ahead} ahead");
                assert_eq!(pair.b.host.outcomes(Queue::Receive).len(), received);
                assert!(pair.b.host.bytes(2).iter().all(|byte| *byte == 0x11));
                assert!(pair.b.host.atomics.is_empty());
            }
        }
    }
}

/// How a forger picks PSNs.
#[derive(Clone, Copy, Debug)]
enum Aim {
    /// It knows nothing.
    Anywhere,
    /// It knows about where the connection is, and sends so many in a row.
    Near { row: u32 },
}

struct Outcome {
    took: Duration,
    /// Forged packets from 1 to [`NEAR`] ahead.
    near: u64,
    forged: u64,
}

/// A connection over a link of 10 Gbit/s; the forger sends `often` packets for each of the partner's, in a thousand.
fn under_fire(messages: u64, often: u64, aim: Aim, loss_ppm: u32, seed: u64) -> (Pair, Outcome) {
    let mut pair = sends(
        messages,
        Setup {
            seed,
            timeout: 14,
            ..Setup::default()
        },
    );
    pair.link.loss_ppm = loss_ppm;
    pair.link.bottlenecks[Side::B as usize] = Some(Bottleneck::new(10_000_000_000, 512 << 10));
    let budget = HoldBudget::new(1 << 20);
    pair.b.host.hold_budget = Some(budget.clone());
    let mut rng = StdRng::seed_from_u64(seed);
    let begin = pair.now;
    let mut outcome = Outcome {
        took: Duration::ZERO,
        near: 0,
        forged: 0,
    };
    let mut due = 0;
    let mut seen = 0;
    let mut took = None;
    loop {
        let more = pair.step();
        let done = pair.a.host.completions.len() as u64 == messages;
        if done {
            took.get_or_insert(pair.now - begin);
        }
        if !more {
            break;
        }
        let arrived = pair.b.qp.counters().rcvd_requests - outcome.forged;
        due += (arrived - seen) * often;
        seen = arrived;
        while due >= 1000 && !done {
            let at = expected(&mut pair);
            let (first, row) = match aim {
                Aim::Anywhere => (rng.random_range(1..PSNS), 1),
                Aim::Near { row } => (rng.random_range(1..=AIM), row),
            };
            let opcode = match aim {
                Aim::Anywhere => REQUESTS[rng.random_range(0..REQUESTS.len())],
                Aim::Near { .. } => Opcode::RC_SEND_ONLY,
            };
            for ahead in first..first + row {
                outcome.near += u64::from((1..=NEAR).contains(&ahead));
                let bytes = forged(Side::B, opcode, at.wrapping_add(ahead), LEN as usize);
                inject(&mut pair, Side::B, &bytes);
                outcome.forged += 1;
                due = due.saturating_sub(1000);
            }
        }
        assert_eq!(budget.left_bytes(), 1 << 20, "something is kept");
    }
    outcome.took = took.expect("all messages have come");
    (pair, outcome)
}

/// What a NAK costs that is not needed: the forger's time as a share of the time without it is 0.9 at least.
fn assert_fast(alone: &Outcome, fire: &Outcome) {
    assert!(
        alone.took >= fire.took.mul_f64(0.9),
        "{:?} without a forger, {:?} with one",
        alone.took,
        fire.took
    );
}

#[test]
fn of_a_million_forged_packets_none_is_kept_and_they_cost_little() {
    const MESSAGES: u64 = 1 << 18;
    const FORGED_PACKETS: u64 = 1 << 20;
    let (_, alone) = under_fire(MESSAGES, 0, Aim::Anywhere, 0, 1);
    let often = 1000 * FORGED_PACKETS / MESSAGES + 100;
    let (mut pair, fire) = under_fire(MESSAGES, often, Aim::Anywhere, 0, 1);
    assert_genuine(&mut pair, MESSAGES);
    assert!(fire.forged >= FORGED_PACKETS, "{}", fire.forged);
    let (a, b) = (*pair.a.qp.counters(), *pair.b.qp.counters());
    let bound = fire.forged * u64::from(NEAR) / u64::from(PSNS);
    println!(
        "{} forged, {} near of about {bound}; {:?} instead of {:?}; {} NAKs, {} sent again",
        fire.forged, fire.near, fire.took, alone.took, a.packet_seq_err, a.retransmitted_requests
    );
    assert!(fire.near < 4 * bound, "the dice are bad");
    assert!(a.packet_seq_err <= fire.near, "{a:?}");
    assert!(b.out_of_sequence > fire.forged / 3, "{b:?}");
    assert_fast(&alone, &fire);
}

/// Alone or in short rows. Rows of eight and more cause NAKs wherever they are.
#[test]
fn a_forger_that_knows_where_the_connection_is_costs_little() {
    const MESSAGES: u64 = 20_000;
    let (_, alone) = under_fire(MESSAGES, 0, Aim::Anywhere, 0, 2);
    for row in [1, 2] {
        let (mut pair, fire) = under_fire(MESSAGES, 10, Aim::Near { row }, 0, 2);
        assert_genuine(&mut pair, MESSAGES);
        let a = *pair.a.qp.counters();
        println!(
            "rows of {row}: {} forged; {:?} instead of {:?}; {} NAKs, {} sent again",
            fire.forged, fire.took, alone.took, a.packet_seq_err, a.retransmitted_requests
        );
        assert_fast(&alone, &fire);
    }
}

/// Three hundred connections that lose 5 of 100 packets, each with a forger that sends as many packets as the partner, all
/// of them within 2,048 PSNs.
#[test]
fn on_a_lossy_path_no_forged_packet_is_executed() {
    const MESSAGES: u64 = 1000;
    let mut forged = 0;
    for seed in 0..300 {
        let row = [1, 2, 4][seed as usize % 3];
        let (mut pair, fire) = under_fire(MESSAGES, 1000, Aim::Near { row }, 50_000, seed);
        assert!(fire.forged > MESSAGES / 2, "{}", fire.forged);
        assert_genuine(&mut pair, MESSAGES);
        forged += fire.forged;
    }
    println!("{forged} forged packets");
}

/// The requester keeps data of READs that come early. One that is forged comes alone.
#[test]
fn forged_data_of_a_read_are_not_taken() {
    const READS: u64 = 100;
    const MESSAGE: u32 = 64 << 10;
    for (loss_ppm, seed) in [(0, 1), (0, 2), (10_000, 3), (10_000, 4)] {
        let mut pair = Pair::new(Setup {
            timeout: 14,
            ..Setup::default()
        });
        pair.link.loss_ppm = loss_ppm;
        let bytes = READS as usize * MESSAGE as usize;
        pair.a.host.register(1, 0x100_0000, vec![0; bytes]);
        pair.b.host.register(2, SLOTS, vec![0x11; MESSAGE as usize]);
        let mut rng = StdRng::seed_from_u64(seed);
        let mut sent = 0;
        for wr_id in 0..READS {
            let at = 0x100_0000 + wr_id * u64::from(MESSAGE);
            pair.a.host.post(wr_id, read(SLOTS, 2), &[sge(1, at, MESSAGE)]);
        }
        while pair.step() {
            let connection = pair.a.qp.as_rc_mut().expect("it is a connection");
            let position = connection.position();
            let ahead = rng.random_range(3..200);
            if rng.random_range(0..2) == 0 && position.sent.offset_from(position.acknowledged) > ahead {
                let psn = position.acknowledged.add(ahead).get();
                let bytes = forged(Side::A, Opcode::RC_READ_RESPONSE_MIDDLE, psn, 1024);
                inject(&mut pair, Side::A, &bytes);
                sent += 1;
            }
        }
        assert!(sent > 10, "{sent}");
        let outcomes = pair.a.host.outcomes(Queue::Send);
        assert_eq!(outcomes.len() as u64, READS);
        assert!(outcomes.iter().all(|(_, status)| *status == WcStatus::Success));
        assert!(
            pair.a.host.bytes(1).iter().all(|byte| *byte == 0x11),
            "seed {seed}"
        );
    }
}
