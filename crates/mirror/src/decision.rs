//! Which copy of a volume may serve, by what is durable on the hosts' disks.
//!
//! Each copy has a [`Sidecar`] beside its data: identity, generation, [`Role`]. It is replaced as a whole. The commit of a move is one
//! such replacement, at the destination: from `Incoming` to `Serving`, with the generation raised by one. Nothing else raises it.
//!
//! ```text
//!  source                                   destination
//!  Serving g                                (nothing), Moved or Incomplete, generation < g
//!    │        ── Offer {session, g} ──►     Incoming {session, g}*
//!    │        ── chunks, changes, flush ─►
//!  Deciding {session}*                        │
//!    │        ── Ask {session, g} ────►     Serving g + 1*          ◄── the commit
//!    │        ◄── Committed ───────────       │
//!  Moved*                                     │
//!
//!  Deciding   ── Ask ─────────────────►     Incoming, not complete: Incomplete*
//!    │        ◄── NotCommitted ────────
//!  Serving g*
//! ```
//!
//! `*`: durable before anything that relies on it.
//!
//! # Why at most one copy serves
//! A copy serves only while its durable role is `Serving`. Let A serve with the generation g, and no other copy serve or be able to.
//! - Another copy becomes `Serving` only by [`answer`], which wants an Ask for that session. A asks only after its `Deciding` is durable and
//!   its tenant is held; from then on A does not serve, and neither does a process that comes after A's.
//! - A serves again only by `NotCommitted`. That is answered only when the destination's durable role is not (any more) the `Incoming` of that
//!   session, and its generation is not above g. A late offer may bring that role back, but no commit: that wants the source's last flush
//!   on a connection of that session, and a source that has asked sends none any more. So after `NotCommitted` the session is never
//!   committed.
//! - A source that could not write its `Deciding` does not know whether it is there. The process after it might ask, for a destination that
//!   has not what the tenant wrote meanwhile. So the tenant goes on only when `Serving` is durable again.
//! - `Committed` is answered only if the destination's durable generation is above g. Generations do not fall, so A hears the same for ever.
//! - A destination that does not know the volume answers `NotKnown`, which decides nothing: the copy may have been deleted there
//!   after it had served.
//! - [`forced`] is an operator's word in place of an answer, for a destination that gives none: what is said here holds if the word is true.
//!
//! So at each time at most one copy is `Serving`, or is one that A's question decides; and g + 1 is given once.
//!
//! # Why it is the right data
//! The source asks only when it holds its tenant, and the destination has acknowledged everything and flushed it. The destination commits only in
//! the process that has flushed it. (One that came later would have the same on its disk; it cannot know, and answers `NotCommitted`.)

use serde::{Deserialize, Serialize};

/// Identifies a volume, on all hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct VolumeId(pub u128);

/// Identifies an attempt to move a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct SessionId(pub u128);

macro_rules! written_in_hexadecimal {
    ($id:ident) => {
        impl From<$id> for String {
            fn from(id: $id) -> Self {
                format!("{:032x}", id.0)
            }
        }

        impl TryFrom<String> for $id {
            type Error = std::num::ParseIntError;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                u128::from_str_radix(&text, 16).map(Self)
            }
        }
    };
}

written_in_hexadecimal!(VolumeId);
written_in_hexadecimal!(SessionId);

/// A session of the agents, which decides about a volume that moves together with its container.
pub type AgentSession = u64;

/// How often a volume has moved; 1 for one that was made here.
pub type Generation = u64;

/// What a copy is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "role")]
pub enum Role {
    /// The one that serves.
    Serving,
    /// It was the one that serves; the destination is asked.
    Deciding {
        /// The attempt.
        session: SessionId,
        /// The destination.
        to: String,
    },
    /// Another one has served since.
    Moved {
        /// Where it went.
        to: String,
    },
    /// It is being filled.
    Incoming {
        /// The attempt.
        session: SessionId,
        /// The generation of what it is filled from.
        base: Generation,
        /// From where.
        from: String,
    },
    /// An attempt to fill it was given up. It is a mixture.
    Incomplete,
    /// It was the one that serves, and moves with its container ([`crate::together`]).
    Held {
        /// The attempt.
        session: SessionId,
        /// The destination.
        to: String,
        /// The session of the agents that decides.
        by: AgentSession,
    },
    /// It is filled, and moves with its container.
    Ready {
        /// The attempt.
        session: SessionId,
        /// The generation of what it was filled from.
        base: Generation,
        /// From where.
        from: String,
        /// The session of the agents that decides.
        by: AgentSession,
    },
}

