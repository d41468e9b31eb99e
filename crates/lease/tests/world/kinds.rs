//! The second copy of a disk, and the rules that are put out of force: what all worlds have in common.

use verbatim_lease::Quirk;

/// The second copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backup {
    /// A file that never fails.
    File,
    /// A file without enough space.
    FullFile,
    /// A file on a disk that fails, now and then.
    BadFile,
    /// Another server, which fails like the first.
    Server,
    /// No second copy.
    None,
    /// A file, on a disk that goes from host to host: there is a new one on each.
    MovedFile,
    /// Another server, on a disk that goes from host to host.
    MovedServer,
}

pub const BACKUPS: [Backup; 7] = [
    Backup::File,
    Backup::FullFile,
    Backup::BadFile,
    Backup::Server,
    Backup::None,
    Backup::MovedFile,
    Backup::MovedServer,
];

impl Backup {
    pub fn is_server(self) -> bool {
        matches!(self, Self::Server | Self::MovedServer)
    }

    pub fn moves(self) -> bool {
        matches!(self, Self::MovedFile | Self::MovedServer)
    }
}

/// Faults outside the engine, each of which must be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outside {
    /// A file confirms pages that are in its page cache only.
    BelievesTheCache,
    /// A server with older memory (a restored machine) has the same identity.
    BelievesOldMemory,
    /// A copy is back before its requests in flight have ended.
    LandsLate,
    /// A server that has lost its memory since the hand-over is adopted with the old state of the pages.
    AdoptsLost,
    /// A disk that no server gives to its next host is taken for a new one.
    LostIsNew,
    /// A copy that may leave does so some time later.
    LeavesLater,
}

pub const OUTSIDE: [Outside; 6] = [
    Outside::BelievesTheCache,
    Outside::BelievesOldMemory,
    Outside::LandsLate,
    Outside::AdoptsLost,
    Outside::LostIsNew,
    Outside::LeavesLater,
];

/// Rules of the engine, each of which must be missed.
pub const QUIRKS: [Quirk; 9] = [
    Quirk::NoTurns,
    Quirk::NoOrder,
    Quirk::LateCounts,
    Quirk::NoPatience,
    Quirk::TrustsNewMemory,
    Quirk::TrustsUnanswered,
    Quirk::RefusesWhileLeaving,
    Quirk::FillsOverAndOver,
    Quirk::LeavesBehind,
];
