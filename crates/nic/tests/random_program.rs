//! A program of which every message, every descriptor and every byte of shared memory is random, beside one that works.
//!
//! `VERBATIM_HOSTILE_STEPS` says how often (a million in `make fuzz`), `VERBATIM_HOSTILE_SEED` with which numbers.

mod support;
#[path = "support/vandal.rs"]
mod vandal;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use rand::SeedableRng;
use rand::rngs::StdRng;
use support::program::{ALL_ACCESS, read, write};
use support::{Server, pair, wait_for};
use vandal::Vandal;

const PAGES: u64 = 64 * 4096;

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

#[test]
fn whatever_a_program_does_the_others_go_on() {
    let steps = number("VERBATIM_HOSTILE_STEPS", 20_000);
    let seed = number("VERBATIM_HOSTILE_SEED", 0x5eed);
    println!("{steps} steps, seed {seed}");
    let (a, b) = (Server::start([127, 7, 30, 1]), Server::start([127, 7, 30, 2]));
    let (mut left, right) = pair(&a, &b);
    let mut from = left.program.adopted(PAGES, ALL_ACCESS);
    let to = right.program.adopted(PAGES, ALL_ACCESS);
    let back = left.program.adopted(PAGES, ALL_ACCESS);
    let stop = AtomicBool::new(false);
    let totals = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let mut rounds = 0u64;
            while !stop.load(Relaxed) || rounds < 10 {
                let salt = rounds as usize;
                from.fill(|index| (index ^ (index >> 8)).wrapping_add(salt) as u8);
                let (there, again) = (from.sge(0, PAGES as u32), back.sge(0, PAGES as u32));
                left.program.post(&mut left.qp, write(rounds, &to, 0), &[there]);
                let done = left.queue.wait();
                assert_eq!((done.wr_id, done.status), (rounds, 0));
                left.program.post(&mut left.qp, read(rounds, &to, 0), &[again]);
                let done = left.queue.wait();
                assert_eq!((done.wr_id, done.status), (rounds, 0));
                assert!(
                    to.as_slice() == from.as_slice() && back.as_slice() == from.as_slice(),
                    "round {rounds}: other bytes arrived"
                );
                rounds += 1;
            }
            rounds
        });
        let vandals = [(&a, seed), (&b, !seed)].map(|(server, seed)| {
            scope.spawn(move || {
                let mut vandal = Vandal::new(server, StdRng::seed_from_u64(seed));
                for _ in 0..steps / 2 {
                    vandal.step();
                }
                vandal.done
            })
        });
        let totals = vandals.map(|vandal| vandal.join().expect("each message was answered"));
        stop.store(true, Relaxed);
        let rounds = worker.join().expect("the worker was not disturbed");
        println!("the other program: {rounds} rounds of WRITE and READ");
        totals
    });
    for (server, done) in [&a, &b].into_iter().zip(totals) {
        println!("{done:?}\n{:?}", server.stats.read());
        assert!(
            done.accepted > 0 && done.refused > 0,
            "some of it must make sense"
        );
        server.wait_for("the end of the hostile contexts", |counters| {
            (counters.contexts, counters.qps) == (1, 1)
        });
        assert!(
            server.stats.read().bad_indices > 0,
            "the check of indices is reached"
        );
    }
    drop((left, right));
    for server in [&a, &b] {
        wait_for("an empty RNIC", || (server.stats.read().mrs == 0).then_some(()));
    }
}
