//! Goodput against random loss and reordering, and many senders against one receiver, in simulated time.
//!
//! `cargo run --release -p verbatim-roce --example loss` prints tables. Two queue pairs in memory are joined by a link of
//! 10 Gbit/s with a round trip of 50 µs and a queue of 512 KiB; each packet is lost with the given probability, in both
//! directions. The share is that of the goodput without loss. Packets out of order are up to ten times as long under way.

#[path = "../tests/pair/mod.rs"]
mod pair;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use pair::{Bottleneck, Faults, Pair, SEND, Setup, read, sge, write};
use verbatim_roce::{Mtu, Operation, QpConfig, QpState};

const RATE: u64 = 10_000_000_000;
const ONE_WAY: Duration = Duration::from_micros(25);
const QUEUE_BYTES: u64 = 512 << 10;
const MESSAGE_BYTES: u32 = 64 << 10;
const SIMULATED: Duration = Duration::from_millis(200);
const HOLD_BYTES: u32 = 512 << 10;
/// Messages posted ahead.
const DEPTH: usize = 16;

struct Run {
    pair: Pair,
    operation: Operation,
    posted: u64,
}

impl Run {
    fn new(
        setup: Setup,
        operation: Operation,
        to_a: &Rc<RefCell<Bottleneck>>,
        to_b: &Rc<RefCell<Bottleneck>>,
    ) -> Run {
        let mut pair = Pair::new(setup);
        pair.a.host.register(1, 0, vec![1; MESSAGE_BYTES as usize]);
        pair.b.host.register(2, 0, vec![2; MESSAGE_BYTES as usize]);
        pair.link.latency = ONE_WAY;
        pair.link.bottlenecks = [Some(to_a.clone()), Some(to_b.clone())];
        Run {
            pair,
            operation,
            posted: 0,
        }
    }

    /// Keeps the rings filled and sends.
    fn work(&mut self) {
        let done = self.pair.a.host.completions.len() as u64;
        while self.posted < done + DEPTH as u64 {
            let sges = [sge(1, 0, MESSAGE_BYTES)];
            self.pair.a.host.post(self.posted, self.operation, &sges);
            self.pair
                .b
                .host
                .post_receive(self.posted, &[sge(2, 0, MESSAGE_BYTES)]);
            self.posted += 1;
        }
        for side in [pair::Side::A, pair::Side::B] {
            while self.pair.transmit(side) {}
        }
    }

    /// Message bytes completed.
    fn bytes(&self) -> u64 {
        self.pair.a.host.completions.len() as u64 * u64::from(MESSAGE_BYTES)
    }
}

fn setup(mtu: Mtu, seed: u64, hold_bytes: u32) -> Setup {
    Setup {
        mtu,
        seed,
        timeout: 14,
        retry_cnt: 7,
        config: QpConfig {
            window_bytes: 256 << 10,
            hold_bytes,
            min_ack_timeout: Duration::from_millis(50),
            ..QpConfig::default()
        },
        ..Setup::default()
    }
}

/// Runs all side by side until the simulated time is over; gives Gbit/s.
fn simulate(runs: &mut [Run]) -> f64 {
    let start = runs[0].pair.now;
    let end = start + SIMULATED;
    for run in runs.iter_mut() {
        run.work();
    }
    let next = |run: &Run| run.pair.next_event();
    while let Some((time, index)) = (0..runs.len())
        .filter_map(|i| next(&runs[i]).map(|time| (time, i)))
        .min()
    {
        if time > end {
            break;
        }
        runs[index].pair.go_to(time);
        runs[index].work();
    }
    assert!(runs.iter().all(|run| run.pair.a.qp.state() == QpState::Rts));
    runs.iter().map(Run::bytes).sum::<u64>() as f64 * 8.0 / SIMULATED.as_secs_f64() / 1e9
}

fn wire() -> Rc<RefCell<Bottleneck>> {
    Bottleneck::new(RATE, QUEUE_BYTES)
}

