//! The destination's part in the decision.

use strum::{EnumDiscriminants, IntoStaticStr, VariantArray};

use super::{CommitAnswer, Evidence, Fact, Mark, Outcome, Timer, Written};
use crate::record::Standing;

/// What is done once it is known how the tasks stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Then {
    /// The session is given up.
    GiveUp,
    /// The same, which the journal says already.
    Undo,
    /// The instance is here: this host does what is left.
    Drive,
}

/// Where the decision stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(StateKind), doc = "The kinds of [`State`].")]
pub enum State {
    /// An earlier agent took part in the session. How the tasks stand is looked at before anything is done to them.
    Probing(Then),
    /// The place for the instance is made, and filled.
    Preparing,
    /// The tasks are restored. They do not run.
    Restored,
    /// The source has decided, which is being written down.
    Committing,
    /// The tasks are let go.
    Releasing,
    /// That has failed, or an earlier agent was about to: whether they have run is looked at until it is known.
    Judging {
        /// A marker of the present boot would be there.
        same_boot: bool,
    },
    /// The tasks have not run, and will not, which is being written down.
    RollingBack(Evidence),
    /// What was made for the session is removed.
    Undoing(Evidence),
    /// The tasks run here, or have run: the instance is this host's.
    Running {
        /// This host does what is left to do.
        drives: bool,
    },
    /// All is done; that is being written down.
    Closing(Outcome, Option<Evidence>),
    /// The end.
    Ended(Outcome),
}

/// What happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(EventKind), doc = "The kinds of [`Event`].")]
pub enum Event {
    /// The tasks are restored, and held.
    Restored,
    /// A step has failed that the source had asked for.
    Failed,
    /// The source wants the instance to run here.
    Commit {
        /// What was prepared at the RNIC is still there.
        alive: bool,
    },
    /// The source wants no more of the session.
    Abort,
    /// The source is gone.
    SourceLost,
    /// [`Action::Release`] is done, and every task runs.
    Released,
    /// [`Action::Release`] has failed: the tasks may run or not.
    ReleaseFailed,
    /// The answer to [`Action::Probe`].
    Fact(Fact),
    /// The answer to [`Action::Write`].
    Written(Mark, Written),
    /// [`Action::Undo`] is done: no task of the session is left here.
    Undone,
    /// All hosts have switched and resumed.
    Finished,
    /// A time has passed.
    Elapsed(Timer),
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Write this down, durably.
    Write(Mark),
    /// Let the tasks go: the proxy writes its marker first.
    Release,
    /// Find out how the tasks stand. Where the proxy is gone and has left no marker, they are killed, and are gone when
    /// this is answered: what was not released never runs.
    Probe,
    /// Kill the tasks and remove what was made for the session.
    Undo,
    /// Do what is left at all hosts: switch and resume.
    Drive,
    /// Report when the time has passed.
    After(Timer),
}

/// The machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Destination {
    pub(super) state: State,
    pub(super) source_lost: bool,
}

impl Destination {
    /// A session begins.
    pub fn begin() -> Self {
        Self::at(State::Preparing)
    }

    /// An earlier agent took part in it, and the journal says this. `same_boot`: the last record is of the present boot of
    /// this host.
    pub fn recover(standing: Standing, same_boot: bool) -> (Self, Vec<Action>) {
        let (state, actions) = match standing {
            Standing::Opened | Standing::Deciding => (State::Probing(Then::GiveUp), vec![Action::Probe]),
            // What is damaged may have been the commit.
            Standing::Committed | Standing::Damaged => (State::Judging { same_boot }, vec![Action::Probe]),
            Standing::Ran | Standing::Drained | Standing::Switched | Standing::Resolved(_) => {
                (State::Probing(Then::Drive), vec![Action::Probe])
            }
            Standing::RolledBack => (State::Probing(Then::Undo), vec![Action::Probe]),
            Standing::Closed(outcome) => (State::Ended(outcome), Vec::new()),
        };
        let source_lost = true;
        (Self { state, source_lost }, actions)
    }

