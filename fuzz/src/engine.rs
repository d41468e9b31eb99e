//! The short runs: mutation without coverage, the same inputs every time.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::Target;

/// Inputs do not grow beyond this.
const MAX_BYTES: usize = 4096;

/// Numbers at which parsers go wrong.
const INTERESTING: [u64; 12] = [
    0,
    1,
    0x7f,
    0x80,
    0xff,
    0x7fff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    0x7fff_ffff_ffff_ffff,
    u64::MAX,
];

/// Runs regressions and seeds as they are, then `executions` inputs made from them, and says how many that were.
///
/// # Panics
/// If the target does; the input is printed before.
pub fn run(target: &Target, seed: u64, executions: u64) -> u64 {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut base = (target.seeds)();
    base.extend(target.regressions().into_iter().map(|(_, content)| content));
    base.push(Vec::new());
    for input in &base {
        execute(target, input);
    }
    for _ in 0..executions {
        let input = mutate(&base, &mut rng);
        execute(target, &input);
    }
    base.len() as u64 + executions
}

fn execute(target: &Target, input: &[u8]) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (target.run)(input))) {
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        eprintln!("target {}, input of {} bytes: {hex}", target.name, input.len());
        resume_unwind(panic);
    }
}

/// One of the base inputs after some changes, now and then nothing but noise.
fn mutate(base: &[Vec<u8>], rng: &mut StdRng) -> Vec<u8> {
    if rng.random_ratio(1, 16) {
        let length = rng.random_range(0..=256);
        return (0..length).map(|_| rng.random()).collect();
    }
    let mut input = base.choose(rng).expect("at least the empty one").clone();
    for _ in 0..1 << rng.random_range(0..5) {
        change(&mut input, base, rng);
    }
    input.truncate(MAX_BYTES);
    input
}

fn change(input: &mut Vec<u8>, base: &[Vec<u8>], rng: &mut StdRng) {
    let at = rng.random_range(0..=input.len());
    let some = rng.random_range(1..=16);
    let end = (at + some).min(input.len());
    match rng.random_range(0..8) {
        0 => input.truncate(at),
        1 => drop(input.drain(at..end)),
        2 => {
            let noise: Vec<u8> = (0..some).map(|_| rng.random()).collect();
            drop(input.splice(at..at, noise));
        }
        3 => {
            let copy = input[at..end].to_vec();
            let to = rng.random_range(0..=input.len());
            drop(input.splice(to..to, copy));
        }
        4 => {
            let other = base.choose(rng).expect("at least the empty one");
            let from = rng.random_range(0..=other.len());
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        5 => {
            let value = INTERESTING
                .choose(rng)
                .expect("it is not empty")
                .wrapping_add(rng.random_range(0..3));
            let bytes = match rng.random() {
                true => value.to_le_bytes(),
                false => value.rotate_right(8).to_be_bytes(),
            };
            let width = [1, 2, 4, 8][rng.random_range(0..4)].min(input.len() - at);
            input[at..at + width].copy_from_slice(&bytes[..width]);
        }
        _ if at < input.len() => match rng.random() {
            true => input[at] ^= 1 << rng.random_range(0..8),
            false => input[at] = rng.random(),
        },
        _ => input.push(rng.random()),
    }
}
