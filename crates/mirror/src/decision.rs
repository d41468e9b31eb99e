//! Which copy of a volume may serve, by what is durable on the hosts' disks.
//!
//! Each copy has a [`Sidecar`] beside its data: identity, generation, [`Role`]. It is replaced as a whole.
//! The commit of a move is one such replacement, at the destination: from `Incoming` to `Serving`, with the
//! generation raised by one. Nothing else raises it, except an operator's decision, which raises it by two.
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
//! - A serves again only by `NotCommitted`. That is answered only when the destination's durable role is not
//!   (any more) the `Incoming` of that session, and no generation above g is known there. A late offer may
//!   bring that role back, but no commit: a commit needs the source's last flush on a connection of that
//!   session, and a source that has asked sends no more flushes. So after `NotCommitted` the session is never
//!   committed.
//! - A source that could not write its `Deciding` does not know whether it is there. The process after it might ask, for a destination that
//!   has not what the tenant wrote meanwhile. So the tenant goes on only when `Serving` is durable again.
//! - `Committed` is answered only if a generation above g is known at the destination. Only A could ask for
//!   the next generation, and A asks for one session at a time: a host that knows a generation above g knows
//!   that this session was committed. The highest known generation never falls, so A gets the same answer for
//!   ever.
//! - The highest generation that a host knows is the maximum of its copy's generation, the base of the offer
//!   to it, and both numbers of its earlier copies ([`Sidecar::known`], [`Tombstone`]). So a destination
//!   whose copy has moved on and was deleted gives the same answer as before. A destination without any trace
//!   gives it again as soon as a younger copy comes there: the base of that copy proves the commit.
//! - A destination without a trace of the volume answers `NotKnown`, which decides nothing: its disks may
//!   have been replaced after it had served. A destination that does not know its copy's state
//!   ([`Here::Unknown`]) does not answer.
//! - An offer whose base is below the highest known generation is refused ([`Refusal::Stale`]): its source is
//!   an old copy.
//! - [`forced`] is an operator's decision in place of an answer, for a destination that gives none. The rules
//!   here hold if the decision is right. If it is wrong, the source learns it as soon as the destination
//!   answers ([`heard`]), and the source's generation is above the other copy's.
//! - [`revived`] is such a decision for an old copy.
//!
//! So at each time at most one copy is `Serving`, or is one that A's question decides; and g + 1 is given once.
//!
//! None of this holds for a sidecar that was restored from a backup: it describes a past state. Where the
//! number kept with the data is higher ([`crate::opening::age`]), the copy's state is unknown until an
//! operator decides.
//!
//! # Why it is the right data
//! The source asks only when it holds its tenant, and the destination has acknowledged everything and flushed
//! it. The destination commits only in the process that has flushed it. (One that came later would have the
//! same on its disk; it cannot know, and answers `NotCommitted`.) A successful flush proves this only if no
//! flush has failed since everything was written: [`crate::trust`].

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
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sidecar {
    /// Which volume.
    pub id: VolumeId,
    /// Its age.
    pub generation: Generation,
    /// Its size in bytes.
    pub length: u64,
    /// The highest generation that this host knows from earlier copies and offers; 0 if there is none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub floor: Generation,
    /// A flush of this copy has failed: its page cache is not to be trusted ([`crate::trust`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspect: bool,
    /// Questions that an operator has decided in favour of this copy, and that the destinations have not
    /// answered yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overruled: Vec<Overruled>,
    /// What it is.
    #[serde(flatten)]
    pub role: Role,
}

/// A question that an operator has answered in place of the destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Overruled {
    /// The attempt.
    pub session: SessionId,
    /// The base of the question.
    pub base: Generation,
    /// The destination.
    pub to: String,
}

/// Left by a deletion in place of the sidecar, to answer late questions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tombstone {
    /// Which volume.
    pub id: VolumeId,
    /// The highest generation that this host knows to have been given.
    pub floor: Generation,
}

