//! What the journal knows of one host's part in a session.

use verbatim_session::Role;
use verbatim_session::decision::{Keep, Outcome};
use verbatim_session::fill::Noted;
use verbatim_session::part::Part;
use verbatim_session::record::{Entry, Note, Parties, Standing, What};

use crate::report::Bytes;

/// All that the records say beside what happened; of each the latest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Told {
    /// The instance.
    pub instance: Option<String>,
    /// The host that it leaves.
    pub source: Option<String>,
    /// The host that it goes to.
    pub destination: Option<String>,
    /// The partners' hosts.
    pub partners: Vec<String>,
    /// What went wrong.
    pub error: Option<String>,
    /// What was sent.
    pub bytes: Bytes,
}

/// What is known of this host's part in a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Known {
    /// The session.
    pub session: u64,
    /// This host's part.
    pub role: Role,
    /// How it stands, and where in the order of sessions.
    pub part: Part,
    /// The boot in which the record was written that it stands by.
    pub boot: [u8; 16],
    /// All else.
    pub told: Told,
    /// What happened and when, in milliseconds since 1970.
    pub steps: Vec<(u64, String)>,
    /// The records that are to be kept; none of a session that ended long ago.
    entries: Vec<Entry>,
}

impl Known {
    /// Its first record is about to be added; `sequence` parts have begun before.
    pub(super) fn new(sequence: u64, first: &Entry) -> Self {
        Self {
            session: first.session,
            role: first.role,
            part: Part::begin(sequence, &first.what),
            boot: [0; 16],
            told: Told::default(),
            steps: Vec::new(),
            entries: Vec::new(),
        }
    }

    /// Whether it has come to its end.
    pub fn has_ended(&self) -> bool {
        self.part.standing.has_ended()
    }

    /// The same, and no task lacks memory that it was let go without.
    pub fn is_over(&self) -> bool {
        self.has_ended() && self.part.memory != Noted::Missing
    }

    /// Whether nothing is left to do for the instance itself, whatever others are still to be told.
    pub fn is_decided(&self) -> Option<Outcome> {
        match self.part.standing {
            Standing::Closed(outcome) => Some(outcome),
            Standing::Ran | Standing::Cleared | Standing::Resolved(Keep::Destination) => {
                Some(Outcome::Committed)
            }
            Standing::RolledBack | Standing::Resolved(Keep::Source) => Some(Outcome::RolledBack),
            _ => None,
        }
    }

    /// Keeps nothing but how it ended, and that no memory is missing any more: a source may ask late.
    pub(super) fn forget(&mut self) {
        self.steps = Vec::new();
        self.entries
            .retain(|entry| matches!(entry.what, What::Opened(_) | What::Filled | What::Closed(_)));
        let Told {
            instance,
            source,
            destination,
            ..
        } = std::mem::take(&mut self.told);
        self.told = Told {
            instance,
            source,
            destination,
            ..Told::default()
        };
    }

    /// Records that say all that is known.
    pub(super) fn entries(&self) -> impl Iterator<Item = Entry> {
        self.entries.iter().cloned()
    }

    pub(super) fn add(&mut self, entry: Entry) {
        self.part.add(&entry.what);
        let name = match &entry.what {
            What::Step { name, .. } => Some(name.as_str()),
            What::Note(_) => None,
            What::Opened(_) => Some("Open"),
            What::Deciding => Some("Deciding"),
            What::Committed(_) => Some("Commit"),
            What::Filled => Some("Filled"),
            What::Ran => Some("Running"),
            What::Cleared => Some("Cleared"),
            What::Drained => Some("Drained"),
            What::Switched => Some("Switched"),
            What::RolledBack => Some("RolledBack"),
            What::Resolved(_) => Some("Resolved"),
            What::Closed(_) => Some("Closed"),
        };
        self.steps
            .extend(name.map(|name| (entry.unix_ms, name.to_owned())));
        match &entry.what {
            What::Opened(parties) => {
                let Parties {
                    instance,
                    source,
                    destination,
                } = parties.clone();
                self.told.instance = Some(instance);
                self.told.source = Some(source);
                self.told.destination = Some(destination);
            }
            What::Note(note) => {
                let Note {
                    partners,
                    error,
                    pre_copy_bytes,
                    stop_and_copy_bytes,
                } = note.clone();
                if !partners.is_empty() {
                    self.told.partners = partners;
                }
                self.told.error = error.or(self.told.error.take());
                if let (Some(pre_copy), Some(stop_and_copy)) = (pre_copy_bytes, stop_and_copy_bytes) {
                    self.told.bytes = Bytes {
                        pre_copy,
                        stop_and_copy,
                    };
                }
            }
            // Filled may be written in a later boot, in which nobody looks for a marker of the one before.
            What::Step { .. } | What::Filled => {}
            _ => self.boot = entry.boot,
        }
        self.entries.push(entry);
    }
}
