//! What the records of a journal add up to for one host's part in one session, where records may be missing.
//!
//! Damage is a place in the journal: what is missing there was written after all records before it, and before all behind it. So it
//! says nothing of a part that had come to its end before, nor of one that began behind it.

use crate::decision::Outcome;
use crate::record::{Noted, Standing, What};

/// One host's part in one session, by the records that were read so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Part {
    /// Where it stands in the order in which parts began here. No clock says that.
    pub sequence: u64,
    /// How it stands.
    pub standing: Standing,
    /// Whether memory is missing to the tasks that it brought here.
    pub memory: Noted,
    /// Records are missing since [`Self::memory`] was written, which may have said more of the instance's memory.
    pub is_memory_in_doubt: bool,
}

impl Part {
    /// The first record that there is of it is about to be added.
    pub fn begin(sequence: u64, first: &What) -> Self {
        Self {
            sequence,
            standing: match first {
                What::Opened(_) => Standing::Opened,
                // Records before this one are missing.
                _ => Standing::Damaged,
            },
            memory: Noted::Unknown,
            is_memory_in_doubt: false,
        }
    }

    /// One record more.
    pub fn add(&mut self, what: &What) {
        // A beginning that was lost is written down again behind what followed it.
        if !matches!(what, What::Opened(_)) {
            self.standing = self.standing.after(what);
        }
        let noted = match what {
            What::Committed(noted) => *noted,
            What::Filled | What::RolledBack | What::Closed(Outcome::RolledBack) => Noted::Nothing,
            _ => return,
        };
        self.memory = noted;
        self.is_memory_in_doubt = false;
    }

    /// Records are missing here.
    pub fn damaged(&mut self) {
        self.standing = self.standing.damaged();
        self.is_memory_in_doubt = true;
    }

    /// What the journal says of the memory of the instance that it brought here, if no part of that instance began later.
    pub fn memory_here(&self) -> Noted {
        match self.is_memory_in_doubt {
            true => Noted::Unknown,
            false => self.memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Parties;

    fn read(records: &[Option<What>]) -> Part {
        let first = records.iter().flatten().next().expect("a record");
        let mut part = Part::begin(0, first);
        for record in records {
            match record {
                Some(what) => part.add(what),
                None => part.damaged(),
            }
        }
        part
    }

    fn opened() -> Option<What> {
        Some(What::Opened(Parties::default()))
    }

    #[test]
    fn what_is_missing_counts_until_a_later_record_says_more() {
        let committed = Some(What::Committed(Noted::Missing));
        let closed = Some(What::Closed(Outcome::Committed));
        assert_eq!(read(&[opened(), None]).standing, Standing::Damaged);
        assert_eq!(
            read(&[opened(), None, committed.clone()]).standing,
            Standing::Committed
        );
        let step = Some(What::Note(crate::record::Note::default()));
        assert_eq!(read(&[opened(), None, step.clone()]).standing, Standing::Damaged);
        let over = read(&[opened(), committed.clone(), closed.clone(), None]);
        assert_eq!(over.standing, Standing::Closed(Outcome::Committed));
        let rolled_back = read(&[opened(), Some(What::RolledBack), None]);
        assert_eq!(rolled_back.standing, Standing::RolledBack);
        // Its beginning is missing.
        assert_eq!(read(std::slice::from_ref(&step)).standing, Standing::Damaged);
        assert_eq!(read(&[committed]).standing, Standing::Committed);
        assert_eq!(
            read(&[Some(What::Deciding), opened()]).standing,
            Standing::Deciding,
            "its beginning was written again"
        );
    }

    #[test]
    fn of_memory_damage_says_nothing_either_way() {
        let committed = |noted| Some(What::Committed(noted));
        for noted in [Noted::Missing, Noted::Nothing] {
            assert_eq!(read(&[opened(), committed(noted)]).memory_here(), noted);
            assert_eq!(
                read(&[opened(), None, committed(noted)]).memory_here(),
                noted,
                "what is missing was written before"
            );
            let doubt = read(&[opened(), committed(noted), None]);
            assert_eq!(doubt.memory_here(), Noted::Unknown);
            assert_eq!(doubt.memory, noted);
        }
        let filled = [opened(), committed(Noted::Missing), None, Some(What::Filled)];
        assert_eq!(read(&filled).memory_here(), Noted::Nothing);
    }
}