impl Tombstone {
    /// Of a copy that is deleted.
    pub fn of(here: &Sidecar) -> Self {
        Self {
            id: here.id,
            floor: here.known(),
        }
    }
}

/// Content of the one file about a volume on a host. A deletion replaces the sidecar by the tombstone in one
/// step, and an offer replaces the tombstone by a sidecar. If both lay side by side, and the sidecar were
/// lost, the tombstone would tell less than this host knew.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Record {
    /// There is a copy.
    Copy(Sidecar),
    /// There was one.
    Gone {
        /// Its tombstone.
        gone: Tombstone,
    },
}

/// A host's knowledge of its copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Here<'a> {
    /// The state of the copy is unknown: the sidecar is damaged, cannot be read, or is older than the data,
    /// or it is not known which of two is durable. All orders are refused.
    Unknown,
    /// There is no copy, and no trace of one.
    Nothing,
    /// A copy was deleted.
    Gone(&'a Tombstone),
    /// A copy is there.
    Copy(&'a Sidecar),
}

impl<'a> From<Option<&'a Sidecar>> for Here<'a> {
    fn from(here: Option<&'a Sidecar>) -> Self {
        here.map_or(Self::Nothing, Self::Copy)
    }
}

impl<'a> From<&'a Record> for Here<'a> {
    fn from(record: &'a Record) -> Self {
        match record {
            Record::Copy(sidecar) => Self::Copy(sidecar),
            Record::Gone { gone } => Self::Gone(gone),
        }
    }
}

impl<'a> From<Option<&'a Record>> for Here<'a> {
    fn from(record: Option<&'a Record>) -> Self {
        record.map_or(Self::Nothing, Self::from)
    }
}

