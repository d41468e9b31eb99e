use super::*;

const ID: VolumeId = VolumeId(7);
const SESSION: SessionId = SessionId(1);

fn offer(base: Generation) -> Offer {
    Offer {
        id: ID,
        session: SESSION,
        base,
        length: 4096,
        from: "a".into(),
    }
}

fn ask(base: Generation) -> Ask {
    Ask {
        id: ID,
        session: SESSION,
        base,
    }
}

#[test]
fn a_commit_raises_the_generation_and_is_answered_the_same_for_ever() {
    let incoming = prepare(Here::Nothing, &offer(3)).expect("there is nothing here");
    assert!(!incoming.may_serve());
    let Verdict::WriteThenSay(served, Answer::Committed) = answer(Here::Copy(&incoming), &ask(3), true)
    else {
        panic!("it is complete");
    };
    assert!(served.may_serve());
    assert_eq!(served.generation, 4);
    for later in [served.clone(), served.with(Role::Moved { to: "c".into() })] {
        for is_complete in [false, true] {
            let said = answer(Here::Copy(&later), &ask(3), is_complete);
            assert_eq!(said, Verdict::Say(Answer::Committed));
        }
    }
}

#[test]
fn what_is_not_complete_is_given_up_before_that_is_said() {
    let incoming = prepare(Here::Nothing, &offer(3)).expect("there is nothing here");
    let Verdict::WriteThenSay(given_up, Answer::NotCommitted) = answer(Here::Copy(&incoming), &ask(3), false)
    else {
        panic!("it is not complete");
    };
    assert_eq!(
        answer(Here::Copy(&given_up), &ask(3), true),
        Verdict::Say(Answer::NotCommitted)
    );
    let other = Ask {
        session: SessionId(2),
        ..ask(3)
    };
    assert_eq!(
        answer(Here::Copy(&incoming), &other, true),
        Verdict::Say(Answer::NotCommitted)
    );
    assert_eq!(
        answer(Here::Nothing, &ask(3), true),
        Verdict::Say(Answer::NotKnown)
    );
}

#[test]
fn only_an_older_copy_that_does_not_serve_is_filled() {
    let served = Sidecar::new(ID, 4096);
    assert_eq!(prepare(Here::Copy(&served), &offer(5)), Err(Refusal::Serves));
    let old = served.with(Role::Moved { to: "b".into() });
    assert_eq!(prepare(Here::Copy(&old), &offer(1)), Err(Refusal::NotOlder));
    assert_eq!(
        prepare(Here::Copy(&old), &offer(2)).map(|here| here.generation),
        Ok(1)
    );
    let other = Sidecar::new(VolumeId(8), 1);
    assert_eq!(prepare(Here::Copy(&other), &offer(2)), Err(Refusal::OtherVolume));
}

#[test]
fn a_source_takes_no_answer_but_the_two() {
    let deciding = Sidecar::new(ID, 1).with(Role::Deciding {
        session: SESSION,
        to: "b".into(),
    });
    assert_eq!(decided(&deciding, Answer::NotKnown), None);
    assert!(
        decided(&deciding, Answer::NotCommitted)
            .expect("decided")
            .may_serve()
    );
    let moved = decided(&deciding, Answer::Committed).expect("decided");
    assert_eq!(moved.role, Role::Moved { to: "b".into() });
    assert_eq!(decided(&moved, Answer::NotCommitted), None);
}

#[test]
fn what_was_committed_is_known_after_the_copy_is_gone() {
    let committed = Sidecar {
        generation: 2,
        ..Sidecar::new(ID, 4096)
    };
    let gone = Tombstone::of(&committed.with(Role::Moved { to: "c".into() }));
    assert_eq!(
        answer(Here::Gone(&gone), &ask(1), true),
        Verdict::Say(Answer::Committed)
    );
    assert_eq!(
        answer(Here::Gone(&gone), &ask(2), true),
        Verdict::Say(Answer::NotCommitted)
    );
    // The volume comes back, with or without the tombstone, is given up, and is deleted.
    let younger = Offer {
        session: SessionId(3),
        ..offer(3)
    };
    for before in [Here::Gone(&gone), Here::Nothing] {
        let incoming = prepare(before, &younger).expect("it is older");
        assert_eq!(incoming.generation, 0);
        let given_up = incoming.given_up();
        let gone = Tombstone::of(&given_up);
        for here in [Here::Copy(&incoming), Here::Copy(&given_up), Here::Gone(&gone)] {
            let said = answer(here, &ask(1), true);
            assert_eq!(said, Verdict::Say(Answer::Committed), "{here:?}");
            assert_eq!(prepare(here, &offer(2)), Err(Refusal::Stale), "{here:?}");
            assert!(prepare(here, &younger).is_ok(), "{here:?}");
        }
    }
}

#[test]
fn who_does_not_know_what_it_is_decides_nothing() {
    assert_eq!(answer(Here::Unknown, &ask(1), true), Verdict::Refuse);
    assert_eq!(prepare(Here::Unknown, &offer(9)), Err(Refusal::Unknown));
    // The format of a release that did not note the base.
    let old = r#"{"id":"7","generation":0,"length":4096,"role":"incomplete"}"#;
    let old: Sidecar = serde_json::from_str(old).expect("as it was written");
    assert_eq!(
        answer(Here::Copy(&old), &ask(1), false),
        Verdict::Say(Answer::NotKnown)
    );
}

