//! A partner's part in the decision.

use strum::{EnumDiscriminants, IntoStaticStr, VariantArray};

use super::{CommitAnswer, Fact, Mark, Outcome, Timer, Written};
use crate::record::Standing;

/// What is done once it is known that the programs can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Then {
    /// The connections go on as they were.
    Undo,
    /// The other hosts are asked what was decided.
    Ask,
    /// The connections change to the new ones.
    Switch,
}

/// Where the decision stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(StateKind), doc = "The kinds of [`State`].")]
pub enum State {
    /// An earlier agent took part in the session.
    Probing(Then),
    /// The new connections stand by; the old ones work, or are being drained.
    Prepared,
    /// Nothing is in flight, which is being written down before the source hears of it.
    Draining,
    /// Nothing is in flight, and the source may have decided: only its word, or the destination's, ends the wait.
    Drained,
    /// The source is gone: the destination and the source are asked until one of them knows.
    Asking,
    /// The connections go on as they were, which is being written down.
    RollingBack,
    /// The connections are made to work again as they were.
    Undoing,
    /// The instance runs at the destination: the connections change to the new ones, while that is written down.
    Switching,
    /// All is done; that is being written down.
    Closing(Outcome),
    /// The end.
    Ended(Outcome),
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(EventKind), doc = "The kinds of [`Event`].")]
pub enum Event {
    /// Nothing is in flight at this end, or the connections are paused.
    Quiesced,
    /// A step has failed that the source had asked for.
    Failed,
    /// The source has rolled the session back.
    Abort,
    /// The instance runs at the destination: its source says so, or its destination.
    Switch,
    /// The source is gone.
    SourceLost,
    /// Another host has said what was decided.
    Answer(CommitAnswer),
    /// The answer to [`Action::Probe`].
    Fact(Fact),
    /// The answer to [`Action::Write`].
    Written(Mark, Written),
    /// [`Action::Undo`] is done.
    Undone,
    /// [`Action::Switch`] is done, and requests reach the RNIC again.
    Finished,
    /// A time has passed.
    Elapsed(Timer),
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write this down, durably.
    Write(Mark),
    /// Tell the source that nothing is in flight here.
    Drained,
    /// Tell the source that this host does not come to a stop for the session, or could not write that down.
    Refuse,
    /// Ask the destination, and then the source, what was decided.
    Ask,
    /// Find out whether the programs can be reached.
    Probe,
    /// Let the old connections work again.
    Undo,
    /// Change to the new connections.
    Switch,
    /// Report when the time has passed.
    After(Timer),
}

/// The machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Partner {
    pub(super) state: State,
    pub(super) source_lost: bool,
}

impl Partner {
    /// A session begins.
    pub fn begin() -> Self {
        Self {
            state: State::Prepared,
            source_lost: false,
        }
    }

    /// An earlier agent took part in it, and the journal says this.
    pub fn recover(standing: Standing) -> (Self, Vec<Action>) {
        let then = match standing {
            Standing::Opened | Standing::RolledBack => Then::Undo,
            Standing::Switched | Standing::Ran | Standing::Cleared => Then::Switch,
            // What is damaged may have been any of the rest. The other hosts know.
            Standing::Drained
            | Standing::Damaged
            | Standing::Deciding
            | Standing::Committed
            | Standing::Resolved(_) => Then::Ask,
            Standing::Closed(outcome) => return (Self::lost(State::Ended(outcome)), Vec::new()),
        };
        (Self::lost(State::Probing(then)), vec![Action::Probe])
    }

    pub(super) fn lost(state: State) -> Self {
        Self {
            state,
            source_lost: true,
        }
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// Takes an event; says what is to be done, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        if event == Event::SourceLost {
            self.source_lost = true;
        }
        match (self.state, event) {
            (State::Probing(_), Event::Fact(Fact::Unknown)) => vec![Action::After(Timer::Probe)],
            (State::Probing(_), Event::Elapsed(Timer::Probe)) => vec![Action::Probe],
            (State::Probing(then), Event::Fact(_)) => match then {
                Then::Undo => self.go(State::Undoing, Action::Undo),
                Then::Ask => self.ask(),
                Then::Switch => self.go(State::Switching, Action::Switch),
            },

            (State::Prepared, Event::Quiesced) => self.go(State::Draining, Action::Write(Mark::Drained)),
            (State::Prepared, Event::Failed | Event::Abort | Event::SourceLost) => self.roll_back(),
            (State::Draining, Event::Written(Mark::Drained, Written::Durable)) => match self.source_lost {
                false => self.go(State::Drained, Action::Drained),
                true => self.ask(),
            },
            // The source was not told that nothing is in flight, so that it decides nothing.
            (State::Draining, Event::Written(Mark::Drained, Written::Failed)) => match self.source_lost {
                false => self.go(State::Prepared, Action::Refuse),
                true => self.roll_back(),
            },
            // The answer to an earlier request was lost.
            (State::Drained, Event::Quiesced) => vec![Action::Drained],
            (State::Drained, Event::SourceLost) => self.ask(),
            (State::Drained | State::Asking, Event::Abort | Event::Answer(CommitAnswer::NotRun(_))) => {
                self.roll_back()
            }
            (State::Drained | State::Asking, Event::Switch | Event::Answer(CommitAnswer::Runs)) => {
                // An agent that comes after this one hears the same.
                self.state = State::Switching;
                vec![Action::Write(Mark::Switched), Action::Switch]
            }
            (State::Asking, Event::Elapsed(Timer::Ask)) => self.ask(),

            // A source that was out of sight is back. It must not go on: it may have been told to be gone.
            (State::Asking | State::RollingBack | State::Undoing, Event::Quiesced) => vec![Action::Refuse],

            // Without the record an agent that comes after this one asks, and hears the same.
            (State::RollingBack, Event::Written(Mark::RolledBack, _)) => {
                self.go(State::Undoing, Action::Undo)
            }
            (State::Undoing, Event::Undone) => self.close(Outcome::RolledBack),
            (State::Switching, Event::Finished) => self.close(Outcome::Committed),

            (State::Closing(outcome), Event::Written(Mark::Closed(_), Written::Durable)) => {
                self.state = State::Ended(outcome);
                Vec::new()
            }
            (State::Closing(_), Event::Written(Mark::Closed(_), Written::Failed)) => {
                vec![Action::After(Timer::Write)]
            }
            (State::Closing(outcome), Event::Elapsed(Timer::Write)) => self.close(outcome),

            // Too late, or about a step that was given up meanwhile.
            _ => Vec::new(),
        }
    }

    fn go(&mut self, state: State, action: Action) -> Vec<Action> {
        self.state = state;
        vec![action]
    }

    fn ask(&mut self) -> Vec<Action> {
        self.state = State::Asking;
        vec![Action::Ask, Action::After(Timer::Ask)]
    }

    fn roll_back(&mut self) -> Vec<Action> {
        self.go(State::RollingBack, Action::Write(Mark::RolledBack))
    }

    fn close(&mut self, outcome: Outcome) -> Vec<Action> {
        self.go(State::Closing(outcome), Action::Write(Mark::Closed(outcome)))
    }
}
