//! What the journal keeps of a session, and what follows from it.
//!
//! The journal is a log of [`Entry`]s in protobuf encoding. What they add up to for one host's part in one session is its
//! [`Standing`]: the input of a machine that goes on where an earlier agent was cut off.

use std::fmt;

use prost::Message;
use verbatim_versions::Versions;

use crate::decision::{Keep, Outcome};
use crate::{Phase, Role};

/// The newest version of records. Each is written in the oldest one that knows its kind. A journal with records of a newer version is not read. What is
/// written is recorded, and `docs/versions.md` says when the version rises.
pub const VERSION: u32 = 2;

/// The oldest version of records that are read, too: an agent goes on where one of an earlier release was cut off.
pub const OLDEST: u32 = 1;

/// Both.
pub const VERSIONS: Versions = Versions::new(OLDEST, VERSION);

/// One record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The session: 64 random bits.
    pub session: u64,
    /// This host's part in it.
    pub role: Role,
    /// When it was written, in milliseconds since 1970.
    pub unix_ms: u64,
    /// The boot of this host in which it was written (`/proc/sys/kernel/random/boot_id`).
    pub boot: [u8; 16],
    /// What happened.
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(test, derive(strum::EnumDiscriminants))]
#[cfg_attr(test, strum_discriminants(name(WhatKind), derive(strum::VariantArray)))]
pub enum What {
    /// The session began here.
    Opened(Parties),
    /// It has come to a phase, or a span of one. Decides nothing.
    Step {
        /// The phase.
        phase: Phase,
        /// The span's name.
        name: String,
    },
    /// Something became known that explains. Decides nothing.
    Note(Note),
    /// By a source: from now on the destination may have been asked to commit.
    Deciding,
    /// By a destination: it was asked to commit, and its tasks may run; whether they lack memory then.
    Committed(Noted),
    /// By a destination: no task lacks memory any more ([`crate::fill`]). Says nothing of the session, which may have been over before. Since version 2.
    Filled,
    /// The tasks run at the destination, or have run.
    Ran,
    /// By a source: they run there, and nothing of them is left here. The name is free, and what is found under it later is not this session's. An agent of
    /// an earlier release reads [`What::Ran`].
    Cleared,
    /// By a partner: nothing is in flight, and the source knows.
    Drained,
    /// By a partner: the instance runs at the destination.
    Switched,
    /// The instance is the source's, and does not run at the destination.
    RolledBack,
    /// An operator decided in the place of the hosts.
    Resolved(Keep),
    /// Everything is cleared away.
    Closed(Outcome),
}

/// What the journal says of an instance's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Noted {
    /// Something may be missing to its tasks.
    Missing,
    /// Nothing is.
    Nothing,
    /// It does not say: records are missing, or are those of an agent that wrote nothing of it. Then the traces of the fill tell, which go only when
    /// nothing is missing: the cache, and the processes' socket.
    Unknown,
}

/// Bytes that are no record, or one that is not understood.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unreadable {
    /// A later release has written it, of this version: nothing is wrong with it.
    Newer(u32),
    /// This is wrong with it.
    Damaged(String),
}

impl From<String> for Unreadable {
    fn from(why: String) -> Self {
        Self::Damaged(why)
    }
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Newer(version) => write!(
                f,
                "a record of version {version}, where this agent knows {VERSIONS}"
            ),
            Self::Damaged(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for Unreadable {}

/// Who takes part.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Parties {
    /// The instance.
    #[prost(string, tag = "1")]
    pub instance: String,
    /// The host that it leaves.
    #[prost(string, tag = "2")]
    pub source: String,
    /// The host that it goes to.
    #[prost(string, tag = "3")]
    pub destination: String,
}

/// What explains.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Note {
    /// The hosts of the partners.
    #[prost(string, repeated, tag = "1")]
    pub partners: Vec<String>,
    /// What went wrong.
    #[prost(string, optional, tag = "2")]
    pub error: Option<String>,
    /// What was sent while the instance ran, in bytes.
    #[prost(uint64, optional, tag = "3")]
    pub pre_copy_bytes: Option<u64>,
    /// What was sent while it stood still, in bytes.
    #[prost(uint64, optional, tag = "4")]
    pub stop_and_copy_bytes: Option<u64>,
}