/// What is kept beside the data of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sidecar {
    /// Which volume.
    pub id: VolumeId,
    /// Its age.
    pub generation: Generation,
    /// Its size in bytes.
    pub length: u64,
    /// What it is.
    #[serde(flatten)]
    pub role: Role,
}

impl Sidecar {
    /// Of a new volume.
    pub fn new(id: VolumeId, length: u64) -> Self {
        Self {
            id,
            generation: 1,
            length,
            role: Role::Serving,
        }
    }

    /// Whether it may answer requests.
    pub fn may_serve(&self) -> bool {
        self.role == Role::Serving
    }

    /// With another role.
    pub fn with(&self, role: Role) -> Self {
        Self { role, ..self.clone() }
    }
}

/// What a source wants filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// Which volume.
    pub id: VolumeId,
    /// The attempt.
    pub session: SessionId,
    /// The source's generation.
    pub base: Generation,
    /// The source's size.
    pub length: u64,
    /// The source's name.
    pub from: String,
}

/// Why a destination does not take an offer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Another volume has the name.
    OtherVolume,
    /// The copy here serves, or may.
    Serves,
    /// The copy here is not older than the source's.
    NotOlder,
    /// The copy here waits for a session of the agents.
    Promised,
}

/// What a destination's sidecar must be before it takes anything of this session. `here`: what there is of that name.
pub fn prepare(here: Option<&Sidecar>, offer: &Offer) -> Result<Sidecar, Refusal> {
    let generation = match here {
        None => 0,
        Some(here) if here.id != offer.id => return Err(Refusal::OtherVolume),
        Some(here)
            if matches!(
                here.role,
                Role::Serving | Role::Deciding { .. } | Role::Held { .. }
            ) =>
        {
            return Err(Refusal::Serves);
        }
        Some(here) if matches!(here.role, Role::Ready { .. }) => return Err(Refusal::Promised),
        Some(here) if here.generation >= offer.base => return Err(Refusal::NotOlder),
        Some(here) => here.generation,
    };
    Ok(Sidecar {
        id: offer.id,
        generation,
        length: offer.length,
        role: Role::Incoming {
            session: offer.session,
            base: offer.base,
            from: offer.from.clone(),
        },
    })
}

/// A source's question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Which volume.
    pub id: VolumeId,
    /// The attempt.
    pub session: SessionId,
    /// The source's generation.
    pub base: Generation,
}

/// What a destination says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// The volume is this host's, or was.
    Committed,
    /// It is not, and by this session never will be.
    NotCommitted,
    /// Decides nothing.
    NotKnown,
}

/// How a destination comes to an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// This one.
    Say(Answer),
    /// First this sidecar has to be durable. If it cannot be said whether it is, nothing is answered until it can.
    WriteThenSay(Sidecar, Answer),
}

/// The destination's part of the decision. `here` is durable; `is_complete`: this very process has flushed all of that session.
pub fn answer(here: Option<&Sidecar>, ask: &Ask, is_complete: bool) -> Verdict {
    let Some(here) = here.filter(|here| here.id == ask.id) else {
        return Verdict::Say(Answer::NotKnown);
    };
    if here.generation > ask.base {
        return Verdict::Say(Answer::Committed);
    }
    match &here.role {
        Role::Incoming { session, base, .. } if *session == ask.session && *base == ask.base => {
            match is_complete {
                true => {
                    let committed = Sidecar {
                        generation: ask.base + 1,
                        ..here.with(Role::Serving)
                    };
                    Verdict::WriteThenSay(committed, Answer::Committed)
                }
                false => Verdict::WriteThenSay(here.with(Role::Incomplete), Answer::NotCommitted),
            }
        }
        Role::Incoming { .. } | Role::Incomplete | Role::Moved { .. } => Verdict::Say(Answer::NotCommitted),
        // It has that generation, or an older one, and serves: two copies of one age are nothing that this rule can have made.
        Role::Serving | Role::Deciding { .. } | Role::Held { .. } => Verdict::Say(Answer::NotKnown),
        // Another rule decides.
        Role::Ready { .. } => Verdict::Say(Answer::NotKnown),
    }
}

