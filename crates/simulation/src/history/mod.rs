//! A fifth world: several sessions of one instance, one after the other, while an earlier one is still being finished.
//!
//! The instance moves from host to host and back. Partners are away for long, so that a session that is committed is not over when the next one
//! begins; agents start again, hosts go down, clocks jump, and records of the journals are lost. What happens within one session is the
//! affair of the world of the decision; here its steps are coarse, and messages arrive at once or not at all.

pub mod check;
mod faults;
mod host;
mod journal;
mod known;
mod session;

use std::fmt;

use strum::{EnumIter, IntoStaticStr};
use verbatim_session::Role;
use verbatim_session::decision::destination::Destination;
use verbatim_session::decision::source::Source;
use verbatim_session::decision::{Mark, Outcome};
use verbatim_session::fill::Fill;
use verbatim_session::recovery::{Brought, Record, Touches};

use crate::simulated::{self, Simulated, What};

pub use check::Violation;
use journal::Journal;

/// Hosts.
pub const HOSTS: usize = 3;

/// Moves of the instance, at most: out, back, elsewhere.
pub const MOVES: usize = 3;

/// Faults that are put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Quirk {
    /// A session takes what is found under the instance's name for its own.
    ByName,
    /// Records that are missing anywhere count against every session that has not ended, and a destination that has lost them says
    /// after a restart of its machine that it has committed.
    DamageIsCommit,
    /// Records that are missing anywhere count also against sessions that have begun since.
    DamageIsEverywhere,
    /// The order of sessions is that of the clock.
    ByClock,
    /// The same for whoever asks which session has brought the memory.
    MemoryByClock,
    /// Of the sessions of an instance all but the latest by the clock are closed with a guess.
    Guesses,
    /// The volume daemon is told of sessions that have ended before some are closed.
    VolumesFirst,
    /// An agent that starts leaves to the destination what its session has left to do elsewhere.
    LeavesThePartner,
}

/// The quirks of a world.
pub type Quirks = simulated::Quirks<Quirk>;

/// What can happen next.
pub type Step = simulated::Step<Who>;

type Steps<'a> = simulated::Steps<'a, World>;

/// Whom it concerns: a host, or its part in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Who {
    host: u8,
    /// The session; its source if that is set.
    part: Option<(u8, bool)>,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.host, self.part) {
            (host, _) if usize::from(host) >= HOSTS => f.write_str("partner"),
            (host, None) => write!(f, "host {host}"),
            (host, Some((session, true))) => write!(f, "host {host}, source of session {session}"),
            (host, Some((session, false))) => write!(f, "host {host}, destination of session {session}"),
        }
    }
}

/// The machine of one host's part in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Machine {
    /// Of the host that it leaves.
    Source(Source),
    /// Of the host that it goes to.
    Destination(Destination),
}

/// What the driver of a part carries out, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// Write it down.
    Write(Mark),
    /// Freeze the tasks.
    Freeze,
    /// Have them held for the decision.
    Hold,
    /// Let them go.
    Release,
    /// Find out how they stand.
    Probe,
    /// Undo the session.
    Undo,
    /// Clear the old place.
    Finish,
}

/// A part of a session that an agent sees to.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Part {
    /// Its machine.
    pub machine: Machine,
    /// What is to be carried out.
    pub effects: Vec<Effect>,
    /// What of the tasks is this session's.
    pub touches: Touches,
    /// An earlier agent had begun it.
    pub is_recovered: bool,
}

/// An agent that is up.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Agent {
    /// Its parts: by session, first those as a source, then those as a destination.
    pub parts: [Option<Part>; 2 * MOVES],
    /// The instance's memory comes, and the session whose record says so.
    pub fill: Option<(Fill, Option<u8>)>,
    /// What is being done for it is written down next.
    pub notes_fill: bool,
    /// The session that has the instance's name.
    pub reserved: Option<u8>,
    /// The volume daemon is being told of these parts.
    pub tells: u8,
}

/// The tasks on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tasks {
    /// They run.
    pub run: bool,
    /// Their record.
    pub record: Record,
    /// Some of their memory is still to come.
    pub lack: bool,
    /// It is kept for them.
    pub cache: bool,
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    /// Its agent.
    pub agent: Option<Agent>,
    /// The instance's tasks.
    pub tasks: Option<Tasks>,
    /// The session that has restored them here, and not let them go.
    pub arriving: Option<u8>,
    /// The session whose proxy has left its marker under the instance's name.
    pub marker: Option<u8>,
    /// Its journal.
    pub journal: Journal,
    /// The volume daemon waits to hear of these parts.
    pub volumes: u8,
}

