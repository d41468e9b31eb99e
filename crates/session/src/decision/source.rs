//! The source's part in the decision.

use strum::{EnumDiscriminants, IntoStaticStr, VariantArray};

use super::{CommitAnswer, Fact, Keep, Mark, Outcome, Timer, Written};
use crate::record::Standing;

/// What the decision still waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Ready {
    /// The tasks' cgroup is frozen.
    pub frozen: bool,
    /// The journal says that the destination may have been asked.
    pub deciding: bool,
    /// The instance is restored at the destination, and all that the decision relies on is there.
    pub verified: bool,
}

impl Ready {
    fn all(self) -> bool {
        self.frozen && self.deciding && self.verified
    }
}

/// What the destination is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Question {
    /// Let the instance run.
    Commit,
    /// Give the session up, unless it is committed, and say which is the case. An agent asks so that comes after one
    /// that died: it does not know whether the destination was asked to commit.
    Settle,
}

/// What is done once it is known how the tasks stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Then {
    /// The session is rolled back.
    RollBack,
    /// The same, which the journal says already.
    Undo,
    /// The destination is asked what it did.
    Settle,
    /// The instance is the destination's: what is left is done.
    Finish,
}

/// Where the decision stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EnumDiscriminants)]
#[strum_discriminants(derive(Hash, VariantArray, IntoStaticStr))]
#[strum_discriminants(name(StateKind), doc = "The kinds of [`State`].")]
pub enum State {
    /// An earlier agent began the session. How the tasks stand is looked at before anything is done to them.
    Probing(Then),
    /// Nobody was asked to commit: everything can be undone.
    Working(Ready),
    /// All is ready; the proxy is told to hold the frozen tasks also without this agent.
    Holding,
    /// The destination is asked, until it answers or an operator decides.
    Asking(Question),
    /// An operator has decided, which is being written down.
    Resolving(Keep, Question),
    /// The instance stays, which is being written down.
    RollingBack,
    /// The instance stays: what was done for the session is undone.
    Undoing,
    /// The instance runs on. The others are told until all of them know.
    Telling,
    /// The instance is the destination's: what is left to do after the decision is done, while that is written down.
    Finishing,
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
    /// CRIU has dumped the tasks, and holds them.
    Dumped,
    /// [`Action::Freeze`] has succeeded.
    Frozen,
    /// The instance is restored at the destination; every other host of the session is there.
    Verified,
    /// [`Action::Hold`] has succeeded.
    Held,
    /// A step has failed, or another host was lost.
    Failed,
    /// An operator wants no more of it.
    Cancel,
    /// An operator decides in the place of the hosts.
    Resolve(Keep),
    /// The destination has answered.
    Answer(CommitAnswer),
    /// The answer to [`Action::Probe`].
    Fact(Fact),
    /// The answer to [`Action::Write`].
    Written(Mark, Written),
    /// [`Action::Undo`] is done.
    Undone,
    /// All others know that the session was rolled back, or do not take part in it any more.
    Told,
    /// Of [`Action::Finish`], what is to be done here: nothing of the instance is left. The name is let go after this.
    Cleared,
    /// [`Action::Finish`] is done, at all hosts.
    Finished,
    /// A time has passed.
    Elapsed(Timer),
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Freeze the tasks' cgroup, so that they stay still whatever becomes of CRIU.
    Freeze,
    /// Have the proxy hold the tasks, and answer it, also if this agent dies.
    Hold,
    /// Write this down, durably.
    Write(Mark),
    /// Ask the destination.
    Ask(Question),
    /// Find out how the tasks stand; without that nothing is done to them.
    Probe,
    /// Undo what was done for the session, and let the tasks go on.
    Undo,
    /// Tell the others that the session was rolled back.
    Tell,
    /// Do what is left: switch, resume, reclaim.
    Finish,
    /// Tell the operator that the destination does not answer.
    Doubt,
    /// Tell the operator that the decision could not be written down, and is not taken.
    Refuse,
    /// Report when the time has passed.
    After(Timer),
}

/// The machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Source {
    state: State,
    in_doubt: bool,
}

impl Source {
    /// A session begins.
    pub fn begin() -> Self {
        Self::at(State::Working(Ready::default()))
    }

    /// An earlier agent began it, and its journal says this.
    pub fn recover(standing: Standing) -> (Self, Vec<Action>) {
        let then = match standing {
            Standing::Opened => Then::RollBack,
            // What is damaged may have been any of the rest. The destination knows.
            Standing::Deciding | Standing::Damaged => Then::Settle,
            Standing::RolledBack | Standing::Resolved(Keep::Source) => Then::Undo,
            Standing::Ran | Standing::Resolved(Keep::Destination) => Then::Finish,
            // Not written by a source; it ran there if it was committed.
            Standing::Committed | Standing::Drained | Standing::Switched => Then::Settle,
            // What is found under the name is another session's.
            Standing::Cleared => return (Self::at(State::Finishing), vec![Action::Finish]),
            Standing::Closed(outcome) => return (Self::at(State::Ended(outcome)), Vec::new()),
        };
        (Self::at(State::Probing(then)), vec![Action::Probe])
    }

