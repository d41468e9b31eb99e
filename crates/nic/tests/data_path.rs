//! Two RNICs on loopback addresses, a program at each: what one posts, the other has.

mod support;

use support::program::{ALL_ACCESS, CAP, read, send, write, write_with_imm};
use support::{Memory, Program, Qp, Server, pair};

const SUCCESS: u32 = 0;
const MIB: u64 = 1 << 20;

fn pattern(seed: usize) -> impl Fn(usize) -> u8 {
    move |index| (index.wrapping_mul(31) ^ (index >> 9) ^ seed) as u8
}

fn check(memory: &Memory, range: std::ops::Range<usize>, seed: usize) {
    let expected: Vec<u8> = (0..range.len()).map(pattern(seed)).collect();
    assert!(memory.as_slice()[range] == expected[..], "the bytes differ");
}

#[test]
fn write_send_and_read_between_adopted_and_private_memory() {
    let (a, b) = (Server::start([127, 7, 2, 1]), Server::start([127, 7, 2, 2]));
    let (mut left, mut right) = pair(&a, &b);
    for private in [false, true] {
        let make = |program: &Program| match private {
            false => program.adopted(MIB, ALL_ACCESS),
            true => program.private(MIB, ALL_ACCESS),
        };
        let (mut from, mut to) = (make(&left.program), make(&right.program));
        let lengths = [1u32, 3, 64, 4096, 4097, 65_536, MIB as u32];
        for (seed, length) in lengths.into_iter().enumerate() {
            let seed = seed + 10 * usize::from(private);
            let bytes = length as usize;
            from.fill(pattern(seed));

            to.fill(|_| 0);
            left.program
                .post(&mut left.qp, write(1, &to, 0), &[from.sge(0, length)]);
            let done = left.queue.wait();
            assert_eq!(
                (done.wr_id, done.status, done.opcode, done.qpn),
                (1, SUCCESS, 1, left.qp.qpn)
            );
            check(&to, 0..bytes, seed);
            assert!(
                to.as_slice()[bytes..].iter().all(|byte| *byte == 0),
                "nothing behind it was touched"
            );

            to.fill(|_| 0);
            right.program.post_recv(&mut right.qp, 2, &[to.sge(0, length)]);
            left.program.post(&mut left.qp, send(3), &[from.sge(0, length)]);
            let received = right.queue.wait();
            assert_eq!(
                (received.wr_id, received.status, received.opcode),
                (2, SUCCESS, 128)
            );
            assert_eq!(received.byte_len, length);
            assert_eq!(left.queue.wait().wr_id, 3);
            check(&to, 0..bytes, seed);

            to.fill(pattern(seed + 100));
            left.program
                .post(&mut left.qp, read(4, &to, 0), &[from.sge(0, length)]);
            let done = left.queue.wait();
            assert_eq!((done.wr_id, done.status, done.opcode), (4, SUCCESS, 2));
            check(&from, 0..bytes, seed + 100);
        }
    }
    let sent = a.stats.read();
    assert!(
        sent.tx_payload_bytes > 2 * MIB && sent.rx_payload_bytes > MIB,
        "{sent:?}"
    );
    assert_eq!(
        (sent.rx_icrc_errors, sent.rx_malformed, sent.rx_unknown_qp),
        (0, 0, 0)
    );
}

