//! Three hosts with realistic disks, folders and operators. Steps are coarse, and each is either durable or
//! has not happened, so that all orders can be explored.
//!
//! The rules are the daemon's own ([`verbatim_mirror::decision`], `trust`, `opening`, `resize`, `together`);
//! only their surroundings are modelled.
//!
//! Operators may decide wrongly. The only promise then is a report: the copy of that decision reports that two
//! copies serve, or none.
//!
//! Destinations are of an earlier release where that is worse: such a destination answers that it knows nothing
//! while its copy is promised to a session.
//!
//! Checks in each world: at most one copy serves, unless an operator was wrong; flushed and acknowledged data
//! are on the disk of the copy that serves, and within the length that clients see. And there is a way out of
//! each world: when everything is started and mounted again, and operators decide as the documentation tells
//! them, one copy serves and can be moved to each of the other hosts.

mod calm;
mod deciding;
mod explore;
mod faults;
mod moving;
mod operators;
mod serving;
mod steps;

use verbatim_mirror::decision::{Here, Record, Sidecar, VolumeId};
use verbatim_mirror::opening::{self, Age, Found, Kind, Noted, Opening};
use verbatim_mirror::trust::{self, First, Trust};

pub use explore::{explore, stroll};
pub use steps::Step;

/// Two cells; the second one comes by a resize.
pub const CELLS: usize = 2;
pub const ID: VolumeId = VolumeId(7);
pub type Value = u8;

/// Faults of earlier code, each put back by one condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quirk {
    /// After a failed flush the next session compares with the page cache.
    ComparesWithTheCache,
    /// A failed flush is forgotten when the data are opened again.
    ForgetsAtReopen,
    /// A connection of the same session goes on after a failed flush.
    RetriesWithinTheSession,
    /// A flush that a killed process has left without a result is not looked for.
    ForgetsCutOffFlush,
    /// The success of a simultaneous flush, or of a write, is answered before the failure is written down.
    AnswersBeforeNoted,
    /// An `Incoming` of a higher base proves nothing.
    BaseProvesNothing,
    /// A deletion leaves no tombstone, and the base of an offer is not noted.
    DeleteForgets,
    /// Opening makes missing data.
    OpenMakes,
    /// Opening cuts longer data.
    OpenCuts,
    /// Opening lengthens shorter data.
    OpenLengthens,
    /// Opening takes any data.
    OpenTakesAnother,
    /// A host that does not know its copy's state acknowledges a decision.
    SettlesUnknown,
    /// Each start writes the sidecar again.
    RewritesAtStart,
    /// A new size is announced before it is durable.
    TellsSizeFirst,
    /// The commit's sidecar needs room.
    CommitNeedsRoom,
    /// A copy that an operator keeps keeps its generation.
    KeepsWithoutRaising,
    /// A copy that an operator keeps no longer asks.
    KeepsWithoutAsking,
    /// The same for a copy in a session of the agents.
    KeepsTogetherWithoutAsking,
    /// A copy that an operator has made an old one, or a destination that he has decided, asks no more.
    LeavesWithoutAsking,
    /// An old copy that serves again asks nobody.
    RevivesWithoutAsking,
    /// A host that knows nothing is one without a copy.
    NotKnownConfirms,
    /// A sidecar that was restored is believed.
    BelievesOldSidecar,
}

pub const QUIRKS: [Quirk; 22] = [
    Quirk::ComparesWithTheCache,
    Quirk::ForgetsAtReopen,
    Quirk::RetriesWithinTheSession,
    Quirk::ForgetsCutOffFlush,
    Quirk::AnswersBeforeNoted,
    Quirk::BaseProvesNothing,
    Quirk::DeleteForgets,
    Quirk::OpenMakes,
    Quirk::OpenCuts,
    Quirk::OpenLengthens,
    Quirk::OpenTakesAnother,
    Quirk::SettlesUnknown,
    Quirk::RewritesAtStart,
    Quirk::TellsSizeFirst,
    Quirk::CommitNeedsRoom,
    Quirk::KeepsWithoutRaising,
    Quirk::KeepsWithoutAsking,
    Quirk::KeepsTogetherWithoutAsking,
    Quirk::LeavesWithoutAsking,
    Quirk::RevivesWithoutAsking,
    Quirk::NotKnownConfirms,
    Quirk::BelievesOldSidecar,
];