/// How one host's part in a session stands, by the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Standing {
    /// It began.
    Opened,
    /// See [`What::Deciding`].
    Deciding,
    /// See [`What::Committed`].
    Committed,
    /// See [`What::Ran`].
    Ran,
    /// See [`What::Cleared`].
    Cleared,
    /// See [`What::Drained`].
    Drained,
    /// See [`What::Switched`].
    Switched,
    /// See [`What::RolledBack`].
    RolledBack,
    /// See [`What::Resolved`].
    Resolved(Keep),
    /// See [`What::Closed`].
    Closed(Outcome),
    /// Records are missing that may have said any of this.
    Damaged,
}

impl Standing {
    /// How it stands after a record more.
    pub fn after(self, what: &What) -> Self {
        match what {
            What::Step { .. } | What::Note(_) | What::Filled => self,
            What::Opened(_) => Self::Opened,
            What::Deciding => Self::Deciding,
            What::Committed(_) => Self::Committed,
            What::Ran => Self::Ran,
            What::Cleared => Self::Cleared,
            What::Drained => Self::Drained,
            What::Switched => Self::Switched,
            What::RolledBack => Self::RolledBack,
            What::Resolved(keep) => Self::Resolved(*keep),
            What::Closed(outcome) => Self::Closed(*outcome),
        }
    }

    /// How it stands where records behind it may be missing.
    pub fn damaged(self) -> Self {
        match self {
            // What ran, ran. What did not never will. What an operator has decided stays decided, and what is over stays over.
            Self::Closed(_)
            | Self::Ran
            | Self::Cleared
            | Self::Switched
            | Self::RolledBack
            | Self::Resolved(_) => self,
            Self::Opened | Self::Deciding | Self::Committed | Self::Drained | Self::Damaged => Self::Damaged,
        }
    }

    /// Nothing is left to do.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Closed(_))
    }
}

