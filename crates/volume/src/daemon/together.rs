//! A volume moves together with its instance, a container or a virtual machine: the agents' session decides.
//! `verbatim_mirror::together` has the rules.
//!
//! The source copies the volume ([`Daemon::follow`]) while the instance runs, and holds it ([`Daemon::hold`])
//! when the instance's tasks are frozen. The destination then promises its copy, and lends it to the instance
//! that is restored. Either host waits for the decision of its agent ([`Daemon::settle`]), in this process or
//! in a later one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::MissedTickBehavior;
use verbatim_mirror::decision::{AgentSession, Ask, Role, SessionId, Sidecar};
use verbatim_mirror::together::{Settle, held, promised, settle};
use verbatim_mirror::{Event, Report};

use super::orders::{has_its_size, is_free, is_nobodys, known, serving};
use super::resolving::is_answered;
use super::space::needed;
use super::{Daemon, Entry, State};
use crate::device::Device;
use crate::faults::Point;
use crate::own_thread::OwnThread;
use crate::volume::Volume;
use crate::wire::Purpose;
use crate::words;

/// Interval of the engine's clock ticks.
const TICK: Duration = Duration::from_millis(10);

/// Pause after a failed hold, during the blackout of an instance.
const HOLD_AGAIN: Duration = Duration::from_millis(50);

/// Limit for repeated tries of a hold.
const HOLD_LIMIT: Duration = Duration::from_secs(10);

/// Progress of the copy.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Stage {
    Copying,
    /// The other host has all data.
    Mirrored,
    /// Clients are held.
    Held,
    /// The move is over, for this reason.
    Ended(String),
}

/// A volume that is copied for a session of the agents.
pub(super) struct Following {
    by: AgentSession,
    session: SessionId,
    to: String,
    stage: watch::Receiver<Stage>,
    hold: watch::Sender<bool>,
    link: JoinHandle<()>,
}

impl Drop for Following {
    fn drop(&mut self) {
        self.link.abort();
    }
}

/// Connects the engine with the orders: takes its reports, and gives it ticks and holds.
struct Driver {
    volume: Arc<Volume>,
    name: String,
    to: String,
    reports: UnboundedReceiver<Report>,
    refused: UnboundedReceiver<String>,
    stage: watch::Sender<Stage>,
    hold: watch::Receiver<bool>,
    hook: crate::faults::Hook,
}

impl Driver {
    /// Runs until the move is over.
    async fn run(mut self) {
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
        // Time of the order to hold, and time of the next try.
        let mut hold: Option<(Instant, Instant)> = None;
        let mut is_asked = false;
        while self.volume.migration().is_some() {
            tokio::select! {
                _ = ticks.tick() => {
                    if let Some(why) = self.volume.tick() {
                        tracing::warn!("{}: {why}", self.name);
                    }
                    if hold.is_some_and(|(_, at)| Instant::now() >= at) {
                        hold = hold.map(|(since, _)| (since, Instant::now() + HOLD_LIMIT));
                        self.volume.event(Event::Hold);
                    }
                }
                changed = self.hold.changed(), if !is_asked => {
                    if changed.is_err() {
                        // The follower has gone.
                        is_asked = true;
                    } else if *self.hold.borrow_and_update() {
                        is_asked = true;
                        hold = Some((Instant::now(), Instant::now() + HOLD_LIMIT));
                        self.volume.event(Event::Hold);
                    }
                }
                report = self.reports.recv() => match report {
                    Some(Report::Mirrored) => {
                        (self.hook)(Point::Mirrored);
                        self.stage.send_replace(Stage::Mirrored);
                    }
                    Some(Report::HoldFailed(why)) => {
                        tracing::info!("{}: a hold has failed: {}", self.name, words::hold(&why, &self.to));
                        let since = hold.map_or_else(Instant::now, |(since, _)| since);
                        if since.elapsed() > HOLD_LIMIT {
                            self.volume.event(Event::Cancel);
                            self.end(format!("it cannot be held: {}", words::hold(&why, &self.to)));
                            return;
                        }
                        hold = Some((since, Instant::now() + HOLD_AGAIN));
                    }
                    Some(Report::Held) => {
                        hold = None;
                        (self.hook)(Point::Held);
                        self.stage.send_replace(Stage::Held);
                    }
                    Some(Report::Ended(why)) => {
                        let why = self.refused.try_recv().unwrap_or_else(|_| words::ended(&why, &self.to));
                        self.end(why);
                        return;
                    }
                    None => return,
                },
            }
        }
        self.end("the move is over".to_owned());
    }