/// The possible events, and their limits.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub hosts: usize,
    pub faults: u8,
    pub moves: u8,
    pub writes: u8,
    /// Also resizes.
    pub grows: bool,
    /// Moves are sessions of the agents.
    pub sessions: bool,
    /// Faults of disks: flushes, power, missing files, other files, cut files.
    pub disks: bool,
    /// Faults of folders, and copies that are deleted or lost.
    pub folders: bool,
    /// Decisions of operators.
    pub operators: bool,
    pub quirk: Option<Quirk>,
}

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
    /// The data at the path.
    pub place: Option<Disk>,
    /// The data that belong at the path, and are elsewhere.
    pub away: Option<Disk>,
    /// The note in the runtime folder: a flush is in progress, or was when its process ended.
    pub is_flushing: bool,
    pub process: Option<Process>,
    /// The host has lost its knowledge: its disks are new, or an operator has deleted everything.
    pub has_forgotten: bool,
}

impl Host {
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

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    pub hosts: Vec<Host>,
    pub letters: Vec<Letter>,
    pub agents: Vec<Agents>,
    pub sessions: u8,
    pub values: Value,
    /// The promises to the tenant, by cell.
    pub acknowledged: [Value; CELLS],
    pub flushed: [Value; CELLS],
    /// Sessions that were committed.
    pub committed: Vec<u8>,
    /// Sessions that never will be committed, by an operator's decision.
    pub overruled: Vec<u8>,
    /// Words that put another copy in the place of the one that they were said of, or this one in that one's.
    pub said: Vec<Said>,
    pub faults: u8,
    pub moves: u8,
    pub writes: u8,
    /// An operator's decision was wrong.
    pub has_lied: bool,
    /// A copy has said that two have served, or that none does.
    pub is_shouted: bool,
    /// The only copy was deleted, or its disk is gone.
    pub is_lost: bool,
    pub wrong: Option<String>,
}

impl World {
    pub fn new(rules: &Rules) -> Self {
        let host = Host {
            record: None,
            backup: None,
            is_old: false,
            folder: Folder::Good,
            place: None,
            away: None,
            is_flushing: false,
            process: None,
            has_forgotten: false,
        };
        let mut hosts = vec![host; rules.hosts];
        hosts[0].record = Some(Record::Copy(Sidecar::new(ID, 1)));
        hosts[0].place = Some(Disk {
            has_rest: true,
            ..Disk::zeros(1)
        });
        let mut world = Self {
            hosts,
            letters: Vec::new(),
            agents: Vec::new(),
            sessions: 0,
            values: 0,
            acknowledged: [0; CELLS],
            flushed: [0; CELLS],
            committed: Vec::new(),
            overruled: Vec::new(),
            said: Vec::new(),
            faults: rules.faults,
            moves: rules.moves,
            writes: rules.writes,
            has_lied: false,
            is_shouted: false,
            is_lost: false,
            wrong: None,
        };
        for host in 0..rules.hosts {
            world.start(host, rules);
        }
        world
    }

    pub fn is_wrong(&mut self, what: impl Into<String>) {
        self.wrong.get_or_insert(what.into());
    }

    pub fn process(&self, host: usize) -> Option<&Process> {
        self.hosts[host].process.as_ref()
    }

    pub fn process_mut(&mut self, host: usize) -> &mut Process {
        self.hosts[host].process.as_mut().expect("it runs")
    }

    /// The copy, as its process knows it.
    pub fn copy(&self, host: usize) -> Option<&Sidecar> {
        match &self.process(host)?.row {
            Row::Known(Some(Record::Copy(sidecar))) => Some(sidecar),
            _ => None,
        }
    }

