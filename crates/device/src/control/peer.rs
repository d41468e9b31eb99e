//! Whether the queue pair at the other end of a connection names this one, too.
//!
//! An RNIC sends towards a queue pair of another host only after that host has confirmed it. The RNIC asks its agent, which asks the
//! agent of the other host, which asks the RNIC there.

use serde::{Deserialize, Serialize};

/// How many pairs one request names at most; more are `EINVAL`.
pub const MAX_PEER_PAIRS: usize = 256;

/// A queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct QpEnd {
    /// The GID of its RNIC by which it is connected.
    pub gid: [u8; 16],
    /// Its number there.
    pub qpn: u32,
}

/// Two ends of a connection, as one of them is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PeerPair {
    /// The end at this RNIC.
    pub own: QpEnd,
    /// The end at the other RNIC.
    pub other: QpEnd,
}

impl PeerPair {
    /// The same two ends, seen from the other one.
    pub fn turned(&self) -> Self {
        Self {
            own: self.other,
            other: self.own,
        }
    }
}

/// What the RNIC sends on a connection that has asked for it by [`Request::TakePeerQuestions`](super::Request::TakePeerQuestions).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerNews {
    /// Does the other end name this one?
    Question(PeerQuestion),
    /// The other end was told that this one names it, and it does so no more. The RNIC keeps the number of this end back until
    /// [`Request::PeersHeard`](super::Request::PeersHeard) says that the RNIC of the other end knows.
    Gone(PeerPair),
}

/// Does the other end of a connection name this one?
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerQuestion {
    /// Which question of this RNIC: an answer to an earlier one about the same ends counts for nothing.
    pub number: u64,
    /// The two ends, as this RNIC's is set.
    pub pair: PeerPair,
    /// Whose the queue pair is: an instance, or a user of the host, in words.
    pub tenant: String,
    /// It has been answered with no before.
    pub again: bool,
}

/// The answer to a [`PeerQuestion`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PeerAnswer {
    /// To which question.
    pub number: u64,
    /// About which ends.
    pub pair: PeerPair,
    /// What holds.
    pub verdict: PeerVerdict,
}

/// What the RNIC does with a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerVerdict {
    /// It sends.
    Confirmed,
    /// A new connection waits, a confirmed one goes on; the RNIC asks again.
    NotYet,
    /// It gets no answer from the other end.
    Refused,
}

/// How a queue pair of an RNIC stands to one that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PeerStanding {
    /// It names that one, too.
    Named,
    /// It is connected to nothing yet.
    Unconnected,
    /// It is connected to something else, or is no reliable connection.
    Elsewhere,
    /// There is no such queue pair.
    Missing,
    /// The GID is none of this RNIC's.
    Foreign,
}
