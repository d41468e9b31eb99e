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

/// What it means that no task is left, and no marker is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum NoMarker {
    /// It was committed in this boot: the tasks have not run.
    NeverReleased,
    /// It was committed, and what was here has gone since: with the boot, or with a later session of the instance. The tasks may have run.
    Went,
    /// Nothing: records are missing. It may have been committed or not.
    SaysNothing,
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
    Judging(NoMarker),
    /// Records are missing, and nothing here says what became of the session: the other hosts are asked, until one of them knows.
    Asking,
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
    /// Another host has said what was decided. So has a source that has this host do what follows from the commit.
    Answer(CommitAnswer),
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
    /// Ask the other hosts what was decided.
    Ask,
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

    /// An earlier agent took part in it, and the journal says this. `would_be_here`: a marker would still be here, for the last record is of
    /// the present boot of this host, and no later session of the instance has begun here.
    pub fn recover(standing: Standing, would_be_here: bool) -> (Self, Vec<Action>) {
        let judging = |no_marker| (State::Judging(no_marker), vec![Action::Probe]);
        let (state, actions) = match standing {
            Standing::Opened | Standing::Deciding => (State::Probing(Then::GiveUp), vec![Action::Probe]),
            Standing::Committed if would_be_here => judging(NoMarker::NeverReleased),
            Standing::Committed => judging(NoMarker::Went),
            // What is damaged may have been the commit, or what followed.
            Standing::Damaged => judging(NoMarker::SaysNothing),
            Standing::Ran
            | Standing::Cleared
            | Standing::Drained
            | Standing::Switched
            | Standing::Resolved(_) => (State::Probing(Then::Drive), vec![Action::Probe]),
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
            State::Asking => CommitAnswer::NotKnown,
            _ => CommitAnswer::NotYet,
        }
    }

    /// Takes an event; says what is to be done, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        if event == Event::SourceLost {
            self.source_lost = true;
        }
        match (self.state, event) {
            (State::Probing(_) | State::Judging(_), Event::Fact(Fact::Unknown))
            | (State::Judging(_), Event::Fact(Fact::Frozen)) => vec![Action::After(Timer::Probe)],
            (State::Probing(_) | State::Judging(_), Event::Elapsed(Timer::Probe)) => vec![Action::Probe],
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
                self.go(State::Judging(NoMarker::NeverReleased), vec![Action::Probe])
            }
            (State::Judging(_), Event::Fact(Fact::Running | Fact::Gone { ran: true })) => self.run(),
            (State::Judging(no_marker), Event::Fact(Fact::Gone { ran: false })) => match no_marker {
                NoMarker::NeverReleased => self.roll_back(Evidence::NeverReleased),
                NoMarker::Went => self.run(),
                NoMarker::SaysNothing => self.ask(),
            },

            (State::Asking, Event::Answer(CommitAnswer::Runs)) => self.run(),
            (State::Asking, Event::Answer(CommitAnswer::NotRun(evidence))) => self.roll_back(evidence),
            (State::Asking, Event::Elapsed(Timer::Ask)) => self.ask(),

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
            // The marker may go before the session ends, with what is found by it.
            (State::Running { .. }, Event::Written(Mark::Ran, Written::Failed)) => {
                vec![Action::After(Timer::Write)]
            }
            (State::Running { .. }, Event::Elapsed(Timer::Write)) => vec![Action::Write(Mark::Ran)],
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

    fn ask(&mut self) -> Vec<Action> {
        self.go(State::Asking, vec![Action::Ask, Action::After(Timer::Ask)])
    }

    fn drive(&mut self) -> Vec<Action> {
        self.go(State::Running { drives: true }, vec![Action::Drive])
    }

    fn close(&mut self, outcome: Outcome, evidence: Option<Evidence>) -> Vec<Action> {
        let write = Action::Write(Mark::Closed(outcome));
        self.go(State::Closing(outcome, evidence), vec![write])
    }
}
