//! A volume that moves together with its container: the session of the agents decides, and the copies obey.
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
//! - Both copies give their decision away before the session is decided: `Held` becomes nothing by itself, and neither does `Ready`. Each waits,
//!   in whichever process, for the word of its own agent about the session `by`.
//! - The session is decided once, and is committed only when the destination is `Ready`: its agent has the volume mounted for the tasks
//!   that it restored. So both copies hear the same, and of `Moved` and `Serving` one is at each host, or the other way round.
//! - `Ready` takes no offer, not even a later one: who is promised cannot know that an offer of that age is not a late one.
//! - The copy that is `Ready` is written to before the decision, by the mount and by CRIU, for tasks that do not run. If the session is rolled back, it is
//!   `Incomplete`: nothing of it counts, and the next attempt compares it.

use crate::decision::{AgentSession, Ask, Role, SessionId, Sidecar};

/// What a source becomes when it holds its tenant, and the destination has everything. Nothing if it does not serve.
pub fn held(here: &Sidecar, session: SessionId, to: &str, by: AgentSession) -> Option<Sidecar> {
    let to = to.to_owned();
    here.may_serve()
        .then(|| here.with(Role::Held { session, to, by }))
}

/// What a destination becomes that promises to serve if the session `by` is committed, or is already. `here` is durable; `is_complete`: this very
/// process has flushed all of that session. Nothing if it cannot.
pub fn promised(here: Option<&Sidecar>, ask: &Ask, by: AgentSession, is_complete: bool) -> Option<Sidecar> {
    let here = here.filter(|here| here.id == ask.id)?;
    match &here.role {
        Role::Incoming { session, base, from }
            if is_complete && *session == ask.session && *base == ask.base =>
        {
            Some(here.with(Role::Ready {
                session: *session,
                base: *base,
                from: from.clone(),
                by,
            }))
        }
        Role::Ready { session, by: to, .. } if *session == ask.session && *to == by => Some(here.clone()),
        _ => None,
    }
}

/// What a copy becomes when the session `by` is decided. Nothing if it does not wait for that.
pub fn settled(here: &Sidecar, by: AgentSession, is_committed: bool) -> Option<Sidecar> {
    match &here.role {
        Role::Held { to, by: waits, .. } if *waits == by => Some(here.with(match is_committed {
            true => Role::Moved { to: to.clone() },
            false => Role::Serving,
        })),
        Role::Ready { base, by: waits, .. } if *waits == by => Some(match is_committed {
            true => Sidecar {
                generation: base + 1,
                ..here.with(Role::Serving)
            },
            false => here.with(Role::Incomplete),
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::decision::{Answer, Offer, Refusal, Verdict, VolumeId, answer, prepare};

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
        let incoming = prepare(None, &offer(SESSION)).expect("there is nothing here");
        promised(Some(&incoming), &ask(), BY, true).expect("it is complete")
    }

    #[test]
    fn a_promise_wants_everything_and_is_given_again() {
        let incoming = prepare(None, &offer(SESSION)).expect("there is nothing here");
        assert_eq!(promised(Some(&incoming), &ask(), BY, false), None);
        let other = Ask {
            session: SessionId(2),
            ..ask()
        };
        assert_eq!(promised(Some(&incoming), &other, BY, true), None);
        assert_eq!(promised(Some(&ready()), &ask(), BY, false), Some(ready()));
        assert_eq!(promised(Some(&ready()), &ask(), BY + 1, true), None);
        assert!(!ready().may_serve());
    }

    #[test]
    fn what_is_promised_takes_no_offer_and_no_other_decision() {
        for session in [SESSION, SessionId(2)] {
            assert_eq!(prepare(Some(&ready()), &offer(session)), Err(Refusal::Promised));
        }
        for is_complete in [false, true] {
            let said = answer(Some(&ready()), &ask(), is_complete);
            assert_eq!(said, Verdict::Say(Answer::NotKnown));
        }
        assert_eq!(settled(&ready(), BY + 1, true), None, "another session");
    }

    /// All that can happen to both copies, in each order, with each daemon killed at each step: what is durable is all that counts.
    #[test]
    fn at_most_one_copy_serves_in_all_worlds() {
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
        struct World {
            /// As they are on the disks.
            copies: [String; 2],
            /// The process at the destination has all.
            is_complete: bool,
            is_asked: bool,
            is_promised: bool,
            decision: Option<bool>,
        }
        let text = |sidecar: &Sidecar| serde_json::to_string(sidecar).expect("plain data");
        let incoming = prepare(None, &offer(SESSION)).expect("there is nothing here");
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
            // The tenant goes on at the source: what the destination has is not all any more.
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
            // Also late, when nobody waits for it any more.
            if world.is_asked {
                let by = promised(Some(&destination), &ask(), BY, world.is_complete);
                if let Some(ready) = by {
                    go(&|after| {
                        after.copies[1] = text(&ready);
                        after.is_promised = true;
                    });
                }
            }
            if let Ok(again) = prepare(Some(&destination), &offer(SESSION)) {
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
