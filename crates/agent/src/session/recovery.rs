//! Sessions that an earlier agent of this host had begun.
//!
//! The journal says how each stands, and the machines of `verbatim_session::decision` say how it goes on. Nothing is done to an
//! instance's tasks before it is known how they stand.

mod source;

use std::collections::{BTreeMap, BTreeSet};

use verbatim_session::Role;
use verbatim_session::decision::Outcome;
use verbatim_session::record::What;

use super::destination::Destinations;
use super::partner::Partners;
use super::volumes;
use crate::agent::Shared;
use crate::instances::recovery;
use crate::journal::Known;
use crate::keeper;

/// Brings them to their end, in the background. Returns the instances whose tasks they have to do with.
pub fn take_up(agent: &Shared) -> anyhow::Result<BTreeSet<String>> {
    volumes::take_up(agent);
    let mut latest: BTreeMap<String, Known> = BTreeMap::new();
    for known in agent.journal.sessions() {
        if known.role == Role::Partner || known.has_ended() {
            continue;
        }
        let name = known.told.instance.clone().unwrap_or_default();
        match latest.get(&name) {
            Some(other) if other.begun() > known.begun() => supersede(agent, &known)?,
            _ => {
                if let Some(earlier) = latest.insert(name, known) {
                    supersede(agent, &earlier)?;
                }
            }
        }
    }
    let open: Vec<u64> = latest.values().map(|known| known.session).collect();
    keeper::clear(&agent.config.runtime_dir, |session| open.contains(&session));
    let names = latest.keys().cloned().collect();
    for known in latest.into_values() {
        let name = known.told.instance.as_deref().unwrap_or_default();
        recovery::expect(agent, name, Some((known.session, known.role)));
        match known.role {
            Role::Source => source::take_up(agent, known),
            Role::Destination => Destinations::take_up(agent, &known),
            Role::Partner => unreachable!("passed over above"),
        }
    }
    Partners::recover(agent)?;
    Ok(names)
}

/// Another session of the instance has begun since, which none does before the one before it has come to its end here. Only that was
/// not written down any more.
fn supersede(agent: &Shared, known: &Known) -> anyhow::Result<()> {
    let outcome = known.is_decided().unwrap_or(match known.role {
        Role::Destination => Outcome::Committed,
        Role::Source | Role::Partner => Outcome::RolledBack,
    });
    agent
        .journal
        .write(known.session, known.role, What::Closed(outcome))?;
    Ok(())
}
