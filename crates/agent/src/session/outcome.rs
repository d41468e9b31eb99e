//! What this host says of a decision to others, who may have missed it.

use verbatim_session::Role;
use verbatim_session::decision::{Keep, Outcome as Decided};
use verbatim_session::fill::Noted;
use verbatim_session::record::Standing;

use crate::journal::{Journal, Known};
use crate::proto::OutcomeReply;
use crate::proto::outcome_reply::{Memory, Outcome};

/// What the journal knows of it.
pub fn known(journal: &Journal, session: u64) -> OutcomeReply {
    let parts = journal.parts(session);
    let error = parts.iter().rev().find_map(|part| part.told.error.clone());
    let own = parts.iter().find(|part| part.role == Role::Destination);
    let memory = match own.map(|part| part.memory) {
        // What lies in memory ended with the boot in which that was written.
        Some(Noted::Missing) if journal.boot() == own.map_or([0; 16], |part| part.boot) => Memory::Missing,
        Some(Noted::Missing | Noted::Nothing) => Memory::Whole,
        Some(Noted::Unknown) | None => Memory::NotSaid,
    };
    OutcomeReply {
        outcome: outcome(&parts).into(),
        reason: error.unwrap_or_default(),
        memory: memory.into(),
    }
}

/// The destination's word is the decision, and the source writes down what it has heard. A destination whose tasks may still be
/// there says nothing yet.
fn outcome(parts: &[Known]) -> Outcome {
    let mut outcome = Outcome::Unknown;
    for part in parts {
        outcome = match (part.role, part.standing) {
            (Role::Partner, _) => continue,
            (_, Standing::Ran | Standing::Resolved(Keep::Destination))
            | (_, Standing::Closed(Decided::Committed)) => return Outcome::Committed,
            (_, Standing::Closed(Decided::RolledBack))
            | (Role::Source, Standing::RolledBack | Standing::Resolved(Keep::Source)) => {
                return Outcome::RolledBack;
            }
            _ => Outcome::Undecided,
        };
    }
    outcome
}