/// The source's part: what its sidecar becomes by an answer. Nothing while it decides nothing.
pub fn decided(here: &Sidecar, answer: Answer) -> Option<Sidecar> {
    let Role::Deciding { to, .. } = &here.role else {
        return None;
    };
    match answer {
        Answer::Committed => Some(here.with(Role::Moved { to: to.clone() })),
        Answer::NotCommitted => Some(here.with(Role::Serving)),
        Answer::NotKnown => None,
    }
}

/// Which copy stays, by an operator's word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// The one that asks: the destination has not committed, and never will.
    Source,
    /// The other one.
    Destination,
}

/// What a source's sidecar becomes when an operator decides in the place of a destination that never answers. Nothing if no answer is missing.
pub fn forced(here: &Sidecar, keep: Keep) -> Option<Sidecar> {
    decided(
        here,
        match keep {
            Keep::Source => Answer::NotCommitted,
            Keep::Destination => Answer::Committed,
        },
    )
}

#[cfg(test)]
mod tests {
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
        let incoming = prepare(None, &offer(3)).expect("there is nothing here");
        assert!(!incoming.may_serve());
        let Verdict::WriteThenSay(served, Answer::Committed) = answer(Some(&incoming), &ask(3), true) else {
            panic!("it is complete");
        };
        assert!(served.may_serve());
        assert_eq!(served.generation, 4);
        for later in [served.clone(), served.with(Role::Moved { to: "c".into() })] {
            for is_complete in [false, true] {
                let said = answer(Some(&later), &ask(3), is_complete);
                assert_eq!(said, Verdict::Say(Answer::Committed));
            }
        }
    }

    #[test]
    fn what_is_not_complete_is_given_up_before_that_is_said() {
        let incoming = prepare(None, &offer(3)).expect("there is nothing here");
        let Verdict::WriteThenSay(given_up, Answer::NotCommitted) = answer(Some(&incoming), &ask(3), false)
        else {
            panic!("it is not complete");
        };
        assert_eq!(
            answer(Some(&given_up), &ask(3), true),
            Verdict::Say(Answer::NotCommitted)
        );
        let other = Ask {
            session: SessionId(2),
            ..ask(3)
        };
        assert_eq!(
            answer(Some(&incoming), &other, true),
            Verdict::Say(Answer::NotCommitted)
        );
        assert_eq!(answer(None, &ask(3), true), Verdict::Say(Answer::NotKnown));
    }

    #[test]
    fn only_an_older_copy_that_does_not_serve_is_filled() {
        let served = Sidecar::new(ID, 4096);
        assert_eq!(prepare(Some(&served), &offer(5)), Err(Refusal::Serves));
        let old = served.with(Role::Moved { to: "b".into() });
        assert_eq!(prepare(Some(&old), &offer(1)), Err(Refusal::NotOlder));
        assert_eq!(prepare(Some(&old), &offer(2)).map(|here| here.generation), Ok(1));
        let other = Sidecar::new(VolumeId(8), 1);
        assert_eq!(prepare(Some(&other), &offer(2)), Err(Refusal::OtherVolume));
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
    fn an_operator_decides_only_where_an_answer_is_missing() {
        let served = Sidecar::new(ID, 1);
        let session = SESSION;
        let deciding = served.with(Role::Deciding {
            session,
            to: "b".into(),
        });
        assert_eq!(forced(&deciding, Keep::Source), Some(served.clone()));
        let moved = served.with(Role::Moved { to: "b".into() });
        assert_eq!(forced(&deciding, Keep::Destination), Some(moved.clone()));
        let held = crate::together::held(&served, session, "b", 1).expect("it serves");
        for here in [served, moved, held] {
            for keep in [Keep::Source, Keep::Destination] {
                assert_eq!(forced(&here, keep), None, "{here:?}");
            }
        }
    }
}
