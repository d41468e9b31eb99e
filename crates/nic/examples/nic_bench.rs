//! Measures the software RNIC alone, without the guest library.
//!
//! ```text
//! nic_bench nic ADDRESS FOLDER [SPIN_US [WINDOW]]               runs an RNIC (once per network namespace)
//! nic_bench bw  FOLDER FOLDER [SIZE [QPS [SECONDS [DEPTH]]]]    WRITEs from the first RNIC to the second
//! nic_bench lat FOLDER FOLDER [SIZE [ROUNDS]]                   half round trip of WRITEs, both ends polling memory
//! ```
//!
//! One process plays both programs: control sockets are files, and do not care about network namespaces. For example,
//! with `nic_bench nic` in the namespaces `a` and `b`:
//!
//! ```text
//! ip netns exec a nic_bench nic 10.0.0.1 /tmp/a &  ip netns exec b nic_bench nic 10.0.0.2 /tmp/b &
//! nic_bench bw /tmp/a /tmp/b 65536 16
//! ```

#[path = "../tests/support/mod.rs"]
mod support;

use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use support::program::{ALL_ACCESS, CAP, write};
use support::{Program, Qp};
use verbatim_device::control::{QpCap, SOCKET_NAME};
use verbatim_device::layout::{SEND_INLINE, SEND_SIGNALED, SendWqe};
use verbatim_device::ring::Body;
use verbatim_nic::{NicConfig, NicCounters, Port, STATS_NAME, StatsReader};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let number = |index: usize, default: u64| {
        arguments
            .get(index)
            .map_or(default, |text| text.parse().expect("a number"))
    };
    match arguments.as_slice() {
        ["nic", address, folder, ..] => {
            let mut config = NicConfig::new(folder);
            config.port = Port::Address(address.parse().expect("an IPv4 address"));
            config.spin = Duration::from_micros(number(3, 20));
            config.limits.window_bytes = number(4, config.limits.window_bytes.into()) as u32;
            verbatim_nic::run(config).expect("the RNIC runs");
        }
        ["bw", from, to, ..] => {
            let (from, to) = (End::new(from), End::new(to));
            let shape = Shape {
                size: number(3, 65_536),
                qps: number(4, 16),
                depth: number(6, 16) as u32,
            };
            bandwidth(from, to, shape, Duration::from_secs(number(5, 3)));
        }
        ["lat", from, to, ..] => {
            let (from, to) = (End::new(from), End::new(to));
            latency(from, to, number(3, 8) as u32, number(4, 20_000));
        }
        _ => {
            eprintln!("usage: nic_bench nic|bw|lat … (see the head of the source)");
            std::process::exit(2);
        }
    }
}

struct End {
    program: Program,
    stats: StatsReader,
    address: Ipv4Addr,
}

impl End {
    fn new(folder: &str) -> Self {
        let program = Program::connect(&Path::new(folder).join(SOCKET_NAME), "nic_bench");
        let stats = StatsReader::open(&Path::new(folder).join(STATS_NAME)).expect("statistics");
        let gid = std::net::Ipv6Addr::from(program.port.gids[0].gid);
        Self {
            address: gid.to_ipv4_mapped().expect("an IPv4 GID"),
            program,
            stats,
        }
    }
}

struct Shape {
    size: u64,
    qps: u64,
    depth: u32,
}

fn bandwidth(from: End, to: End, shape: Shape, time: Duration) {
    let Shape { size, qps, depth } = shape;
    let cap = QpCap {
        max_send_wr: depth,
        ..CAP
    };
    let mut queue = from.program.cq((qps as u32 * depth).max(16));
    let far_queue = to.program.cq(16);
    let source = from
        .program
        .adopted((qps * size).next_multiple_of(4096), ALL_ACCESS);
    let target = to
        .program
        .adopted((qps * size).next_multiple_of(4096), ALL_ACCESS);
    let mut pairs: Vec<Qp> = (0..qps)
        .map(|_| {
            let (near, far) = (from.program.qp(&queue, cap), to.program.qp(&far_queue, cap));
            from.program.connect_qp(&near, to.address, far.qpn);
            to.program.connect_qp(&far, from.address, near.qpn);
            near
        })
        .collect();
    let post = |index: usize, qp: &mut Qp| {
        let offset = index as u64 * size;
        from.program.post(
            qp,
            write(index as u64, &target, offset),
            &[source.sge(offset, size as u32)],
        );
    };
    for _ in 0..depth {
        for (index, qp) in pairs.iter_mut().enumerate() {
            post(index, qp);
        }
    }
    let mut run = |until: Instant| {
        let mut done = 0u64;
        while Instant::now() < until {
            match queue.poll() {
                Some(completion) => {
                    assert_eq!(completion.status, 0, "a WRITE failed");
                    post(completion.wr_id as usize, &mut pairs[completion.wr_id as usize]);
                    done += 1;
                }
                None => std::thread::yield_now(),
            }
        }
        done
    };
    run(Instant::now() + Duration::from_millis(300));
    let before = (from.stats.read(), to.stats.read());
    let start = Instant::now();
    let done = run(start + time);
    let seconds = start.elapsed().as_secs_f64();
    let gbit = done as f64 * size as f64 * 8.0 / seconds / 1e9;
    println!(
        "{qps} QPs, {size} bytes, depth {depth}: {gbit:.2} Gbit/s, {:.0} messages/s",
        done as f64 / seconds
    );
    report("sender", &before.0, &from.stats.read(), seconds);
    report("receiver", &before.1, &to.stats.read(), seconds);
}