    fn end(&self, why: String) {
        self.stage.send_replace(Stage::Ended(why));
    }
}

impl Daemon {
    /// Begins to copy the volume.
    pub(super) fn follow(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        to: String,
        by: AgentSession,
        bytes_per_second: Option<u64>,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        serving(entry, state)?;
        self.may_move(entry, state, false)?;
        if to == self.config.name {
            bail!("{name} is on {to} already");
        }
        let volume = state.volume.clone().context("it is not served")?;
        if volume.migration().is_some() {
            bail!("{name} is being moved already");
        }
        has_its_size(entry, state, &volume)?;
        is_answered(state, &to)?;
        // Before any decision: later this must not fail.
        let reserved = entry.folder.reserve_sidecar();
        reserved.with_context(|| format!("what is decided about {name} could not be written down here"))?;
        let session = SessionId(rand::random());
        let sidecar = state.sidecar.as_ref().expect("it is served");
        let purpose = Purpose::Fill {
            length: sidecar.length,
            from: self.config.name.clone(),
            attached: false,
            rdma: None,
            link: 0,
        };
        let mut call = self.call(entry, sidecar, session, &to, purpose, None)?;
        call.about = state.about(entry);
        let (reports, reported) = unbounded_channel();
        let (refusals, refused) = unbounded_channel();
        let (stages, stage) = watch::channel(Stage::Copying);
        let (hold, is_held) = watch::channel(false);
        let thread = OwnThread::start("link").context("no thread for the connection")?;
        let allocated = needed(entry, state, sidecar.length)?;
        volume.migrate(bytes_per_second, reports);
        let driver = Driver {
            volume: volume.clone(),
            name: name.clone(),
            to: to.clone(),
            reports: reported,
            refused,
            stage: stages,
            hold: is_held,
            hook: self.config.hook,
        };
        tokio::spawn(driver.run());
        let link = thread.spawn(call.keep(volume, allocated, refusals, self.config.hook));
        state.following = Some(Following {
            by,
            session,
            to,
            stage,
            hold,
            link,
        });
        Ok(())
    }

    /// Waits until the volume can be held.
    pub(super) async fn mirrored(&self, entry: &Entry, by: AgentSession) -> anyhow::Result<()> {
        let mut stage = {
            let state = entry.state.lock().await;
            followed(entry, &state, by)?.stage.clone()
        };
        reached(entry, &mut stage, |stage| *stage != Stage::Copying).await
    }

    /// Holds its clients, and has the other host promise the copy. After an error it waits for
    /// [`Self::settle`] as well.
    pub(super) async fn hold(self: &Arc<Self>, entry: &Arc<Entry>, by: AgentSession) -> anyhow::Result<()> {
        let mut stage = {
            let state = entry.state.lock().await;
            let following = followed(entry, &state, by)?;
            following.hold.send_replace(true);
            following.stage.clone()
        };
        reached(entry, &mut stage, |stage| *stage == Stage::Held).await?;
        let call = {
            let mut state = entry.state.lock().await;
            let following = followed(entry, &state, by)?;
            let (session, to) = (following.session, following.to.clone());
            // Its disk may have failed meanwhile.
            self.may_move(entry, &state, false)?;
            let sidecar = known(entry, &state)?.clone();
            let next = held(&sidecar, session, &to, by).context("it does not serve")?;
            if let Err(error) = self.write(entry, &mut state, next.clone()) {
                // The record may be durable all the same, and a later process would then wait for its
                // session. So clients go on only when it is known that the record is not durable.
                if state.unknown.is_none()
                    && let Some(volume) = &state.volume
                {
                    volume.event(Event::Release);
                }
                return Err(error.context("that it is held could not be written down"));
            }
            let call = self.call(entry, &next, session, &to, Purpose::Promise { by }, None);
            call?
        };
        (self.config.hook)(Point::Deciding);
        call.ask_to_promise().await?;
        (self.config.hook)(Point::Answered);
        Ok(())
    }

