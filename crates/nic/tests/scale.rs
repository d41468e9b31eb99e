//! Thousands of queue pairs: the time to make them, and the memory that they take.

mod support;

use std::time::{Duration, Instant};

use support::program::{ALL_ACCESS, write};
use support::{Program, Server};
use verbatim_device::control::QpCap;

const COUNT: usize = 4096;
const MOST_BYTES_EACH: u64 = 16 << 10;

/// A generous bound for a debug build on a machine that does other things too; a release build takes a tenth.
const MOST_TIME: Duration = Duration::from_secs(10);

const CAP: QpCap = QpCap {
    max_send_wr: 16,
    max_recv_wr: 16,
    max_send_sge: 1,
    max_recv_sge: 1,
    max_inline_data: 0,
};

/// Private memory of this process, RNIC and program together.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("the process's own status");
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:"))
        .expect("a line");
    let kib: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kib << 10
}

#[test]
fn thousands_of_connected_queue_pairs_are_small_and_quickly_made() {
    let (a, b) = (Server::start([127, 7, 80, 1]), Server::start([127, 7, 80, 2]));
    let (left, right) = (
        Program::connect(&a.socket(), "left"),
        Program::connect(&b.socket(), "right"),
    );
    let (mut left_queue, right_queue) = (left.cq(64), right.cq(64));
    let before = private_bytes() + left.arena_bytes() + right.arena_bytes();
    let start = Instant::now();
    let make = |program: &Program, queue| (0..COUNT).map(|_| program.qp(queue, CAP)).collect::<Vec<_>>();
    let mut lefts = make(&left, &left_queue);
    let rights = make(&right, &right_queue);
    for (one, other) in lefts.iter().zip(&rights) {
        left.connect_qp(one, b.address, other.qpn);
        right.connect_qp(other, a.address, one.qpn);
    }
    let took = start.elapsed();
    let after = private_bytes() + left.arena_bytes() + right.arena_bytes();
    let each = (after - before) / (2 * COUNT as u64);
    eprintln!("{COUNT} pairs of queue pairs: {took:?}, {each} bytes for each queue pair");
    assert!(each < MOST_BYTES_EACH, "{each} bytes for each queue pair");
    assert!(took < MOST_TIME, "it took {took:?}");

    // All of them idle but one, which has the window to itself.
    let from = left.adopted(1 << 20, ALL_ACCESS);
    let into = right.adopted(1 << 20, ALL_ACCESS);
    for wr_id in 0..16 {
        left.post(
            &mut lefts[COUNT / 2],
            write(wr_id, &into, 0),
            &[from.sge(0, 1 << 20)],
        );
    }
    for _ in 0..16 {
        assert_eq!(left_queue.wait().status, 0);
    }
    // And all of them busy: nothing collapses.
    for round in 0..2 {
        for qp in &mut lefts {
            // Unsignaled, so that the completion queue need not be as long.
            let request = verbatim_device::layout::SendWqe {
                num_sge: 1,
                ..write(round, &into, 0)
            };
            qp.send.push(
                &request,
                verbatim_device::ring::Body::Sges(&[from.sge(0, 16 << 10)]),
            );
            left.ring(qp);
        }
    }
    let target: u32 = 2;
    support::wait_for("all requests", || {
        lefts
            .iter()
            .enumerate()
            .all(|(index, qp)| {
                let own = if index == COUNT / 2 { 16 } else { 0 };
                qp.send.completed() == target + own
            })
            .then_some(())
    });
    assert_eq!(a.stats.read().retry_exceeded, 0);
    let start = Instant::now();
    drop((left, right));
    for server in [&a, &b] {
        server.wait_for("the end of all objects", |counters| {
            counters.qps == 0 && counters.mrs == 0
        });
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}
