//! What the machine does in each state, and that nothing is removed before it is noted.

use strum::VariantArray;

use super::*;

/// Every event.
fn events() -> Vec<Event> {
    let both = [true, false];
    let mut events = vec![Event::Filled, Event::Lost];
    events.extend(both.map(|gone| Event::Killed { gone }));
    events.extend([Written::Durable, Written::Failed].map(Event::Written));
    events.extend(both.map(|gone| Event::Cleared { gone }));
    events.extend(Timer::VARIANTS.iter().map(|timer| Event::Elapsed(*timer)));
    let kinds: std::collections::HashSet<_> = events.iter().map(|event| EventKind::from(*event)).collect();
    assert_eq!(kinds.len(), EventKind::VARIANTS.len(), "an event is missing here");
    events
}

/// Takes the events one after the other; says what was wanted last.
fn after(mut fill: Fill, events: &[Event]) -> (State, Vec<Action>) {
    let mut wanted = Vec::new();
    for event in events {
        wanted = fill.handle(*event);
    }
    (fill.state(), wanted)
}

#[test]
fn all_is_given() {
    let (fill, actions) = Fill::begin();
    assert_eq!(actions, [Action::Listen]);
    assert_eq!(
        after(fill, &[Event::Filled]),
        (State::Noting, vec![Action::Write])
    );
    let failed = Event::Written(Written::Failed);
    assert_eq!(
        after(fill, &[Event::Filled, failed]),
        (State::Noting, vec![Action::After(Timer::Write)])
    );
    assert_eq!(
        after(fill, &[Event::Filled, failed, Event::Elapsed(Timer::Write)]),
        (State::Noting, vec![Action::Write])
    );
    let noted = [Event::Filled, Event::Written(Written::Durable)];
    assert_eq!(after(fill, &noted), (State::Clearing, vec![Action::Clear]));
    let cleared = [&noted[..], &[Event::Cleared { gone: true }]].concat();
    assert_eq!(after(fill, &cleared), (State::Ended, Vec::new()));
}

#[test]
fn tasks_whose_memory_is_lost_are_ended_until_none_is_left() {
    let (fill, _) = Fill::begin();
    assert_eq!(after(fill, &[Event::Lost]), (State::Ending, vec![Action::Kill]));
    let not_gone = [Event::Lost, Event::Killed { gone: false }];
    assert_eq!(
        after(fill, &not_gone),
        (State::Ending, vec![Action::After(Timer::Probe)])
    );
    let again = [&not_gone[..], &[Event::Elapsed(Timer::Probe)]].concat();
    assert_eq!(after(fill, &again), (State::Ending, vec![Action::Kill]));
    let gone = [Event::Lost, Event::Killed { gone: true }];
    assert_eq!(after(fill, &gone), (State::Noting, vec![Action::Write]));
}

#[test]
fn an_agent_goes_by_the_journal_and_by_traces_where_that_says_nothing() {
    for (noted, traces, expected) in [
        (Noted::Missing, true, State::Filling),
        (Noted::Missing, false, State::Filling),
        (Noted::Nothing, true, State::Clearing),
        (Noted::Nothing, false, State::Clearing),
        (Noted::Unknown, true, State::Filling),
        (Noted::Unknown, false, State::Clearing),
    ] {
        let (fill, actions) = Fill::recover(noted, traces);
        assert_eq!(fill.state(), expected, "{noted:?}, {traces}");
        assert_eq!(actions.len(), 1);
    }
}

#[test]
fn what_comes_too_late_changes_nothing() {
    for state in [
        State::Filling,
        State::Ending,
        State::Noting,
        State::Clearing,
        State::Ended,
    ] {
        for event in events() {
            let mut fill = Fill { state };
            let actions = fill.handle(event);
            let moved = fill.state() != state;
            assert!(
                !moved || fill.state() == State::Ended || actions.len() == 1,
                "{state:?} {event:?}"
            );
            if actions.contains(&Action::Clear) {
                let known = matches!(event, Event::Written(Written::Durable)) || state == State::Clearing;
                assert!(known, "{state:?} {event:?} removes what may be needed");
            }
            if actions.contains(&Action::Kill) {
                assert!(
                    matches!(state, State::Filling | State::Ending),
                    "{state:?} {event:?}"
                );
            }
        }
    }
}

#[test]
fn it_is_whole_only_when_that_is_noted() {
    for state in [State::Filling, State::Ending, State::Noting] {
        assert!(!Fill { state }.is_whole());
    }
    for state in [State::Clearing, State::Ended] {
        assert!(Fill { state }.is_whole());
    }
}
