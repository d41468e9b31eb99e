//! What this host says of a decision to others, who may have missed it.

use verbatim_session::Role;
use verbatim_session::decision::{Keep, Outcome as Decided};
use verbatim_session::fill::Noted;
use verbatim_session::record::Standing;

use crate::journal::{Journal, Known};
use crate::proto::OutcomeReply;
use crate::proto::outcome_reply::{Memory, Outcome};

/// What the journal knows of it.
///
/// `is_asking`: this host is the session's destination, has lost records of it, and asks the others itself.
pub fn known(journal: &Journal, session: u64, is_asking: bool) -> OutcomeReply {
    let parts = journal.parts(session);
    let error = parts.iter().rev().find_map(|part| part.told.error.clone());
    let own = parts.iter().find(|part| part.role == Role::Destination);
    let memory = match own.map(|part| part.part.memory) {
        // What lies in memory ended with the boot in which that was written.
        Some(Noted::Missing) if journal.boot() == own.map_or([0; 16], |part| part.boot) => Memory::Missing,
        Some(Noted::Missing | Noted::Nothing) => Memory::Whole,
        Some(Noted::Unknown) | None => Memory::NotSaid,
    };
    OutcomeReply {
        outcome: outcome(&parts, is_asking).into(),
        reason: error.unwrap_or_default(),
        memory: memory.into(),
    }
}

/// The destination's word is the decision; the source writes down what it has heard, and so does a partner that has switched. A partner that was rolled
/// back may have been so without a word: its programs are gone. A destination whose tasks may still be there says nothing yet.
fn outcome(parts: &[Known], is_asking: bool) -> Outcome {
    let mut outcome = Outcome::Unknown;
    for part in parts {
        outcome = match (part.role, part.part.standing) {
            (Role::Partner, Standing::Switched) => return Outcome::Committed,
            (_, Standing::Ran | Standing::Cleared | Standing::Resolved(Keep::Destination))
            | (_, Standing::Closed(Decided::Committed)) => return Outcome::Committed,
            (Role::Partner, _) => continue,
            (_, Standing::Closed(Decided::RolledBack))
            | (Role::Source, Standing::RolledBack | Standing::Resolved(Keep::Source)) => {
                return Outcome::RolledBack;
            }
            (Role::Destination, Standing::Damaged) if is_asking => Outcome::Unknown,
            _ => Outcome::Undecided,
        };
    }
    outcome
}

#[cfg(test)]
mod tests {
    use verbatim_session::record::{Parties, What};

    use super::*;

    /// What is said where the journal has these records.
    fn said(records: &[(Role, What)], is_asking: bool) -> Outcome {
        let folder = tempfile::tempdir().unwrap();
        let journal = Journal::open(folder.path()).unwrap();
        for (role, what) in records {
            journal.write(1, *role, what.clone()).unwrap();
        }
        known(&journal, 1, is_asking).outcome()
    }

    #[test]
    fn a_partner_that_has_switched_knows_and_one_that_has_not_does_not() {
        let opened = |role| (role, What::Opened(Parties::default()));
        let partner = Role::Partner;
        for (what, expected) in [
            (What::Drained, Outcome::Unknown),
            (What::Switched, Outcome::Committed),
            (What::Closed(Decided::Committed), Outcome::Committed),
            // It may have been so for want of programs.
            (What::Closed(Decided::RolledBack), Outcome::Unknown),
        ] {
            let records = [opened(partner), (partner, what.clone())];
            assert_eq!(said(&records, false), expected, "{what:?}");
        }
        let records = [
            opened(Role::Destination),
            opened(partner),
            (partner, What::Switched),
        ];
        assert_eq!(said(&records, false), Outcome::Committed);
    }

    #[test]
    fn a_destination_that_asks_does_not_know() {
        // Its beginning is lost.
        let lost = [(Role::Destination, What::Note(Default::default()))];
        assert_eq!(said(&lost, true), Outcome::Unknown);
        assert_eq!(said(&lost, false), Outcome::Undecided);
        let cleared = [(Role::Source, What::Cleared)];
        assert_eq!(said(&cleared, false), Outcome::Committed);
    }
}
