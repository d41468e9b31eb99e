//! Decision which copy of a volume may serve, by the durable state of the hosts' disks.
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
//! A copy serves only while its durable role is `Serving`. Let A serve with the generation g, and let no
//! other copy serve or be able to.
//! - Another copy becomes `Serving` only by [`answer`], which requires an Ask for its session. A asks only
//!   after its `Deciding` is durable and its tenant is held; from then on A does not serve, and neither does
//!   a later process with A's data.
//! - A serves again only by `NotCommitted`. That is answered only when the destination's durable role is not
//!   (any more) the `Incoming` of that session, and no generation above g is known there. A late offer may
//!   bring that role back, but no commit: a commit needs the source's last flush on a connection of that
//!   session, and a source that has asked sends no more flushes. So after `NotCommitted` the session is never
//!   committed.
//! - A source that could not write its `Deciding` does not know whether it is durable. A later process might
//!   ask, for a destination without the tenant's writes since then. So the tenant goes on only when `Serving`
//!   is durable again.
//! - `Committed` is answered only if a generation above g is known at the destination. Only A could ask for
//!   the next generation, and A asks for one session at a time: a host that knows a generation above g knows
//!   that this session was committed. The highest known generation never falls, so A gets the same answer
//!   forever.
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
//!   answers ([`heard`]). The generation of a source that was kept is above the other copy's.
//! - An operator may also decide a session at its destination ([`crate::together::forced`]). The destination then
//!   asks its source in the same way ([`has_left`]).
//! - [`revived`] is such a decision for an old copy: all later ones are lost.
//!
//! At each time, therefore, at most one copy is `Serving`, or can become so by A's question; and g + 1 is
//! given once.
//!
//! None of this holds for a sidecar that was restored from a backup: it describes a past state. Where the
//! number kept with the data is higher ([`crate::opening::age`]), the copy's state is unknown until an
//! operator decides.
//!
//! # Why it is the right data
//! The source asks only when it holds its tenant, and the destination has acknowledged everything and flushed
//! it. The destination commits only in the process that has flushed it. (A later process would have the same
//! data on its disk, but cannot know this, and answers `NotCommitted`.) A successful flush proves this only
//! if no flush has failed since everything was written: [`crate::trust`].

mod sidecar;
mod words;

use serde::{Deserialize, Serialize};

pub use sidecar::{
    AgentSession, Generation, Here, Overruled, Record, Role, SessionId, Sidecar, Tombstone, VolumeId,
};
pub use words::{Heard, Keep, all_overruled, forced, has_left, heard, overruled, revived, serves_by_word};

/// A source's offer of a volume to fill.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    /// The volume.
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

/// Reason why a destination does not take an offer.
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

/// The sidecar that a destination needs before it takes anything of this session. `here`: the state of the
/// copy with this name.
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
    /// The volume.
    pub id: VolumeId,
    /// The attempt.
    pub session: SessionId,
    /// The source's generation.
    pub base: Generation,
}

/// A destination's answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Answer {
    /// The session was committed: the volume is, or was, this host's.
    Committed,
    /// The session was not committed here, and never will be.
    NotCommitted,
    /// No decision.
    NotKnown,
}

/// A destination's way to an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// This answer.
    Say(Answer),
    /// This sidecar has to become durable before the answer. While it is uncertain whether it is, there is no
    /// answer.
    WriteThenSay(Sidecar, Answer),
    /// This host does not know its copy's state, or waits for its agent: an error instead of an answer. The
    /// source asks again.
    Refuse,
}

/// The destination's part of the decision. `here` is durable; `is_complete`: this very process has flushed
/// all data of this session.
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
        // A release that did not note the base has written this: the copy may have served in between.
        Role::Incomplete if here.floor == 0 => Verdict::Say(Answer::NotKnown),
        Role::Incoming { .. } | Role::Incomplete | Role::Moved { .. } => Verdict::Say(Answer::NotCommitted),
        // The copy serves, or served, with this generation or an older one: these rules never make two copies
        // of the same generation.
        Role::Serving | Role::Deciding { .. } | Role::Held { .. } => Verdict::Say(Answer::NotKnown),
        // Another rule decides. Until then there is no decision, and an error cannot be taken for one.
        Role::Ready { .. } => Verdict::Refuse,
    }
}

/// The sidecar of a source that holds its tenant, when the destination has everything. `None` if it does not
/// serve, or if it is suspect and this is not a rescue.
pub fn deciding(here: &Sidecar, session: SessionId, to: &str, is_rescue: bool) -> Option<Sidecar> {
    let may = here.may_serve() && (is_rescue || !here.suspect);
    let to = to.to_owned();
    may.then(|| here.with(Role::Deciding { session, to }))
}

/// The source's part: its sidecar after an answer. `None` for an answer without a decision.
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

#[cfg(test)]
mod tests;
