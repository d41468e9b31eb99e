//! The same for the world in which sessions of one instance follow each other.

use strum::IntoEnumIterator;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::history::{self, Quirk, Quirks, Violation, World};
use verbatim_simulation::seeds::{self, End};

/// Within how many seeds each fault must be found.
const SEEDS_FOR_A_QUIRK: u64 = 20_000;

/// A few seconds of walks. `make sim` walks further.
const SEEDS: u64 = 40_000;

#[test]
fn every_fault_is_found_when_it_is_put_back() {
    for quirk in Quirk::iter() {
        let (_, story) = seeds::run::<World>(0..SEEDS_FOR_A_QUIRK, Quirks::only(quirk));
        let story = story.unwrap_or_else(|| panic!("{quirk:?} is not found in {SEEDS_FOR_A_QUIRK} seeds"));
        let expected: &[End<Violation>] = match quirk {
            Quirk::ByName => &[
                End::Violation(Violation::NoCopy),
                End::Violation(Violation::TwoCopies),
            ],
            Quirk::DamageIsCommit => &[
                End::Violation(Violation::Contradicts),
                End::Violation(Violation::NoCopy),
            ],
            Quirk::DamageIsEverywhere => &[End::Violation(Violation::NeedlessDoubt)],
            Quirk::ByClock => &[
                End::Violation(Violation::NoCopy),
                End::Violation(Violation::TwoCopies),
                End::Violation(Violation::MemoryForgotten),
            ],
            Quirk::MemoryByClock => &[End::Violation(Violation::MemoryForgotten)],
            Quirk::Guesses => &[
                End::Violation(Violation::Contradicts),
                End::Violation(Violation::NoCopy),
                End::Violation(Violation::TwoCopies),
                // A source that is closed tells its partner nothing.
                End::Never,
            ],
            Quirk::VolumesFirst | Quirk::LeavesThePartner => &[End::Never],
        };
        assert!(expected.contains(&story.end), "{quirk:?}: {story}");
    }
}

#[test]
fn an_instance_is_never_twice_never_gone_and_every_history_can_end() {
    for first in history::small() {
        let report = explore::explore(first, Quirks::NONE, 1);
        if let Found::Violation(_, way) | Found::NeverEnds(way, _) = &report.found {
            let way: Vec<_> = way.iter().map(ToString::to_string).collect();
            panic!("{:?}:\n{}", report.found, way.join("\n"));
        }
        assert!(report.worlds > 10_000, "only {} worlds", report.worlds);
    }
}

#[test]
fn every_walk_ends_well_and_sessions_overlap() {
    let (tally, story) = seeds::run::<World>(0..SEEDS, Quirks::NONE);
    if let Some(story) = story {
        panic!("{story}");
    }
    assert!(2 * tally.faults >= 3 * tally.walks, "too few faults: {tally:?}");
    assert!(
        2 * tally.moved >= tally.walks,
        "too few walks move the instance: {tally:?}"
    );
    let overlaps = |seed: &u64| {
        let (mut begun, mut ended, mut overlaps) = (0, 0, false);
        let faults = seeds::faults::<World>(*seed);
        seeds::walk::<World>(*seed, Quirks::NONE, &faults, |step| match step.what {
            "a move begins" => {
                overlaps |= ended < 2 * begun;
                begun += 1;
            }
            "writes down that it is over" => ended += 1,
            _ => {}
        });
        overlaps
    };
    let met = (0..1_000).filter(overlaps).count();
    assert!(met > 300, "sessions overlap in only {met} of 1,000 walks");
}
