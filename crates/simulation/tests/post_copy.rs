//! The same for the world of post-copy.

use strum::IntoEnumIterator;
use verbatim_simulation::explore::{self, Found};
use verbatim_simulation::post_copy::{Quirk, Quirks, Violation, World};
use verbatim_simulation::seeds::{self, End};

/// Within how many seeds each fault must be found.
const SEEDS_FOR_A_QUIRK: u64 = 10_000;

/// A few seconds of walks. `make sim` walks further.
const SEEDS: u64 = 200_000;

#[test]
fn every_fault_is_found_when_it_is_put_back() {
    for quirk in Quirk::iter() {
        // What nobody asks for again is kept for ever.
        let expected = match quirk {
            Quirk::ForgetsWhenItHasLeft
            | Quirk::ForgetsWhatIsOpen
            | Quirk::SilentNeedsNothing
            | Quirk::SaysWhatIsNotListed => Some(Violation::ForgottenTooEarly),
            Quirk::AnswersBeforeItLooks | Quirk::SilentKeepsNothing => Some(Violation::EndedForNothing),
            Quirk::ForgetsList => Some(Violation::TakenForWhole),
            Quirk::MovesOn => Some(Violation::MovesWithoutRam),
            Quirk::DoesNotAskAgain | Quirk::KeepsWhenRolledBack | Quirk::EndIsNotNoted => None,
        };
        let (_, story) = seeds::run::<World>(0..SEEDS_FOR_A_QUIRK, Quirks::only(quirk));
        let story = story.unwrap_or_else(|| panic!("{quirk:?} is not found in {SEEDS_FOR_A_QUIRK} seeds"));
        let is_expected = match expected {
            Some(violation) => story.end == End::Violation(violation) || story.end == End::Never,
            None => story.end == End::Never,
        };
        assert!(is_expected, "{quirk:?}: {story}");
        // Exhaustively, with as few faults as it takes.
        let found = (0..4).find_map(|faults| {
            match explore::explore(World::new(), Quirks::only(quirk), faults).found {
                Found::Violation(violation, _) => Some(Some(violation)),
                Found::NeverEnds(..) if expected.is_none() => Some(None),
                Found::Safe | Found::NeverEnds(..) => None,
            }
        });
        assert_eq!(found, Some(expected), "{quirk:?}");
    }
}

#[test]
fn nothing_is_given_away_that_is_needed_and_everything_can_end() {
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
        "too few walks let the guest run: {tally:?}"
    );
}