fn report(who: &str, before: &NicCounters, after: &NicCounters, seconds: f64) {
    let per_second = |pick: fn(&NicCounters) -> u64| (pick(after) - pick(before)) as f64 / seconds;
    println!(
        "  {who}: tx {:.0} packets/s in {:.0} sends, rx {:.0} in {:.0}, retransmitted {:.0}/s, timeouts {:.1}/s, \
         out of order {:.0}/s, blocked {:.0}/s, turns {:.0}/s, sleeps {:.0}/s",
        per_second(|c| c.tx_packets),
        per_second(|c| c.tx_batches),
        per_second(|c| c.rx_packets),
        per_second(|c| c.rx_batches),
        per_second(|c| c.retransmitted_packets),
        per_second(|c| c.ack_timeouts),
        per_second(|c| c.rx_out_of_order),
        per_second(|c| c.tx_blocked),
        per_second(|c| c.busy_turns),
        per_second(|c| c.sleeps),
    );
}

fn latency(a: End, b: End, size: u32, rounds: u64) {
    let (mut a_queue, mut b_queue) = (a.program.cq(256), b.program.cq(256));
    let a_memory = a
        .program
        .adopted(u64::from(size).next_multiple_of(4096), ALL_ACCESS);
    let b_memory = b
        .program
        .adopted(u64::from(size).next_multiple_of(4096), ALL_ACCESS);
    let (mut a_qp, mut b_qp) = (a.program.qp(&a_queue, CAP), b.program.qp(&b_queue, CAP));
    a.program.connect_qp(&a_qp, b.address, b_qp.qpn);
    b.program.connect_qp(&b_qp, a.address, a_qp.qpn);
    // The last byte of a WRITE becomes visible last.
    let last = size as usize - 1;
    let arrived = |memory: &support::Memory, mark: u8| {
        // SAFETY: inside the mapped memory, which lives as long as `memory`.
        while unsafe { (memory.address as *const u8).add(last).read_volatile() } != mark {
            std::thread::yield_now();
        }
    };
    let post =
        |program: &Program, qp: &mut Qp, queue: &mut support::Queue, to: &support::Memory, mark: u8| {
            while queue.poll().is_some() {}
            let mut data = [0u8; 128];
            let length = (size as usize).min(data.len());
            data[length - 1] = mark;
            let head = SendWqe {
                flags: SEND_INLINE | SEND_SIGNALED,
                inline_bytes: length as u32,
                ..write(0, to, u64::from(size) - length as u64)
            };
            while qp.send.room() == 0 {
                std::thread::yield_now();
            }
            qp.send.push(&head, Body::Inline(&[&data[..length]]));
            program.ring(qp);
        };
    let mut samples = Vec::with_capacity(rounds as usize);
    for round in 0..rounds + 100 {
        let mark = (round % 255 + 1) as u8;
        let start = Instant::now();
        post(&a.program, &mut a_qp, &mut a_queue, &b_memory, mark);
        arrived(&b_memory, mark);
        post(&b.program, &mut b_qp, &mut b_queue, &a_memory, mark);
        arrived(&a_memory, mark);
        if round >= 100 {
            samples.push(start.elapsed().as_nanos() as f64 / 2000.0);
        }
    }
    samples.sort_by(f64::total_cmp);
    let at = |part: f64| samples[(samples.len() as f64 * part) as usize];
    println!(
        "{size} bytes, half round trip in µs: min {:.1}, median {:.1}, 99 % {:.1}",
        samples[0],
        at(0.5),
        at(0.99)
    );
}
