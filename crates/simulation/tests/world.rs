//! The simulator's own proof, and what it proves.

use std::path::Path;

use strum::IntoEnumIterator;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::seeds::{self, End};
use verbatim_simulation::world::{Quirk, Quirks, World};
use verbatim_simulation::{check::Violation, coverage};

/// Within how many seeds each old fault must be found.
const SEEDS_FOR_A_QUIRK: u64 = 10_000;

/// A minute of walks on two slow cores. `make sim` walks further.
const SEEDS: u64 = 500_000;

#[test]
fn every_old_fault_is_found_when_it_is_put_back() {
    for quirk in Quirk::iter() {
        let (_, story) = seeds::run::<World>(0..SEEDS_FOR_A_QUIRK, Quirks::only(quirk));
        let story = story.unwrap_or_else(|| panic!("{quirk:?} is not found in {SEEDS_FOR_A_QUIRK} seeds"));
        let never_ends = matches!(quirk, Quirk::VolatileJournal | Quirk::LostListeners);
        match story.end {
            End::Never => assert!(never_ends, "{quirk:?} breaks something: {story}"),
            End::Violation(violation) => assert!(!never_ends, "{quirk:?}: {violation:?}"),
            End::Good { .. } => panic!("{quirk:?}: the shrunk walk ends well"),
        }
    }
}

#[test]
fn every_old_fault_is_found_exhaustively() {
    for quirk in Quirk::iter() {
        // A torn record shows only to an agent that reads it.
        let faults = if quirk == Quirk::Glue { 2 } else { 1 };
        let report = explore::explore(World::new(), Quirks::only(quirk), faults);
        let is_found = !matches!(report.found, Found::Safe);
        assert!(is_found, "{quirk:?} is not found among {} worlds", report.worlds);
    }
}

#[test]
fn nothing_that_must_not_happen_happens_with_one_fault() {
    // `make sim` takes more.
    let report = explore::explore(World::new(), Quirks::NONE, 1);
    if let Found::Violation(_, way) | Found::NeverEnds(way, _) = &report.found {
        let way: Vec<_> = way.iter().map(ToString::to_string).collect();
        panic!("{:?}:\n{}", report.found, way.join("\n"));
    }
    assert!(report.worlds > 100_000, "only {} worlds", report.worlds);
}

#[test]
fn every_walk_ends_well_and_walks_are_worth_their_name() {
    let (tally, story) = seeds::run::<World>(0..SEEDS, Quirks::NONE);
    if let Some(story) = story {
        panic!("{story}");
    }
    assert!(
        tally.faults >= 2 * tally.walks,
        "fewer than two faults on average: {tally:?}"
    );
    assert!(
        3 * tally.moved >= tally.walks,
        "too few walks move the instance: {tally:?}"
    );
}

/// What has failed once must not fail again.
#[test]
fn seeds_that_have_failed_end_well() {
    let text = include_str!("seeds.txt");
    let seeds: Vec<u64> = text
        .lines()
        .filter_map(|line| line.split_whitespace().next()?.parse().ok())
        .collect();
    assert!(!seeds.is_empty());
    for seed in seeds {
        let (end, _) = seeds::walk::<World>(seed, Quirks::NONE, &seeds::faults::<World>(seed), |_| {});
        assert!(matches!(end, End::Good { .. }), "seed {seed}: {end:?}");
    }
}

/// The cells that are met are written out; the others cannot happen in this world. A cell more or less is to be read in a review.
#[test]
fn the_table_of_states_and_events_is_as_it_was() {
    // Each test has a thread of its own, and so its own table.
    explore::explore(World::new(), Quirks::NONE, 1);
    seeds::run::<World>(0..100_000, Quirks::NONE);
    let table = coverage::tables(&coverage::met());
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/coverage.txt");
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    assert_eq!(table, std::fs::read_to_string(&path).unwrap_or_default());
}

#[test]
fn a_shrunk_story_is_short_and_says_what_went_wrong() {
    let (_, story) = seeds::run::<World>(0..SEEDS_FOR_A_QUIRK, Quirks::only(Quirk::PtraceOnly));
    let story = story.unwrap();
    assert_eq!(story.end, End::Violation(Violation::TwoCopies));
    let faults = story.steps.iter().filter(|step| step.is_fault());
    assert_eq!(faults.count(), 1, "{story}");
    assert!(story.to_string().contains("! source: CRIU is killed"), "{story}");
}
