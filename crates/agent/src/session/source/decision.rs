//! The source's machine (`verbatim_session::decision::source`), and what it wants done.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use verbatim_session::Role;
use verbatim_session::decision::source::{Action, Event, Source as Machine, State};
use verbatim_session::decision::{CommitAnswer, Evidence, Mark, Outcome, Timer, Written};

use super::{Source, cancelled};
use crate::faults::Point;
use crate::instances::home::Undecided;
use crate::peers::reason;
use crate::proto::outcome_reply::Outcome as Answered;
use crate::session::writer::Writer;

/// How long one question to the destination may take before it is asked again.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The decision of one attempt.
pub(super) struct Decision {
    machine: Machine,
    writer: Writer,
    timers: Vec<(Instant, Timer)>,
    /// The question that is under way.
    asked: Option<JoinHandle<Answer>>,
    /// Why the attempt cannot go on, if it is the machine that stopped it.
    why: Option<anyhow::Error>,
}

/// What the destination has answered, and why.
type Answer = (CommitAnswer, String);

/// What the decision waited for.
enum Next {
    Answered(Answer),
    Elapsed(Timer),
}

impl Decision {
    pub(super) fn new(agent: &crate::agent::Shared, session: u64) -> Self {
        Self {
            machine: Machine::begin(),
            writer: Writer::new(&agent.journal, session, Role::Source),
            timers: Vec::new(),
            asked: None,
            why: None,
        }
    }