    pub fn durable_copy(&self, host: usize) -> Option<&Sidecar> {
        match &self.hosts[host].record {
            Some(Record::Copy(sidecar)) => Some(sidecar),
            _ => None,
        }
    }

    /// Whether this host answers clients.
    pub fn serves(&self, host: usize) -> bool {
        self.copy(host).is_some_and(Sidecar::may_serve) && self.process(host).is_some_and(|it| it.is_open)
    }

    pub fn disk(&mut self, host: usize) -> &mut Disk {
        self.hosts[host].place.as_mut().expect("it is open")
    }

    fn found(&self, host: usize) -> Found {
        match &self.hosts[host].place {
            None => Found::Missing,
            Some(disk) => Found::Data {
                kind: Kind::File,
                identity: Some(if disk.is_it { "it" } else { "another" }.into()),
                length: u64::from(disk.length) + u64::from(disk.has_rest),
            },
        }
    }

    /// Whether the data on this host are the copy's, and are opened.
    pub fn opens(&mut self, host: usize, length: u64, rules: &Rules) -> bool {
        let noted = Noted {
            kind: Some(Kind::File),
            identity: (rules.quirk != Some(Quirk::OpenTakesAnother)).then(|| "it".into()),
        };
        let fresh = Disk::zeros(length as u8);
        match (rules.quirk, &mut self.hosts[host].place) {
            (Some(Quirk::OpenMakes), place @ None) => *place = Some(fresh),
            (Some(Quirk::OpenCuts), Some(disk)) if disk.has_rest => {
                disk.has_rest = false;
                self.wrong = Some("what lies behind the volume is gone".into());
            }
            (Some(Quirk::OpenLengthens), Some(disk)) if u64::from(disk.length) < length => {
                disk.length = length as u8;
            }
            _ => {}
        }
        matches!(
            opening::open(&noted, length, &self.found(host)),
            Opening::Serve { .. }
        )
    }

    /// Starts a process.
    pub fn start(&mut self, host: usize, rules: &Rules) {
        self.hosts[host].process = Some(Process {
            row: Row::Unknown,
            is_open: false,
            told: 0,
            grows: false,
            trust: Trust::new(&Sidecar::new(ID, 1)),
            moving: None,
            filling: None,
            poison: Poison::None,
        });
        self.look(host, rules);
    }

    /// A process with an unknown copy, or without its data, looks (again).
    pub fn look(&mut self, host: usize, rules: &Rules) {
        let place = &mut self.hosts[host];
        let process = place.process.as_mut().expect("it runs");
        if process.row == Row::Unknown {
            if place.folder == Folder::Broken {
                return;
            }
            if rules.quirk == Some(Quirk::RewritesAtStart)
                && place.record.is_some()
                && place.folder != Folder::Good
            {
                return;
            }
            let with_data = place.place.as_ref().filter(|disk| disk.is_it).map(|_| 2);
            let in_sidecar = if place.is_old { 1 } else { 2 };
            let is_seen = with_data.is_some() || !matches!(place.record, Some(Record::Copy(_)));
            let age = opening::age(in_sidecar, with_data);
            let believes = rules.quirk == Some(Quirk::BelievesOldSidecar);
            // Beside data that are away, the daemon believes a restored sidecar until they come, and promises
            // nothing. Here it is not believed, so that the world goes on.
            if !believes && (age == Age::Old || !is_seen && place.is_old) {
                return;
            }
            // The folder is from before the volume came there, and the data are elsewhere: nothing on this
            // host shows that there was more. It decides nothing (`NotKnown`), like a host with new disks.
            place.has_forgotten |= place.is_old && with_data.is_none();
            process.row = Row::Known(place.record.clone());
        }
        self.open(host, rules);
    }

