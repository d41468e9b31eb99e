//! An operator's word in the place of an answer, and what becomes of the question.

use serde::{Deserialize, Serialize};

use super::{Answer, Ask, Overruled, Role, SessionId, Sidecar, decided};

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
/// A source that is kept is raised by two: a copy that has that session's commit all the same has one more than the source had, and is never
/// taken for as young, nor for younger; so the volume can move there again, over it.
pub fn forced(here: &Sidecar, keep: Keep) -> Option<Sidecar> {
    let Role::Deciding { session, to } = &here.role else {
        return None;
    };
    match keep {
        Keep::Destination => decided(here, Answer::Committed),
        Keep::Source => Some(here.kept(*session, to)),
    }
}

impl Sidecar {
    /// It serves again, by an operator's word, and asks on.
    pub(crate) fn kept(&self, session: SessionId, to: &str) -> Self {
        let mut overruled = self.overruled.clone();
        overruled.push(Overruled {
            session,
            base: self.generation,
            to: to.to_owned(),
        });
        Self {
            generation: self.generation + 2,
            overruled,
            ..self.with(Role::Serving)
        }
    }
}

/// What an old copy becomes when an operator says that the one which has served since is lost. Nothing if the copy here is no whole one, or serves.
pub fn revived(here: &Sidecar) -> Option<Sidecar> {
    matches!(here.role, Role::Moved { .. }).then(|| Sidecar {
        generation: here.known() + 2,
        floor: 0,
        ..here.with(Role::Serving)
    })
}

/// The questions that operators have answered, and to which hosts, the last one first. They are asked on, with no more than a wish to know, until
/// those hosts answer: their copies may serve. No offer goes to one of them before.
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

/// The last of them.
pub fn overruled(here: &Sidecar) -> Option<(Ask, &str)> {
    all_overruled(here).next()
}

/// What an answer means to a source that has not waited for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// Nothing: it was for another question, or decides nothing.
    Nothing,
    /// The operator was right. This becomes durable, and the question is not asked any more.
    Confirmed(Sidecar),
    /// The operator was wrong: the destination has the volume, or had. **Two copies have served**: this is told to everybody who looks, and is no
    /// reason to do anything by itself.
    Contradiction,
}

/// The answer to the question of [`overruled`], or to one that was under way when an operator decided.
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
        // A host that does not know what it has gives no answer: there is nothing.
        Answer::NotCommitted | Answer::NotKnown => {
            let mut confirmed = here.clone();
            confirmed
                .overruled
                .retain(|overruled| overruled.session != session);
            Heard::Confirmed(confirmed)
        }
    }
}