    /// Waits for the next timer that passes, or for the answer.
    async fn next(&mut self) -> Next {
        let first = self.timers.iter().enumerate().min_by_key(|(_, (at, _))| *at);
        let first = first.map(|(index, (at, timer))| (index, *at, *timer));
        let elapsed = async {
            match first {
                Some((_, at, _)) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        let answered = async {
            match &mut self.asked {
                Some(asked) => asked.await.unwrap_or((CommitAnswer::NotYet, String::new())),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            answer = answered => {
                self.asked = None;
                Next::Answered(answer)
            }
            () = elapsed => {
                let (index, _, timer) = first.expect("it has passed");
                self.timers.swap_remove(index);
                Next::Elapsed(timer)
            }
        }
    }

    /// Nothing is left to do but to write that down, however long the disk refuses. `event` says so of a session that was
    /// committed; of another one the machine knows it already.
    pub(super) async fn end(mut self, event: Event) {
        let mut actions = self.machine.handle(event);
        // A record that the disk has refused is written again when its time has come.
        actions.extend(self.timers.iter().map(|(_, timer)| Action::After(*timer)));
        while let Some(action) = actions.pop() {
            match action {
                Action::Write(mark) => {
                    let written = self.writer.write(mark).await;
                    actions.extend(self.machine.handle(Event::Written(mark, written)));
                }
                Action::After(Timer::Write) => {
                    tokio::time::sleep(Timer::Write.duration()).await;
                    actions.extend(self.machine.handle(Event::Elapsed(Timer::Write)));
                }
                _ => {}
            }
        }
    }
}

impl Source {
    /// Gives the machine an event, and does what it wants until it waits for somebody else.
    pub(super) async fn decide(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.decision.machine.handle(event) {
                match action {
                    Action::Freeze => events.push_back(match self.freeze_cgroup().await {
                        Ok(()) => Event::Frozen,
                        Err(error) => self.stopped(error),
                    }),
                    Action::Hold => events.push_back(match self.hold_tasks().await {
                        Ok(()) => Event::Held,
                        Err(error) => self.stopped(error),
                    }),
                    // The disk works while the images are sent, or while everybody switches.
                    Action::Write(mark @ (Mark::Deciding | Mark::Ran)) => self.decision.writer.begin(mark).await,
                    Action::Write(mark) => {
                        let written = self.decision.writer.write(mark).await;
                        events.push_back(Event::Written(mark, written));
                    }
                    Action::Undo => {
                        self.undo().await;
                        events.push_back(Event::Undone);
                    }
                    // Undoing it has told them. Who has not heard it misses the source, and finds out.
                    Action::Tell => events.push_back(Event::Told),
                    Action::Doubt => self.doubt(),
                    Action::Refuse => self.note(
                        "what was decided by hand cannot be written down, and is not done; look after the disk of the journal",
                    ),
                    Action::After(timer) => {
                        let at = Instant::now() + timer.duration();
                        self.decision.timers.push((at, timer));
                    }
                    // One question at a time, and none while an operator is about to decide.
                    Action::Ask(_) if self.decision.asked.is_some() || self.control.is_quiet() => {}
                    Action::Ask(_) => self.decision.asked = Some(self.ask()),
                    // `after_commit` finishes, and what an earlier agent began is probed by `recovery`.
                    Action::Finish | Action::Probe => {}
                }
            }
        }
    }

    fn stopped(&mut self, error: anyhow::Error) -> Event {
        self.decision.why = Some(error);
        Event::Failed
    }

    /// The images are written. From now on the tasks stay still, whatever becomes of CRIU.
    pub(super) async fn dumped(&mut self) -> anyhow::Result<()> {
        self.decide(Event::Dumped).await;
        self.decision.why.take().map_or(Ok(()), Err)
    }

    async fn freeze_cgroup(&mut self) -> anyhow::Result<()> {
        let dumped = self.dumped.as_mut().context("the instance is not frozen")?;
        dumped.freeze().await.context("the frozen tasks cannot be held")
    }

    /// The tasks are held whatever becomes of this agent, and one that comes after it finds them.
    async fn hold_tasks(&mut self) -> anyhow::Result<()> {
        if !self.control.decide() {
            return Err(cancelled());
        }
        let (to, name) = (self.request.destination.clone(), self.instance.name().to_owned());
        // Until the old place is cleared no new one may be made under its name.
        self.reservation = Some(self.agent.instances.reserve(&name)?);
        let (home, init_pid) = (&self.instance.home, self.instance.init_pid());
        let forward = self.forwarding();
        let dumped = self.dumped.as_mut().context("the instance is not frozen")?;
        let undecided = Undecided {
            session: self.session,
            destination: to,
            held: dumped.held_path(),
            forward,
        };
        home.keep_record(init_pid, Some(undecided))?;
        dumped.hold().await?;
        self.pass(Point::SourceAsk).await.map(drop)
    }

    fn doubt(&self) {
        let to = &self.request.destination;
        tracing::error!(
            instance = self.instance.name(),
            "frozen until {to} says whether the instance runs there"
        );
        let doubt = format!(
            "{to} is out of reach at the commit; the instance is frozen until it is known what {to} did"
        );
        self.note(&doubt);
        let journal = &self.agent.journal;
        journal.failed(self.session, Role::Source, &anyhow::anyhow!("{doubt}"));
        self.control.doubt();
    }

    /// The decision. Returns when it is known: an error means that the instance is the source's.
    ///
    /// While the destination is out of reach the instance stays frozen here, also if this agent dies; the destination
    /// knows from its journal what became of the question, so that it can be asked again at any time.
    pub(super) async fn decision(&mut self) -> anyhow::Result<()> {
        if let Some(written) = self.decision.writer.finish().await {
            self.decide(Event::Written(Mark::Deciding, written)).await;
            if written == Written::Failed {
                bail!("the journal cannot be written; look after its disk");
            }
        }
        self.decide(Event::Verified).await;
        let (mut refused, mut resolved) = (String::new(), false);
        while let State::Asking(_) = self.decision.machine.state() {
            let control = Arc::clone(&self.control);
            let asks = self.decision.asked.is_some();
            let event = tokio::select! {
                // Dropping the task would let it go on.
                () = control.hushed(), if asks => {
                    if let Some(asked) = self.decision.asked.take() {
                        asked.abort();
                    }
                    continue;
                }
                next = self.decision.next() => match next {
                    Next::Answered((answer, why)) => {
                        refused = why;
                        Event::Answer(answer)
                    }
                    Next::Elapsed(timer) => Event::Elapsed(timer),
                },
                keep = control.resolved() => {
                    resolved = true;
                    Event::Resolve(keep)
                }
            };
            self.decide(event).await;
        }
        if let Some(asked) = self.decision.asked.take() {
            asked.abort();
        }
        if let State::Finishing = self.decision.machine.state() {
            return Ok(());
        }
        let to = &self.request.destination;
        Err(match self.decision.why.take() {
            Some(error) => error,
            None if resolved => anyhow::anyhow!("an operator decided that the instance stays"),
            None => anyhow::anyhow!("{to} could not let the instance run: {refused}"),
        })
    }

    /// Asks the destination once.
    fn ask(&self) -> JoinHandle<Answer> {
        let (mut destination, id) = (self.destination(), self.id());
        tokio::spawn(async move {
            match tokio::time::timeout(COMMIT_TIMEOUT, destination.commit(id)).await {
                Ok(Ok(reply)) => {
                    let reply = reply.into_inner();
                    let answer = match reply.outcome() {
                        Answered::Committed => CommitAnswer::Runs,
                        // The destination's own word that the tasks have not run, and will not.
                        Answered::RolledBack => CommitAnswer::NotRun(Evidence::NeverReleased),
                        Answered::Undecided => CommitAnswer::NotYet,
                        Answered::Unknown => CommitAnswer::NotKnown,
                    };
                    (answer, reply.reason)
                }
                Ok(Err(status)) => (CommitAnswer::NotYet, reason(&status)),
                Err(_) => (CommitAnswer::NotYet, String::new()),
            }
        })
    }

    /// Undoes what the attempt has done, and closes its session.
    pub(super) async fn roll_back(&mut self, error: &anyhow::Error) {
        let session = self.session;
        if self.agent.journal.standing(session, Role::Source).is_none() {
            // It was not begun.
            self.undo().await;
            return;
        }
        self.agent.journal.failed(session, Role::Source, error);
        // What was begun to be written is written, so that records stand in their order.
        self.decision.writer.finish().await;
        self.decide(Event::Failed).await;
    }

    /// The session is over.
    pub(super) fn take_decision(&mut self) -> Decision {
        let fresh = Decision::new(&self.agent, self.session);
        std::mem::replace(&mut self.decision, fresh)
    }

    /// Whether the instance is the destination's.
    pub(super) fn is_committed(&self) -> bool {
        matches!(
            self.decision.machine.state(),
            State::Finishing | State::Closing(Outcome::Committed) | State::Ended(Outcome::Committed)
        )
    }
}
