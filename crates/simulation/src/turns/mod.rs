//! A second world: moves that meet.
//!
//! Up to four instances on up to four hosts, with connections between them, any of which may be asked to move, both ends of
//! a connection at once too. What each host knows is a [`Turns`], the very structure of the agent; how a source takes its turn
//! is told here as in the agent. What becomes of one session's decision is the other world's affair: here a session
//! is committed in one step.
//!
//! What is not told: that a session holds back programs which ask where its instance's queue pairs are.
//!
//! Nobody gives up here because it has waited long, as agents do. So whatever waits for ever is seen.

pub mod check;
mod host;
mod session;
mod state;

use std::fmt;
use std::rc::Rc;

use strum::{EnumIter, IntoStaticStr};
use verbatim_session::turns::Turns;

use crate::explore::Plain;
use crate::simulated::{self, Simulated, What};

pub use check::Violation;
pub use state::{Met, Part, Reply, Session, Stage};

/// The most hosts, and the most instances.
pub const MOST: usize = 4;

/// Faults that are put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Quirk {
    /// Whoever meets another session keeps what it has.
    NeverLetsGo,
    /// Not the name decides who keeps what it has, but who came first, as each host counts for itself.
    FirstComeKeeps,
    /// What a session has joined stays joined when its source is gone.
    DeadKeepsItsJoins,
    /// What a source asked for before it was gone is begun after that.
    JoinsForTheGone,
    /// The destination does not have an instance that arrives.
    ArrivesWithoutTurn,
    /// A move joins where an earlier one of the same instance has not ended.
    NextDoesNotWait,
    /// An agent that starts again does not join what its sessions had joined.
    ForgetsJoins,
}

/// The quirks of a world.
pub type Quirks = simulated::Quirks<Quirk>;

/// What can happen next.
pub type Step = simulated::Step<Who>;

type Steps<'a> = simulated::Steps<'a, World>;

/// Where something happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Who {
    /// The host.
    pub host: u8,
    /// What at that host.
    pub what: Whom,
}

/// Whom something concerns at a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Whom {
    /// The agent.
    Agent,
    /// A session, by its number, and the instance that it moves.
    Session(u8, u8),
    /// Two instances.
    Pair(u8, u8),
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {}", self.host)?;
        match self.what {
            Whom::Agent => Ok(()),
            Whom::Session(number, moving) => write!(f, ", session {number} ({})", name(moving)),
            Whom::Pair(one, other) => write!(f, ", {} and {}", name(one), name(other)),
        }
    }
}

/// An instance's name.
fn name(instance: u8) -> char {
    char::from(b'a' + instance)
}

/// A host.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Host {
    /// Its agent runs.
    pub up: bool,
    /// Whose turn it is here.
    pub turns: Turns<u8>,
    /// A bit for each session whose source watches it here.
    pub watched: u16,
    /// How often an instance was had here, by which a quirk decides.
    pub count: u8,
}

/// An instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Instance {
    /// Where it is.
    pub host: u8,
    /// A bit for each instance that it is connected with.
    pub peers: u8,
    /// It is being moved, and nobody can ask for another move.
    pub moving: bool,
    /// Where it is still asked to go, first one last.
    pub wishes: [Option<u8>; 2],
}

/// All of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct World {
    /// The hosts.
    pub hosts: Vec<Rc<Host>>,
    /// The instances.
    pub instances: [Option<Instance>; MOST],
    /// The sessions, by their numbers.
    pub sessions: Vec<Session>,
}

/// Two instances with a connection, where exhaustive searches begin: they change places, and one of them is asked twice.
pub fn small() -> [World; 2] {
    [
        World::new(2, &[(0, [None, Some(1)]), (1, [None, Some(0)])], &[(0, 1)]),
        World::new(3, &[(0, [Some(1), Some(2)]), (0, [None; 2])], &[(0, 1)]),
    ]
}

/// The bits that are set.
fn bits(of: u8) -> impl Iterator<Item = u8> {
    (0..8).filter(move |bit| of & 1 << bit != 0)
}

