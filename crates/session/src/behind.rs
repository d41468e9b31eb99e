//! What a virtual machine has left behind by post-copy: how long its source keeps that.
//!
//! The guest runs at its destination before all of its RAM is there. The rest is at the source alone, which gives it on demand. So the
//! source keeps it from before the decision until the destination says that nothing is missing there, as its journal has it
//! ([`crate::fill`]), or that the guest has never run there. Whoever asks for what is not kept any more is told so, and ends the guest.
//!
//! ```text
//!  Kept ── the session is committed ──► Asking ── the destination needs nothing ──► Clearing ──► Ended
//!    └──── the session is rolled back ──────────────────────────────────────────────────┘
//! ```
//!
//! Nothing of it is in the journal: what is kept is there or not, and the session's own records say the rest. As in
//! [`crate::decision`] the machine is a pure function: the agent and a simulated world run the same.

use strum::{EnumDiscriminants, IntoStaticStr, VariantArray};

use crate::decision::{Outcome, Timer};
use crate::record::Noted;

/// Where it stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(StateKind), doc = "The kinds of [`State`].")]
pub enum State {
    /// The session is not over.
    Kept,
    /// The guest is the destination's, which may need it.
    Asking,
    /// Nobody needs it: it is being removed.
    Clearing,
    /// The end.
    Ended,
}

/// What the destination says of the session, as its journal has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Told {
    /// It does not know the session. It may have lost its journal, and the guest may run there.
    NotKnown,
    /// Nothing is decided.
    Undecided,
    /// The guest has never run there, and never will.
    RolledBack,
    /// The guest has run there; and whether RAM is missing to it.
    Committed(Noted),
}

impl Told {
    /// Whether nothing of what is kept can be needed.
    pub fn needs_nothing(self) -> bool {
        match self {
            Self::RolledBack | Self::Committed(Noted::Nothing) => true,
            Self::NotKnown | Self::Undecided | Self::Committed(Noted::Missing | Noted::Unknown) => false,
        }
    }
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(EventKind), doc = "The kinds of [`Event`].")]
pub enum Event {
    /// The session is over here.
    Over(Outcome),
    /// The answer to [`Action::Ask`].
    Told(Told),
    /// There is no answer to it.
    Silent,
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
    /// Ask the destination.
    Ask,
    /// Give nobody anything of it any more, and remove it.
    Clear,
    /// Report when the time has passed.
    After(Timer),
}

/// The machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Behind {
    state: State,
}

impl Behind {
    /// It is kept, and the session is not decided.
    pub fn begin() -> Self {
        Self { state: State::Kept }
    }

    /// An agent finds it, of an earlier one. `over`: how the session has ended here, unless it goes on; of one that the journal does not know any more
    /// [`Outcome::Committed`], for the destination knows better.
    pub fn recover(over: Option<Outcome>) -> (Self, Vec<Action>) {
        let mut behind = Self::begin();
        let actions = over.map_or_else(Vec::new, |outcome| behind.handle(Event::Over(outcome)));
        (behind, actions)
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// Takes an event; says what is to be done, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Kept, Event::Over(Outcome::Committed)) => self.go(State::Asking, Action::Ask),
            (State::Kept, Event::Over(Outcome::RolledBack)) => self.go(State::Clearing, Action::Clear),

            (State::Asking, Event::Told(told)) if told.needs_nothing() => {
                self.go(State::Clearing, Action::Clear)
            }
            (State::Asking, Event::Told(_) | Event::Silent) => vec![Action::After(Timer::Probe)],
            (State::Asking, Event::Elapsed(Timer::Probe)) => vec![Action::Ask],

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