    /// Promises this copy to the source, which holds its tenant.
    pub(super) async fn promise(
        self: &Arc<Self>,
        name: &str,
        ask: &Ask,
        by: AgentSession,
    ) -> anyhow::Result<()> {
        (self.config.hook)(Point::Question);
        let entry = self.entry(name).await?;
        let mut state = entry.state_soon().await?;
        state.is_known(&entry)?;
        let incoming = state.incoming.clone();
        let has_all = incoming
            .as_ref()
            .is_some_and(|incoming| incoming.is_complete(ask.session));
        let is_complete = (has_all || state.whole == Some(ask.session)) && state.has_file(&entry);
        let next = promised(state.here(None), ask, by, is_complete);
        let next = next.with_context(|| format!("the copy of {name} here is not whole"))?;
        // The copy receives nothing more. If this cannot be written, the source asks again.
        state.whole = Some(ask.session);
        if let Some(incoming) = incoming {
            incoming.close();
        }
        if state.lent.as_ref().is_some_and(|lent| !lent.waits_for(by)) {
            // The loan was for an earlier session, which is over.
            self.end_lent(&entry, &mut state);
        }
        (self.config.hook)(Point::Committing);
        self.write(&entry, &mut state, next)?;
        self.is_filled(&entry, &mut state);
        state.filling = None;
        (self.config.hook)(Point::Committed);
        Ok(())
    }

    /// Makes it a block device for one instance, which may ask repeatedly. `by`: the instance is restored in
    /// this session.
    pub(super) fn lend(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        holder: String,
        by: Option<AgentSession>,
        is_read_only: bool,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        let sidecar = known(entry, state)?;
        let length = sidecar.length;
        let is_promised = match (&sidecar.role, by) {
            (Role::Ready { by: promised, .. }, Some(by)) => *promised == by,
            _ => false,
        };
        if !is_promised {
            serving(entry, state)?;
        }
        if state.settings.attached {
            bail!("{name} is attached for other clients; `verbatim volume detach {name}` first");
        }
        if state.holder.as_ref() != Some(&holder) {
            is_nobodys(entry, state)?;
        }
        if state
            .volume
            .as_ref()
            .is_some_and(|volume| volume.migration().is_some())
        {
            bail!("{name} is being moved");
        }
        self.end_lent(entry, state);
        if is_promised {
            self.open(entry, state, length)?;
        }
        state.look_whether_fresh();
        let is_other = |device: &Device| device.is_read_only() != is_read_only;
        if state.device.as_ref().is_some_and(is_other) {
            // The instance has examined it, and no longer uses it.
            is_free(entry, state)?;
            self.end_device(entry, state, "");
        }
        self.make_device(entry, state, is_read_only, Some(&holder))
            .with_context(|| format!("{name} cannot be a block device of this machine"))?;
        state.holder = Some(holder);
        Ok(())
    }

    /// Applies the decision of the session.
    pub(super) async fn settle(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        by: AgentSession,
        is_committed: bool,
    ) -> anyhow::Result<()> {
        // An answer without the act would leave a copy that waits forever.
        state.is_known(entry)?;
        let Some(sidecar) = state.sidecar.clone() else {
            return Ok(());
        };
        match settle(state.here(None), by, is_committed) {
            Settle::Unknown => bail!("it is not known what the copy of {} here is", entry.name),
            Settle::NotFilled => {
                let (why, serves_none) = not_filled(&entry.name, &sidecar, by);
                if serves_none {
                    state.alarm = Some(why.clone());
                }
                bail!(why)
            }
            Settle::Become(next) if matches!(sidecar.role, Role::Held { .. } | Role::Ready { .. }) => {
                return self.become_settled(entry, state, by, next).await;
            }
            Settle::Become(next) => {
                // A late question then finds the attempt given up.
                if let Some(incoming) = &state.incoming {
                    incoming.close();
                }
                state.whole = None;
                self.write(entry, state, next)?;
                self.watch_rest(entry, state);
            }
            Settle::Already | Settle::NotMine => {}
        }
        self.settle_lent(entry, state, by, is_committed)?;
        if is_committed {
            // The earlier daemon may have been killed between the decision and the service.
            self.serve_or_try_again(entry, state);
            return Ok(());
        }
        let is_followed = |following: &Following| following.by == by;
        if state.following.as_ref().is_some_and(is_followed) {
            if let Some(volume) = &state.volume {
                volume.event(Event::Release);
                volume.event(Event::Cancel);
            }
            state.following = None;
        }
        Ok(())
    }

