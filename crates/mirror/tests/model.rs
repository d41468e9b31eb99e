//! The engine, the receiver and the decision in a world with every kind of failure; and the paper's
//! algorithm, which loses data there.
//!
//! Some 20 s. `VERBATIM_VOLUME_SEEDS=FIRST..END cargo test --release -p verbatim-mirror --test model` walks further ([`verbatim_walks`]).

mod world;

use verbatim_walks::{Of, Walk};
use world::{Mended, QUIRKS, Rules, Tally, Which, story, walk};

/// Some ten seconds on two slow cores.
const SEEDS: std::ops::Range<u64> = 0..30_000;

/// Seeds within which a fault that was put back must be found.
const SEEDS_FOR_A_QUIRK: u64 = 20_000;

const OURS: Rules = Rules {
    which: Which::Ours,
    faults: true,
    quirk: None,
};

fn one(seed: u64, rules: Rules) -> Tally {
    let (wrong, tally) = walk(seed, rules);
    if wrong.is_some() {
        panic!("{}", story(seed, rules));
    }
    tally
}

#[test]
fn nothing_that_was_acknowledged_is_lost_whatever_fails() {
    let walk = Walk::new(Of::Volumes, SEEDS);
    let (walks, tally) = walk.through("two-hosts", |seed| one(seed, OURS), Tally::add);
    println!("{walks} walks: {tally:?}");
    assert!(3 * tally.faults >= walks, "too few faults: {tally:?}");
    assert!(2 * tally.commits >= 3 * walks, "too few moves: {tally:?}");
    assert!(tally.silences >= walks / 2, "too few silences: {tally:?}");
}

#[test]
fn the_algorithm_as_printed_loses_data_without_any_fault() {
    let printed = Mended {
        waits_before_read: false,
        locks: false,
    };
    // Each of its two holes alone is enough.
    let only_locks = Mended {
        locks: true,
        ..printed
    };
    let only_waits = Mended {
        waits_before_read: true,
        ..printed
    };
    for mended in [printed, only_locks, only_waits] {
        let rules = Rules {
            which: Which::Paper(mended),
            faults: false,
            quirk: None,
        };
        let seed = (0..SEEDS_FOR_A_QUIRK).find(|&seed| walk(seed, rules).0.is_some());
        let seed = seed.unwrap_or_else(|| panic!("{mended:?} is not found to lose data"));
        let (wrong, _) = walk(seed, rules);
        println!("{mended:?}: seed {seed}: {wrong:?}");
    }
}

#[test]
fn with_both_holes_stopped_it_does_not_so_that_the_world_is_no_worse_than_it_says() {
    let rules = Rules {
        which: Which::Paper(Mended {
            waits_before_read: true,
            locks: true,
        }),
        faults: false,
        quirk: None,
    };
    let mut tally = Tally::default();
    for seed in 0..SEEDS_FOR_A_QUIRK {
        tally.add(one(seed, rules));
    }
    assert!(tally.commits > SEEDS_FOR_A_QUIRK / 2, "{tally:?}");
}

#[test]
fn every_fault_that_is_put_back_is_found() {
    let mut missed = Vec::new();
    for quirk in QUIRKS {
        let rules = Rules {
            quirk: Some(quirk),
            ..OURS
        };
        // Only the end of a walk shows that no copy serves any more.
        let finds = |seed: &u64| walk(*seed, rules).0.is_some();
        match (0..SEEDS_FOR_A_QUIRK).find(finds) {
            Some(seed) => println!("{quirk:?}: seed {seed}: {:?}", walk(seed, rules).0),
            None => missed.push(quirk),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