fn random_loss(hold_bytes: u32) {
    println!(
        "| operation | MTU | loss % | Gbit/s | share | retransmitted | NAK | implied NAK | early | timeouts |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    for (name, operation) in [("WRITE", write(0, 2)), ("SEND", SEND), ("READ", read(0, 2))] {
        for mtu in [Mtu::Mtu1024, Mtu::Mtu4096] {
            let mut without = None;
            for loss_ppm in [0, 1_000, 10_000, 50_000] {
                let mut run = Run::new(setup(mtu, 7, hold_bytes), operation, &wire(), &wire());
                run.pair.link.loss_ppm = loss_ppm;
                let runs = std::slice::from_mut(&mut run);
                let goodput = simulate(runs);
                let share = goodput / *without.get_or_insert(goodput);
                let counters = runs[0].pair.a.qp.counters();
                println!(
                    "| {name} | {} | {} | {goodput:.2} | {share:.2} | {} | {} | {} | {} | {} |",
                    mtu.bytes(),
                    f64::from(loss_ppm) / 10_000.0,
                    counters.retransmitted_requests,
                    counters.packet_seq_err,
                    counters.implied_nak_seq_err,
                    counters.early_retransmits,
                    counters.local_ack_timeout_err,
                );
            }
        }
    }
}

fn reordering() {
    println!();
    println!(
        "| operation | out of order % | Gbit/s | share | retransmitted | NAK | implied NAK | early | timeouts |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    for (name, operation) in [("WRITE", write(0, 2)), ("SEND", SEND), ("READ", read(0, 2))] {
        let mut without = None;
        for reordering in [0, 1, 5] {
            let faults = Faults {
                reordering,
                ..Faults::default()
            };
            let setup = Setup {
                faults,
                ..setup(Mtu::Mtu4096, 7, HOLD_BYTES)
            };
            let mut run = Run::new(setup, operation, &wire(), &wire());
            let runs = std::slice::from_mut(&mut run);
            let goodput = simulate(runs);
            let share = goodput / *without.get_or_insert(goodput);
            let counters = runs[0].pair.a.qp.counters();
            println!(
                "| {name} | {reordering} | {goodput:.2} | {share:.2} | {} | {} | {} | {} | {} |",
                counters.retransmitted_requests,
                counters.packet_seq_err,
                counters.implied_nak_seq_err,
                counters.early_retransmits,
                counters.local_ack_timeout_err,
            );
        }
    }
}

fn many_to_one() {
    println!();
    println!(
        "| senders of WRITE | Gbit/s together | fewest of one | most of one | lost at the queue | early | timeouts |"
    );
    println!("|---|---|---|---|---|---|---|");
    for senders in [1, 4, 16, 64] {
        let (to_a, to_b) = (wire(), wire());
        let mut runs: Vec<Run> = (0..senders)
            .map(|i| Run::new(setup(Mtu::Mtu4096, i, HOLD_BYTES), write(0, 2), &to_a, &to_b))
            .collect();
        let goodput = simulate(&mut runs);
        let shares = runs
            .iter()
            .map(|run| run.bytes() as f64 * 8.0 / SIMULATED.as_secs_f64() / 1e9);
        let (least, most) = (
            shares.clone().fold(f64::MAX, f64::min),
            shares.fold(0.0, f64::max),
        );
        let counted = |of: fn(&verbatim_roce::Counters) -> u64| -> u64 {
            runs.iter().map(|run| of(run.pair.a.qp.counters())).sum()
        };
        println!(
            "| {senders} | {goodput:.2} | {least:.2} | {most:.2} | {} | {} | {} |",
            to_b.borrow().dropped,
            counted(|counters| counters.early_retransmits),
            counted(|counters| counters.local_ack_timeout_err),
        );
    }
}

fn main() {
    random_loss(HOLD_BYTES);
    println!();
    println!(
        "The same with queue pairs that drop what comes before a packet that is missing, as the standard has it:"
    );
    println!();
    random_loss(0);
    reordering();
    many_to_one();
}
