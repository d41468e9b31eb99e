//! The engine under a client with a few requests: all orders of requests, ends of I/O, refills, recoveries and
//! moves to another host, with all placements of up to two faults.
//!
//! `VERBATIM_LEASE_FAULTS=3` has three faults, and a client that makes any three requests: some nine minutes of one
//! core, and up to 2 GB.

mod worlds;

use std::panic::catch_unwind;

use verbatim_lease::{Op, Quirk};
use worlds::{BACKUPS, Backup, Explored, OUTSIDE, Outside, QUIRKS, Request, Rules, explore};

const READ: Op = Op::Read;
const WRITE: Op = Op::Write;
const ZERO: Op = Op::Zero;

/// A client that may make any of these.
const ANY: &[Request] = &[
    (WRITE, 0, 1),
    (WRITE, 0, 2),
    (READ, 0, 2),
    (ZERO, 0, 1),
    (WRITE, 1, 1),
];

type Script = &'static [&'static [Request]];

/// What the client does. Each request may begin before those before it have ended.
const SCRIPTS: [(&str, Script); 5] = [
    ("any two", &[ANY, ANY]),
    (
        "two writes",
        &[&[(WRITE, 0, 1)], &[(WRITE, 0, 1)], &[(READ, 0, 1)]],
    ),
    ("a part", &[&[(WRITE, 0, 2)], &[(WRITE, 1, 1)], &[(READ, 0, 2)]]),
    (
        "zeros between",
        &[
            &[(WRITE, 0, 1)],
            &[(ZERO, 0, 1)],
            &[(WRITE, 0, 1)],
            &[(READ, 0, 1)],
        ],
    ),
    (
        "zeros behind",
        &[
            &[(WRITE, 0, 2)],
            &[(READ, 0, 2)],
            &[(ZERO, 0, 2)],
            &[(WRITE, 0, 1)],
        ],
    ),
];

/// Minutes.
const LONG: (&str, Script) = ("any three", &[ANY, ANY, ANY]);

fn faults() -> u8 {
    match std::env::var("VERBATIM_LEASE_FAULTS") {
        Ok(text) => text.parse().expect("a number"),
        Err(_) => 2,
    }
}

const fn rules(backup: Backup, script: Script, faults: u8) -> Rules<'static> {
    Rules {
        backup,
        script,
        faults,
        moves: 1,
        quirk: None,
        outside: None,
    }
}

fn goes_through(backup: Backup) {
    let faults = faults();
    let long = (faults > 2).then_some(LONG);
    let mut all = Explored::default();
    for (name, script) in SCRIPTS.into_iter().chain(long) {
        match explore(&rules(backup, script, faults)) {
            Ok(explored) => all.add(explored),
            Err(wrong) => panic!("{backup:?}, {name}: {wrong}"),
        }
    }
    println!("{backup:?}, up to {faults} faults: {all}");
}

#[test]
fn in_all_worlds_with_a_file_nothing_is_lost_stale_or_refused() {
    goes_through(Backup::File);
}

#[test]
fn in_all_worlds_with_a_full_file_nothing_is_stale() {
    goes_through(Backup::FullFile);
}

#[test]
fn in_all_worlds_with_a_file_whose_disk_fails_nothing_is_stale() {
    goes_through(Backup::BadFile);
}

#[test]
fn in_all_worlds_with_two_servers_nothing_is_lost_while_one_is_there() {
    goes_through(Backup::Server);
}

#[test]
fn in_all_worlds_without_a_second_copy_nothing_is_stale() {
    goes_through(Backup::None);
}

#[test]
fn in_all_worlds_a_disk_with_a_file_goes_from_host_to_host() {
    goes_through(Backup::MovedFile);
}

#[test]
fn in_all_worlds_a_disk_with_two_servers_goes_from_host_to_host() {
    goes_through(Backup::MovedServer);
}

/// The world, with the fewest faults, that finds a rule out of force.
fn finds(quirk: Option<Quirk>, outside: Option<Outside>) -> Option<String> {
    (0..=2).find_map(|faults| {
        SCRIPTS.into_iter().find_map(|(name, script)| {
            BACKUPS.into_iter().find_map(|backup| {
                let explored = catch_unwind(|| {
                    explore(&Rules {
                        quirk,
                        outside,
                        ..rules(backup, script, faults)
                    })
                });
                let found = explored.unwrap_or_else(|_| Err("a panic".to_owned()));
                let wrong = found.err()?;
                let wrong = wrong.lines().next().unwrap_or_default();
                Some(format!("{faults} faults, {backup:?}, {name}: {wrong}"))
            })
        })
    })
}

#[test]
fn every_rule_out_of_force_is_found() {
    let quirks = QUIRKS.map(|quirk| (Some(quirk), None));
    let outside = OUTSIDE.map(|outside| (None, Some(outside)));
    let mut missed = Vec::new();
    for (quirk, outside) in quirks.into_iter().chain(outside) {
        match finds(quirk, outside) {
            Some(found) => println!("{quirk:?} {outside:?}: {found}"),
            None => missed.push((quirk, outside)),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
