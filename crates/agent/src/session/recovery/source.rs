//! The source's part in a session that an earlier agent had begun.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use verbatim_container::{CheckpointConfig, ContainerName, Dumped, Tasks};
use verbatim_session::Role;
use verbatim_session::decision::source::{Action, Event, Question, Source as Machine, State, Then};
use verbatim_session::decision::{CommitAnswer, Evidence, Fact, Outcome, Timer};
use verbatim_session::recovery::Touches;

use super::touches;
use crate::agent::Shared;
use crate::guests::Guest;
use crate::instances::home::Paths;
use crate::instances::machine::{domain, leaving};
use crate::instances::recovery::{self, Found};
use crate::instances::volumes::Disks;
use crate::instances::{Instance, Reservation};
use crate::journal::Known;
use crate::keeper::Keeper;
use crate::proto::SessionId;
use crate::proto::outcome_reply::Outcome as Answered;
use crate::session::behind;
use crate::session::control::{Driven, Stage};
use crate::session::members::{self, Member, Members};
use crate::session::source::volumes::{leave, take_back};
use crate::session::volumes::settle;
use crate::session::writer::Writer;
use crate::turns::Turn;

/// How long another host may take for an answer, or to undo its part.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// One session.
struct Recovery {
    agent: Shared,
    known: Known,
    name: String,
    destination: String,
    machine: Machine,
    writer: Writer,
    driven: Driven,
    timers: Vec<(Instant, Timer)>,
    asked: Option<JoinHandle<CommitAnswer>>,
    /// The name is the session's until it is known what is there.
    reservation: Option<Reservation>,
    found: Option<Found>,
    /// What of the instance is this session's; nothing as long as that is not known.
    touches: Option<Touches>,
    _turn: Option<Turn>,
}

/// Goes on where the earlier agent was cut off.
pub(super) fn take_up(agent: &Shared, known: Known, touches: Option<Touches>) {
    let (machine, actions) = Machine::recover(known.part.standing);
    let name = known.told.instance.clone().unwrap_or_default();
    let destination = known.told.destination.clone().unwrap_or_default();
    let stage = match machine.state() {
        State::Probing(Then::Settle) => Stage::InDoubt,
        State::Probing(Then::Finish) | State::Finishing => Stage::Committed,
        _ => Stage::Cancelled,
    };
    let has_the_instance = touches.is_none_or(Touches::anything);
    let driven = match has_the_instance {
        true => agent.controls.begin(&name, &destination, stage),
        false => agent.controls.begin_without(&name, &destination, stage),
    };
    driven.control.set_session(known.session);
    let recovery = Recovery {
        agent: Arc::clone(agent),
        writer: Writer::new(&agent.journal, known.session, Role::Source),
        reservation: has_the_instance
            .then(|| agent.instances.reserve(&name).ok())
            .flatten(),
        known,
        name,
        destination,
        machine,
        driven,
        timers: Vec::new(),
        asked: None,
        found: None,
        touches,
        _turn: None,
    };
    tokio::spawn(recovery.run(actions));
}

impl Recovery {
    async fn run(mut self, actions: Vec<Action>) {
        self.carry_out(actions).await;
        while !matches!(self.machine.state(), State::Ended(_)) {
            let event = self.next().await;
            let actions = self.machine.handle(event);
            self.carry_out(actions).await;
        }
        if let Some(found) = &self.found {
            found.instance.end_move();
        }
    }

