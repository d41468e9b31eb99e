//! The fill: private memory that an instance still lacks when it runs at its destination.
//!
//! Before the decision the destination has every page, in files of its own, the *cache*. The tasks are restored without them, and processes that
//! outlive the agent give each page to its task, before and while it runs. A page that is missing when these processes
//! are gone reads as zeros, and nobody is told. So the rule is: while something is missing to a task, the cache and the processes stay; where
//! they are lost the tasks are ended, and go on with no page that is not theirs.
//!
//! ```text
//!  Filling ── all is given, or no task is left ──► Noting: Filled* ──► Clearing ──► Ended
//!     └────── the processes are gone ──► Ending ── no task is left ──────┘
//! ```
//!
//! The beginning is in the record of the commit ([`crate::record::What::Committed`]), so that the blackout has one record less to wait for. `*`: in the journal
//! before the cache and the processes are removed. As in [`crate::decision`] the machine is a pure function: the agent and a simulated world run the same.

use strum::{EnumDiscriminants, IntoStaticStr, VariantArray};

use crate::decision::{Timer, Written};

pub use crate::record::Noted;

/// Where the fill stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(StateKind), doc = "The kinds of [`State`].")]
pub enum State {
    /// Memory is missing, or may be.
    Filling,
    /// What is missing cannot come any more: the tasks are being ended.
    Ending,
    /// Nothing is missing to any task, which is being written down.
    Noting,
    /// The cache is removed, then the processes end.
    Clearing,
    /// The end.
    Ended,
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(EventKind), doc = "The kinds of [`Event`].")]
pub enum Event {
    /// The processes say, or have left word, that all is given, or that no task is left.
    Filled,
    /// They are gone, and have left no such word. That they do not answer is no event: they are asked again.
    Lost,
    /// The answer to [`Action::Kill`].
    Killed {
        /// No task is left.
        gone: bool,
    },
    /// The answer to [`Action::Write`].
    Written(Written),
    /// The answer to [`Action::Clear`].
    Cleared {
        /// Nothing is left.
        gone: bool,
    },
    /// A time has passed.
    Elapsed(Timer),
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Listen to the processes until they have said how it ends, or are gone.
    Listen,
    /// End the tasks.
    Kill,
    /// Write [`crate::record::What::Filled`] down, durably.
    Write,
    /// Remove the cache, then have the processes end.
    Clear,
    /// Report when the time has passed.
    After(Timer),
}

/// The machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fill {
    state: State,
}

impl Fill {
    /// The tasks begin to run without some of their memory, and the journal says so.
    pub fn begin() -> (Self, Vec<Action>) {
        let state = State::Filling;
        (Self { state }, vec![Action::Listen])
    }

    /// An agent finds the tasks that an earlier one has left. `traces`: the cache is there, or the processes' socket.
    pub fn recover(noted: Noted, traces: bool) -> (Self, Vec<Action>) {
        match (noted, traces) {
            (Noted::Missing, _) | (Noted::Unknown, true) => Self::begin(),
            (Noted::Nothing, _) | (Noted::Unknown, false) => {
                let state = State::Clearing;
                (Self { state }, vec![Action::Clear])
            }
        }
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// Nothing is missing to any task, and the journal says so: the instance may move on.
    pub fn is_whole(&self) -> bool {
        matches!(self.state, State::Clearing | State::Ended)
    }

    /// Takes an event; says what is to be done, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Filling, Event::Filled) => self.go(State::Noting, Action::Write),
            (State::Filling, Event::Lost) => self.go(State::Ending, Action::Kill),

            (State::Ending, Event::Killed { gone: true }) => self.go(State::Noting, Action::Write),
            (State::Ending, Event::Killed { gone: false }) => vec![Action::After(Timer::Probe)],
            (State::Ending, Event::Elapsed(Timer::Probe)) => vec![Action::Kill],

            (State::Noting, Event::Written(Written::Durable)) => self.go(State::Clearing, Action::Clear),
            // Without the record the cache and the processes stay.
            (State::Noting, Event::Written(Written::Failed)) => vec![Action::After(Timer::Write)],
            (State::Noting, Event::Elapsed(Timer::Write)) => vec![Action::Write],

            (State::Clearing, Event::Cleared { gone: true }) => {
                self.state = State::Ended;
                Vec::new()
            }
            (State::Clearing, Event::Cleared { gone: false }) => vec![Action::After(Timer::Probe)],
            (State::Clearing, Event::Elapsed(Timer::Probe)) => vec![Action::Clear],

            // Of a state before.
            _ => Vec::new(),
        }
    }

    fn go(&mut self, state: State, action: Action) -> Vec<Action> {
        self.state = state;
        vec![action]
    }
}

#[cfg(test)]
mod tests;
