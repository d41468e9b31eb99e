//! The same for the world in which moves meet.

use strum::IntoEnumIterator;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::seeds::{self, End};
use verbatim_simulation::turns::{self, Quirk, Quirks, Violation, World};

/// Within how many seeds each fault must be found.
const SEEDS_FOR_A_QUIRK: u64 = 10_000;

/// A few seconds of walks. `make sim` walks further.
const SEEDS: u64 = 30_000;

#[test]
fn every_fault_is_found_when_it_is_put_back() {
    for quirk in Quirk::iter() {
        let (_, story) = seeds::run::<World>(0..SEEDS_FOR_A_QUIRK, Quirks::only(quirk));
        let story = story.unwrap_or_else(|| panic!("{quirk:?} is not found in {SEEDS_FOR_A_QUIRK} seeds"));
        let expected = match quirk {
            Quirk::ArrivesWithoutTurn | Quirk::NextDoesNotWait | Quirk::ForgetsJoins => {
                End::Violation(Violation::BothEnds)
            }
            Quirk::NeverLetsGo
            | Quirk::FirstComeKeeps
            | Quirk::DeadKeepsItsJoins
            | Quirk::JoinsForTheGone => End::Never,
        };
        assert_eq!(story.end, expected, "{quirk:?}: {story}");
    }
}

#[test]
fn two_instances_never_move_at_once_and_never_wait_for_ever() {
    for first in turns::small() {
        let report = explore::explore(first, Quirks::NONE, 3);
        if let Found::Violation(_, way) | Found::NeverEnds(way, _) = &report.found {
            let way: Vec<_> = way.iter().map(ToString::to_string).collect();
            panic!("{:?}:\n{}", report.found, way.join("\n"));
        }
        assert!(report.worlds > 30_000, "only {} worlds", report.worlds);
    }
}

#[test]
fn an_exhaustive_search_finds_what_waits_for_ever() {
    let [first, _] = turns::small();
    let report = explore::explore(first, Quirks::only(Quirk::JoinsForTheGone), 0);
    assert!(matches!(report.found, Found::NeverEnds(..)), "{:?}", report.found);
}

#[test]
fn every_walk_ends_and_leaves_nothing_and_moves_meet() {
    let (tally, story) = seeds::run::<World>(0..SEEDS, Quirks::NONE);
    if let Some(story) = story {
        panic!("{story}");
    }
    assert!(
        tally.faults >= 2 * tally.walks,
        "fewer than two faults on average: {tally:?}"
    );
    assert!(
        2 * tally.moved >= tally.walks,
        "too few walks move an instance: {tally:?}"
    );
    let waits = |seed: &u64| {
        let (mut waits, faults) = (false, seeds::faults::<World>(*seed));
        seeds::walk::<World>(*seed, Quirks::NONE, &faults, |step| {
            waits |= step.what == "hears that the other move has ended";
        });
        waits
    };
    let met = (0..1_000).filter(waits).count();
    assert!(met > 100, "moves have met in only {met} of 1,000 walks");
}
