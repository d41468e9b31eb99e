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
mod opening;
mod operators;
mod quirks;
mod serving;
mod state;
mod steps;
mod told;

use std::sync::LazyLock;

use verbatim_mirror::decision::{Here, Record, Sidecar, VolumeId};

pub use explore::{explore, stroll};
pub use quirks::{QUIRKS, Quirk};
pub use state::{
    Agents, Disk, Filling, Folder, Host, Letter, Medium, Moving, Path, Poison, Process, Question, Row, Said,
};
pub use steps::Step;

/// Two cells; the second one comes by a resize.
pub const CELLS: usize = 2;
pub const ID: VolumeId = VolumeId(7);
pub type Value = u8;

/// Content behind the volume's end, which becomes the volume's own by a resize. Clients write later values.
pub const REST: Value = 1;

/// The content within a volume of this length.
fn within(content: [Value; CELLS], length: u64) -> [Value; CELLS] {
    std::array::from_fn(|cell| if (cell as u64) < length { content[cell] } else { 0 })
}

/// Another volume of the same name.
static OTHER: LazyLock<Sidecar> = LazyLock::new(|| Sidecar::new(VolumeId(8), 1));

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
    /// Data disks that are full or read-only, and chunks that cannot be read.
    pub media: bool,
    /// Data that are gone for good.
    pub losses: bool,
    /// Operators make another volume of the same name where this one has no copy.
    pub names: bool,
    /// Decisions of operators.
    pub operators: bool,
    pub quirk: Option<Quirk>,
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
    /// The copy that served was deleted, since its data were gone.
    pub was_gone: bool,
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
            medium: Medium::Good,
            path: Path::There,
            has_other: false,
            place: None,
            away: None,
            is_flushing: false,
            is_dropped: false,
            dropped: [0; CELLS],
            process: None,
            has_forgotten: false,
        };
        let mut hosts = vec![host; rules.hosts];
        hosts[0].record = Some(Record::Copy(Sidecar::new(ID, 1)));
        hosts[0].place = Some(Disk {
            has_rest: true,
            durable: [0, REST],
            cache: [0, REST],
            ..Disk::zeros(1)
        });
        let mut world = Self {
            hosts,
            letters: Vec::new(),
            agents: Vec::new(),
            sessions: 0,
            values: REST,
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
            was_gone: false,
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

    /// Whether the copy here would serve, and its data are gone for good, or cut.
    pub fn lacks_data(&self, host: usize) -> bool {
        let Some(here) = self.durable_copy(host).filter(|here| here.may_serve()) else {
            return false;
        };
        let data = self.own_data(host);
        let is_whole = data.is_some_and(|disk| u64::from(disk.length) >= here.length);
        !is_whole && !self.hosts[host].is_old && !self.serves(host)
    }

    pub fn disk(&mut self, host: usize) -> &mut Disk {
        self.hosts[host].place.as_mut().expect("it is open")
    }

    /// The data of the copy here, wherever they are.
    pub fn own_data(&self, host: usize) -> Option<&Disk> {
        let place = &self.hosts[host];
        place.place.iter().chain(&place.away).find(|disk| disk.is_it)
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
            Row::Known(_) if self.hosts[host].has_other => Here::Copy(&OTHER),
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
            // What was behind the volume is its own before clients can reach it.
            let is_told = cell < usize::from(told) || self.flushed[cell] == REST;
            if !is_told || cell >= usize::from(disk.length) {
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
