//! Two hosts with one volume, a tenant, and everything that can go wrong, by seed.
//!
//! Checks: a read returns written values, none older than the acknowledged ones; flushed values outlive a
//! power failure, acknowledged ones a killed process; at most one copy answers; the copy that serves after a
//! commit has all acknowledged values on its disk; and after any events some copy serves again at last, and
//! can be moved.

mod destination;
mod disk;
mod history;
mod host;
mod network;
mod paper;
mod run;
mod source;

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use verbatim_mirror::decision::{Role, Sidecar, VolumeId};
use verbatim_mirror::{Config, Engine};

use disk::Disk;
use history::History;
use host::{Host, Process, Stage};
use network::{Connection, Letter, ToSource};
pub use paper::Mended;
use paper::{Machine, Paper};

/// Bytes of the engine are cells here.
pub const CELLS: usize = 11;
pub const CONFIG: Config = Config {
    chunk_bytes: 4,
    silence: Duration::from_millis(200),
    hold: Duration::from_secs(2),
    dead: Duration::from_secs(10),
};

/// The algorithm at the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    Ours,
    /// Algorithm 1. Its tenant does not let its own changes overlap.
    Paper(Mended),
}

/// Faults around the engine, each of which must be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quirk {
    /// A restarted destination counts as having all the data that it had acknowledged.
    TrustsRestarted,
    /// A new connection is welcomed while writes of an earlier one are in flight.
    EarlyWelcome,
    /// The destination acknowledges flushes without flushing.
    NoFlush,
    /// A source that is restarted in the middle of the decision serves.
    ServesInDoubt,
    /// The destination serves when its commit is being written.
    CommitsBeforeDurable,
    /// The tenant goes on at once when the decision could not be written down.
    ReleasesAtOnce,
}

pub const QUIRKS: [Quirk; 6] = [
    Quirk::TrustsRestarted,
    Quirk::EarlyWelcome,
    Quirk::NoFlush,
    Quirk::ServesInDoubt,
    Quirk::CommitsBeforeDurable,
    Quirk::ReleasesAtOnce,
];

#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub which: Which,
    pub faults: bool,
    pub quirk: Option<Quirk>,
}

/// Events of a walk.
#[derive(Debug, Clone, Copy, Default)]
pub struct Tally {
    pub steps: u64,
    pub faults: u64,
    pub commits: u64,
    pub acknowledged: u64,
    pub silences: u64,
}

impl Tally {
    pub fn add(&mut self, other: Self) {
        self.steps += other.steps;
        self.faults += other.faults;
        self.commits += other.commits;
        self.acknowledged += other.acknowledged;
        self.silences += other.silences;
    }
}

pub struct World {
    rules: Rules,
    random: SmallRng,
    now: Duration,
    hosts: Vec<Host>,
    connections: Vec<Option<Connection>>,
    letters: Vec<Letter>,
    history: History,
    counter: u64,
    /// The most requests that the tenant has open.
    depth: usize,
    /// One of this many possible faults happens.
    rarity: u32,
    tally: Tally,
    /// No more faults.
    is_calm: bool,
    /// No more requests.
    is_quiet: bool,
    /// The violation that was found.
    wrong: Option<String>,
    /// The events, if they are recorded.
    story: Option<Vec<String>>,
}

impl World {
    fn new(seed: u64, rules: Rules, with_story: bool) -> Self {
        let host = |sidecar: Option<Sidecar>| Host {
            disk: Disk::new(CELLS),
            sidecar,
            process: None,
            has_lost_power: false,
        };
        let mut world = Self {
            rules,
            random: SmallRng::seed_from_u64(seed),
            now: Duration::ZERO,
            hosts: vec![host(Some(Sidecar::new(VolumeId(7), CELLS as u64))), host(None)],
            connections: Vec::new(),
            letters: Vec::new(),
            history: History::new(CELLS),
            counter: 0,
            depth: 1 + seed as usize % 5,
            rarity: [1, 3, 10, 30][(seed / 5) as usize % 4],
            tally: Tally::default(),
            is_calm: false,
            is_quiet: false,
            wrong: None,
            story: with_story.then(Vec::new),
        };
        world.start(0);
        world.start(1);
        world
    }

    fn has(&self, quirk: Quirk) -> bool {
        self.rules.quirk == Some(quirk)
    }

