//! The record beside the data of a copy, and the knowledge that a host has by it.

use serde::{Deserialize, Serialize};

/// Identifies a volume, on all hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct VolumeId(pub u128);

/// Identifies an attempt to move a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct SessionId(pub u128);

macro_rules! written_in_hexadecimal {
    ($id:ident) => {
        impl From<$id> for String {
            fn from(id: $id) -> Self {
                format!("{:032x}", id.0)
            }
        }

        impl TryFrom<String> for $id {
            type Error = std::num::ParseIntError;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                u128::from_str_radix(&text, 16).map(Self)
            }
        }
    };
}

written_in_hexadecimal!(VolumeId);
written_in_hexadecimal!(SessionId);

/// A session of the agents, which decides about a volume that moves together with its instance.
pub type AgentSession = u64;

/// Number of a volume's moves, plus one.
pub type Generation = u64;

/// The role of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "role")]
pub enum Role {
    /// The copy serves.
    Serving,
    /// The copy has served; the destination is asked.
    Deciding {
        /// The attempt.
        session: SessionId,
        /// The destination.
        to: String,
    },
    /// Another copy has served since.
    Moved {
        /// The destination.
        to: String,
    },
    /// The copy is being filled.
    Incoming {
        /// The attempt.
        session: SessionId,
        /// The generation of the source.
        base: Generation,
        /// The source.
        from: String,
    },
    /// An attempt to fill the copy was given up. Its data are a mixture.
    Incomplete,
    /// The copy has served, and moves with its instance ([`crate::together`]).
    Held {
        /// The attempt.
        session: SessionId,
        /// The destination.
        to: String,
        /// The session of the agents that decides.
        by: AgentSession,
    },
    /// The copy is filled, and moves with its instance.
    Ready {
        /// The attempt.
        session: SessionId,
        /// The generation of the source.
        base: Generation,
        /// The source.
        from: String,
        /// The session of the agents that decides.
        by: AgentSession,
    },
}

/// The record beside the data of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sidecar {
    /// The volume.
    pub id: VolumeId,
    /// The generation.
    pub generation: Generation,
    /// Its size in bytes.
    pub length: u64,
    /// The highest generation that this host knows from earlier copies and offers; 0 if there is none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub floor: Generation,
    /// A flush of this copy has failed: its page cache is not to be trusted ([`crate::trust`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub suspect: bool,
    /// Questions that an operator has decided in the place of another host, which has not answered them yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub overruled: Vec<Overruled>,
    /// The role.
    #[serde(flatten)]
    pub role: Role,
}

/// A question that an operator has answered in place of another host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Overruled {
    /// The attempt.
    pub session: SessionId,
    /// The base of the question.
    pub base: Generation,
    /// The other host.
    pub to: String,
    /// The copy here was the destination: the other host is asked whether its copy has left by that session ([`crate::decision::has_left`]).
    #[serde(default, skip_serializing_if = "is_false")]
    pub was_destination: bool,
}

/// Left by a deletion in place of the sidecar, to answer late questions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tombstone {
    /// The volume.
    pub id: VolumeId,
    /// The highest generation that this host knows to have been given.
    pub floor: Generation,
}

impl Tombstone {
    /// The tombstone of a deleted copy.
    pub fn of(here: &Sidecar) -> Self {
        Self {
            id: here.id,
            floor: here.known(),
        }
    }
}

/// Content of the one file about a volume on a host. A deletion replaces the sidecar by the tombstone in one
/// step, and an offer replaces the tombstone by a sidecar. If both lay side by side, and the sidecar were
/// lost, the tombstone would tell less than this host knew.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Record {
    /// There is a copy.
    Copy(Sidecar),
    /// There was a copy.
    Gone {
        /// The tombstone of the copy.
        gone: Tombstone,
    },
}

/// A host's knowledge of its copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Here<'a> {
    /// The state of the copy is unknown: the sidecar is damaged, cannot be read, or is older than the data,
    /// or it is not known which of two is durable. All orders are refused.
    Unknown,
    /// There is no copy, and no trace of one.
    Nothing,
    /// A copy was deleted.
    Gone(&'a Tombstone),
    /// A copy is there.
    Copy(&'a Sidecar),
}

impl<'a> From<Option<&'a Sidecar>> for Here<'a> {
    fn from(here: Option<&'a Sidecar>) -> Self {
        here.map_or(Self::Nothing, Self::Copy)
    }
}

impl<'a> From<&'a Record> for Here<'a> {
    fn from(record: &'a Record) -> Self {
        match record {
            Record::Copy(sidecar) => Self::Copy(sidecar),
            Record::Gone { gone } => Self::Gone(gone),
        }
    }
}

impl<'a> From<Option<&'a Record>> for Here<'a> {
    fn from(record: Option<&'a Record>) -> Self {
        record.map_or(Self::Nothing, Self::from)
    }
}

fn is_zero(value: &Generation) -> bool {
    *value == 0
}

fn is_false(value: &bool) -> bool {
    !value
}

impl Sidecar {
    /// The sidecar of a new volume.
    pub fn new(id: VolumeId, length: u64) -> Self {
        Self {
            id,
            generation: 1,
            length,
            floor: 0,
            suspect: false,
            overruled: Vec::new(),
            role: Role::Serving,
        }
    }

    /// Whether the copy may answer requests.
    pub fn may_serve(&self) -> bool {
        self.role == Role::Serving
    }

    /// The same sidecar with another role.
    pub fn with(&self, role: Role) -> Self {
        Self { role, ..self.clone() }
    }

    /// The highest generation that this host knows.
    pub fn known(&self) -> Generation {
        let offered = match self.role {
            Role::Incoming { base, .. } | Role::Ready { base, .. } => base,
            _ => 0,
        };
        self.generation.max(self.floor).max(offered)
    }

    /// The sidecar after a given-up attempt to fill the copy. Its base stays known.
    pub fn given_up(&self) -> Self {
        Self {
            floor: self.known(),
            ..self.with(Role::Incomplete)
        }
    }

    /// The sidecar of the copy that becomes the serving one, with all data of this base on its disk.
    pub(crate) fn committed(&self, base: Generation) -> Self {
        Self {
            generation: base + 1,
            floor: 0,
            // All data were written again, and flushed.
            suspect: false,
            overruled: Vec::new(),
            ..self.with(Role::Serving)
        }
    }

    /// The sidecar after another copy has served.
    pub(crate) fn moved(&self, to: &str) -> Self {
        Self {
            overruled: Vec::new(),
            ..self.with(Role::Moved { to: to.to_owned() })
        }
    }
}
