//! The world of post-copy: a virtual machine that runs at its destination while its source keeps what it lacks ([`verbatim_session::behind`],
//! [`verbatim_session::fill`]).
//!
//! Two hosts: their agents and journals, what the source keeps, and QEMU at the destination with its list of what is missing, which lies in memory
//! as the RAM does. The world begins when QEMU has the list and nothing is decided. How a session is decided is the affair of another world: here
//! the destination commits, or gives up, and the source hears of it.

pub mod check;
mod destination;
mod source;

use std::fmt;

use strum::{EnumIter, IntoStaticStr};
use verbatim_session::behind::{Behind, Told};
use verbatim_session::decision::Outcome;
use verbatim_session::fill::{Fill, Noted};

use crate::explore::Plain;
use crate::simulated::{self, Simulated, What};

pub use check::Violation;

/// Pages that are left behind.
const PAGES: u8 = 2;

/// Faults that are put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumIter, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum Quirk {
    /// The source keeps nothing once it has left.
    ForgetsWhenItHasLeft,
    /// A source's agent that starts takes for a leftover what is kept in a session that is not over.
    ForgetsWhatIsOpen,
    /// A source's agent that starts answers before it has looked for what an earlier one keeps.
    AnswersBeforeItLooks,
    /// A source's agent that starts does not ask the destination whether what it finds is still needed.
    DoesNotAskAgain,
    /// The source keeps what it has when the session was rolled back.
    KeepsWhenRolledBack,
    /// A destination that does not answer is taken for one that needs nothing.
    SilentNeedsNothing,
    /// A source that does not answer is taken for one that keeps nothing.
    SilentKeepsNothing,
    /// The destination says that all has come before that is on the list.
    SaysWhatIsNotListed,
    /// A destination's agent that starts does not look whether RAM is missing.
    ForgetsList,
    /// A destination's agent that starts does not note that the guest has ended.
    EndIsNotNoted,
    /// The guest moves on while RAM is missing.
    MovesOn,
}

/// The quirks of a world.
pub type Quirks = simulated::Quirks<Quirk>;

/// What can happen next.
pub type Step = simulated::Step<Who>;

type Steps<'a> = simulated::Steps<'a, World>;

/// Whom it concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Who {
    /// The host that the guest leaves.
    Source,
    /// The host that it comes to.
    Destination,
    /// The guest.
    Guest,
}

impl fmt::Display for Who {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
            Self::Guest => "guest",
        })
    }
}

/// QEMU at the destination.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Qemu {
    /// It loads the devices' state, or has loaded it; the guest does not run.
    Held,
    /// The guest runs.
    Running,
    /// It is gone, for this reason.
    Gone(Why),
}

/// Why QEMU is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    /// The session was given up before the guest ran.
    GivenUp,
    /// The guest ended, somebody has stopped it, or its host went down.
    Ended,
    /// The agent has ended it, since its RAM was lost.
    Lost,
    /// It has moved on.
    Moved,
}

/// What an agent at the source carries out for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Effect {
    /// It asks the destination.
    Ask,
    /// It removes what it keeps.
    Clear,
}

/// An agent at the source that is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SourceAgent {
    /// It gives what is kept, as far as it knows.
    pub gives: bool,
    /// The machine, if something is kept.
    pub behind: Option<Behind>,
    /// What it does for it.
    pub effect: Option<Effect>,
    /// The machine's timers, by their numbers.
    pub timers: u8,
}

/// The source's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source {
    /// The agent.
    pub agent: Option<SourceAgent>,
    /// How the session has ended, as the journal there has it.
    pub over: Option<Outcome>,
    /// What was left is there.
    pub kept: bool,
    /// A fault has taken it away.
    pub lost: bool,
}

/// What an agent at the destination carries out for the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bringing {
    /// It brings what is missing.
    Listen,
    /// It ends QEMU.
    Kill,
    /// It removes the list.
    Clear,
}

/// How far the session is, to an agent at the destination that takes part in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Session {
    /// QEMU loads the devices' state, and may touch what is missing.
    Restored,
    /// That it is committed is being written down.
    Committing,
    /// The guest is to be let run.
    Releasing,
    /// Nothing is left to do, or an earlier agent had begun it.
    Over,
}

/// An agent at the destination that is up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DestinationAgent {
    /// The session.
    pub session: Session,
    /// The machine, if the guest runs or has run.
    pub fill: Option<Fill>,
    /// What it does for it.
    pub effect: Option<Bringing>,
    /// The machine's timers, by their numbers.
    pub timers: u8,
}

/// What is being written to the destination's journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Record {
    /// The session is committed.
    Committed,
    /// No RAM is missing.
    Filled,
}

/// The destination's host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The agent.
    pub agent: Option<DestinationAgent>,
    /// What the journal there says.
    pub journal: Told,
    /// What is being written to it.
    pub writing: Option<Record>,
    /// QEMU.
    pub qemu: Qemu,
    /// Pages that are not there.
    pub missing: u8,
    /// Pages that are on the list of what is missing: some may have come. `None` if there is no list.
    pub listed: Option<u8>,
}

/// All of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct World {
    /// The host that the guest leaves.
    pub source: Source,
    /// The host that it comes to.
    pub destination: Destination,
}

impl Default for World {
    fn default() -> Self {
        Self::new()
    }
}

impl World {
    /// QEMU at the destination knows what is missing, and the source keeps it.
    pub fn new() -> Self {
        Self {
            source: Source {
                agent: Some(SourceAgent {
                    gives: true,
                    behind: Some(Behind::begin()),
                    effect: None,
                    timers: 0,
                }),
                over: None,
                kept: true,
                lost: false,
            },
            destination: Destination {
                agent: Some(DestinationAgent {
                    session: Session::Restored,
                    fill: None,
                    effect: None,
                    timers: 0,
                }),
                journal: Told::Undecided,
                writing: None,
                qemu: Qemu::Held,
                missing: PAGES,
                listed: Some(PAGES),
            },
        }
    }

    /// The guest would read zeros where it has something else, were what it lacks not brought.
    fn lacks(&self) -> bool {
        self.destination.qemu == Qemu::Running && self.destination.missing > 0
    }

    /// Somebody will ask the source for what is on the list, or may.
    fn is_needed(&self) -> bool {
        let is_there = matches!(self.destination.qemu, Qemu::Held | Qemu::Running);
        is_there && self.destination.listed.is_some_and(|pages| pages > 0)
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
        let mut steps = Steps::new(self, quirks, what, Who::Source, found);
        source::steps(&mut steps);
        steps.who = Who::Destination;
        destination::steps(&mut steps);
        steps.who = Who::Guest;
        destination::guest(&mut steps);
    }

    fn violation(&self, after: &Self) -> Option<Violation> {
        check::violation(self, after)
    }

    fn is_good_end(&self) -> bool {
        check::is_good_end(self)
    }

    fn has_moved(&self) -> bool {
        !matches!(self.destination.qemu, Qemu::Held | Qemu::Gone(Why::GivenUp))
    }
}

/// Whether the journal says that nothing is missing to a guest that has run.
fn is_filled(journal: Told) -> bool {
    journal == Told::Committed(Noted::Nothing)
}
