//! The same for the world in which memory comes to an instance that runs.

use strum::IntoEnumIterator;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::fill::{Quirk, Quirks, Violation, World};
use verbatim_simulation::seeds::{self, End};

/// Within how many seeds each fault must be found.
const SEEDS_FOR_A_QUIRK: u64 = 10_000;

/// A few seconds of walks. `make sim` walks further.
const SEEDS: u64 = 200_000;

#[test]
fn every_fault_is_found_when_it_is_put_back() {
    for quirk in Quirk::iter() {
        let (_, story) = seeds::run::<World>(0..SEEDS_FOR_A_QUIRK, Quirks::only(quirk));
        let story = story.unwrap_or_else(|| panic!("{quirk:?} is not found in {SEEDS_FOR_A_QUIRK} seeds"));
        let expected = match quirk {
            Quirk::SilentIsLost => Violation::EndedForNothing,
            Quirk::GoneIsFilled | Quirk::ForgetsFill | Quirk::OnlyTheCache => Violation::TakenForWhole,
            Quirk::EndsWhatItFinds | Quirk::ClearsWithTheSession => Violation::RemovedTooEarly,
            Quirk::MovesOn => Violation::MovesWithoutMemory,
        };
        // What no fill looks after is not cleared away either, which a walk may meet first.
        let may_stay = matches!(quirk, Quirk::ForgetsFill | Quirk::OnlyTheCache);
        let is_expected = story.end == End::Violation(expected) || may_stay && story.end == End::Never;
        assert!(is_expected, "{quirk:?}: {story}");
        // Exhaustively, with as few faults as it takes.
        let violation = |faults| match explore::explore(World::new(), Quirks::only(quirk), faults).found {
            Found::Violation(violation, _) => Some(violation),
            Found::Safe | Found::NeverEnds(..) => None,
        };
        assert_eq!((0..4).find_map(violation), Some(expected), "{quirk:?}");
    }
}

#[test]
fn no_instance_goes_on_without_its_memory_and_every_fill_can_end() {
    // With more faults no world is reached that was not reached with fewer.
    let report = explore::explore(World::new(), Quirks::NONE, 12);
    if let Found::Violation(_, way) | Found::NeverEnds(way, _) = &report.found {
        let way: Vec<_> = way.iter().map(ToString::to_string).collect();
        panic!("{:?}:\n{}", report.found, way.join("\n"));
    }
    assert!(report.worlds > 1_000, "only {} worlds", report.worlds);
}

#[test]
fn every_walk_ends_and_leaves_nothing() {
    let (tally, story) = seeds::run::<World>(0..SEEDS, Quirks::NONE);
    if let Some(story) = story {
        panic!("{story}");
    }
    assert!(
        tally.faults >= tally.walks,
        "fewer than a fault on average: {tally:?}"
    );
    assert!(
        2 * tally.moved >= tally.walks,
        "too few walks let the tasks run: {tally:?}"
    );
}
