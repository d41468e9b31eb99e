//! An operator's decision in place of an answer, and the question that stays open.

use serde::{Deserialize, Serialize};

use super::{Answer, Ask, Overruled, Role, SessionId, Sidecar, decided};

/// The copy that stays, by an operator's decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// The copy that asks: the destination has not committed, and never will.
    Source,
    /// The copy at the destination.
    Destination,
}

/// The sidecar of a source after an operator has decided in the place of a destination that never answers.
/// `None` if no answer is missing.
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
        Keep::Source => Some(here.kept(*session, to)),
    }
}

impl Sidecar {
    /// The sidecar of a copy that serves again by an operator's decision, and whose question stays open.
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
