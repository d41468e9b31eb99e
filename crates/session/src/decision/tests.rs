//! Every state with every event, written out: `tables/*.txt` beside this file. A change of a rule is a change there, to be read
//! in a review. `UPDATE_TABLES=1 cargo test -p verbatim-session` writes them anew.

use std::fmt::{Debug, Write};
use std::path::Path;

use strum::VariantArray;

use super::*;

const KEEPS: [Keep; 2] = [Keep::Source, Keep::Destination];
const OUTCOMES: [Outcome; 2] = [Outcome::Committed, Outcome::RolledBack];
const FACTS: [Fact; 5] = [
    Fact::Running,
    Fact::Frozen,
    Fact::Gone { ran: false },
    Fact::Gone { ran: true },
    Fact::Unknown,
];
const ANSWERS: [CommitAnswer; 4] = [
    CommitAnswer::Runs,
    CommitAnswer::NotRun(Evidence::GivenUp),
    CommitAnswer::NotYet,
    CommitAnswer::NotKnown,
];

fn marks() -> Vec<Mark> {
    let mut marks = vec![
        Mark::Deciding,
        Mark::Committed,
        Mark::Ran,
        Mark::Cleared,
        Mark::Drained,
        Mark::Switched,
        Mark::RolledBack,
    ];
    marks.extend(KEEPS.map(Mark::Resolved));
    marks.extend(OUTCOMES.map(Mark::Closed));
    marks
}

fn written<E>(event: impl Fn(Mark, Written) -> E) -> Vec<E> {
    let marks = marks().into_iter();
    marks
        .flat_map(|mark| [event(mark, Written::Durable), event(mark, Written::Failed)])
        .collect()
}

/// The rows of a table: what each event does in each state. Events that do nothing are left out.
fn table<M: Copy + PartialEq, S: Debug, E: Debug + Copy, A: Debug>(
    machines: &[M],
    events: &[E],
    state: impl Fn(&M) -> S,
    handle: impl Fn(&mut M, E) -> Vec<A>,
) -> String {
    let mut text = String::new();
    for before in machines {
        let _ = writeln!(text, "{:?}", state(before));
        for event in events {
            let mut after = *before;
            let actions = handle(&mut after, *event);
            if after == *before && actions.is_empty() {
                continue;
            }
            let _ = write!(text, "    {event:?} → {:?}", state(&after));
            if !actions.is_empty() {
                let _ = write!(text, " {actions:?}");
            }
            text.push('\n');
        }
    }
    text
}

fn compare(name: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/decision/tables/{name}.txt"));
    if std::env::var_os("UPDATE_TABLES").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, table).unwrap();
    }
    let known = std::fs::read_to_string(&path).unwrap_or_default();
    for (line, (now, known)) in table.lines().zip(known.lines()).enumerate() {
        assert_eq!(now, known, "line {} of {}", line + 1, path.display());
    }
    assert_eq!(table, known, "{}", path.display());
}

#[test]
fn the_source_does_what_its_table_says() {
    use source::{Event, Question, Ready, Source, State, Then};
    let questions = [Question::Commit, Question::Settle];
    let mut states = Vec::new();
    states.extend([Then::RollBack, Then::Undo, Then::Settle, Then::Finish].map(State::Probing));
    for bits in 0..7 {
        states.push(State::Working(Ready {
            frozen: bits & 1 != 0,
            deciding: bits & 2 != 0,
            verified: bits & 4 != 0,
        }));
    }
    states.push(State::Holding);
    states.extend(questions.map(State::Asking));
    states.extend(KEEPS.map(|keep| State::Resolving(keep, Question::Settle)));
    states.extend([
        State::RollingBack,
        State::Undoing,
        State::Telling,
        State::Finishing,
    ]);
    states.extend(OUTCOMES.map(State::Closing));
    states.extend(OUTCOMES.map(State::Ended));

    let mut events = vec![
        Event::Dumped,
        Event::Frozen,
        Event::Verified,
        Event::Held,
        Event::Failed,
        Event::Cancel,
        Event::Undone,
        Event::Told,
        Event::Cleared,
        Event::Finished,
    ];
    events.extend(KEEPS.map(Event::Resolve));
    events.extend(ANSWERS.map(Event::Answer));
    events.extend(FACTS.map(Event::Fact));
    events.extend(written(Event::Written));
    events.extend(Timer::VARIANTS.iter().map(|timer| Event::Elapsed(*timer)));

    let machines: Vec<_> = states.into_iter().map(Source::at).collect();
    let text = table(&machines, &events, Source::state, Source::handle);
    compare("source", &text);
}

