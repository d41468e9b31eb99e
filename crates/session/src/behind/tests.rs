use super::*;

fn asking() -> Behind {
    let mut behind = Behind::begin();
    assert_eq!(behind.handle(Event::Over(Outcome::Committed)), [Action::Ask]);
    behind
}

#[test]
fn it_is_kept_until_the_destination_needs_nothing() {
    let mut behind = asking();
    for told in [
        Told::NotKnown,
        Told::Undecided,
        Told::Committed(Noted::Missing),
        Told::Committed(Noted::Unknown),
    ] {
        assert_eq!(
            behind.handle(Event::Told(told)),
            [Action::After(Timer::Probe)],
            "{told:?}"
        );
        assert_eq!(behind.handle(Event::Elapsed(Timer::Probe)), [Action::Ask]);
    }
    assert_eq!(behind.handle(Event::Silent), [Action::After(Timer::Probe)]);
    assert_eq!(behind.handle(Event::Elapsed(Timer::Probe)), [Action::Ask]);
    let all = Event::Told(Told::Committed(Noted::Nothing));
    assert_eq!(behind.handle(all), [Action::Clear]);
    assert_eq!(behind.handle(Event::Cleared { gone: true }), []);
    assert_eq!(behind.state(), State::Ended);
}

#[test]
fn nobody_is_asked_where_the_session_is_rolled_back() {
    let mut behind = Behind::begin();
    assert_eq!(behind.handle(Event::Over(Outcome::RolledBack)), [Action::Clear]);
    let mut behind = asking();
    assert_eq!(behind.handle(Event::Told(Told::RolledBack)), [Action::Clear]);
}

#[test]
fn what_cannot_be_removed_is_removed_later() {
    let (mut behind, actions) = Behind::recover(Some(Outcome::RolledBack));
    assert_eq!(actions, [Action::Clear]);
    let failed = behind.handle(Event::Cleared { gone: false });
    assert_eq!(failed, [Action::After(Timer::Probe)]);
    assert_eq!(behind.handle(Event::Elapsed(Timer::Probe)), [Action::Clear]);
}

#[test]
fn an_agent_that_comes_later_goes_on_from_the_journal() {
    let (mut behind, actions) = Behind::recover(None);
    assert_eq!((behind.state(), actions.len()), (State::Kept, 0));
    // Before it is decided, an answer says nothing.
    assert_eq!(behind.handle(Event::Told(Told::Committed(Noted::Nothing))), []);
    assert_eq!(behind.handle(Event::Over(Outcome::Committed)), [Action::Ask]);
    let (behind, actions) = Behind::recover(Some(Outcome::Committed));
    assert_eq!((behind.state(), actions), (State::Asking, vec![Action::Ask]));
}
