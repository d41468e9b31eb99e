//! A volume that moves together with its instance: the session of the agents decides, and the copies obey.
//!
//! ```text
//!  source                                        destination
//!  Serving g                                     Incoming {session, g}*
//!    │         ── chunks, changes, flush ─────►
//!  Held {by}*  ── Promise {session, g, by} ───►  Ready {by}*            the tasks are frozen; those that are restored have it
//!    │                                             │
//!    │   the session `by` is decided, by the journal of the destination's agent, and each agent tells its own daemon:
//!    │                                             │
//!  Moved*      committed                         Serving g + 1*
//!  Serving g*  rolled back                       Incomplete*
//! ```
//!
//! `*`: durable before anything that relies on it.
//!
//! # Why at most one copy serves
//! - Both copies give the decision away before the session is decided: neither `Held` nor `Ready` changes by
//!   itself. Each waits, in any process, for the decision of its own agent about the session `by`.
//! - The session is decided once, and is committed only when the destination is `Ready`: its agent has the
//!   volume mounted for the tasks that it restored. So both copies get the same decision: one host has
//!   `Moved` and the other `Serving`.
//! - `Ready` takes no offer, not even a later one: a promised copy cannot tell a late offer of the same
//!   generation from a new one.
//! - A `Ready` copy is written to before the decision, by the mount and by CRIU, for tasks that do not run.
//!   If the session is rolled back, the copy is `Incomplete`: none of its data count, and the next attempt
//!   compares them.

use crate::decision::{AgentSession, Ask, Here, Keep, Role, SessionId, Sidecar};

/// The sidecar of a source that holds its tenant, when the destination has everything. `None` if it does not
/// serve, or is suspect.
pub fn held(here: &Sidecar, session: SessionId, to: &str, by: AgentSession) -> Option<Sidecar> {
    let to = to.to_owned();
    (here.may_serve() && !here.suspect).then(|| here.with(Role::Held { session, to, by }))
}

/// The sidecar of a destination that promises to serve if the session `by` is committed, or has promised
/// already. `here` is durable; `is_complete`: this very process has flushed all data of this session. `None`
/// if it cannot promise.
pub fn promised(here: Here<'_>, ask: &Ask, by: AgentSession, is_complete: bool) -> Option<Sidecar> {
    let Here::Copy(here) = here else {
        return None;
    };
    if here.id != ask.id {
        return None;
    }
    match &here.role {
        Role::Incoming { session, base, from }
            if is_complete && *session == ask.session && *base == ask.base =>
        {
            let ready = here.with(Role::Ready {
                session: *session,
                base: *base,
                from: from.clone(),
                by,
            });
            // All data were written again, and flushed.
            Some(Sidecar {
                suspect: false,
                ..ready
            })
        }
        Role::Ready { session, by: to, .. } if *session == ask.session && *to == by => Some(here.clone()),
        _ => None,
    }
}

/// Meaning of a session's decision for a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settle {
    /// This is the copy's new sidecar. The decision counts as delivered when it is durable.
    Become(Sidecar),
    /// The copy already is as decided.
    Already,
    /// The copy does not wait for this session (any more), or there is no copy.
    NotMine,
    /// The session was committed, but the copy was never filled completely, or an operator has given up its promise: an error
    /// that has to be reported. It ends when the copy is deleted, or filled again.
    NotFilled,
    /// This host does not know its copy's state: an error, and the decision is delivered again, since the
    /// copy may be waiting for it.
    Unknown,
}

/// Applies the decision of the session `by`. It counts as delivered unless the result is [`Settle::Unknown`]
/// or [`Settle::NotFilled`].
pub fn settle(here: Here<'_>, by: AgentSession, is_committed: bool) -> Settle {
    let here = match here {
        Here::Unknown => return Settle::Unknown,
        Here::Nothing | Here::Gone(_) => return Settle::NotMine,
        Here::Copy(here) => here,
    };
    if let Some(settled) = settled(here, by, is_committed) {
        return Settle::Become(settled);
    }
    match (&here.role, is_committed) {
        (Role::Incoming { .. } | Role::Incomplete, true) => Settle::NotFilled,
        // The attempt was given up before the promise.
        (Role::Incoming { .. }, false) => Settle::Become(here.given_up()),
        (Role::Serving | Role::Moved { .. }, true) | (Role::Serving | Role::Incomplete, false) => {
            Settle::Already
        }
        _ => Settle::NotMine,
    }
}