#[test]
fn the_destination_does_what_its_table_says() {
    use destination::{Destination, Event, NoMarker, State, Then};
    let evidence = [Evidence::GivenUp, Evidence::NeverReleased];
    let mut states = Vec::new();
    states.extend([Then::GiveUp, Then::Undo, Then::Drive].map(State::Probing));
    states.extend([
        State::Preparing,
        State::Restored,
        State::Committing,
        State::Releasing,
    ]);
    let no_marker = [NoMarker::NeverReleased, NoMarker::Went, NoMarker::SaysNothing];
    states.extend(no_marker.map(State::Judging));
    states.push(State::Asking);
    states.extend(evidence.map(State::RollingBack));
    states.extend(evidence.map(State::Undoing));
    states.extend([false, true].map(|drives| State::Running { drives }));
    states.push(State::Closing(Outcome::Committed, None));
    states.extend(evidence.map(|evidence| State::Closing(Outcome::RolledBack, Some(evidence))));
    states.extend(OUTCOMES.map(State::Ended));

    let mut events = vec![
        Event::Restored,
        Event::Failed,
        Event::Commit { alive: true },
        Event::Commit { alive: false },
        Event::Abort,
        Event::Released,
        Event::ReleaseFailed,
        Event::Undone,
        Event::Finished,
    ];
    events.extend(ANSWERS.map(Event::Answer));
    events.extend(FACTS.map(Event::Fact));
    events.extend(written(Event::Written));
    events.extend(Timer::VARIANTS.iter().map(|timer| Event::Elapsed(*timer)));
    // Last, since it changes what comes after it.
    events.push(Event::SourceLost);

    let mut machines = Vec::new();
    for state in states {
        let seen = Destination::at(state);
        let mut lost = seen;
        lost.source_lost = true;
        machines.extend([seen, lost]);
    }
    let state = |machine: &Destination| {
        let lost = if machine.source_lost {
            "; the source is lost"
        } else {
            ""
        };
        Shown(format!(
            "{:?}, says {:?}{lost}",
            machine.state(),
            machine.answer()
        ))
    };
    compare(
        "destination",
        &table(&machines, &events, state, Destination::handle),
    );
}

#[test]
fn the_partner_does_what_its_table_says() {
    use partner::{Event, Partner, State, Then};
    let mut states = Vec::new();
    states.extend([Then::Undo, Then::Ask, Then::Switch].map(State::Probing));
    states.extend([
        State::Prepared,
        State::Draining,
        State::Drained,
        State::Asking,
        State::RollingBack,
        State::Undoing,
        State::Switching,
    ]);
    states.extend(OUTCOMES.map(State::Closing));
    states.extend(OUTCOMES.map(State::Ended));

    let mut events = vec![
        Event::Quiesced,
        Event::Failed,
        Event::Abort,
        Event::Switch,
        Event::Undone,
        Event::Finished,
    ];
    events.extend(ANSWERS.map(Event::Answer));
    events.extend(FACTS.map(Event::Fact));
    events.extend(written(Event::Written));
    events.extend(Timer::VARIANTS.iter().map(|timer| Event::Elapsed(*timer)));
    events.push(Event::SourceLost);

    let mut machines = Vec::new();
    for state in states {
        let mut seen = Partner::begin();
        seen.state = state;
        machines.extend([seen, Partner::lost(state)]);
    }
    let state = |machine: &Partner| {
        let lost = if machine.source_lost {
            "; the source is lost"
        } else {
            ""
        };
        Shown(format!("{:?}{lost}", machine.state()))
    };
    compare("partner", &table(&machines, &events, state, Partner::handle));
}

/// What is printed as it is.
struct Shown(String);

impl Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[test]
fn an_agent_that_comes_after_one_that_died_goes_on_as_the_journal_says() {
    use crate::record::Standing;
    let mut text = String::new();
    let mut standings = vec![
        Standing::Opened,
        Standing::Deciding,
        Standing::Committed,
        Standing::Ran,
        Standing::Cleared,
        Standing::Drained,
        Standing::Switched,
        Standing::RolledBack,
        Standing::Damaged,
    ];
    standings.extend(KEEPS.map(Standing::Resolved));
    standings.extend(OUTCOMES.map(Standing::Closed));
    for standing in standings {
        let (source, actions) = source::Source::recover(standing);
        let _ = writeln!(text, "{standing:?}\n    source: {:?} {actions:?}", source.state());
        for would_be_here in [true, false] {
            let (destination, actions) = destination::Destination::recover(standing, would_be_here);
            let state = destination.state();
            let _ = writeln!(
                text,
                "    destination, a marker would be here {would_be_here}: {state:?} {actions:?}"
            );
        }
        let (partner, actions) = partner::Partner::recover(standing);
        let _ = writeln!(text, "    partner: {:?} {actions:?}", partner.state());
    }
    compare("recovery", &text);
}

#[test]
fn only_the_parties_of_a_session_may_send_its_messages() {
    use crate::Role;
    use crate::authority::{Message, Party, may};
    let mut text = String::new();
    for message in Message::VARIANTS {
        for party in Party::VARIANTS {
            let to: Vec<_> = Role::VARIANTS
                .iter()
                .filter(|role| may(*party, *message, **role))
                .collect();
            let _ = writeln!(text, "{message:?} by {party:?}: to {to:?}");
        }
    }
    compare("authority", &text);
}

#[test]
fn a_source_says_until_when_it_can_be_cancelled_and_whether_it_is_in_doubt() {
    use source::{Event, Source};
    let mut source = Source::begin();
    for event in [
        Event::Dumped,
        Event::Frozen,
        Event::Written(Mark::Deciding, Written::Durable),
        Event::Verified,
    ] {
        assert!(source.can_be_cancelled());
        source.handle(event);
    }
    assert!(
        source.can_be_cancelled(),
        "the tasks are held, and nobody was asked"
    );
    source.handle(Event::Held);
    assert!(!source.can_be_cancelled());
    assert!(!source.is_in_doubt());
    source.handle(Event::Elapsed(Timer::Doubt));
    assert!(source.is_in_doubt());
    source.handle(Event::Answer(CommitAnswer::Runs));
    source.handle(Event::Written(Mark::Ran, Written::Failed));
    assert!(!source.is_in_doubt());
}

#[test]
fn timers_are_as_long_as_the_design_says() {
    let all = Timer::VARIANTS.iter().map(|timer| timer.duration().as_millis());
    assert_eq!(all.collect::<Vec<_>>(), [200, 5_000, 200, 1_000]);
}