    pub(super) fn at(state: State) -> Self {
        Self {
            state,
            source_lost: false,
        }
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// What is said to whoever asks for the decision.
    pub fn answer(&self) -> CommitAnswer {
        match self.state {
            State::Running { .. }
            | State::Closing(Outcome::Committed, _)
            | State::Ended(Outcome::Committed) => CommitAnswer::Runs,
            State::Closing(Outcome::RolledBack, evidence) => {
                CommitAnswer::NotRun(evidence.unwrap_or(Evidence::GivenUp))
            }
            State::Ended(Outcome::RolledBack) => CommitAnswer::NotRun(Evidence::GivenUp),
            _ => CommitAnswer::NotYet,
        }
    }

    /// Takes an event; says what is to be done, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        if event == Event::SourceLost {
            self.source_lost = true;
        }
        match (self.state, event) {
            (State::Probing(_) | State::Judging { .. }, Event::Fact(Fact::Unknown))
            | (State::Judging { .. }, Event::Fact(Fact::Frozen)) => vec![Action::After(Timer::Probe)],
            (State::Probing(_) | State::Judging { .. }, Event::Elapsed(Timer::Probe)) => vec![Action::Probe],
            (State::Probing(then), Event::Fact(_)) => match then {
                Then::GiveUp => self.roll_back(Evidence::GivenUp),
                Then::Undo => self.undo(Evidence::GivenUp),
                Then::Drive => self.drive(),
            },

            (State::Preparing, Event::Restored) => self.go(State::Restored, Vec::new()),
            (State::Preparing | State::Restored, Event::Failed | Event::Abort | Event::SourceLost)
            | (State::Restored, Event::Commit { alive: false }) => self.roll_back(Evidence::GivenUp),
            (State::Restored, Event::Commit { alive: true }) => {
                self.go(State::Committing, vec![Action::Write(Mark::Committed)])
            }

            (State::Committing, Event::Written(Mark::Committed, Written::Durable)) => {
                self.go(State::Releasing, vec![Action::Release])
            }
            // Nothing was released.
            (State::Committing, Event::Written(Mark::Committed, Written::Failed)) => {
                self.roll_back(Evidence::NeverReleased)
            }
            (State::Releasing, Event::Released) => self.run(),
            (State::Releasing, Event::ReleaseFailed) => {
                self.go(State::Judging { same_boot: true }, vec![Action::Probe])
            }
            (State::Judging { .. }, Event::Fact(Fact::Running | Fact::Gone { ran: true })) => self.run(),
            (State::Judging { same_boot: true }, Event::Fact(Fact::Gone { ran: false })) => {
                self.roll_back(Evidence::NeverReleased)
            }
            // A marker would have gone with that boot.
            (State::Judging { same_boot: false }, Event::Fact(Fact::Gone { ran: false })) => self.run(),

            (State::RollingBack(evidence), Event::Written(Mark::RolledBack, written)) => {
                match (evidence, written) {
                    // Without the record, another boot would take what was committed for what has run.
                    (Evidence::NeverReleased, Written::Failed) => vec![Action::After(Timer::Write)],
                    _ => self.undo(evidence),
                }
            }
            (State::RollingBack(evidence), Event::Elapsed(Timer::Write)) => self.roll_back(evidence),
            (State::Undoing(evidence), Event::Undone) => self.close(Outcome::RolledBack, Some(evidence)),

            (State::Running { drives: false }, Event::SourceLost) => {
                self.go(State::Running { drives: true }, vec![Action::Drive])
            }
            (State::Running { .. }, Event::Finished) => self.close(Outcome::Committed, None),

            (State::Closing(outcome, _), Event::Written(Mark::Closed(_), Written::Durable)) => {
                self.go(State::Ended(outcome), Vec::new())
            }
            (State::Closing(..), Event::Written(Mark::Closed(_), Written::Failed)) => {
                vec![Action::After(Timer::Write)]
            }
            (State::Closing(outcome, evidence), Event::Elapsed(Timer::Write)) => {
                self.close(outcome, evidence)
            }

            // Too late, or about a step that was given up meanwhile.
            _ => Vec::new(),
        }
    }

    fn go(&mut self, state: State, actions: Vec<Action>) -> Vec<Action> {
        self.state = state;
        actions
    }

    fn roll_back(&mut self, evidence: Evidence) -> Vec<Action> {
        let write = Action::Write(Mark::RolledBack);
        self.go(State::RollingBack(evidence), vec![write])
    }

    fn undo(&mut self, evidence: Evidence) -> Vec<Action> {
        self.go(State::Undoing(evidence), vec![Action::Undo])
    }

    /// The tasks run. The record may come later: one that says Committed leads to the same, by the marker.
    fn run(&mut self) -> Vec<Action> {
        let drives = self.source_lost;
        let mut actions = vec![Action::Write(Mark::Ran)];
        actions.extend(drives.then_some(Action::Drive));
        self.go(State::Running { drives }, actions)
    }

    fn drive(&mut self) -> Vec<Action> {
        self.go(State::Running { drives: true }, vec![Action::Drive])
    }

    fn close(&mut self, outcome: Outcome, evidence: Option<Evidence>) -> Vec<Action> {
        let write = Action::Write(Mark::Closed(outcome));
        self.go(State::Closing(outcome, evidence), vec![write])
    }
}