    pub(super) fn at(state: State) -> Self {
        Self {
            state,
            in_doubt: false,
        }
    }

    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// The destination was asked, and has not answered in time.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    /// Whether an operator can still cancel it.
    pub fn can_be_cancelled(&self) -> bool {
        matches!(self.state, State::Working(_) | State::Holding)
    }

    /// Takes an event; says what is to be done, in this order.
    pub fn handle(&mut self, event: Event) -> Vec<Action> {
        match (self.state, event) {
            (State::Probing(_), Event::Fact(Fact::Unknown)) => vec![Action::After(Timer::Probe)],
            (State::Probing(_), Event::Elapsed(Timer::Probe)) => vec![Action::Probe],
            (State::Probing(then), Event::Fact(_)) => match then {
                Then::RollBack => self.roll_back(),
                Then::Undo => self.undo(),
                Then::Settle => self.ask(Question::Settle),
                Then::Finish => self.finish(),
            },

            (State::Working(_), Event::Dumped) => vec![Action::Freeze, Action::Write(Mark::Deciding)],
            (State::Working(ready), Event::Frozen) => self.ready(Ready {
                frozen: true,
                ..ready
            }),
            (State::Working(ready), Event::Verified) => self.ready(Ready {
                verified: true,
                ..ready
            }),
            (State::Working(ready), Event::Written(Mark::Deciding, Written::Durable)) => self.ready(Ready {
                deciding: true,
                ..ready
            }),
            (State::Working(_) | State::Holding, Event::Failed | Event::Cancel)
            | (State::Working(_), Event::Written(Mark::Deciding, Written::Failed)) => self.roll_back(),
            (State::Holding, Event::Held) => self.ask(Question::Commit),

            // An agent that comes after this one hears the same: what is left to do need not wait for the disk.
            (State::Asking(_) | State::Resolving(..), Event::Answer(CommitAnswer::Runs)) => {
                let mut actions = vec![Action::Write(Mark::Ran)];
                actions.extend(self.finish());
                actions
            }
            // What an operator forces is not taken back by what the destination said before.
            (State::Asking(_), Event::Answer(CommitAnswer::NotRun(_))) => self.roll_back(),
            (State::Asking(_), Event::Answer(CommitAnswer::NotKnown)) => self.doubt(),
            (State::Asking(_), Event::Elapsed(Timer::Doubt)) => self.doubt(),
            (State::Asking(question), Event::Elapsed(Timer::Ask)) => {
                vec![Action::Ask(question), Action::After(Timer::Ask)]
            }
            (State::Asking(question), Event::Resolve(keep)) => self.go(
                State::Resolving(keep, question),
                Action::Write(Mark::Resolved(keep)),
            ),
            (State::Resolving(keep, question), Event::Written(Mark::Resolved(_), written)) => {
                match (keep, written) {
                    (Keep::Source, Written::Durable) => self.undo(),
                    (Keep::Destination, Written::Durable) => self.finish(),
                    (_, Written::Failed) => {
                        let mut actions = self.ask(question);
                        actions.push(Action::Refuse);
                        actions
                    }
                }
            }

            // Nobody was asked to commit, or the destination has said that it never will: an agent that comes after this
            // one comes to the same end without the record.
            (State::RollingBack, Event::Written(Mark::RolledBack, _)) => self.undo(),
            (State::Undoing, Event::Undone) => self.go(State::Telling, Action::Tell),
            (State::Telling, Event::Told) => self.close(Outcome::RolledBack),

            // Without the record an agent that comes after this one goes by that of the tasks.
            (State::Finishing, Event::Cleared) => vec![Action::Write(Mark::Cleared)],
            (State::Finishing, Event::Finished) => self.close(Outcome::Committed),

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

    fn ready(&mut self, ready: Ready) -> Vec<Action> {
        self.state = State::Working(ready);
        if !ready.all() {
            return Vec::new();
        }
        self.go(State::Holding, Action::Hold)
    }

    fn ask(&mut self, question: Question) -> Vec<Action> {
        self.state = State::Asking(question);
        vec![
            Action::Ask(question),
            Action::After(Timer::Ask),
            Action::After(Timer::Doubt),
        ]
    }

    fn doubt(&mut self) -> Vec<Action> {
        match std::mem::replace(&mut self.in_doubt, true) {
            false => vec![Action::Doubt],
            true => Vec::new(),
        }
    }

    fn roll_back(&mut self) -> Vec<Action> {
        self.go(State::RollingBack, Action::Write(Mark::RolledBack))
    }

    fn undo(&mut self) -> Vec<Action> {
        self.go(State::Undoing, Action::Undo)
    }

    fn finish(&mut self) -> Vec<Action> {
        self.in_doubt = false;
        self.go(State::Finishing, Action::Finish)
    }

    fn close(&mut self, outcome: Outcome) -> Vec<Action> {
        self.go(State::Closing(outcome), Action::Write(Mark::Closed(outcome)))
    }
}
