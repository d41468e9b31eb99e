//! A third world: memory that still comes to an instance when it runs at its destination ([`verbatim_session::fill`]).
//!
//! One host: its agent, the processes that give the tasks their memory, the files that they take it from, and the journal. The world
//! begins when the tasks are restored there and nothing is decided. What the other hosts do is the affair of the world of the decision; here
//! a session is committed or given up in one step.

pub mod check;
mod host;

use std::fmt;

use strum::{EnumIter, IntoStaticStr};
use verbatim_session::fill::{Fill, Noted};

use crate::explore::Plain;
use crate::simulated::{self, Simulated, What};

pub use check::Violation;

/// Pages that the tasks lack when they are let go.
const PAGES: u8 = 2;

/// Faults that are put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Quirk {
    /// Processes that are gone are taken for such that have given all.
    GoneIsFilled,
    /// No answer is taken for the processes' end.
    SilentIsLost,
    /// An agent that starts does not ask whether memory is missing.
    ForgetsFill,
    /// An agent that starts ends the processes that it has not started itself.
    EndsWhatItFinds,
    /// An instance moves on while memory is missing.
    MovesOn,
    /// Whether memory is missing is not in the journal: an agent that starts goes by the files alone.
    OnlyTheCache,
    /// What is kept is removed when the session is closed.
    ClearsWithTheSession,
}

/// The quirks of a world.
pub type Quirks = simulated::Quirks<Quirk>;

/// What can happen next.
pub type Step = simulated::Step<Who>;

type Steps<'a> = simulated::Steps<'a, World>;

/// Whom it concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Who {
    /// The agent.
    Agent,
    /// The processes that give memory.
    Processes,
    /// The instance.
    Instance,
    /// The host itself.
    Host,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Agent => "agent",
            Self::Processes => "processes",
            Self::Instance => "instance",
            Self::Host => "host",
        })
    }
}

/// The tasks of the instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tasks {
    /// They are restored, and do not run.
    Held,
    /// They run.
    Running,
    /// They are gone, for this reason.
    Gone(Why),
}

/// Why the tasks are gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// The session was given up before they ran.
    GivenUp,
    /// They ended by themselves, an operator has stopped them, or their host went down.
    Ended,
    /// The agent has ended them, since their memory was lost.
    Lost,
    /// They have moved on.
    Moved,
}

/// How far the session is, to an agent that takes part in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Session {
    /// The tasks are restored.
    Restored,
    /// That it is committed is being written down.
    Committing,
    /// The tasks are to be let go.
    Releasing,
    /// Nothing is left to do, or an earlier agent had begun it.
    Over,
}

/// What the driver carries out for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// It listens to the processes.
    Listen,
    /// It ends the tasks.
    Kill,
    /// It removes the cache.
    RemoveCache,
    /// It has the processes end.
    EndProcesses,
}

/// An agent that is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Agent {
    /// The session.
    pub session: Session,
    /// The machine, if the tasks run or have run.
    pub fill: Option<Fill>,
    /// What it does for it.
    pub effect: Option<Effect>,
    /// The machine's timers, by their numbers.
    pub timers: u8,
}

/// What is being written to the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Record {
    /// The session is committed.
    Committed,
    /// No memory is missing.
    Filled,
}

/// All of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct World {
    /// The agent.
    pub agent: Option<Agent>,
    /// What the journal says, once the session is committed.
    pub journal: Option<Noted>,
    /// What is being written to it.
    pub writing: Option<Record>,
    /// The files from which memory comes are in their folder.
    pub cache: bool,
    /// The worker is there, and has them open.
    pub worker: bool,
    /// The guardian is there.
    pub guardian: bool,
    /// Their socket is there; they remove it when they end in order.
    pub socket: bool,
    /// Their word that all is given, or that no task is left, is there.
    pub word: bool,
    /// A worker has found no files to take memory from.
    pub stalled: bool,
    /// Both were killed, and nobody could start the other again.
    pub killed: bool,
    /// The tasks.
    pub tasks: Tasks,
    /// Pages that they lack.
    pub missing: u8,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// The tasks are restored without some of their memory.
    pub fn new() -> Self {
        Self {
            agent: Some(Agent {
                session: Session::Restored,
                fill: None,
                effect: None,
                timers: 0,
            }),
            journal: None,
            writing: None,
            cache: true,
            worker: true,
            guardian: true,
            socket: true,
            word: false,
            stalled: false,
            killed: false,
            tasks: Tasks::Held,
            missing: PAGES,
        }
    }

    /// Somebody could give the tasks their memory.
    fn is_given(&self) -> bool {
        self.worker || self.guardian
    }

    /// A task would read zeros where it has something else.
    fn lacks(&self) -> bool {
        self.tasks == Tasks::Running && self.missing > 0
    }

    /// The place of the instance is cleared, in order.
    fn clear(&mut self) {
        (self.cache, self.word, self.stalled) = (false, false, false);
        self.end_processes();
    }

    fn end_processes(&mut self) {
        (self.worker, self.guardian, self.socket, self.word) = (false, false, false, false);
    }
}

impl Simulated for World {
    type Who = Who;
    type Quirk = Quirk;
    type Violation = Violation;
    type Known = Plain<Self>;

    const FAULTS_WITHIN: u64 = 25;
    const HEALED_AFTER: usize = 60;

    fn of_seed(_: u64) -> Self {
        Self::new()
    }

    fn steps(&self, quirks: Quirks, what: What, found: &mut Vec<(Step, Self)>) {
        let mut steps = Steps::new(self, quirks, what, Who::Agent, found);
        host::agent(&mut steps);
        steps.who = Who::Processes;
        host::processes(&mut steps);
        steps.who = Who::Instance;
        host::instance(&mut steps);
        steps.who = Who::Host;
        host::faults(&mut steps);
    }

    fn violation(&self, after: &Self) -> Option<Violation> {
        check::violation(self, after)
    }

    fn is_good_end(&self) -> bool {
        check::is_good_end(self)
    }

    fn has_moved(&self) -> bool {
        !matches!(self.tasks, Tasks::Held | Tasks::Gone(Why::GivenUp))
    }
}
