//! Three hosts in a world in which disks, folders and operators fail: all orders of up to two faults, and
//! many with more.
//!
//! `VERBATIM_VOLUME_FAULTS=3` explores all orders of three: some four minutes of one core, and more than eight for
//! sessions alone. `VERBATIM_VOLUME_SEEDS=FIRST..END` walks further, and `VERBATIM_WALKED=walked.txt` leaves out
//! seeds that were walked with these sources ([`verbatim_walks`]).

mod worlds;

use verbatim_walks::{Of, Walk};
use worlds::{QUIRKS, Quirk, Rules, explore, stroll};

const SEEDS: std::ops::Range<u64> = 0..8_000;
const NO_END: usize = usize::MAX;
/// Limits within which a fault that was put back must be found, in worlds and in walks.
const MOST: usize = 400_000;
const WALKS: u64 = 60_000;

const NONE: Rules = Rules {
    hosts: 2,
    faults: 2,
    moves: 0,
    writes: 0,
    grows: false,
    sessions: false,
    disks: false,
    folders: false,
    media: false,
    losses: false,
    names: false,
    operators: false,
    quirk: None,
};

/// The copy that may serve: folders, deletions, operators.
const DECISIONS: Rules = Rules {
    hosts: 3,
    moves: 3,
    folders: true,
    operators: true,
    ..NONE
};

/// Trust in a copy: flushes that fail, power, wrong data.
const DISKS: Rules = Rules {
    moves: 2,
    writes: 2,
    disks: true,
    operators: true,
    ..NONE
};

/// Volumes that move with their instances.
const SESSIONS: Rules = Rules {
    moves: 2,
    writes: 1,
    sessions: true,
    folders: true,
    operators: true,
    ..NONE
};

/// Volumes that grow.
const SIZES: Rules = Rules {
    moves: 1,
    writes: 2,
    grows: true,
    disks: true,
    folders: true,
    ..NONE
};

/// Data disks that are full, read-only or unreadable.
const MEDIA: Rules = Rules {
    moves: 2,
    writes: 2,
    media: true,
    operators: true,
    ..NONE
};

/// Other volumes of the same name.
const NAMES: Rules = Rules {
    hosts: 3,
    moves: 2,
    names: true,
    operators: true,
    ..NONE
};

/// Data that are gone for good.
const LOSSES: Rules = Rules {
    hosts: 3,
    moves: 2,
    writes: 1,
    losses: true,
    operators: true,
    ..NONE
};

const ALL: [(&str, Rules); 7] = [
    ("decisions", DECISIONS),
    ("disks", DISKS),
    ("sessions", SESSIONS),
    ("sizes", SIZES),
    ("media", MEDIA),
    ("names", NAMES),
    ("losses", LOSSES),
];

/// Everything at once, for walks.
const LIFE: Rules = Rules {
    hosts: 3,
    faults: 6,
    moves: 6,
    writes: 8,
    grows: true,
    sessions: false,
    disks: true,
    folders: true,
    media: true,
    losses: true,
    names: true,
    operators: true,
    quirk: None,
};

fn faults() -> u8 {
    match std::env::var("VERBATIM_VOLUME_FAULTS") {
        Ok(text) => text.parse().expect("a number"),
        Err(_) => 2,
    }
}

fn goes_through(name: &str, rules: Rules) {
    let rules = Rules {
        faults: faults(),
        ..rules
    };
    match explore(&rules, NO_END) {
        Ok(worlds) => println!("{name}: {worlds} worlds"),
        Err(wrong) => panic!("{name}: {wrong}"),
    }
}

#[test]
fn in_all_worlds_one_copy_may_serve_and_there_is_a_way_out() {
    goes_through(
        "decisions",
        Rules {
            moves: 2,
            ..DECISIONS
        },
    );
}

/// With one fault less, since there are more orders.
#[test]
fn in_all_worlds_a_volume_may_come_back_to_where_it_was() {
    let faults = faults() - 1;
    match explore(&Rules { faults, ..DECISIONS }, NO_END) {
        Ok(worlds) => println!("three moves: {worlds} worlds"),
        Err(wrong) => panic!("three moves: {wrong}"),
    }
}

#[test]
fn in_all_worlds_what_was_flushed_is_on_the_disk() {
    goes_through("disks", DISKS);
}

#[test]
fn in_all_worlds_a_session_is_told_to_both_copies() {
    goes_through("sessions", SESSIONS);
}

#[test]
fn in_all_worlds_what_was_written_is_within_reach() {
    goes_through("sizes", SIZES);
}

#[test]
fn in_all_worlds_a_disk_that_takes_or_gives_no_data_loses_none() {
    goes_through("media", MEDIA);
}

#[test]
fn in_all_worlds_another_volume_of_the_name_hides_nothing() {
    goes_through("names", NAMES);
}

#[test]
fn in_all_worlds_a_copy_whose_data_are_gone_is_in_nobodys_way() {
    goes_through("losses", LOSSES);
}

#[test]
fn walks_through_everything_at_once() {
    let everything = |seed| {
        let walk = |rules: Rules| stroll(seed, &rules, 120).unwrap_or_else(|wrong| panic!("{wrong}")) as u64;
        walk(LIFE)
            + walk(Rules {
                sessions: true,
                ..LIFE
            })
    };
    let (walks, steps) =
        Walk::new(Of::Volumes, SEEDS).through("three-hosts", everything, |all, one| *all += one);
    println!("{walks} seeds: {steps} steps");
    assert!(steps >= 20 * walks, "walks end early: {steps} steps");
}

/// The world or walk that finds a fault that was put back.
fn finds(quirk: Quirk) -> Option<String> {
    let name = |name: &str, wrong: String| {
        let what = wrong.lines().next().unwrap_or_default().to_owned();
        format!("{name}: {what}")
    };
    let walks = |seeds: std::ops::Range<u64>| {
        seeds.into_iter().find_map(|seed| {
            let rules = Rules {
                quirk: Some(quirk),
                sessions: seed % 2 == 1,
                ..LIFE
            };
            stroll(seed, &rules, 120).err().map(|wrong| name("walks", wrong))
        })
    };
    let worlds = || {
        ALL.iter().find_map(|&(which, rules)| {
            let moves = rules.moves.min(2);
            let quirk = Some(quirk);
            let found = explore(
                &Rules {
                    quirk,
                    moves,
                    ..rules
                },
                MOST,
            );
            found.err().map(|wrong| name(which, wrong))
        })
    };
    walks(0..WALKS / 5)
        .or_else(worlds)
        .or_else(|| walks(WALKS / 5..WALKS))
}

#[test]
fn every_fault_that_is_put_back_is_found() {
    let mut missed = Vec::new();
    for quirk in QUIRKS {
        match finds(quirk) {
            Some(found) => println!("{quirk:?}: {found}"),
            None => missed.push(quirk),
        }
    }
    assert!(missed.is_empty(), "not found: {missed:?}");
}
