//! The engine in a world in which servers die, hang, come back and leave, and disks are full.
//!
//! `VERBATIM_LEASE_SEEDS=FIRST..END cargo test --release -p verbatim-lease --test model` walks further.

mod world;

use verbatim_lease::Quirk;
use world::{BACKUPS, Backup, Tally, story, walk};

/// A few seconds on two slow cores.
const SEEDS: std::ops::Range<u64> = 0..10_000;

/// Within how many seeds a rule that is out of force must be noticed.
const SEEDS_FOR_A_QUIRK: u64 = 10_000;

fn seeds() -> std::ops::Range<u64> {
    let Ok(text) = std::env::var("VERBATIM_LEASE_SEEDS") else {
        return SEEDS;
    };
    let (first, end) = text.split_once("..").expect("FIRST..END");
    first.parse().expect("a number")..end.parse().expect("a number")
}

fn all(backup: Backup) -> Tally {
    let mut all = Tally::default();
    for seed in seeds() {
        let (wrong, tally) = walk(seed, backup, None);
        if wrong.is_some() {
            panic!("{}", story(seed, backup, None));
        }
        all.requests += tally.requests;
        all.refused += tally.refused;
        all.deaths += tally.deaths;
        all.returns += tally.returns;
        all.refills += tally.refills;
        all.drained += tally.drained;
        all.moves += tally.moves;
    }
    println!("{backup:?}: {all:?}");
    all
}

#[test]
fn with_a_file_nothing_is_lost_stale_or_refused_whatever_the_server_does() {
    let tally = all(Backup::File);
    let walks = seeds().end - seeds().start;
    assert_eq!(tally.refused, 0);
    assert!(
        tally.deaths > walks && tally.refills > walks && tally.drained > walks / 4,
        "{tally:?}"
    );
}

#[test]
fn with_a_full_file_nothing_is_stale() {
    let tally = all(Backup::FullFile);
    assert!(tally.refused > 0, "{tally:?}");
}

#[test]
fn with_two_servers_nothing_is_lost_while_one_is_there() {
    let tally = all(Backup::Server);
    assert!(tally.refills > 0 && tally.drained > 0, "{tally:?}");
}

#[test]
fn a_disk_that_goes_from_host_to_host_loses_nothing_and_is_never_stale() {
    for backup in [Backup::MovedFile, Backup::MovedServer] {
        let tally = all(backup);
        assert!(tally.moves > tally.deaths / 8 && tally.refills > 0, "{tally:?}");
    }
}

#[test]
fn without_anything_behind_it_what_a_server_takes_along_is_an_error_and_never_something_else() {
    let tally = all(Backup::None);
    assert!(
        tally.refused > 0 && tally.refused < tally.requests / 2,
        "{tally:?}"
    );
}

#[test]
fn every_rule_is_needed() {
    let quirks = [
        Quirk::NoTurns,
        Quirk::NoOrder,
        Quirk::LateCounts,
        Quirk::NoPatience,
        Quirk::TrustsNewMemory,
        Quirk::TrustsUnanswered,
        Quirk::LeavesBehind,
    ];
    let mut missed = Vec::new();
    for quirk in quirks {
        let found = (0..SEEDS_FOR_A_QUIRK).find_map(|seed| {
            let finds = |backup: &&Backup| {
                std::panic::catch_unwind(|| walk(seed, **backup, Some(quirk)).0.is_some()).unwrap_or(true)
            };
            BACKUPS.iter().find(finds).map(|backup| (seed, *backup))
        });
        match found {
            Some((seed, backup)) => println!("{quirk:?}: {backup:?}, seed {seed}"),
            None => missed.push(quirk),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}
