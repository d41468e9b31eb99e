//! The decision of a session, and the way back after a failure.
//!
//! ```text
//!  source                        destination                     partner
//!  Working                       Preparing                       Prepared
//!    │ dumped: freeze, Deciding* │ restored                        │ nothing in flight: Drained*
//!    │ verified: hold            Restored                        Drained
//!  Asking ───── Commit ────────► Committing: Committed*
//!    │                           Releasing: marker, tasks run
//!    │ ◄──────── Runs ────────── Running
//!  Finishing ── Switch, Resume ─►  … ───────────────────────────► Switching
//!  Closing: Closed*              Closing: Closed*                Closing: Closed*
//! ```
//!
//! `*`: in the journal before anything that relies on it. Ran and Switched are written meanwhile: without them an agent that comes
//! later asks, and hears the same. A destination writes Ran until it is there: its marker may go before the session ends. Each machine is a pure function of its state and an event; what
//! it wants done comes back as a list of actions, in order. Of one host's actions for one session, those that touch the
//! tasks are carried out one after the other.
//!
//! The rules, each of which a simulated world breaks on purpose to see that it is found:
//!
//! - A source that was frozen for the decision is held by its cgroup, not by CRIU alone.
//! - Only [`CommitAnswer::NotRun`] thaws a source that has asked. A failure at the destination is no evidence.
//! - A destination's tasks have not run only if the proxy has not written its marker, in this boot, and no task is left.
//! - [`Fact::Unknown`] decides nothing: it is looked at again.
//! - Where records are missing nothing is concluded from that: a destination that finds no marker then asks the other hosts.
//! - A session that the journal does not know is not one that was rolled back.

pub mod destination;
pub mod partner;
pub mod source;

#[cfg(test)]
mod tests;

use std::time::Duration;

use strum::VariantArray;

use crate::record::{Noted, What};

/// How an instance's tasks stand on one host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fact {
    /// They run.
    Running,
    /// They are there, and do not run.
    Frozen,
    /// No task is left.
    Gone {
        /// They may have run here before.
        ran: bool,
    },
    /// It cannot be said now. Decides nothing.
    Unknown,
}

/// Why it is certain that the tasks have not run at the destination, and never will.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Evidence {
    /// The session was given up before it was committed.
    GivenUp,
    /// It was committed, but no task was released: there is no marker of this boot, and no task is left.
    NeverReleased,
}

/// What the destination says of the decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CommitAnswer {
    /// The tasks run there, or have run.
    Runs,
    /// They have not run, and will not. Nothing else lets the source go on.
    NotRun(Evidence),
    /// To be asked again.
    NotYet,
    /// The journal there does not know the session.
    NotKnown,
}

/// Which copy an operator keeps where the hosts have lost each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Keep {
    /// The frozen one at the source.
    Source,
    /// The one at the destination.
    Destination,
}

/// How a session ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// The instance is the destination's.
    Committed,
    /// The instance is the source's.
    RolledBack,
}

/// What a machine waits for when it waits for time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, VariantArray)]
pub enum Timer {
    /// Until another host is asked again.
    Ask,
    /// Until the operator is told that the session is in doubt.
    Doubt,
    /// Until an unknown fact is looked at again.
    Probe,
    /// Until the journal is written again.
    Write,
}

impl Timer {
    /// How long that is.
    pub fn duration(self) -> Duration {
        match self {
            Self::Ask | Self::Probe => Duration::from_millis(200),
            Self::Doubt => Duration::from_secs(5),
            Self::Write => Duration::from_secs(1),
        }
    }
}

/// Whether a record is in the journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Written {
    /// It is, and survives this machine.
    Durable,
    /// It may or may not be.
    Failed,
}

/// What a machine wrote, or wants written. A subset of [`What`], which says what each means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "as in `What`")]
pub enum Mark {
    Deciding,
    Committed,
    Ran,
    Cleared,
    Drained,
    Switched,
    RolledBack,
    Resolved(Keep),
    Closed(Outcome),
}

impl From<Mark> for What {
    fn from(mark: Mark) -> Self {
        match mark {
            Mark::Deciding => Self::Deciding,
            // Whoever knows whether memory is missing says so.
            Mark::Committed => Self::Committed(Noted::Unknown),
            Mark::Ran => Self::Ran,
            Mark::Cleared => Self::Cleared,
            Mark::Drained => Self::Drained,
            Mark::Switched => Self::Switched,
            Mark::RolledBack => Self::RolledBack,
            Mark::Resolved(keep) => Self::Resolved(keep),
            Mark::Closed(outcome) => Self::Closed(outcome),
        }
    }
}