fn is_zero(value: &Generation) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Sidecar {
    /// Of a new volume.
    pub fn new(id: VolumeId, length: u64) -> Self {
        Self {
            id,
            generation: 1,
            length,
            floor: 0,
            suspect: false,
            overruled: Vec::new(),
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

    /// The highest generation that this host knows.
    pub fn known(&self) -> Generation {
        let offered = match self.role {
            Role::Incoming { base, .. } | Role::Ready { base, .. } => base,
            _ => 0,
        };
        self.generation.max(self.floor).max(offered)
    }

    /// The attempt to fill it is over. Its base stays known.
    pub fn given_up(&self) -> Self {
        Self {
            floor: self.known(),
            ..self.with(Role::Incomplete)
        }
    }

    /// It has all data of that base on its disk, and becomes the copy that serves.
    pub(crate) fn committed(&self, base: Generation) -> Self {
        Self {
            generation: base + 1,
            floor: 0,
            // All data were written again, and flushed.
            suspect: false,
            overruled: Vec::new(),
            ..self.with(Role::Serving)
        }
    }

    /// Another copy has served since.
    pub(crate) fn moved(&self, to: &str) -> Self {
        Self {
            overruled: Vec::new(),
            ..self.with(Role::Moved { to: to.to_owned() })
        }
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
    /// A copy younger than the source's has been here and was deleted, or was offered. So the source's is an
    /// old copy. If it is the right one all the same, an operator deletes twice here: the copy, and then its
    /// tombstone.
    Stale,
    /// This host does not know its copy's state.
    Unknown,
}

/// What a destination's sidecar must be before it takes anything of this session. `here`: what there is of that name.
pub fn prepare(here: Here<'_>, offer: &Offer) -> Result<Sidecar, Refusal> {
    let (generation, floor, suspect) = match here {
        Here::Unknown => return Err(Refusal::Unknown),
        Here::Nothing => (0, 0, false),
        // The tombstone is of another volume: the name is free again.
        Here::Gone(gone) if gone.id != offer.id => (0, 0, false),
        Here::Gone(gone) => (0, gone.floor, false),
        Here::Copy(here) if here.id != offer.id => return Err(Refusal::OtherVolume),
        Here::Copy(here) => match here.role {
            Role::Serving | Role::Deciding { .. } | Role::Held { .. } => return Err(Refusal::Serves),
            Role::Ready { .. } => return Err(Refusal::Promised),
            _ if here.generation >= offer.base => return Err(Refusal::NotOlder),
            Role::Moved { .. } | Role::Incoming { .. } | Role::Incomplete => {
                (here.generation, here.known(), here.suspect)
            }
        },
    };
    if floor > offer.base {
        return Err(Refusal::Stale);
    }
    Ok(Sidecar {
        id: offer.id,
        generation,
        length: offer.length,
        floor,
        suspect,
        overruled: Vec::new(),
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// This host does not know its copy's state: an error instead of an answer. The source asks again.
    Refuse,
}

/// The destination's part of the decision. `here` is durable; `is_complete`: this very process has flushed all of that session.
pub fn answer(here: Here<'_>, ask: &Ask, is_complete: bool) -> Verdict {
    let here = match here {
        Here::Unknown => return Verdict::Refuse,
        Here::Nothing => return Verdict::Say(Answer::NotKnown),
        Here::Gone(gone) if gone.id != ask.id => return Verdict::Say(Answer::NotKnown),
        // The tombstone covers everything since the first offer.
        Here::Gone(gone) if gone.floor > ask.base => return Verdict::Say(Answer::Committed),
        Here::Gone(_) => return Verdict::Say(Answer::NotCommitted),
        Here::Copy(here) if here.id != ask.id => return Verdict::Say(Answer::NotKnown),
        Here::Copy(here) => here,
    };
    if here.known() > ask.base {
        return Verdict::Say(Answer::Committed);
    }
    match &here.role {
        Role::Incoming { session, base, .. } if *session == ask.session && *base == ask.base => {
            match is_complete {
                true => Verdict::WriteThenSay(here.committed(ask.base), Answer::Committed),
                false => Verdict::WriteThenSay(here.given_up(), Answer::NotCommitted),
            }
        }
        // Written by a release that did not note the base: the copy may have served in between.
        Role::Incomplete if here.floor == 0 => Verdict::Say(Answer::NotKnown),
        Role::Incoming { .. } | Role::Incomplete | Role::Moved { .. } => Verdict::Say(Answer::NotCommitted),
        // It has that generation, or an older one, and serves: two copies of one age are nothing that this rule can have made.
        Role::Serving | Role::Deciding { .. } | Role::Held { .. } => Verdict::Say(Answer::NotKnown),
        // Another rule decides.
        Role::Ready { .. } => Verdict::Say(Answer::NotKnown),
    }
}

/// The sidecar of a source that holds its tenant, when the destination has everything. `None` if it does not
/// serve, or if it is suspect and this is not a rescue.
pub fn deciding(here: &Sidecar, session: SessionId, to: &str, is_rescue: bool) -> Option<Sidecar> {
    let may = here.may_serve() && (is_rescue || !here.suspect);
    let to = to.to_owned();
    may.then(|| here.with(Role::Deciding { session, to }))
}

/// The source's part: what its sidecar becomes by an answer. Nothing while it decides nothing.
pub fn decided(here: &Sidecar, answer: Answer) -> Option<Sidecar> {
    let Role::Deciding { to, .. } = &here.role else {
        return None;
    };
    match answer {
        Answer::Committed => Some(here.moved(to)),
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
///
/// A kept source is raised by two. If the destination did commit that session, its copy's generation is the
/// source's old one plus one. So it is older than the kept source, and the volume can move there again and
/// overwrite it.
pub fn forced(here: &Sidecar, keep: Keep) -> Option<Sidecar> {
    let Role::Deciding { session, to } = &here.role else {
        return None;
    };
    match keep {
        Keep::Destination => decided(here, Answer::Committed),
        Keep::Source => {
            let mut overruled = here.overruled.clone();
            overruled.push(Overruled {
                session: *session,
                base: here.generation,
                to: to.clone(),
            });
            Some(Sidecar {
                generation: here.generation + 2,
                overruled,
                ..here.with(Role::Serving)
            })
        }
    }
}

/// The sidecar of an old copy after an operator has declared the copy that served since as lost. `None` if
/// the copy here is not complete, or serves.
pub fn revived(here: &Sidecar) -> Option<Sidecar> {
    matches!(here.role, Role::Moved { .. }).then(|| Sidecar {
        generation: here.known() + 2,
        floor: 0,
        ..here.with(Role::Serving)
    })
}

/// The questions that operators have answered, with the hosts that they are for, the last one first. They are
/// still asked until those hosts answer, only to learn whether their copies serve. No offer goes to such a
/// host before.
pub fn all_overruled(here: &Sidecar) -> impl Iterator<Item = (Ask, &str)> {
    here.overruled.iter().rev().map(|overruled| {
        let ask = Ask {
            id: here.id,
            session: overruled.session,
            base: overruled.base,
        };
        (ask, overruled.to.as_str())
    })
}

/// The last of these questions.
pub fn overruled(here: &Sidecar) -> Option<(Ask, &str)> {
    all_overruled(here).next()
}

/// Meaning of an answer for a source that has not waited for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// No consequence: the answer is to another question.
    Nothing,
    /// The operator was right. This becomes durable, and the question is not asked any more.
    Confirmed(Sidecar),
    /// The operator was wrong: the destination has, or had, the volume. **Two copies have served.** This is
    /// reported wherever the volume is shown, and nothing is done about it automatically.
    Contradiction,
}

/// Takes the answer to a question of [`all_overruled`], or to one that was in flight when an operator
/// decided.
pub fn heard(here: &Sidecar, session: SessionId, answer: Answer) -> Heard {
    if here
        .overruled
        .iter()
        .all(|overruled| overruled.session != session)
    {
        return Heard::Nothing;
    }
    match answer {
        Answer::Committed => Heard::Contradiction,
        // `NotKnown` means that there is no copy: a host that does not know its copy's state gives no answer.
        Answer::NotCommitted | Answer::NotKnown => {
            let mut confirmed = here.clone();
            confirmed
                .overruled
                .retain(|overruled| overruled.session != session);
            Heard::Confirmed(confirmed)
        }
    }
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
        let Verdict::WriteThenSay(given_up, Answer::NotCommitted) =
            answer(Here::Copy(&incoming), &ask(3), false)
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
        // Written by a release that did not note the base.
        let old = r#"{"id":"7","generation":0,"length":4096,"role":"incomplete"}"#;
        let old: Sidecar = serde_json::from_str(old).expect("as it was written");
        assert_eq!(
            answer(Here::Copy(&old), &ask(1), false),
            Verdict::Say(Answer::NotKnown)
        );
    }

    #[test]
    fn files_of_before_are_read_and_new_words_are_left_out() {
        let old =
            r#"{"id":"00000000000000000000000000000007","generation":1,"length":4096,"role":"serving"}"#;
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
        assert_eq!(heard(&kept, SESSION, Answer::Committed), Heard::Contradiction);
        assert_eq!(heard(&kept, SessionId(9), Answer::Committed), Heard::Nothing);
        let Heard::Confirmed(confirmed) = heard(&kept, SESSION, Answer::NotCommitted) else {
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
        let revived = revived(&old).expect("it is a whole copy");
        assert!(revived.may_serve() && revived.generation == 3);
        assert_eq!(super::revived(&old.given_up()), None, "a mixture");
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
        assert_eq!(forced(&deciding, Keep::Destination), Some(moved.clone()));
        let held = crate::together::held(&served, session, "b", 1).expect("it serves");
        for here in [served, moved, held] {
            for keep in [Keep::Source, Keep::Destination] {
                assert_eq!(forced(&here, keep), None, "{here:?}");
            }
        }
    }
}
