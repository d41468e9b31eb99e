//! The engine in a world in which servers die, hang, come back and leave, and disks become full.
//!
//! `VERBATIM_LEASE_SEEDS=FIRST..END cargo test --release -p verbatim-lease --test model` walks further ([`verbatim_walks`]).

mod world;

use verbatim_lease::Quirk;
use verbatim_walks::{Of, Walk};
use world::{BACKUPS, Backup, OUTSIDE, Outside, QUIRKS, Rules, Tally, story, walk};

/// Takes a few seconds on two slow cores.
const SEEDS: std::ops::Range<u64> = 0..10_000;

/// Limit of seeds within which a disabled rule must be detected.
const SEEDS_FOR_A_QUIRK: u64 = 10_000;

/// Walks all seeds. Returns the number of seeds, and the events.
fn all(backup: Backup) -> (u64, Tally) {
    let rules = Rules {
        backup,
        quirk: None,
        outside: None,
    };
    let one = |seed| {
        let (wrong, tally) = walk(seed, rules);
        if wrong.is_some() {
            panic!("{}", story(seed, rules));
        }
        tally
    };
    let name = format!("{backup:?}");
    let (walks, tally) = Walk::new(Of::Leases, SEEDS).through(&name, one, Tally::add);
    println!("{name}: {walks} walks: {tally:?}");
    (walks, tally)
}

#[test]
fn with_a_file_nothing_is_lost_stale_or_refused_whatever_the_server_does() {
    let (walks, tally) = all(Backup::File);
    assert_eq!(tally.refused, 0);
    assert!(
        tally.deaths >= walks && tally.refills >= walks && tally.drained >= walks / 4,
        "{tally:?}"
    );
}

#[test]
fn with_a_full_file_nothing_is_stale() {
    let (walks, tally) = all(Backup::FullFile);
    assert!(tally.refused >= walks / 10, "{tally:?}");
}

#[test]
fn with_a_file_whose_disk_fails_nothing_is_stale_and_a_server_that_is_there_takes_all() {
    let (walks, tally) = all(Backup::BadFile);
    assert!(tally.errors >= walks && tally.refused >= walks / 10, "{tally:?}");
}

#[test]
fn with_two_servers_nothing_is_lost_while_one_is_there() {
    let (walks, tally) = all(Backup::Server);
    assert!(
        tally.refills >= walks / 10 && tally.drained >= walks / 10,
        "{tally:?}"
    );
}

#[test]
fn a_disk_that_goes_from_host_to_host_loses_nothing_and_is_never_stale() {
    for backup in [Backup::MovedFile, Backup::MovedServer] {
        let (walks, tally) = all(backup);
        assert!(
            tally.moves >= tally.deaths / 10 && tally.refills >= walks / 10,
            "{tally:?}"
        );
    }
}

#[test]
fn without_anything_behind_it_what_a_server_takes_along_is_an_error_and_never_something_else() {
    let (walks, tally) = all(Backup::None);
    assert!(
        tally.refused >= walks / 10 && tally.refused <= tally.requests / 2,
        "{tally:?}"
    );
}

#[test]
fn every_rule_is_needed() {
    missed(QUIRKS.map(|quirk| (Some(quirk), None)));
}

#[test]
fn what_the_engine_takes_for_granted_is_needed() {
    missed(OUTSIDE.map(|outside| (None, Some(outside))));
}

/// Fails unless each fault is detected in one of the worlds.
fn missed<const N: usize>(faults: [(Option<Quirk>, Option<Outside>); N]) {
    let mut missed = Vec::new();
    for (quirk, outside) in faults {
        let found = (0..SEEDS_FOR_A_QUIRK).find_map(|seed| {
            BACKUPS.into_iter().find_map(|backup| {
                let rules = Rules {
                    backup,
                    quirk,
                    outside,
                };
                let walked = std::panic::catch_unwind(|| walk(seed, rules).0);
                let wrong = walked.unwrap_or_else(|_| Some("a panic".to_owned()));
                wrong.map(|wrong| format!("{backup:?}, seed {seed}: {wrong}"))
            })
        });
        match found {
            Some(found) => println!("{quirk:?} {outside:?}: {found}"),
            None => missed.push((quirk, outside)),
        }
    }
    assert!(missed.is_empty(), "not noticed: {missed:?}");
}