    fn number(&mut self) -> u64 {
        self.counter += 1;
        self.counter
    }

    fn tell(&mut self, text: impl FnOnce() -> String) {
        if let Some(story) = &mut self.story {
            story.push(text());
        }
    }

    fn is_wrong(&mut self, what: String) {
        self.wrong.get_or_insert(what);
    }

    fn chance(&mut self, of: u32) -> bool {
        self.random.random_ratio(1, of)
    }

    fn machine(&self) -> Box<dyn Machine> {
        match self.rules.which {
            Which::Ours => Box::new(Engine::new(CONFIG, CELLS as u64)),
            Which::Paper(mended) => Box::new(Paper::new(CONFIG, CELLS as u64, mended)),
        }
    }

    /// A process starts on this host, with the state of its disk.
    fn start(&mut self, host: usize) {
        let number = self.number();
        let mut process = Process::new(number);
        let role = self.hosts[host].sidecar.clone();
        self.tell(|| format!("{host}: starts as {role:?}"));
        if role.is_some_and(|sidecar| matches!(sidecar.role, Role::Deciding { .. })) {
            process.stage = Stage::Asking;
        }
        self.hosts[host].process = Some(process);
        let serves = match &self.hosts[host].sidecar {
            Some(sidecar) if sidecar.may_serve() => true,
            Some(_) => self.has(Quirk::ServesInDoubt) && self.process(host).stage == Stage::Asking,
            None => false,
        };
        if serves {
            self.serve_again(host);
        }
    }

    /// The copy that has served here before does so again, in another process.
    fn serve_again(&mut self, host: usize) {
        let was_power = std::mem::take(&mut self.hosts[host].has_lost_power);
        let content = self.hosts[host].disk.visible().to_vec();
        if let Err(what) = self.history.after_crash(&content, was_power) {
            self.is_wrong(format!("{host} serves again: {what}"));
        }
        self.serve(host);
    }

    fn serve(&mut self, host: usize) {
        let (machine, number) = (self.machine(), self.number());
        let process = self.process_mut(host);
        process.engine = Some(machine);
        process.engine_number = number;
        process.stage = Stage::None;
        process.session = None;
        process.chunks.clear();
        process.requests.clear();
        process.open.clear();
    }

    fn process(&self, host: usize) -> &Process {
        self.hosts[host].process.as_ref().expect("it runs")
    }

    fn process_mut(&mut self, host: usize) -> &mut Process {
        self.hosts[host].process.as_mut().expect("it runs")
    }

    /// Ends the process. I/O in flight is carried out in part.
    fn kill(&mut self, host: usize, is_power: bool) {
        let Some(mut process) = self.hosts[host].process.take() else {
            return;
        };
        self.tally.faults += 1;
        self.tell(|| format!("{host}: {}", if is_power { "loses power" } else { "is killed" }));
        for connection in self.connections.iter_mut().flatten() {
            if connection.to_process == process.number {
                connection.to_source.push(ToSource::Closed);
            }
        }
        for (_, io) in &mut process.io {
            while !io.is_done() && self.random.random_bool(0.7) {
                io.step(&mut self.hosts[host].disk, &mut self.random);
            }
        }
        if let Some(writing) = process.writing
            && self.random.random_bool(0.5)
        {
            self.hosts[host].sidecar = Some(writing.sidecar);
        }
        if is_power {
            self.hosts[host].disk.lose_power(&mut self.random);
            self.hosts[host].has_lost_power = true;
        }
    }

    /// Checks after each step.
    fn check(&mut self) {
        let serving = self
            .hosts
            .iter()
            .filter(|host| host.process.as_ref().is_some_and(Process::serves));
        if serving.count() > 1 {
            self.is_wrong("two copies serve".into());
        }
    }
}

/// One walk. Returns the violation, if there is one, and the events.
pub fn walk(seed: u64, rules: Rules) -> (Option<String>, Tally) {
    let mut world = World::new(seed, rules, false);
    world.run();
    (world.wrong, world.tally)
}

/// The same walk, told.
pub fn story(seed: u64, rules: Rules) -> String {
    let mut world = World::new(seed, rules, true);
    world.run();
    let story = world.story.unwrap_or_default();
    let last = story.len().saturating_sub(80);
    format!("seed {seed}: {:?}\n  {}", world.wrong, story[last..].join("\n  "))
}