/// What an operator's word makes of a copy that waits for a session, in the place of an agent that never says how it was decided: one that has lost its state, or
/// that was told before the promise came. Nothing if it waits for none. Either copy asks the other host on, since the session may be decided otherwise, or be
/// so already: a source asks whether the destination has committed, as by [`crate::decision::forced`], and a destination whether the source has left
/// ([`crate::decision::has_left`]).
pub fn forced(here: &Sidecar, keep: Keep) -> Option<Sidecar> {
    match (&here.role, keep) {
        (Role::Held { session, to, .. }, Keep::Source) => Some(here.kept(*session, to)),
        (Role::Held { session, to, .. }, Keep::Destination) => Some(here.left(*session, to)),
        (
            Role::Ready {
                session, base, from, ..
            },
            keep,
        ) => {
            let next = match keep {
                Keep::Source => here.given_up(),
                Keep::Destination => here.committed(*base),
            };
            Some(next.asks_source(*session, *base, from))
        }
        _ => None,
    }
}

/// The sidecar of a copy after the decision of the session `by`. `None` if the copy does not wait for it.
fn settled(here: &Sidecar, by: AgentSession, is_committed: bool) -> Option<Sidecar> {
    match &here.role {
        Role::Held { to, by: waits, .. } if *waits == by => Some(match is_committed {
            true => here.moved(to),
            false => here.with(Role::Serving),
        }),
        Role::Ready { base, by: waits, .. } if *waits == by => Some(match is_committed {
            true => here.committed(*base),
            false => here.given_up(),
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::decision::{
        Answer, Heard, Offer, Refusal, Verdict, VolumeId, answer, has_left, heard, overruled, prepare,
    };

    const ID: VolumeId = VolumeId(7);
    const SESSION: SessionId = SessionId(1);
    const BY: AgentSession = u64::MAX - 3;

    fn ask() -> Ask {
        Ask {
            id: ID,
            session: SESSION,
            base: 1,
        }
    }

    fn offer(session: SessionId) -> Offer {
        Offer {
            id: ID,
            session,
            base: 1,
            length: 4096,
            from: "a".into(),
        }
    }

    fn ready() -> Sidecar {
        let incoming = prepare(Here::Nothing, &offer(SESSION)).expect("there is nothing here");
        promised(Here::Copy(&incoming), &ask(), BY, true).expect("it is complete")
    }

    #[test]
    fn a_promise_wants_everything_and_is_given_again() {
        let incoming = prepare(Here::Nothing, &offer(SESSION)).expect("there is nothing here");
        assert_eq!(promised(Here::Copy(&incoming), &ask(), BY, false), None);
        let other = Ask {
            session: SessionId(2),
            ..ask()
        };
        assert_eq!(promised(Here::Copy(&incoming), &other, BY, true), None);
        assert_eq!(promised(Here::Copy(&ready()), &ask(), BY, false), Some(ready()));
        assert_eq!(promised(Here::Copy(&ready()), &ask(), BY + 1, true), None);
        assert!(!ready().may_serve());
    }

    #[test]
    fn what_is_promised_takes_no_offer_and_no_other_decision() {
        for session in [SESSION, SessionId(2)] {
            assert_eq!(
                prepare(Here::Copy(&ready()), &offer(session)),
                Err(Refusal::Promised)
            );
        }
        for is_complete in [false, true] {
            let said = answer(Here::Copy(&ready()), &ask(), is_complete);
            assert_eq!(said, Verdict::Refuse, "not before it is decided");
        }
        assert_eq!(settled(&ready(), BY + 1, true), None, "another session");
    }

    #[test]
    fn a_decision_counts_as_told_only_where_the_copy_is_known() {
        let held = held(&Sidecar::new(ID, 4096), SESSION, "b", BY).expect("it serves");
        let moved = held.with(Role::Moved { to: "b".into() });
        let committed = ready().committed(1);
        for is_committed in [false, true] {
            assert_eq!(settle(Here::Unknown, BY, is_committed), Settle::Unknown);
            assert_eq!(settle(Here::Nothing, BY, is_committed), Settle::NotMine);
            assert_eq!(
                settle(Here::Copy(&ready()), BY + 1, is_committed),
                Settle::NotMine
            );
        }
        assert_eq!(settle(Here::Copy(&held), BY, true), Settle::Become(moved.clone()));
        assert_eq!(
            settle(Here::Copy(&ready()), BY, true),
            Settle::Become(committed.clone())
        );
        for here in [moved, committed] {
            assert_eq!(settle(Here::Copy(&here), BY, true), Settle::Already);
        }
        let incoming = prepare(Here::Nothing, &offer(SESSION)).expect("there is nothing here");
        assert_eq!(settle(Here::Copy(&incoming), BY, true), Settle::NotFilled);
        let Settle::Become(given_up) = settle(Here::Copy(&incoming), BY, false) else {
            panic!("it is given up");
        };
        assert_eq!((&given_up.role, given_up.floor), (&Role::Incomplete, 1));
        assert_eq!(settle(Here::Copy(&given_up), BY, false), Settle::Already);
        // The promise was given up by an operator's word, and the session is committed all the same.
        let given_up = forced(&ready(), Keep::Source).expect("it waits");
        assert_eq!(settle(Here::Copy(&given_up), BY, true), Settle::NotFilled);
    }

    #[test]
    fn an_operator_has_a_word_where_an_agent_has_none_any_more() {
        let held = held(&Sidecar::new(ID, 4096), SESSION, "b", BY).expect("it serves");
        let kept = forced(&held, Keep::Source).expect("it waits");
        assert!(kept.may_serve() && kept.generation > ready().committed(1).generation);
        assert_eq!(forced(&kept, Keep::Source), None);
        // The other host's late answer.
        let (question, to) = overruled(&kept).expect("it asks on");
        assert_eq!((question, to), (ask(), "b"));
        for (here, says) in [
            (ready().committed(1), Answer::Committed),
            (ready().given_up(), Answer::NotCommitted),
        ] {
            assert_eq!(answer(Here::Copy(&here), &question, false), Verdict::Say(says));
        }
        assert_eq!(
            heard(&kept, SESSION, Answer::Committed, false),
            Heard::Contradiction
        );
    }

    /// Each word at each host, and each way in which the session was decided: a word that is wrong is contradicted by the other host, and one that is right confirmed.
    #[test]
    fn a_word_is_confirmed_or_contradicted_by_the_other_host() {
        let source = held(&Sidecar::new(ID, 4096), SESSION, "b", BY).expect("it serves");
        for keep in [Keep::Source, Keep::Destination] {
            let (at_source, at_destination) = (forced(&source, keep), forced(&ready(), keep));
            let (at_source, at_destination) =
                (at_source.expect("it waits"), at_destination.expect("it waits"));
            assert_eq!(at_source.may_serve(), keep == Keep::Source);
            assert_eq!(at_destination.may_serve(), keep == Keep::Destination);
            let ((to_b, b), (to_a, a)) = (
                overruled(&at_source).expect("asks"),
                overruled(&at_destination).expect("asks"),
            );
            assert_eq!((to_b, b, to_a, a), (ask(), "b", ask(), "a"));
            // While the other one waits there is no answer.
            assert_eq!(answer(Here::Copy(&ready()), &to_b, false), Verdict::Refuse);
            assert_eq!(has_left(Here::Copy(&source), &to_a, "b"), Verdict::Refuse);
            for is_committed in [false, true] {
                let settled = |here: &Sidecar| settled(here, BY, is_committed).expect("it waits");
                let Verdict::Say(to_source) = answer(Here::Copy(&settled(&ready())), &to_b, false) else {
                    panic!("it is decided");
                };
                let Verdict::Say(to_destination) = has_left(Here::Copy(&settled(&source)), &to_a, "b") else {
                    panic!("it is decided");
                };
                let is_right = is_committed == (keep == Keep::Destination);
                for (here, answer) in [(&at_source, to_source), (&at_destination, to_destination)] {
                    match heard(here, SESSION, answer, false) {
                        Heard::Confirmed(next) => assert!(is_right && overruled(&next).is_none(), "{here:?}"),
                        Heard::Contradiction => assert!(!is_right, "{here:?}"),
                        Heard::Nothing => panic!("{here:?} hears nothing"),
                    }
                    assert_eq!(
                        heard(here, SESSION, Answer::NotKnown, false),
                        Heard::Nothing,
                        "it decides nothing"
                    );
                }
            }
        }
    }

    /// All events at both copies, in each order, with each daemon killed at each step: only durable state
    /// counts.
    #[test]
    fn at_most_one_copy_serves_in_all_worlds() {
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
        struct World {
            /// The copies on the disks.
            copies: [String; 2],
            /// The destination's process has all data.
            is_complete: bool,
            is_asked: bool,
            is_promised: bool,
            decision: Option<bool>,
        }
        let text = |sidecar: &Sidecar| serde_json::to_string(sidecar).expect("plain data");
        let incoming = prepare(Here::Nothing, &offer(SESSION)).expect("there is nothing here");
        let mut left = vec![World {
            copies: [text(&Sidecar::new(ID, 4096)), text(&incoming)],
            is_complete: true,
            is_asked: false,
            is_promised: false,
            decision: None,
        }];
        let (mut seen, mut ends) = (BTreeSet::new(), BTreeSet::new());
        while let Some(world) = left.pop() {
            if !seen.insert(world.clone()) {
                continue;
            }
            let [source, destination]: [Sidecar; 2] =
                [0, 1].map(|side: usize| serde_json::from_str(&world.copies[side]).expect("it was written"));
            assert!(!(source.may_serve() && destination.may_serve()), "two serve");
            // The tenant goes on at the source: the destination's data are no longer complete.
            if world.decision == Some(true) {
                assert!(!source.may_serve(), "the source serves after the commit");
            }
            let mut next = Vec::new();
            let mut go = |change: &dyn Fn(&mut World)| {
                let mut after = world.clone();
                change(&mut after);
                next.push(after);
            };
            // The destination's daemon is killed.
            go(&|after| after.is_complete = false);
            // The session is given up, at any time before it is committed.
            if world.decision.is_none() {
                go(&|after| after.decision = Some(false));
                if let Some(held) = held(&source, SESSION, "b", BY) {
                    go(&|after| {
                        after.copies[0] = text(&held);
                        after.is_asked = true;
                    });
                }
                if world.is_promised {
                    go(&|after| after.decision = Some(true));
                }
            }
            // The promise may also be late, without a waiter.
            if world.is_asked {
                let by = promised(Here::Copy(&destination), &ask(), BY, world.is_complete);
                if let Some(ready) = by {
                    go(&|after| {
                        after.copies[1] = text(&ready);
                        after.is_promised = true;
                    });
                }
            }
            if let Ok(again) = prepare(Here::Copy(&destination), &offer(SESSION)) {
                go(&|after| {
                    after.copies[1] = text(&again);
                    after.is_complete = false;
                });
            }
            if let Some(decision) = world.decision {
                for (side, here) in [&source, &destination].into_iter().enumerate() {
                    if let Some(settled) = settled(here, BY, decision) {
                        go(&|after| after.copies[side] = text(&settled));
                    }
                }
                if !matches!(source.role, Role::Held { .. })
                    && !matches!(destination.role, Role::Ready { .. })
                {
                    ends.insert((decision, source.may_serve(), destination.may_serve()));
                }
            }
            left.extend(next);
        }
        assert_eq!(
            ends.into_iter().collect::<Vec<_>>(),
            [(false, true, false), (true, false, true)],
            "one serves in the end, and the right one"
        );
    }
}
