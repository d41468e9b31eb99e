//! The state of hosts, processes, disks and letters.

use verbatim_mirror::decision::{Record, Sidecar};
use verbatim_mirror::trust::Trust;

use super::{CELLS, Value};

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Disk {
    /// False: another disk with the same name.
    pub is_it: bool,
    pub length: u8,
    pub durable: [Value; CELLS],
    /// The content that programs read.
    pub cache: [Value; CELLS],
    pub is_dirty: [bool; CELLS],
    /// Other data lie behind the volume's, as on a larger device.
    pub has_rest: bool,
}

impl Disk {
    pub fn zeros(length: u8) -> Self {
        Self {
            is_it: true,
            length,
            durable: [0; CELLS],
            cache: [0; CELLS],
            is_dirty: [false; CELLS],
            has_rest: false,
        }
    }

    pub fn write(&mut self, cell: usize, value: Value) {
        (self.cache[cell], self.is_dirty[cell]) = (value, true);
    }

    /// Flushes as Linux does: pages that could not be written are clean and stay.
    pub fn flush(&mut self, is_good: bool) {
        for cell in 0..CELLS {
            if std::mem::take(&mut self.is_dirty[cell]) && is_good {
                self.durable[cell] = self.cache[cell];
            }
        }
    }

    pub fn lose_power(&mut self) {
        self.is_dirty = [false; CELLS];
        self.cache = self.durable;
    }
}

/// State of a folder for writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Folder {
    Good,
    /// Only writes into room that was made ahead succeed.
    Full,
    ReadOnly,
    /// Reads fail, too.
    Broken,
}

/// The disk of the data, for writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Medium {
    Good,
    /// Only what is allocated already can be written.
    Full,
    /// Nothing can be written, and only a suspect copy is opened.
    ReadOnly,
}

/// The path of data that a process has open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    There,
    /// They were moved away.
    Elsewhere,
    /// They were deleted, and go when they are closed.
    Nowhere,
}

/// A process' knowledge of its copy.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Row {
    Unknown,
    Known(Option<Record>),
}

/// An attempt, at its source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Moving {
    pub session: u8,
    pub to: usize,
    pub is_rescue: bool,
    pub by: Option<u8>,
    pub is_linked: bool,
    /// The destination's process is the one that has acknowledged everything so far.
    pub keeps: bool,
    pub has: [bool; CELLS],
    pub is_flushed: bool,
}

/// An attempt, at its destination.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Filling {
    pub session: u8,
    pub compares: bool,
    pub is_flushed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Poison {
    None,
    Unnoted,
    Noted,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Process {
    pub row: Row,
    /// The data are open.
    pub is_open: bool,
    /// The size that clients see, while the copy serves.
    pub told: u8,
    pub grows: bool,
    pub trust: Trust,
    pub moving: Option<Moving>,
    pub filling: Option<Filling>,
    pub poison: Poison,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    pub record: Option<Record>,
    /// The record before the last change: the content of a backup.
    pub backup: Option<Option<Record>>,
    /// The data have seen a later record.
    pub is_old: bool,
    pub folder: Folder,
    pub medium: Medium,
    /// Another volume has the name.
    pub has_other: bool,
    /// The data at the path, or those that a process has open.
    pub place: Option<Disk>,
    pub path: Path,
    /// The data that belong at the path, and are elsewhere.
    pub away: Option<Disk>,
    /// The note in the runtime folder: a flush is in progress, or was when its process ended.
    pub is_flushing: bool,
    /// The page cache has been dropped since that flush: a block device that nobody had open any more.
    pub is_dropped: bool,
    /// Acknowledged writes that went with it. Their clients ask for a flush again.
    pub dropped: [Value; CELLS],
    pub process: Option<Process>,
    /// The host has lost its knowledge: its disks are new, or an operator has deleted everything.
    pub has_forgotten: bool,
}

impl Host {
    /// Whether the data take a write of this cell.
    pub fn takes(&self, cell: usize, value: Value) -> bool {
        match self.medium {
            Medium::Good => true,
            Medium::ReadOnly => false,
            Medium::Full => {
                let is_allocated = |disk: &Disk| disk.durable[cell] != 0 || disk.cache[cell] != 0;
                value == 0 || self.place.as_ref().is_some_and(is_allocated)
            }
        }
    }

    /// Nobody has the data open any more.
    pub fn close(&mut self) {
        match std::mem::replace(&mut self.path, Path::There) {
            Path::There => {}
            Path::Elsewhere => self.away = self.place.take(),
            Path::Nowhere => self.place = None,
        }
    }

    /// The copy by the last write, even if an older record was restored since.
    pub fn last_copy(&self) -> Option<&Sidecar> {
        let last = match (self.is_old, &self.backup) {
            (true, Some(later)) => later,
            _ => &self.record,
        };
        match last {
            Some(Record::Copy(sidecar)) => Some(sidecar),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Question {
    /// Has it committed? It may.
    Commits,
    /// The same, where an operator has answered it already: it is not to commit any more.
    Wish,
    /// Has the source left?
    Leaves,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Letter {
    Ask {
        from: usize,
        to: usize,
        session: u8,
        base: u64,
        question: Question,
    },
    /// 0: committed, 1: not committed, 2: not known, 3: not known, and it would take an offer.
    Answer { to: usize, session: u8, answer: u8 },
}

/// A decision of an operator about a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Said {
    pub host: usize,
    pub session: u8,
    /// The copy's after that.
    pub generation: u64,
    pub serves: bool,
}

/// A session of the agents.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Agents {
    pub by: u8,
    pub from: usize,
    pub to: usize,
    pub is_promised: bool,
    pub decision: Option<bool>,
    /// The decision by an operator.
    pub said: Option<bool>,
    /// The generation of the source that this decision has kept.
    pub kept: Option<u64>,
    /// Whether the source's daemon, and the destination's, still have to be told.
    pub notes: [bool; 2],
}
