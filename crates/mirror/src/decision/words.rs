//! An operator's decision in place of an answer, and the question that stays open.

use serde::{Deserialize, Serialize};

use super::{Answer, Ask, Generation, Here, Overruled, Role, SessionId, Sidecar, Verdict};

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
///
/// The question stays open in both cases: the word may be wrong. Then two copies serve, or none.
pub fn forced(here: &Sidecar, keep: Keep) -> Option<Sidecar> {
    let Role::Deciding { session, to } = &here.role else {
        return None;
    };
    Some(match keep {
        Keep::Destination => here.left(*session, to),
        Keep::Source => here.kept(*session, to),
    })
}

impl Sidecar {
    /// The sidecar of a copy that serves again by an operator's decision. Its question stays open.
    pub(crate) fn kept(&self, session: SessionId, to: &str) -> Self {
        let mut overruled = self.overruled.clone();
        overruled.push(Overruled {
            session,
            base: self.generation,
            to: to.to_owned(),
            was_destination: false,
        });
        Self {
            generation: self.generation + 2,
            overruled,
            ..self.with(Role::Serving)
        }
    }

    /// It is an old copy, by an operator's word, and asks on.
    pub(crate) fn left(&self, session: SessionId, to: &str) -> Self {
        let question = Overruled {
            session,
            base: self.generation,
            to: to.to_owned(),
            was_destination: false,
        };
        Self {
            overruled: vec![question],
            ..self.moved(to)
        }
    }

    /// It was to be the copy that serves, and is or is not, by an operator's word. It asks the source.
    pub(crate) fn asks_source(self, session: SessionId, base: Generation, from: &str) -> Self {
        let question = Overruled {
            session,
            base,
            to: from.to_owned(),
            was_destination: true,
        };
        Self {
            overruled: vec![question],
            ..self
        }
    }
}

/// The sidecar of an old copy after an operator has declared the copy that served since as lost. `None` if
/// the copy here is not complete, or serves. `session`: a new one. The host that the volume went to is asked whether that is so.
pub fn revived(here: &Sidecar, session: SessionId) -> Option<Sidecar> {
    let Role::Moved { to } = &here.role else {
        return None;
    };
    // After an operator's decision that this copy has left, the same question is open already.
    let is_asked = here
        .overruled
        .iter()
        .any(|it| it.to == *to && !it.was_destination);
    let kept = here.kept(session, to);
    Some(Sidecar {
        generation: here.known() + 2,
        floor: 0,
        overruled: if is_asked {
            here.overruled.clone()
        } else {
            kept.overruled.clone()
        },
        ..kept
    })
}

/// The questions that operators have answered, with the hosts that they are for, the last one first. They are
/// still asked until those hosts answer, only to learn whether that was right. No offer goes to such a
/// host before, unless it was the source.
pub fn all_overruled(here: &Sidecar) -> impl Iterator<Item = (Ask, &Overruled)> {
    here.overruled.iter().rev().map(|overruled| {
        let ask = Ask {
            id: here.id,
            session: overruled.session,
            base: overruled.base,
        };
        (ask, overruled)
    })
}

/// The last of these questions, and its host.
pub fn overruled(here: &Sidecar) -> Option<(Ask, &str)> {
    all_overruled(here).next().map(|(ask, it)| (ask, it.to.as_str()))
}

/// The source's answer to a destination at which an operator has decided the session: `Committed` if the copy
/// here has left for `asker` by that session, `NotCommitted` if it serves, or has left for another host.
pub fn has_left(here: Here<'_>, ask: &Ask, asker: &str) -> Verdict {
    let here = match here {
        Here::Unknown => return Verdict::Refuse,
        Here::Copy(here) if here.id == ask.id => here,
        // No copy: another one may serve.
        Here::Nothing | Here::Gone(_) | Here::Copy(_) => return Verdict::Say(Answer::NotKnown),
    };
    match &here.role {
        // It is not decided yet.
        Role::Held { session, .. } if *session == ask.session => Verdict::Refuse,
        Role::Moved { to } if to == asker => Verdict::Say(match here.generation == ask.base {
            true => Answer::Committed,
            false => Answer::NotKnown,
        }),
        Role::Serving | Role::Deciding { .. } | Role::Held { .. } | Role::Moved { .. } => {
            Verdict::Say(Answer::NotCommitted)
        }
        Role::Incoming { .. } | Role::Incomplete | Role::Ready { .. } => Verdict::Say(Answer::NotKnown),
    }
}

/// Meaning of an answer for a copy that has not waited for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Heard {
    /// No consequence: the answer is to another question, or decides nothing. The question stays open.
    Nothing,
    /// The operator was right. This becomes durable, and the question is not asked any more.
    Confirmed(Sidecar),
    /// The operator was wrong. **Two copies have served**, or **none serves** ([`serves_by_word`]). This is
    /// reported wherever the volume is shown, and nothing is done about it automatically.
    Contradiction,
}

/// Whether two copies serve where an operator's word about the copy here was wrong. Else none does.
pub fn serves_by_word(here: &Sidecar) -> bool {
    !matches!(here.role, Role::Moved { .. } | Role::Incomplete)
}

/// Takes the answer to a question of [`all_overruled`], or to one that was in flight when an operator
/// decided.
///
/// `takes`: the host would take an offer of this copy, asked between two answers. `NotKnown` proves nothing without that: a daemon of an earlier release gives it while its
/// copy is promised to a session of the agents, which may yet be committed, and one with a copy of this age that serves gives it, too. Neither takes an offer.
pub fn heard(here: &Sidecar, session: SessionId, answer: Answer, takes: bool) -> Heard {
    let Some(question) = here.overruled.iter().find(|it| it.session == session) else {
        return Heard::Nothing;
    };
    let should_be_committed = serves_by_word(here) == question.was_destination;
    let is_right = match answer {
        Answer::Committed => should_be_committed,
        Answer::NotCommitted => !should_be_committed,
        // There is no copy: so a kept source is the only one.
        Answer::NotKnown if takes && serves_by_word(here) && !question.was_destination => true,
        Answer::NotKnown => return Heard::Nothing,
    };
    if !is_right {
        return Heard::Contradiction;
    }
    let mut confirmed = here.clone();
    confirmed.overruled.retain(|it| it.session != session);
    Heard::Confirmed(confirmed)
}
