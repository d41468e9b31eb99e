//! A session.

use std::collections::BTreeSet;

use verbatim_session::turns::Joined;

use super::MOST;

/// How far a session is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// It wants its turn.
    Taking,
    /// It looks for the other ends.
    Finding,
    /// It has asked their hosts to join them.
    Joining,
    /// Another session goes first: it leaves what it has joined.
    LettingGo(Met),
    /// It waits for another session to end.
    Waiting(Met),
    /// It has its turn, and prepares the partners.
    Preparing,
    /// Nothing is in flight.
    Suspended,
    /// The instance is at the destination: what is left is done.
    Committed,
    /// The same, in the background.
    Behind,
    /// It has failed: what was done is undone.
    Undoing,
    /// The end.
    Ended {
        /// The instance is at the destination.
        moved: bool,
    },
}

/// A session that was met at another host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Met {
    /// Where.
    pub host: u8,
    /// The instance that it moves.
    pub moving: u8,
}

/// What a host has said to the wish to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reply {
    /// It was not asked.
    None,
    /// The request is under way.
    Asked,
    /// It has answered.
    Said(Joined<u8>),
    /// It does not, or its answer was lost.
    Refused,
}

/// A partner's part, as its journal has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Part {
    /// None yet, or none any more.
    None,
    /// Its connections are being moved.
    Prepared,
    /// They lead to the destination.
    Switched,
}

/// A session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Session {
    /// The instance.
    pub moving: u8,
    /// Its source.
    pub from: u8,
    /// Its destination.
    pub to: u8,
    /// How far it is.
    pub stage: Stage,
    /// Where each instance at another end was found.
    pub found: [Option<u8>; MOST],
    /// What each host has said to the wish to join.
    pub replies: [Reply; MOST],
    /// Requests to join that are under way, a bit for each host: also those of a source that is gone.
    pub mail: u8,
    /// The hosts that have left, a bit for each.
    pub left: u8,
    /// The partners.
    pub parts: [Part; MOST],
    /// It has its turn at the source.
    pub has_turn: bool,
    /// The quirk's number of that turn.
    pub came: u8,
    /// It is not the first attempt.
    pub is_another: bool,
    /// A host does not watch it any more.
    pub is_lost: bool,
    /// The agent that began it is gone.
    pub is_orphan: bool,
    /// The destination has resumed.
    pub is_resumed: bool,
    /// The program has changed: there will be another attempt.
    pub again: bool,
}

impl Session {
    pub(super) fn new(moving: u8, from: u8, to: u8, is_another: bool) -> Self {
        Self {
            moving,
            from,
            to,
            stage: Stage::Taking,
            found: [None; MOST],
            replies: [Reply::None; MOST],
            mail: 0,
            left: 0,
            parts: [Part::None; MOST],
            has_turn: false,
            came: 0,
            is_another,
            is_lost: false,
            is_orphan: false,
            is_resumed: false,
            again: false,
        }
    }

    /// Whether it has come to its end.
    pub fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended { .. })
    }

    /// Whether the instance is at the destination.
    pub fn is_committed(&self) -> bool {
        matches!(
            self.stage,
            Stage::Committed | Stage::Behind | Stage::Ended { moved: true }
        )
    }

    /// The hosts where the other ends were found, a bit for each.
    pub(super) fn partners(&self) -> u8 {
        self.found
            .iter()
            .flatten()
            .fold(0, |hosts, host| hosts | 1 << host)
    }

    /// The instances that were found at a host.
    pub(super) fn found_at(&self, host: u8) -> BTreeSet<u8> {
        let found = (0..MOST as u8).zip(self.found);
        found
            .filter(|(_, at)| *at == Some(host))
            .map(|(instance, _)| instance)
            .collect()
    }

    pub(super) fn fail(&mut self) {
        self.stage = Stage::Undoing;
    }

    /// Requests whose answers it waits for.
    pub(super) fn asked(&self) -> u8 {
        let asked = (0..MOST as u8).zip(self.replies);
        asked
            .filter(|(_, reply)| *reply == Reply::Asked)
            .fold(0, |all, (host, _)| all | 1 << host)
    }

    /// Forgets what is of no use any more. Worlds that differ in nothing else are the same.
    pub(super) fn tidy(&mut self) {
        if self.stage == Stage::Undoing {
            self.replies = [Reply::None; MOST];
            (self.left, self.is_lost) = (0, false);
        }
        if !self.has_ended() {
            return;
        }
        let (found, parts, mail) = (self.found, self.parts, self.mail);
        *self = Self {
            stage: self.stage,
            is_resumed: true,
            ..Self::new(self.moving, self.from, self.to, false)
        };
        if mail != 0 || parts.contains(&Part::Prepared) {
            (self.found, self.parts, self.mail) = (found, parts, mail);
        }
    }
}
