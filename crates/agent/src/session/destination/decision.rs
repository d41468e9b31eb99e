//! The destination's machine (`verbatim_session::decision::destination`), and what it wants done.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use verbatim_container::{ContainerName, Init, Tasks};
use verbatim_fill::Phase;
use verbatim_session::Role;
use verbatim_session::decision::destination::{Action, Event, NoMarker, State, Then};
use verbatim_session::decision::{CommitAnswer, Evidence, Fact, Mark, Outcome, Timer, Written};
use verbatim_session::fill::Noted;
use verbatim_session::record::What;
use verbatim_session::recovery::Touches;

use super::Destination;
use super::post_copy::Lacking;
use crate::agent::Shared;
use crate::faults::Point;
use crate::instances::Instance;
use crate::instances::filling::{self, Giver};
use crate::instances::machine::post_copy::Progress;
use crate::instances::machine::{attached, standing};
use crate::instances::recovery;
use crate::keeper::Keeper;
use crate::proto::outcome_reply::Outcome as Answered;
use crate::proto::{OutcomeReply, SessionId};
use crate::session::PAUSE;
use crate::session::driver::Driver;
use crate::session::recovery as recovered;
use crate::session::volumes;

/// How long another host may take to say what was decided.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

impl Destination {
    /// Gives the machine an event, and does what it wants until it waits for somebody else.
    pub(super) async fn decide(&mut self, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for action in self.machine.handle(event) {
                match action {
                    // The tasks run, and the source need not wait for the disk.
                    Action::Write(mark @ Mark::Ran) => {
                        let tells = self.tells(Event::Written(mark, Written::Failed));
                        self.writer.begin_or(mark, tells).await;
                    }
                    Action::Write(mark @ Mark::Committed) => {
                        let written = self.writer.write(What::Committed(self.lacks_memory())).await;
                        events.push_back(Event::Written(mark, written));
                    }
                    Action::Write(mark) => {
                        let written = self.writer.write(mark).await;
                        events.push_back(Event::Written(mark, written));
                    }
                    Action::Release => events.push_back(match self.release().await {
                        Ok(()) => Event::Released,
                        Err(error) => {
                            self.stopped(&error);
                            Event::ReleaseFailed
                        }
                    }),
                    Action::Probe => {
                        let fact = self.probe().await;
                        events.push_back(Event::Fact(fact));
                    }
                    Action::Undo => {
                        self.undo().await;
                        events.push_back(Event::Undone);
                    }
                    Action::Drive => self.drive(),
                    Action::Ask => self.ask().await,
                    Action::After(timer) => self.after(timer),
                }
            }
        }
        self.tell_volumes();
    }

    /// Once it is known what becomes of the session, the volume daemon of this host hears it.
    fn tell_volumes(&mut self) {
        let outcome = match self.machine.state() {
            State::Running { .. } => Outcome::Committed,
            State::Closing(outcome, _) | State::Ended(outcome) => outcome,
            _ => return,
        };
        if !std::mem::replace(&mut self.is_told, true) {
            let role = Role::Destination;
            volumes::settle(&self.agent, self.session, role, outcome);
        }
    }

    /// Nothing is left to do.
    pub(super) fn is_over(&self) -> bool {
        matches!(self.machine.state(), State::Ended(_))
    }

    pub(super) fn must_be_committed(&self) -> anyhow::Result<()> {
        match self.machine.state() {
            State::Running { .. }
            | State::Closing(Outcome::Committed, _)
            | State::Ended(Outcome::Committed) => Ok(()),
            _ => bail!("the session is not committed"),
        }
    }

    fn stopped(&mut self, error: &anyhow::Error) {
        self.why = format!("{error:#}");
        let role = Role::Destination;
        self.agent.journal.failed(self.session, role, error);
    }

    /// The decision. Says what became of it.
    pub async fn commit(&mut self) -> OutcomeReply {
        if self.machine.state() == State::Restored {
            match self.ready_to_run().await {
                Ok(()) => self.decide(Event::Commit { alive: true }).await,
                Err(error) => {
                    self.stopped(&error);
                    self.decide(Event::Commit { alive: false }).await;
                }
            }
        }
        let answer = self.machine.answer();
        if self.is_over() {
            self.agent.destinations.close(self.session);
        }
        let outcome = match answer {
            CommitAnswer::Runs => Answered::Committed,
            CommitAnswer::NotRun(_) => Answered::RolledBack,
            CommitAnswer::NotYet => Answered::Undecided,
            CommitAnswer::NotKnown => Answered::Unknown,
        };
        OutcomeReply {
            outcome: outcome.into(),
            reason: self.why.clone(),
            ..OutcomeReply::default()
        }
    }

    async fn ready_to_run(&mut self) -> anyhow::Result<()> {
        self.agent.faults.pass(Point::DestinationCommit).await?;
        self.contexts_are_alive()?;
        self.has_all_memory()?;
        let restored = self.restored.as_ref().context("nothing was restored")?;
        restored.is_there().await?;
        let home = self.home()?;
        let (paths, record) = (home.paths.clone(), home.record.clone());
        let there = tokio::task::spawn_blocking(move || {
            paths.disks.must_be_there(record.name.as_str(), &record.volumes)?;
            paths.swaps.must_be_ready(&record.swap)
        });
        there.await??;
        self.home()?.gate()?;
        // Before CRIU is told, so that whoever asks again gets the right answer, whatever happens to this agent: one that
        // comes after it finds the tasks if they run.
        let pid = restored.pid().context("CRIU did not name the first process")?;
        self.init_pid = Some(pid);
        self.home()?.keep_record(pid, None)
    }

    /// An error unless whoever gives the tasks their memory is there, and has all of it.
    fn has_all_memory(&self) -> anyhow::Result<()> {
        if let Lacking::Comes(bringing) = &self.lacking
            && let Progress::Lost(why) = bringing.progress()
        {
            bail!("the RAM that was left at its source will not come: {why}");
        }
        let Some(filler) = &self.filler else {
            return Ok(());
        };
        let status = filler
            .status()
            .context("who gives the tasks their memory is gone")?;
        match status.phase {
            // CRIU has given the memory of each task away, and says that these are all just before they run.
            Phase::Restoring | Phase::Filling | Phase::Filled => Ok(()),
            Phase::Waiting => bail!("CRIU has not told which memory the tasks lack"),
            Phase::Refused(why) | Phase::Lost(why) => bail!("the tasks' memory is not all there: {why}"),
        }
    }

    /// Whether the tasks are let go without some of their memory.
    fn lacks_memory(&self) -> Noted {
        match (&self.filler, &self.lacking) {
            (None, Lacking::Nothing | Lacking::Prepared(_)) => Noted::Nothing,
            _ => Noted::Missing,
        }
    }

    /// Lets the tasks run. After an error they may run or not.
    async fn release(&mut self) -> anyhow::Result<()> {
        let mut restored = self.restored.take().context("nothing was restored")?;
        let passed = self.agent.faults.pass(Point::DestinationCommitted).await;
        let ready = passed
            .and_then(|_| self.contexts_are_alive())
            .and_then(|()| self.has_all_memory());
        if let Err(error) = ready {
            restored.abort().await?;
            return Err(error);
        }
        restored.leave_released();
        let mut attached = Ok(());
        let home = self.home()?;
        let resumed = restored.resume_with(|| attached = home.attach()).await?;
        if let Err(error) = attached {
            self.not_all_is_well(&error);
        }
        let pid = resumed.pid();
        self.arrive(pid, resumed.settled());
        if let Err(error) = self.agent.faults.pass(Point::DestinationRunning).await {
            tracing::warn!("{error:#}");
        }
        Ok(())
    }

    fn not_all_is_well(&self, error: &anyhow::Error) {
        tracing::error!(
            session = format!("{:016x}", self.session),
            error = format!("{error:#}"),
            "the instance has arrived, but not all is well"
        );
    }

    /// The tasks run: the instance is this host's. From here on there is no way back; what fails is told, and the instance stays.
    fn arrive(&mut self, pid: i32, init: impl Future<Output = anyhow::Result<Init>> + Send + 'static) {
        let Some(home) = self.home.take() else { return };
        let gate = home.gate().and_then(|gate| Ok(gate.open_up()?));
        if let Err(error) = gate.context("the gate does not open") {
            self.not_all_is_well(&error);
        }
        for qpn in self
            .contexts
            .iter()
            .flat_map(|(_, context)| context.physical_qpns())
        {
            // A number that an earlier queue pair took along when it left is this one's now.
            self.agent.forwarding.remove(qpn);
        }
        self.turn = Some(self.agent.turns.have(home.record.name.as_str(), self.session));
        let instance = Instance::start(home, pid, init, true);
        if self.filler.take().is_some() {
            filling::watch(&self.agent, &instance, self.session, Giver::Processes);
        }
        if let Lacking::Comes(bringing) = std::mem::take(&mut self.lacking) {
            bringing.the_rest();
            filling::watch(&self.agent, &instance, self.session, Giver::Host(Some(bringing)));
        }
        self.agent.instances.insert(Arc::clone(&instance));
        // It may move on before this session is over: a partner may be away for long.
        self._reservation = None;
        // A domain of libvirt's is attached here, too.
        if let Err(error) = attached::watch(&self.agent, &instance) {
            self.not_all_is_well(&error);
        }
        self.instance = Some(instance);
    }

    /// How the tasks stand. What was not released never runs.
    pub(super) async fn probe(&mut self) -> Fact {
        match self.look().await {
            Ok(fact) => fact,
            Err(error) => {
                tracing::warn!(
                    session = format!("{:016x}", self.session),
                    error = format!("{error:#}"),
                    "what became of the tasks is not known yet; it is looked at again"
                );
                Fact::Unknown
            }
        }
    }

    async fn look(&mut self) -> anyhow::Result<Fact> {
        let name = ContainerName::new(self.name()?)?;
        if self.touches.is_none() {
            let parts = self.agent.journal.parts(self.session);
            let own = parts.iter().find(|part| part.role == Role::Destination);
            self.touches = own.and_then(|known| recovered::touches(&self.agent, known));
        }
        let touches = self.touches.context("the record of the tasks cannot be read")?;
        if !touches.anything() {
            return Ok(not_here(self.machine.state()));
        }
        if let State::Judging(no_marker) = self.machine.state() {
            if no_marker == NoMarker::Went {
                return Ok(not_here(self.machine.state()));
            }
            let tasks = Tasks::of(&self.agent.tools, &name, &self.paths.work);
            if let verbatim_container::Ended::NotRun(_) = tasks.end_unreleased().await? {
                return Ok(Fact::Gone { ran: false });
            }
            return self.find_running(&name).await;
        }
        match self.machine.state() {
            State::Probing(Then::Drive) => self.find_running(&name).await,
            // It is undone, whatever there is.
            state => Ok(not_here(state)),
        }
    }

    /// The tasks were released: they run, or have ended since.
    async fn find_running(&mut self, name: &ContainerName) -> anyhow::Result<Fact> {
        if self.instance.is_some() {
            return Ok(Fact::Running);
        }
        if let (Some(home), Some(pid)) = (&self.home, self.init_pid) {
            // This agent has let them go, and CRIU did not come to its end. What runc knows may be missing with it.
            let tasks = Tasks::of(&self.agent.tools, name, &self.paths.work);
            match tasks.fact().await {
                verbatim_container::Fact::Running => {}
                verbatim_container::Fact::Gone { .. } => {
                    // CRIU ends them where it fails after that. The instance is this host's, has ended, and is listed so.
                    tracing::error!(
                        session = format!("{:016x}", self.session),
                        instance = name.as_str(),
                        why = self.why,
                        "the tasks ended while CRIU let them go; CRIU's log has the reason"
                    );
                    self.arrive(pid, async { bail!("it ended while CRIU let it go") });
                    return Ok(Fact::Running);
                }
                other => bail!("the tasks are neither running nor gone: {other:?}"),
            }
            if let Err(error) = home.attach() {
                self.not_all_is_well(&error);
            }
            if home.record.machine.is_some() {
                standing::make_run(&home.paths, pid).await;
            }
            self.arrive(pid, async move { Ok(Init::open(pid)?) });
            return Ok(Fact::Running);
        }
        match recovery::take_over(&self.agent, name.as_str(), true).await? {
            Some(found) => {
                let (home, pid) = (&found.instance.home, found.instance.init_pid());
                if home.record.machine.is_some() {
                    home.attach()?;
                    standing::make_run(&home.paths, pid).await;
                }
                self.take_up(found.instance)?;
                Ok(Fact::Running)
            }
            None => {
                recovery::clear(&self.agent, name.as_str()).await?;
                Ok(Fact::Gone { ran: true })
            }
        }
    }

    fn name(&self) -> anyhow::Result<String> {
        if let Some(home) = &self.home {
            return Ok(home.record.name.to_string());
        }
        let parts = self.agent.journal.parts(self.session);
        let named = parts.into_iter().find_map(|part| part.told.instance);
        named.context("the journal does not say which instance the session moves")
    }

    /// Kills the tasks, and removes what was made for the session. Nothing of it is left when this returns.
    async fn undo(&mut self) {
        if let Some(restored) = self.restored.take()
            && let Err(error) = restored.abort().await
        {
            tracing::warn!(error = format!("{error:#}"), "undoing a restore");
        }
        if let Some(restore) = self.restore.take()
            && let Err(error) = restore.cancel().await
        {
            tracing::warn!(error = format!("{error:#}"), "cancelling a restore");
        }
        self.lacking = Lacking::Nothing;
        self.contexts.clear();
        if let Some(filler) = self.filler.take()
            && let Err(error) = filler.give_up()
        {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "who gave memory to the tasks may be left behind"
            );
        }
        // An earlier agent may have started it.
        let keeper = self.keeper.take();
        if let Some(keeper) = keeper.or_else(|| Keeper::find(&self.agent.config, self.session)) {
            keeper.end();
        }
        while let Err(error) = self.remove().await {
            tracing::error!(
                session = format!("{:016x}", self.session),
                error = format!("{error:#}"),
                "what was made for the session cannot be removed; it is tried again"
            );
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn remove(&mut self) -> anyhow::Result<()> {
        if !self.touches.is_some_and(|touches| touches.undo) {
            return Ok(());
        }
        let name = ContainerName::new(self.name()?)?;
        if self.paths.work.exists() {
            let tasks = Tasks::of(&self.agent.tools, &name, &self.paths.work);
            tasks.kill().await?;
        }
        if let Some(home) = self.home.take() {
            let removed = tokio::task::spawn_blocking(move || {
                home.remove();
            });
            return removed.await.context("removing the instance's place panicked");
        }
        recovery::clear(&self.agent, name.as_str()).await
    }

    /// The source is gone after its decision: this host does in its place what is left to do.
    fn drive(&mut self) {
        let (agent, session) = (Arc::clone(&self.agent), self.session);
        let partners = self.partners.iter().map(|name| (name.clone(), None));
        let driver = Driver::new(&agent, session, (agent.name().to_owned(), None), partners);
        tokio::spawn(async move {
            driver.finish().await;
            agent.destinations.close(session);
        });
    }

    /// Asks the other hosts what was decided. The name is free meanwhile, so that another session may bring the instance here: what this one
    /// had here is removed before, and from then on nothing is its own.
    async fn ask(&mut self) {
        if self.touches.is_some_and(|touches| touches.undo) {
            self.undo().await;
        }
        self.touches = Some(Touches::NOTHING);
        self._reservation = None;
        let (agent, session) = (Arc::clone(&self.agent), self.session);
        tokio::spawn(asked(agent, session));
    }

    /// Gives the machine an event later, from anywhere.
    fn tells(&self, event: Event) -> impl FnOnce() + Send + use<> {
        let (agent, session) = (Arc::clone(&self.agent), self.session);
        let runtime = tokio::runtime::Handle::current();
        move || drop(runtime.spawn(happened(agent, session, event)))
    }

    /// Reports when a time has passed.
    fn after(&self, timer: Timer) {
        let (agent, session) = (Arc::clone(&self.agent), self.session);
        tokio::spawn(elapsed(agent, session, timer));
    }
}