/// In a dialogue the acknowledgement of a message waits for the answer; who goes away after the last one gives none.
#[test]
fn who_hears_the_last_word_and_goes_has_acknowledged_it() {
    let (a, b) = (Server::start([127, 7, 12, 1]), Server::start([127, 7, 12, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let left_memory = left.program.adopted(MIB, ALL_ACCESS);
    let right_memory = right.program.adopted(MIB, ALL_ACCESS);
    for round in 0..100 {
        right
            .program
            .post_recv(&mut right.qp, round, &[right_memory.sge(0, 8)]);
        left.program
            .post_recv(&mut left.qp, round, &[left_memory.sge(0, 8)]);
        left.program
            .post(&mut left.qp, send(100 + round), &[left_memory.sge(64, 8)]);
        assert_eq!(right.queue.wait().wr_id, round);
        right
            .program
            .post(&mut right.qp, send(100 + round), &[right_memory.sge(64, 8)]);
        let mut done = [left.queue.wait().wr_id, left.queue.wait().wr_id];
        done.sort();
        assert_eq!(done, [round, 100 + round]);
        assert_eq!(right.queue.wait().wr_id, 100 + round);
    }
    right
        .program
        .post_recv(&mut right.qp, 1, &[right_memory.sge(0, 8)]);
    left.program
        .post(&mut left.qp, send(2), &[left_memory.sge(64, 8)]);
    assert_eq!(right.queue.wait().wr_id, 1);
    drop(right);
    let last = left.queue.wait();
    assert_eq!((last.wr_id, last.status), (2, SUCCESS));
    assert_eq!(a.stats.read().ack_timeouts, 0);
}

#[test]
fn immediate_data_scattered_and_gathered() {
    let (a, b) = (Server::start([127, 7, 3, 1]), Server::start([127, 7, 3, 2]));
    let (mut left, mut right) = pair(&a, &b);
    let mut from = left.program.adopted(MIB, ALL_ACCESS);
    let to = right.program.adopted(MIB, ALL_ACCESS);
    from.fill(pattern(5));
    // Gathered backwards from two pieces, put where the WRITE says; the RECV tells of it.
    right.program.post_recv(&mut right.qp, 7, &[]);
    let sges = [from.sge(5000, 5000), from.sge(0, 5000)];
    left.program
        .post(&mut left.qp, write_with_imm(8, &to, 100, 0x0403_0201), &sges);
    let told = right.queue.wait();
    assert_eq!(
        (told.wr_id, told.opcode, told.byte_len, told.imm),
        (7, 129, 10_000, 0x0403_0201)
    );
    assert_eq!(left.queue.wait().wr_id, 8);
    assert_eq!(to.as_slice()[100..5100], from.as_slice()[5000..10_000]);
    assert_eq!(to.as_slice()[5100..10_100], from.as_slice()[..5000]);
    // A SEND scattered over three pieces.
    let pieces = [to.sge(200_000, 10), to.sge(300_000, 5000), to.sge(400_000, 5000)];
    right.program.post_recv(&mut right.qp, 9, &pieces);
    left.program.post(&mut left.qp, send(10), &[from.sge(0, 10_000)]);
    assert_eq!(right.queue.wait().byte_len, 10_000);
    assert_eq!(to.as_slice()[200_000..200_010], from.as_slice()[..10]);
    assert_eq!(to.as_slice()[300_000..305_000], from.as_slice()[10..5010]);
    assert_eq!(to.as_slice()[400_000..404_990], from.as_slice()[5010..10_000]);
}

#[test]
fn many_queue_pairs_share_one_wire() {
    const QPS: usize = 64;
    const ROUNDS: u64 = 20;
    const BYTES: u64 = 40_000;
    let (a, b) = (Server::start([127, 7, 4, 1]), Server::start([127, 7, 4, 2]));
    let (left, right) = (
        Program::connect(&a.socket(), "left"),
        Program::connect(&b.socket(), "right"),
    );
    let (mut left_queue, right_queue) = (left.cq(4096), right.cq(16));
    let mut from = left.adopted(QPS as u64 * BYTES, ALL_ACCESS);
    let to = right.adopted(QPS as u64 * BYTES, ALL_ACCESS);
    from.fill(pattern(1));
    let mut qps: Vec<Qp> = (0..QPS)
        .map(|_| {
            let (near, far) = (left.qp(&left_queue, CAP), right.qp(&right_queue, CAP));
            left.connect_qp(&near, b.address, far.qpn);
            right.connect_qp(&far, a.address, near.qpn);
            near
        })
        .collect();
    for round in 0..ROUNDS {
        for (index, qp) in qps.iter_mut().enumerate() {
            let offset = index as u64 * BYTES;
            left.post(qp, write(round, &to, offset), &[from.sge(offset, BYTES as u32)]);
        }
    }
    for _ in 0..ROUNDS * QPS as u64 {
        assert_eq!(left_queue.wait().status, SUCCESS);
    }
    assert!(to.as_slice() == from.as_slice());
}