    /// Waits for an answer, a time or an operator.
    async fn next(&mut self) -> Event {
        let first = self.timers.iter().enumerate().min_by_key(|(_, (at, _))| *at);
        let first = first.map(|(index, (at, timer))| (index, *at, *timer));
        let control = Arc::clone(&self.driven.control);
        let decides = matches!(self.machine.state(), State::Asking(_));
        tokio::select! {
            answer = async {
                match &mut self.asked {
                    Some(asked) => asked.await.unwrap_or(CommitAnswer::NotYet),
                    None => std::future::pending().await,
                }
            } => {
                self.asked = None;
                Event::Answer(answer)
            }
            () = async {
                match first {
                    Some((_, at, _)) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            } => {
                let (index, _, timer) = first.expect("it has passed");
                self.timers.swap_remove(index);
                Event::Elapsed(timer)
            }
            keep = control.resolved(), if decides => Event::Resolve(keep),
        }
    }

    async fn carry_out(&mut self, actions: Vec<Action>) {
        let mut actions = VecDeque::from(actions);
        while let Some(action) = actions.pop_front() {
            let event = match action {
                Action::Write(mark) => Event::Written(mark, self.writer.write(mark).await),
                Action::Probe => Event::Fact(self.probe().await),
                Action::Undo => {
                    self.undo().await;
                    Event::Undone
                }
                // Undoing it has told them. Who has not heard it finds out.
                Action::Tell => Event::Told,
                Action::Finish => {
                    self.finish().await;
                    Event::Finished
                }
                Action::Ask(question) => {
                    if self.asked.is_none() {
                        self.asked = Some(self.ask(question));
                    }
                    continue;
                }
                Action::After(timer) => {
                    self.timers.push((Instant::now() + timer.duration(), timer));
                    continue;
                }
                Action::Doubt => {
                    tracing::error!(
                        instance = self.name,
                        "frozen until {} says whether the instance runs there",
                        self.destination
                    );
                    self.driven.control.doubt();
                    continue;
                }
                Action::Refuse => {
                    tracing::error!(
                        instance = self.name,
                        "what was decided by hand cannot be written down, and is not done; look after the disk of the journal"
                    );
                    continue;
                }
                // Of an attempt that is under way.
                Action::Freeze | Action::Hold => continue,
            };
            actions.extend(self.machine.handle(event));
        }
    }

    /// How the tasks stand here. From then on the instance is this agent's, if it is here.
    async fn probe(&mut self) -> Fact {
        self.touches = self.touches.or_else(|| touches(&self.agent, &self.known));
        match self.touches {
            None => return Fact::Unknown,
            Some(touches) if !touches.anything() => {
                tracing::info!(
                    session = format!("{:016x}", self.known.session),
                    instance = self.name,
                    "nothing that is here under the instance's name is this session's"
                );
                return Fact::Gone { ran: true };
            }
            Some(_) => {}
        }
        match recovery::take_over(&self.agent, &self.name, true).await {
            Ok(Some(found)) => {
                tracing::info!(instance = self.name, "taken over, in the middle of a migration");
                let is_held = found.undecided.is_some();
                self._turn = Some(self.agent.turns.have(&self.name, self.known.session));
                self.found = Some(found);
                if is_held { Fact::Frozen } else { Fact::Running }
            }
            Ok(None) => Fact::Gone { ran: true },
            Err(error) => {
                tracing::warn!(
                    instance = self.name,
                    error = format!("{error:#}"),
                    "how its tasks stand is not known yet; it is looked at again"
                );
                Fact::Unknown
            }
        }
    }

    /// Asks the destination what it did. First it is told that the session is not wanted any more: if it has not committed by
    /// then, it never will.
    fn ask(&self, question: Question) -> JoinHandle<CommitAnswer> {
        debug_assert_eq!(
            question,
            Question::Settle,
            "an earlier agent may have asked the other"
        );
        let (agent, session, host) = (
            Arc::clone(&self.agent),
            self.known.session,
            self.destination.clone(),
        );
        tokio::spawn(async move {
            let asked = async {
                let mut client = agent.peers.connect(&host).await?;
                client.abort(SessionId { session }).await?;
                anyhow::Ok(
                    client
                        .outcome(SessionId { session })
                        .await?
                        .into_inner()
                        .outcome(),
                )
            };
            match tokio::time::timeout(ANSWER_TIMEOUT, asked).await {
                Ok(Ok(Answered::Committed)) => CommitAnswer::Runs,
                Ok(Ok(Answered::RolledBack)) => CommitAnswer::NotRun(Evidence::GivenUp),
                Ok(Ok(Answered::Unknown)) => CommitAnswer::NotKnown,
                Ok(Ok(Answered::Undecided)) => CommitAnswer::NotYet,
                unknown => {
                    tracing::debug!(host, ?unknown, "does not say what it did");
                    CommitAnswer::NotYet
                }
            }
        })
    }

    /// The tasks that an earlier agent held.
    async fn held(&self) -> Option<Dumped> {
        let found = self.found.as_ref()?;
        if found.instance.home.record.machine.is_some() {
            // Nobody but its cgroup holds it.
            return None;
        }
        let held = &found.undecided.as_ref()?.held;
        let home = &found.instance.home;
        let checkpoint = CheckpointConfig {
            name: home.record.name.clone(),
            images: home.paths.images.clone(),
            work: home.paths.work.clone(),
            parent: None,
            lazy: false,
            network: None,
            rnics: false,
            terminals: true,
            stop_limit: None,
        };
        let dumped = Dumped::take_over(&self.agent.tools, checkpoint, held).await;
        if dumped.is_err()
            && let Err(error) = verbatim_container::outlast(&home.paths.work).await
        {
            // Nobody was asked to hold the tasks yet, so its proxy is letting them go on, or it is gone.
            tracing::warn!(%error, "the end of the checkpoint is not awaited");
        }
        dumped.ok()
    }

    /// The instance goes on here, with its connections.
    async fn undo(&mut self) {
        behind::over(&self.agent, self.known.session, Outcome::RolledBack);
        let told = settle(&self.agent, self.known.session, Role::Source, Outcome::RolledBack);
        if !self.touches.is_some_and(|touches| touches.undo) {
            self.end_keeper();
            self.tell_others().await;
            return;
        }
        take_back(told, self.disks()).await;
        let held = self.held().await;
        let Some(found) = &self.found else {
            self.end_keeper();
            self.clear().await;
            self.tell_others().await;
            return;
        };
        let instance = Arc::clone(&found.instance);
        let thawed = match held {
            Some(dumped) => dumped.abort().await,
            None => Ok(()),
        };
        // Also where neither CRIU nor its proxy is left that could do it.
        let home = &instance.home;
        let tasks = Tasks::of(&self.agent.tools, &home.record.name, &home.paths.work);
        for failed in [thawed, tasks.thaw().await].into_iter().filter_map(Result::err) {
            tracing::error!(
                instance = self.name,
                error = format!("{:#}", anyhow::Error::from(failed)),
                "thawing the instance"
            );
        }
        if home.record.machine.is_some() {
            leaving::take_back(&instance).await;
        }
        if let Err(error) = home.keep_record(instance.init_pid(), None) {
            tracing::error!(
                error = format!("{error:#}"),
                "an agent that comes after this one is misled"
            );
        }
        if let Err(error) = home.attach() {
            tracing::error!(
                error = format!("{error:#}"),
                "attaching the instance's network again"
            );
        }
        if home.record.machine.is_none()
            && let Err(error) = tokio::task::block_in_place(|| home.take_connections())
        {
            tracing::error!(
                error = format!("{error:#}"),
                "new connections to the instance may be held back: `nft delete table inet verbatim_arrivals` in its network namespace lets them in"
            );
        }
        let session = self.known.session;
        let keeper = Keeper::find(&self.agent.config, session);
        let returned = self.give_back(&instance, keeper.as_ref()).await;
        // Processes that were not at the gate yet.
        self.agent.guests.undo(session);
        self.tell_others().await;
        let pids: Vec<u32> = returned.iter().map(|guest| guest.pid).collect();
        let returned = returned.iter().map(|guest| Member::here(guest, Vec::new()));
        // Which requests stay intercepted is told there.
        let _ = Members::new(&self.agent, session, returned.collect())
            .take_back(&pids)
            .await;
        if let Some(keeper) = keeper {
            keeper.end();
        }
        self.reservation = None;
    }

    /// Opens the gate and gives the processes that waited there their own RNIC connections back.
    async fn give_back(&self, instance: &Arc<Instance>, keeper: Option<&Keeper>) -> Vec<Guest> {
        if let Err(error) = instance.home.gate().and_then(|gate| Ok(gate.open_up()?)) {
            tracing::error!(error = format!("{error:#}"), "the gate does not open");
        }
        let kept = keeper.map(Keeper::take::<u32>).transpose();
        let kept = kept.unwrap_or_else(|error| {
            tracing::error!(
                error = format!("{error:#}"),
                "the instance's RNIC connections are lost"
            );
            None
        });
        let session = self.known.session;
        let returned =
            members::give_back(&self.agent, instance.name(), session, kept.unwrap_or_default()).await;
        returned.into_iter().filter_map(|(_, guest)| guest).collect()
    }

    /// Tells the other hosts that the session is undone. Those who do not hear it find out by themselves.
    async fn tell_others(&self) {
        let others = self.known.told.partners.iter().chain([&self.destination]);
        let told = others.map(|host| async move {
            let abort = async {
                let mut client = self.agent.peers.connect(host).await?;
                let session = self.known.session;
                client.abort(SessionId { session }).await?;
                anyhow::Ok(())
            };
            match tokio::time::timeout(ANSWER_TIMEOUT, abort).await {
                Ok(Ok(())) => {}
                failed => tracing::warn!(host, ?failed, "did not confirm that it undid the session"),
            }
        });
        join_all(told).await;
    }

    /// The instance is the destination's: the old place is cleared. What is left to do elsewhere the destination does.
    async fn finish(&mut self) {
        self.driven.control.committed();
        behind::over(&self.agent, self.known.session, Outcome::Committed);
        let told = settle(&self.agent, self.known.session, Role::Source, Outcome::Committed);
        if !self.touches.is_some_and(|touches| touches.finish) {
            // The instance may have come back since.
            self.end_keeper();
            return;
        }
        leave(told, self.disks()).await;
        let held = self.held().await;
        self.end_keeper();
        let Some(found) = &self.found else {
            self.clear().await;
            return;
        };
        // Until the old place is cleared no new one may be made under its name.
        let instance = Arc::clone(&found.instance);
        instance.moved(&self.destination);
        if let Some(undecided) = &found.undecided {
            self.agent.forwarding.insert(undecided.forward.clone());
        }
        let name = &instance.home.record.name;
        let removed = match held {
            Some(dumped) => dumped.commit().await.map_err(anyhow::Error::from),
            None => {
                let paths = &instance.home.paths;
                let tasks = Tasks::of(&self.agent.tools, name, &paths.work);
                match domain::kill(&tasks, paths).await {
                    Ok(()) => {
                        domain::left(paths).await;
                        let deleted = self.agent.tools.runc().delete(name, true).await;
                        deleted.map_err(anyhow::Error::from)
                    }
                    Err(error) => Err(error),
                }
            }
        };
        if let Err(error) = removed {
            let error = format!("{error:#}");
            tracing::error!(instance = %name, error, "the copy that was left is not removed");
        }
        let home = Arc::clone(&instance);
        let _ = tokio::task::spawn_blocking(move || home.home.remove()).await;
        self.reservation = None;
    }

    /// What it has is this session's alone.
    fn end_keeper(&self) {
        if let Some(keeper) = Keeper::find(&self.agent.config, self.known.session) {
            keeper.end();
        }
    }

    fn disks(&self) -> Disks {
        Paths::new(&self.agent.config.runtime_dir, &self.name).disks
    }

    /// Its tasks are gone: what is left of its place is removed.
    async fn clear(&mut self) {
        let paths = Paths::new(&self.agent.config.runtime_dir, &self.name);
        if ContainerName::new(self.name.clone()).is_ok()
            && let Err(error) = recovery::clear(&self.agent, &self.name).await
        {
            let folder = paths.folder.display();
            tracing::error!(%folder, error = format!("{error:#}"), "what is left of an instance is not removed");
        }
        self.reservation = None;
    }
}