/// One move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Move {
    /// The host that it leaves.
    pub from: u8,
    /// The host that it goes to.
    pub to: u8,
    /// Some of the memory comes when the tasks run there.
    pub lacks: bool,
    /// The partner has switched, or has nothing left that could.
    pub is_switched: bool,
    /// What was said of its decision, durably or to others.
    pub said: Option<Outcome>,
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    /// The hosts.
    pub hosts: [Host; HOSTS],
    /// The moves.
    pub moves: [Move; MOVES],
    /// How many have begun.
    pub begun: u8,
    /// The partner's agent is up.
    pub partner: bool,
    /// A host went down that the instance may have been lost with.
    pub lost: bool,
    /// An operator has forced a decision, and answers for it.
    pub forced: bool,
    /// There are no volumes, and clocks go right: what is left can be searched exhaustively.
    pub is_small: bool,
}

impl World {
    /// The instance runs on the first host. `ways`: for each move, by how many hosts it goes on, and whether memory comes later.
    pub fn new(ways: [(u8, bool); MOVES]) -> Self {
        let host = |tasks| Host {
            agent: Some(Agent::default()),
            tasks,
            arriving: None,
            marker: None,
            journal: Journal::default(),
            volumes: 0,
        };
        let tasks = Tasks {
            run: true,
            record: Record {
                brought: Brought::Started,
                held_by: None,
            },
            lack: false,
            cache: false,
        };
        Self {
            hosts: [host(Some(tasks)), host(None), host(None)],
            moves: ways.map(|(to, lacks)| Move {
                to,
                lacks,
                ..Move::default()
            }),
            begun: 0,
            partner: true,
            lost: false,
            forced: false,
            is_small: false,
        }
    }

    fn agent(&self, host: u8) -> Option<&Agent> {
        self.hosts[usize::from(host)].agent.as_ref()
    }

    fn part(&self, host: u8, index: usize) -> Option<&Part> {
        self.agent(host)?.parts[index].as_ref()
    }

    fn host_mut(&mut self, host: u8) -> &mut Host {
        &mut self.hosts[usize::from(host)]
    }
}

/// The number of a part.
fn index(session: u8, role: Role) -> usize {
    usize::from(session) + if role == Role::Source { 0 } else { MOVES }
}

/// The part of that number.
fn named(index: usize) -> (u8, Role) {
    match index.checked_sub(MOVES) {
        None => (index as u8, Role::Source),
        Some(session) => (session as u8, Role::Destination),
    }
}

impl Simulated for World {
    type Who = Who;
    type Quirk = Quirk;
    type Violation = Violation;
    type Known = known::Worlds;

    const FAULTS_WITHIN: u64 = 110;
    const HEALED_AFTER: usize = 220;

    fn of_seed(seed: u64) -> Self {
        // Mostly back and forth.
        let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        Self::new(std::array::from_fn(|number| {
            let (way, lacks) = (bits & 3, bits & 4 != 0);
            bits >>= 3;
            let back = if number == 1 { 2 } else { 1 };
            (if way == 0 { 3 - back } else { back }, lacks)
        }))
    }

    fn steps(&self, quirks: Quirks, what: What, found: &mut Vec<(Step, Self)>) {
        let who = |host, part| Who { host, part };
        let mut steps = Steps::new(self, quirks, what, who(0, None), found);
        for host in 0..HOSTS as u8 {
            steps.who = who(host, None);
            host::steps(&mut steps, host);
            for index in 0..2 * MOVES {
                let (session, role) = named(index);
                steps.who = who(host, Some((session, role == Role::Source)));
                session::steps(&mut steps, host, index);
            }
            steps.who = who(host, None);
            faults::steps(&mut steps, host);
        }
        steps.who = who(HOSTS as u8, None);
        session::partner(&mut steps);
        faults::partner(&mut steps);
    }

    fn violation(&self, after: &Self) -> Option<Violation> {
        check::violation(self, after)
    }

    fn is_good_end(&self) -> bool {
        check::is_good_end(self)
    }

    fn has_moved(&self) -> bool {
        self.moves.iter().any(|one| one.said == Some(Outcome::Committed))
    }

    fn tidy(&mut self) {
        for session in 0..self.begun {
            if let Some(outcome) = session::says(self, session).or_else(|| journal::says(self, session)) {
                self.moves[usize::from(session)].said = Some(outcome);
            }
        }
    }
}

/// Worlds for exhaustive searches: out and back, and out and elsewhere. The last move is not made.
pub fn small() -> [World; 2] {
    let two = |ways| World {
        is_small: true,
        ..World::new(ways)
    };
    [
        two([(1, false), (2, false), (0, false)]),
        two([(1, false), (1, false), (0, false)]),
    ]
}