/// Boxed, since what a machine wants after a time is again to be told when a time has passed.
fn elapsed(agent: Shared, session: u64, timer: Timer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        tokio::time::sleep(timer.duration()).await;
        happened(agent, session, Event::Elapsed(timer)).await;
    })
}

fn happened(agent: Shared, session: u64, event: Event) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        let Ok(destination) = agent.destinations.get(session) else {
            return;
        };
        let mut destination = destination.lock().await;
        destination.decide(event).await;
        if destination.is_over() {
            agent.destinations.close(session);
        }
    })
}

/// What is said of tasks that are not looked at: they are not here, or not this session's. Those of a session that is committed may have run.
fn not_here(state: State) -> Fact {
    let ran = matches!(
        state,
        State::Probing(Then::Drive) | State::Judging(NoMarker::NeverReleased | NoMarker::Went)
    );
    Fact::Gone { ran }
}

/// Asks the source what was decided, and then the partners, until one of them knows.
fn asked(agent: Shared, session: u64) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    Box::pin(async move {
        let parts = agent.journal.parts(session);
        let Some(own) = parts.into_iter().find(|part| part.role == Role::Destination) else {
            return;
        };
        for host in own.told.source.iter().chain(&own.told.partners) {
            let answer = async {
                let mut client = agent.peers.connect(host).await?;
                let answer = client.outcome(SessionId { session }).await?;
                anyhow::Ok(answer.into_inner().outcome())
            };
            let answer = match tokio::time::timeout(ANSWER_TIMEOUT, answer).await {
                Ok(Ok(Answered::Committed)) => CommitAnswer::Runs,
                Ok(Ok(Answered::RolledBack)) => CommitAnswer::NotRun(Evidence::GivenUp),
                unknown => {
                    tracing::debug!(host, ?unknown, "does not say what was decided");
                    continue;
                }
            };
            return happened(agent, session, Event::Answer(answer)).await;
        }
    })
}