    /// Opens the data of a copy that serves, or is about to.
    pub fn open(&mut self, host: usize, rules: &Rules) {
        let Some(mut sidecar) = self.copy(host).cloned() else {
            return;
        };
        if !sidecar.may_serve() || self.process(host).is_some_and(|it| it.is_open) {
            return;
        }
        if !self.opens(host, sidecar.length, rules) {
            return;
        }
        if !self.first(host, &sidecar, rules) {
            sidecar = trust::failed(&sidecar).expect("it was not");
            // Where the folder takes no mark, the note in the runtime folder stays.
            let is_marked = self.put(host, Some(Record::Copy(sidecar.clone())), true);
            self.hosts[host].is_flushing = !is_marked;
            self.process_mut(host).row = Row::Known(Some(Record::Copy(sidecar.clone())));
        }
        // What a power failure has left is what there is.
        self.acknowledged = self.disk(host).cache;
        let process = self.process_mut(host);
        process.is_open = true;
        process.told = sidecar.length as u8;
        process.trust = Trust::new(&sidecar);
        if rules.quirk == Some(Quirk::ForgetsAtReopen) {
            process.trust.is_accepted();
        }
    }

    /// The first action on the page cache, and whether the cache equals the disk. If not, the note stays until the copy
    /// is marked.
    pub fn first(&mut self, host: usize, sidecar: &Sidecar, rules: &Rules) -> bool {
        let was_cut_off = std::mem::take(&mut self.hosts[host].is_flushing);
        if rules.quirk == Some(Quirk::ForgetsCutOffFlush)
            || trust::first(sidecar, was_cut_off) == First::Nothing
        {
            return true;
        }
        let disk = self.disk(host);
        disk.flush(true);
        let is_same = disk.cache == disk.durable;
        self.hosts[host].is_flushing = !is_same;
        is_same
    }

    /// The same for a copy that is filled: one that is not sound is written down as suspect. False where it cannot be.
    pub fn first_to_fill(&mut self, host: usize, rules: &Rules) -> bool {
        let here = self.copy(host).expect("it is filled").clone();
        if self.first(host, &here, rules) {
            return true;
        }
        let suspect = trust::failed(&here).expect("it was not");
        let is_noted = self.put(host, Some(Record::Copy(suspect)), true);
        self.hosts[host].is_flushing = !is_noted;
        is_noted
    }

    /// Makes a record durable. `has_room`: the write needs no room.
    pub fn put(&mut self, host: usize, record: Option<Record>, has_room: bool) -> bool {
        let place = &mut self.hosts[host];
        match place.folder {
            Folder::ReadOnly | Folder::Broken => return false,
            Folder::Full if !has_room => return false,
            _ => {}
        }
        if place.record == record {
            return true;
        }
        place.backup = Some(std::mem::replace(&mut place.record, record.clone()));
        place.is_old = false;
        let process = place.process.as_mut().expect("it runs");
        process.row = Row::Known(record);
        true
    }

    pub fn here(&self, host: usize) -> Here<'_> {
        match &self.process(host).expect("it runs").row {
            Row::Unknown => Here::Unknown,
            Row::Known(record) => Here::from(record.as_ref()),
        }
    }

    /// Checks after each step.
    pub fn check(&mut self) {
        if self.wrong.is_some() || self.has_lied || self.is_lost {
            return;
        }
        let serving: Vec<_> = (0..self.hosts.len()).filter(|&host| self.serves(host)).collect();
        if serving.len() > 1 {
            return self.is_wrong("two copies serve");
        }
        let Some(&host) = serving.first() else {
            return;
        };
        let told = self.process(host).expect("it serves").told;
        let disk = self.disk(host).clone();
        for cell in 0..CELLS {
            if self.flushed[cell] == 0 {
                continue;
            }
            if cell >= usize::from(told) || cell >= usize::from(disk.length) {
                self.is_wrong(format!("cell {cell} was flushed, and is out of reach at {host}"));
            } else if disk.durable[cell] < self.flushed[cell] {
                self.is_wrong(format!(
                    "cell {cell} was flushed, and is not on the disk of {host}"
                ));
            } else if disk.cache[cell] < self.flushed[cell] {
                self.is_wrong(format!("cell {cell} was flushed, and is not read at {host}"));
            }
        }
    }
}