/// An entry on disk.
#[derive(Clone, PartialEq, Message)]
struct Stored {
    #[prost(uint32, tag = "1")]
    version: u32,
    #[prost(fixed64, tag = "2")]
    session: u64,
    #[prost(uint32, tag = "3")]
    role: u32,
    #[prost(uint64, tag = "4")]
    unix_ms: u64,
    #[prost(bytes = "vec", tag = "5")]
    boot: Vec<u8>,
    #[prost(oneof = "StoredWhat", tags = "10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21")]
    what: Option<StoredWhat>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum StoredWhat {
    #[prost(message, tag = "10")]
    Opened(Parties),
    #[prost(message, tag = "11")]
    Step(StoredStep),
    #[prost(message, tag = "12")]
    Note(Note),
    #[prost(message, tag = "13")]
    Deciding(Nothing),
    #[prost(message, tag = "14")]
    Committed(StoredCommit),
    #[prost(message, tag = "15")]
    Ran(StoredRan),
    #[prost(message, tag = "16")]
    Drained(Nothing),
    #[prost(message, tag = "17")]
    Switched(Nothing),
    #[prost(message, tag = "18")]
    RolledBack(Nothing),
    /// Whether the destination's copy is kept.
    #[prost(bool, tag = "19")]
    Resolved(bool),
    /// Whether the instance is the destination's.
    #[prost(bool, tag = "20")]
    Closed(bool),
    #[prost(message, tag = "21")]
    Filled(Nothing),
}

#[derive(Clone, PartialEq, Message)]
struct StoredCommit {
    /// Not there in a record of an agent that did not write it down.
    #[prost(bool, optional, tag = "1")]
    lacks_memory: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct StoredRan {
    /// Not there in a record of an agent that did not write it down.
    #[prost(bool, optional, tag = "1")]
    is_cleared: Option<bool>,
}

#[derive(Clone, PartialEq, Message)]
struct StoredStep {
    #[prost(string, tag = "1")]
    phase: String,
    #[prost(string, tag = "2")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct Nothing {}

impl What {
    /// The oldest version that knows it.
    fn version(&self) -> u32 {
        match self {
            Self::Filled => 2,
            _ => 1,
        }
    }
}

impl Entry {
    /// The bytes of a record.
    pub fn encode(&self) -> Vec<u8> {
        let version = self.what.version();
        let what = match self.what.clone() {
            What::Opened(parties) => StoredWhat::Opened(parties),
            What::Step { phase, name } => StoredWhat::Step(StoredStep {
                phase: phase.to_string(),
                name,
            }),
            What::Note(note) => StoredWhat::Note(note),
            What::Deciding => StoredWhat::Deciding(Nothing {}),
            What::Committed(noted) => StoredWhat::Committed(StoredCommit {
                lacks_memory: match noted {
                    Noted::Missing => Some(true),
                    Noted::Nothing => Some(false),
                    Noted::Unknown => None,
                },
            }),
            What::Filled => StoredWhat::Filled(Nothing {}),
            What::Ran => StoredWhat::Ran(StoredRan { is_cleared: None }),
            What::Cleared => StoredWhat::Ran(StoredRan {
                is_cleared: Some(true),
            }),
            What::Drained => StoredWhat::Drained(Nothing {}),
            What::Switched => StoredWhat::Switched(Nothing {}),
            What::RolledBack => StoredWhat::RolledBack(Nothing {}),
            What::Resolved(keep) => StoredWhat::Resolved(keep == Keep::Destination),
            What::Closed(outcome) => StoredWhat::Closed(outcome == Outcome::Committed),
        };
        let role = match self.role {
            Role::Source => 1,
            Role::Destination => 2,
            Role::Partner => 3,
        };
        Stored {
            version,
            session: self.session,
            role,
            unix_ms: self.unix_ms,
            boot: self.boot.to_vec(),
            what: Some(what),
        }
        .encode_to_vec()
    }