#[test]
fn files_of_before_are_read_and_new_words_are_left_out() {
    let old = r#"{"id":"00000000000000000000000000000007","generation":1,"length":4096,"role":"serving"}"#;
    let sidecar = Sidecar::new(ID, 4096);
    assert_eq!(serde_json::from_str::<Sidecar>(old).ok(), Some(sidecar.clone()));
    let record = Record::Copy(sidecar.clone());
    assert_eq!(serde_json::from_str::<Record>(old).ok(), Some(record.clone()));
    let gone = Record::Gone {
        gone: Tombstone::of(&sidecar),
    };
    let suspect = Sidecar {
        suspect: true,
        floor: 9,
        ..sidecar
    };
    for record in [record, gone, Record::Copy(suspect)] {
        let text = serde_json::to_string(&record).expect("plain data");
        assert_eq!(
            serde_json::from_str::<Record>(&text).ok(),
            Some(record.clone()),
            "{text}"
        );
    }
    assert_eq!(
        serde_json::to_string(&Record::Copy(Sidecar::new(ID, 4096)))
            .ok()
            .as_deref(),
        Some(old)
    );
}

#[test]
fn a_source_that_is_kept_is_younger_than_what_was_committed_and_hears_of_it() {
    let source = Sidecar::new(ID, 4096);
    let deciding = deciding(&source, SESSION, "b", false).expect("it serves");
    let incoming = prepare(Here::Nothing, &offer(1)).expect("there is nothing here");
    let Verdict::WriteThenSay(committed, _) = answer(Here::Copy(&incoming), &ask(1), true) else {
        panic!("it is complete");
    };
    let kept = forced(&deciding, Keep::Source).expect("it waits");
    assert!(kept.generation > committed.generation);
    let (question, to) = overruled(&kept).expect("it asks on");
    assert_eq!((question, to), (ask(1), "b"));
    assert_eq!(
        heard(&kept, SESSION, Answer::Committed, false),
        Heard::Contradiction
    );
    assert_eq!(
        heard(&kept, SessionId(9), Answer::Committed, false),
        Heard::Nothing
    );
    // Of a host that takes no offer, or has not said so, it proves nothing.
    assert_eq!(heard(&kept, SESSION, Answer::NotKnown, false), Heard::Nothing);
    assert!(matches!(
        heard(&kept, SESSION, Answer::NotKnown, true),
        Heard::Confirmed(_)
    ));
    let Heard::Confirmed(confirmed) = heard(&kept, SESSION, Answer::NotCommitted, false) else {
        panic!("the operator was right");
    };
    assert_eq!(overruled(&confirmed), None);
    // The stale copy is moved, or deleted, and the volume goes there again.
    let again = offer(kept.generation);
    assert!(
        prepare(
            Here::Copy(&committed.with(Role::Moved { to: "c".into() })),
            &again
        )
        .is_ok()
    );
    assert!(prepare(Here::Gone(&Tombstone::of(&committed)), &again).is_ok());
}

#[test]
fn an_old_copy_is_served_again_only_by_a_word_and_is_younger_then() {
    let old = Sidecar::new(ID, 4096).with(Role::Moved { to: "b".into() });
    let revived = revived(&old, SESSION).expect("it is a whole copy");
    assert!(revived.may_serve() && revived.generation == 3);
    assert_eq!(super::revived(&old.given_up(), SESSION), None, "a mixture");
    // The other copy may not be lost.
    assert_eq!(overruled(&revived), Some((ask(1), "b")));
    let committed = Sidecar {
        generation: 2,
        ..Sidecar::new(ID, 4096)
    };
    let Verdict::Say(said) = answer(Here::Copy(&committed), &ask(1), false) else {
        panic!("it knows");
    };
    assert_eq!(heard(&revived, SESSION, said, false), Heard::Contradiction);
}

#[test]
fn a_source_that_was_left_by_a_word_hears_that_nobody_serves_and_is_served_again() {
    let source = Sidecar::new(ID, 4096);
    let deciding = deciding(&source, SESSION, "b", false).expect("it serves");
    let left = forced(&deciding, Keep::Destination).expect("it waits");
    assert!(!left.may_serve() && !serves_by_word(&left));
    let incoming = prepare(Here::Nothing, &offer(1)).expect("there is nothing here");
    let Verdict::WriteThenSay(given_up, said) = answer(Here::Copy(&incoming), &ask(1), false) else {
        panic!("it is not complete");
    };
    assert_eq!(heard(&left, SESSION, said, false), Heard::Contradiction);
    // The question stays, now that the copy serves, and is answered in its favour.
    let revived = revived(&left, SessionId(9)).expect("it is a whole copy");
    assert_eq!(
        (revived.generation, overruled(&revived)),
        (3, Some((ask(1), "b")))
    );
    let Verdict::Say(said) = answer(Here::Copy(&given_up), &ask(1), false) else {
        panic!("it is given up");
    };
    assert!(matches!(
        heard(&revived, SESSION, said, false),
        Heard::Confirmed(_)
    ));
    // A volume that comes back leaves no question.
    let back = prepare(Here::Copy(&left), &offer(2)).expect("it is older");
    assert_eq!(overruled(&back), None);
}

#[test]
fn an_operator_decides_only_where_an_answer_is_missing() {
    let served = Sidecar::new(ID, 1);
    let session = SESSION;
    let deciding = served.with(Role::Deciding {
        session,
        to: "b".into(),
    });
    let kept = forced(&deciding, Keep::Source).expect("it waits");
    assert!(kept.may_serve());
    assert_eq!(kept.generation, served.generation + 2);
    let moved = served.with(Role::Moved { to: "b".into() });
    let left = forced(&deciding, Keep::Destination).expect("it waits");
    assert_eq!((&left.role, left.generation), (&moved.role, served.generation));
    let held = crate::together::held(&served, session, "b", 1).expect("it serves");
    for here in [served, moved, held] {
        for keep in [Keep::Source, Keep::Destination] {
            assert_eq!(forced(&here, keep), None, "{here:?}");
        }
    }
}