impl World {
    /// Instances, each with its host and where it is asked to go; each of `connections` leads from one to another one.
    pub fn new(hosts: u8, instances: &[(u8, [Option<u8>; 2])], connections: &[(u8, u8)]) -> Self {
        let host = Rc::new(Host {
            up: true,
            turns: Turns::default(),
            watched: 0,
            count: 0,
        });
        let mut world = Self {
            hosts: vec![host; usize::from(hosts)],
            instances: [None; MOST],
            sessions: Vec::new(),
        };
        for (slot, (host, wishes)) in world.instances.iter_mut().zip(instances) {
            *slot = Some(Instance {
                host: *host,
                peers: 0,
                moving: false,
                wishes: *wishes,
            });
        }
        for (one, other) in connections {
            world.instance_mut(*one).peers |= 1 << other;
            world.instance_mut(*other).peers |= 1 << one;
        }
        world
    }

    fn host(&self, host: u8) -> &Host {
        &self.hosts[usize::from(host)]
    }

    fn host_mut(&mut self, host: u8) -> &mut Host {
        Rc::make_mut(&mut self.hosts[usize::from(host)])
    }

    fn instance(&self, instance: u8) -> &Instance {
        self.instances[usize::from(instance)]
            .as_ref()
            .expect("it is there")
    }

    fn instance_mut(&mut self, instance: u8) -> &mut Instance {
        self.instances[usize::from(instance)]
            .as_mut()
            .expect("it is there")
    }

    fn session(&self, session: u8) -> &Session {
        &self.sessions[usize::from(session)]
    }

    fn session_mut(&mut self, session: u8) -> &mut Session {
        &mut self.sessions[usize::from(session)]
    }

    /// The session that moves `instance` now, if one does.
    fn mover(&self, instance: u8) -> Option<&Session> {
        self.sessions
            .iter()
            .find(|session| session.moving == instance && !session.has_ended())
    }

    /// An operator asks for it, or a session for another attempt.
    fn open(&mut self, moving: u8, to: u8, is_another: bool) {
        let from = self.instance(moving).host;
        self.instance_mut(moving).moving = true;
        self.sessions.push(Session::new(moving, from, to, is_another));
    }
}

fn hash(seed: u64, what: u64) -> u64 {
    let mixed = (seed ^ what << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 29
}

impl Simulated for World {
    type Who = Who;
    type Quirk = Quirk;
    type Violation = Violation;
    type Known = Plain<Self>;

    const FAULTS_WITHIN: u64 = 100;
    const HEALED_AFTER: usize = 300;

    fn of_seed(seed: u64) -> Self {
        let mut drawn = 0;
        let mut draw = |below: u8| {
            drawn += 1;
            (hash(seed, drawn) >> 8) as u8 % below
        };
        let hosts = 2 + draw(MOST as u8 - 1);
        let count = 1 + draw(MOST as u8);
        let mut instances = Vec::new();
        for _ in 0..count {
            let wishes = [0, 1].map(|_| (draw(4) != 0).then(|| draw(hosts)));
            instances.push((draw(hosts), wishes));
        }
        let mut connections = Vec::new();
        for one in 0..count {
            for other in 0..one {
                // Three of four pairs.
                if draw(4) != 0 {
                    connections.push((one, other));
                }
            }
        }
        Self::new(hosts, &instances, &connections)
    }

    fn steps(&self, quirks: Quirks, what: What, found: &mut Vec<(Step, Self)>) {
        let who = Who {
            host: 0,
            what: Whom::Agent,
        };
        let mut steps = Steps::new(self, quirks, what, who, found);
        host::steps(&mut steps);
        session::steps(&mut steps);
    }

    fn violation(&self, after: &Self) -> Option<Violation> {
        check::violation(after)
    }

    fn is_good_end(&self) -> bool {
        check::is_good_end(self)
    }

    fn has_moved(&self) -> bool {
        self.sessions
            .iter()
            .any(|session| session.stage == Stage::Ended { moved: true })
    }

    fn tidy(&mut self) {
        self.sessions.iter_mut().for_each(Session::tidy);
    }
}