    /// The record that these bytes are.
    pub fn decode(bytes: &[u8]) -> Result<Self, Unreadable> {
        let stored =
            Stored::decode(bytes).map_err(|error| format!("not a record of the journal: {error}"))?;
        if stored.version > VERSION {
            return Err(Unreadable::Newer(stored.version));
        }
        if !VERSIONS.accepts(stored.version) {
            return Err(format!(
                "a record of version {}, where this agent knows {VERSIONS}",
                stored.version
            )
            .into());
        }
        let role = match stored.role {
            1 => Role::Source,
            2 => Role::Destination,
            3 => Role::Partner,
            other => return Err(format!("a record of the unknown role {other}").into()),
        };
        let boot = stored.boot.try_into();
        let boot = boot.map_err(|_| "a record without the boot that it was written in".to_owned())?;
        let what = stored
            .what
            .ok_or_else(|| "a record that says nothing".to_owned())?;
        let what = match what {
            StoredWhat::Opened(parties) => What::Opened(parties),
            StoredWhat::Step(StoredStep { phase, name }) => What::Step {
                phase: phase
                    .parse()
                    .map_err(|_| format!("the unknown phase {phase:?}"))?,
                name,
            },
            StoredWhat::Note(note) => What::Note(note),
            StoredWhat::Deciding(_) => What::Deciding,
            StoredWhat::Committed(StoredCommit { lacks_memory }) => What::Committed(match lacks_memory {
                Some(true) => Noted::Missing,
                Some(false) => Noted::Nothing,
                None => Noted::Unknown,
            }),
            StoredWhat::Filled(_) => What::Filled,
            StoredWhat::Ran(StoredRan {
                is_cleared: Some(true),
            }) => What::Cleared,
            StoredWhat::Ran(_) => What::Ran,
            StoredWhat::Drained(_) => What::Drained,
            StoredWhat::Switched(_) => What::Switched,
            StoredWhat::RolledBack(_) => What::RolledBack,
            StoredWhat::Resolved(false) => What::Resolved(Keep::Source),
            StoredWhat::Resolved(true) => What::Resolved(Keep::Destination),
            StoredWhat::Closed(false) => What::Closed(Outcome::RolledBack),
            StoredWhat::Closed(true) => What::Closed(Outcome::Committed),
        };
        Ok(Self {
            session: stored.session,
            role,
            unix_ms: stored.unix_ms,
            boot,
            what,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use strum::VariantArray;
    use verbatim_recorded::Recording;

    use super::*;

    const NOTED: [Noted; 3] = [Noted::Unknown, Noted::Missing, Noted::Nothing];

    /// One of each kind, with the phase and the sides that it can name.
    fn of_kind(kind: WhatKind) -> Vec<What> {
        match kind {
            WhatKind::Opened => vec![What::Opened(Parties {
                instance: "web".to_owned(),
                source: "src".to_owned(),
                destination: "dst".to_owned(),
            })],
            WhatKind::Step => Phase::VARIANTS
                .iter()
                .map(|phase| What::Step {
                    phase: *phase,
                    name: "PreSetup".to_owned(),
                })
                .collect(),
            WhatKind::Note => vec![
                What::Note(Note::default()),
                What::Note(Note {
                    partners: vec!["peer".to_owned(), "other".to_owned()],
                    error: Some("no room".to_owned()),
                    pre_copy_bytes: Some(300),
                    stop_and_copy_bytes: Some(7),
                }),
            ],
            WhatKind::Deciding => vec![What::Deciding],
            WhatKind::Committed => NOTED.map(What::Committed).to_vec(),
            WhatKind::Filled => vec![What::Filled],
            WhatKind::Ran => vec![What::Ran],
            WhatKind::Cleared => vec![What::Cleared],
            WhatKind::Drained => vec![What::Drained],
            WhatKind::Switched => vec![What::Switched],
            WhatKind::RolledBack => vec![What::RolledBack],
            WhatKind::Resolved => vec![What::Resolved(Keep::Source), What::Resolved(Keep::Destination)],
            WhatKind::Closed => vec![
                What::Closed(Outcome::RolledBack),
                What::Closed(Outcome::Committed),
            ],
        }
    }

    #[test]
    fn records_are_as_recorded() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../recorded/journal.txt");
        let mut recording = Recording::open(path, VERSION);
        let entry = |role, what| Entry {
            session: 0x0123_4567_89ab_cdef,
            role,
            unix_ms: 1_700_000_000_000,
            boot: *b"a boot of a host",
            what,
        };
        let mut check = |name: String, entry: Entry| {
            recording.check_bytes(&name, &entry.encode(), |bytes| {
                let entry = Entry::decode(bytes).map_err(|error| error.to_string())?;
                Ok(entry.encode())
            });
        };
        for role in [Role::Source, Role::Destination, Role::Partner] {
            check(format!("{role:?}"), entry(role, What::Deciding));
        }
        for what in WhatKind::VARIANTS.iter().flat_map(|kind| of_kind(*kind)) {
            let name = match &what {
                What::Step { phase, .. } => format!("Step/{phase:?}"),
                What::Note(note) => format!("Note/{}", note.partners.len()),
                What::Committed(noted @ (Noted::Missing | Noted::Nothing)) => format!("Committed/{noted:?}"),
                What::Resolved(keep) => format!("Resolved/{keep:?}"),
                What::Closed(outcome) => format!("Closed/{outcome:?}"),
                what => format!("{:?}", WhatKind::from(what)),
            };
            check(name, entry(Role::Source, what));
        }
        recording.finish();
    }

    #[test]
    fn a_record_of_a_later_release_says_so() {
        let entry = Entry {
            session: 1,
            role: Role::Source,
            unix_ms: 1,
            boot: [0; 16],
            what: What::Deciding,
        };
        let mut stored = Stored::decode(&*entry.encode()).unwrap();
        stored.version = VERSION + 1;
        let said = Entry::decode(&stored.encode_to_vec()).unwrap_err();
        assert_eq!(said, Unreadable::Newer(VERSION + 1));
        let said = said.to_string();
        assert!(said.contains(&format!("version {}", VERSION + 1)), "{said}");
    }

    fn what() -> impl Strategy<Value = What> {
        let phase = prop::sample::select(Phase::VARIANTS);
        prop_oneof![
            (".{0,9}", ".{0,9}", ".{0,9}").prop_map(|(instance, source, destination)| What::Opened(
                Parties {
                    instance,
                    source,
                    destination,
                }
            )),
            (phase, ".{0,9}").prop_map(|(phase, name)| What::Step { phase, name }),
            (
                prop::collection::vec(".{0,9}", 0..3),
                any::<Option<String>>(),
                any::<Option<u64>>()
            )
                .prop_map(|(partners, error, bytes)| What::Note(Note {
                    partners,
                    error,
                    pre_copy_bytes: bytes,
                    stop_and_copy_bytes: bytes,
                })),
            prop::sample::select(vec![
                What::Deciding,
                What::Committed(Noted::Unknown),
                What::Committed(Noted::Missing),
                What::Committed(Noted::Nothing),
                What::Filled,
                What::Ran,
                What::Cleared,
                What::Drained,
                What::Switched,
                What::RolledBack,
                What::Resolved(Keep::Source),
                What::Resolved(Keep::Destination),
                What::Closed(Outcome::Committed),
                What::Closed(Outcome::RolledBack),
            ]),
        ]
    }

    proptest! {
        #[test]
        fn records_are_read_back(
            session: u64,
            role in prop::sample::select(Role::VARIANTS),
            unix_ms: u64,
            boot: [u8; 16],
            what in what(),
        ) {
            let entry = Entry { session, role, unix_ms, boot, what };
            prop_assert_eq!(Entry::decode(&entry.encode()), Ok(entry));
        }

        #[test]
        fn bytes_of_any_kind_are_refused_or_read(bytes: Vec<u8>) {
            let _ = Entry::decode(&bytes);
        }
    }

    #[test]
    fn an_agent_of_an_earlier_release_reads_that_it_ran() {
        #[derive(Clone, PartialEq, Message)]
        struct Earlier {
            #[prost(uint32, tag = "1")]
            version: u32,
            #[prost(message, optional, tag = "15")]
            ran: Option<Nothing>,
        }
        let entry = Entry {
            session: 1,
            role: Role::Source,
            unix_ms: 1,
            boot: [0; 16],
            what: What::Cleared,
        };
        let earlier = Earlier::decode(&*entry.encode()).unwrap();
        assert_eq!((earlier.version, earlier.ran), (1, Some(Nothing {})));
    }

    #[test]
    fn only_what_is_closed_has_ended() {
        for outcome in [Outcome::Committed, Outcome::RolledBack] {
            assert!(Standing::Closed(outcome).has_ended());
        }
        for standing in [
            Standing::Opened,
            Standing::Ran,
            Standing::Switched,
            Standing::RolledBack,
            Standing::Damaged,
        ] {
            assert!(!standing.has_ended(), "{standing:?}");
        }
    }

    #[test]
    fn damage_leaves_only_what_cannot_be_taken_back() {
        for standing in [
            Standing::Opened,
            Standing::Deciding,
            Standing::Committed,
            Standing::Drained,
        ] {
            assert_eq!(standing.damaged(), Standing::Damaged, "{standing:?}");
        }
        for standing in [
            Standing::Ran,
            Standing::Cleared,
            Standing::Switched,
            Standing::RolledBack,
            Standing::Resolved(Keep::Source),
            Standing::Closed(Outcome::RolledBack),
        ] {
            assert_eq!(standing.damaged(), standing);
        }
    }
}
