//! Sessions that an earlier agent of this host had begun.
//!
//! The journal says how each stands, and the machines of `verbatim_session::decision` say how it goes on. Nothing is done to an
//! instance's tasks before it is known how they stand, nor by a session that is not theirs (`verbatim_session::recovery`).

mod source;

use std::collections::BTreeSet;

use verbatim_session::Role;
use verbatim_session::record::{Parties, Standing, What};
use verbatim_session::recovery::Touches;

use super::destination::Destinations;
use super::partner::Partners;
use super::volumes;
use crate::agent::Shared;
use crate::instances::recovery;
use crate::journal::Known;
use crate::keeper;

/// Brings them to their end, in the background. Returns the instances whose tasks they have to do with.
///
/// Several sessions of one instance may be open: one that is being finished does not keep it from coming back. At most one of them has to do with
/// the tasks that are here.
pub fn take_up(agent: &Shared) -> anyhow::Result<BTreeSet<String>> {
    mend(agent)?;
    let mut open = agent.journal.sessions();
    open.retain(|known| known.role != Role::Partner && !known.has_ended());
    open.sort_unstable_by_key(|known| known.part.sequence);
    let sessions: Vec<u64> = open.iter().map(|known| known.session).collect();
    keeper::clear(&agent.config.runtime_dir, |session| sessions.contains(&session));
    let mut names = BTreeSet::new();
    for known in open {
        let name = known.told.instance.clone().unwrap_or_default();
        let mine = touches(agent, &known);
        if mine.is_none_or(Touches::anything) {
            recovery::expect(agent, &name, Some((known.session, known.role)));
            names.insert(name);
        }
        match known.role {
            Role::Source => source::take_up(agent, known, mine),
            Role::Destination => Destinations::take_up(agent, &known, mine),
            Role::Partner => unreachable!("passed over above"),
        }
    }
    Partners::recover(agent)?;
    // Last, when every session that has ended says so.
    volumes::take_up(agent);
    Ok(names)
}

/// Tasks that are held for a session, whose records the journal has lost, say themselves what these were about: that it began, and that the
/// destination may have been asked. Without that nobody would ask it, and the tasks would be held for ever.
fn mend(agent: &Shared) -> anyhow::Result<()> {
    for (instance, undecided) in recovery::held(agent)? {
        let (session, role) = (undecided.session, Role::Source);
        let parts = agent.journal.parts(session);
        let own = parts.iter().find(|part| part.role == role);
        if own.is_some_and(|own| own.told.instance.is_some() || own.has_ended()) {
            continue;
        }
        tracing::error!(
            instance,
            session = format!("{session:016x}"),
            "the journal has lost the beginning of the session that the instance is held for; it is written down again"
        );
        if own.is_none() {
            // First, so that an agent that comes after this one does not find a session that has only begun.
            agent.journal.write(session, role, What::Deciding)?;
        }
        let parties = Parties {
            instance,
            source: agent.name().to_owned(),
            destination: undecided.destination,
        };
        agent.journal.write(session, role, What::Opened(parties))?;
    }
    Ok(())
}

/// What of the instance is a session's that an earlier agent had begun; `None` if the record of the tasks cannot be read now.
pub(super) fn touches(agent: &Shared, known: &Known) -> Option<Touches> {
    let name = known.told.instance.as_deref().unwrap_or_default();
    // The record that named the instance may be missing.
    if known.part.standing == Standing::Cleared || name.is_empty() {
        return Some(Touches::NOTHING);
    }
    match recovery::recorded(agent, name) {
        Ok(record) => {
            let is_latest = agent.journal.latest(name) == Some((known.session, known.role));
            Some(Touches::of(known.role, known.session, record, is_latest))
        }
        Err(error) => {
            let error = format!("{error:#}");
            tracing::error!(
                instance = name,
                error,
                "it is not known which session its tasks belong to"
            );
            None
        }
    }
}