    /// Applies the decision to a copy that has waited for the session.
    pub(super) async fn become_settled(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        by: AgentSession,
        next: Sidecar,
    ) -> anyhow::Result<()> {
        let may_serve = next.may_serve();
        let was_held = matches!(&state.sidecar, Some(here) if matches!(here.role, Role::Held { .. }));
        // An operator's decision may be wrong, and serves no client before it is durable. A session's
        // decision is durable already.
        let here = state.sidecar.as_ref();
        let is_word = here.is_some_and(|here| !next.overruled.is_empty() && next.overruled != here.overruled);
        let tell = |state: &State| {
            if was_held && let Some(volume) = &state.volume {
                volume.event(if may_serve { Event::Release } else { Event::Moved });
            }
        };
        if !is_word {
            tell(state);
        }
        self.write(entry, state, next)?;
        self.watch_rest(entry, state);
        if is_word {
            tell(state);
        }
        if was_held {
            state.following = None;
            (self.config.hook)(Point::Moved);
        }
        if !may_serve && let Err(error) = self.close(entry, state).await {
            tracing::warn!("{}: {error:#}", entry.name);
        }
        self.settle_lent(entry, state, by, !was_held && may_serve)?;
        self.serve_or_try_again(entry, state);
        Ok(())
    }
}

/// The report of a commit that the copy cannot follow, and whether it is known that no copy serves.
fn not_filled(name: &str, here: &Sidecar, by: AgentSession) -> (String, bool) {
    let question = here.overruled.iter().find(|it| it.was_destination);
    let way_out = |from: &str| {
        format!(
            "The one at {from} has all that was acknowledged until then: `verbatim volume revive {name} --force` there serves it again. `verbatim volume delete {name}` \
             here ends this report, and so does a move to here"
        )
    };
    match (&here.role, question) {
        (Role::Incoming { from, .. }, _) => (
            format!(
                "the session {by:016x} of the agents was committed, and {name} is only being filled here, from {from}: what the session was about is over \
                 when it has come, or when `verbatim volume delete {name}` has ended that here"
            ),
            false,
        ),
        (_, Some(question)) => (
            format!(
                "the session {by:016x} of the agents, in which {name} came here from {from}, was committed, and an operator has said that it was not: no copy serves. {}",
                way_out(&question.to),
                from = question.to,
            ),
            true,
        ),
        (_, None) => (
            format!(
                "the session {by:016x} of the agents was committed, and {name} was not filled to the end here: unless it is served at another host (`verbatim volume list` \
                 there), no copy serves. {}",
                way_out("its source"),
            ),
            false,
        ),
    }
}

fn followed<'a>(entry: &Entry, state: &'a State, by: AgentSession) -> anyhow::Result<&'a Following> {
    let following = state.following.as_ref();
    let following = following.filter(|following| following.by == by);
    following.with_context(|| format!("{} is not copied for that session (any more)", entry.name))
}

async fn reached(
    entry: &Entry,
    stage: &mut watch::Receiver<Stage>,
    is_it: impl Fn(&Stage) -> bool,
) -> anyhow::Result<()> {
    let reached = stage
        .wait_for(|stage| is_it(stage) || matches!(stage, Stage::Ended(_)))
        .await;
    match reached.map(|stage| stage.clone()) {
        Ok(Stage::Ended(why)) => bail!("{} is not copied any more: {why}", entry.name),
        Ok(_) => Ok(()),
        Err(_) => bail!("{} is not copied any more", entry.name),
    }
}
