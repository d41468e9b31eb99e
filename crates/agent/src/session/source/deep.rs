//! The dump, tried: what a migration does at its source up to CRIU's images, but for memory, and the way back at once.
//!
//! It is an attempt with a session of its own, which is always rolled back. So whatever dies in the middle of it is dealt with as in any
//! attempt before its decision: the partners' hosts resume, an agent that comes after this one thaws the tasks and gives them their RNIC
//! connections back. The destination takes no part, and nothing is sent to it.
//!
//! ```text
//!  turn ─► partners prepare ─► runc and CRIU get ready ─► suspend, drain ─► quiesce ─► freeze, images ─► thaw ─► claim ─► resume
//!                                                         └───────────── no connection carries data ─────────────────────────┘
//!                                                                                     └─ no task runs ─┘
//! ```

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use verbatim_container::{Checkpoint, CheckpointConfig, FileImages, NeededFile};
use verbatim_device::control::QpType;
use verbatim_session::Role;
use verbatim_session::record::{Parties, What};

use super::attempts::{ATTEMPTS, Failure};
use super::{Progress, Request, Source, cancelled};
use crate::agent::Shared;
use crate::faults::Point;
use crate::instances::Instance;
use crate::instances::tasks::Dumped;
use crate::keeper::Keeper;
use crate::memory::convergence::Limits;
use crate::memory::tracked::MOST_BYTES;
use crate::memory::{private, shared};
use crate::protocol::{NETWORK, TERMINALS};
use crate::session::control::{Control, Stage};
use crate::session::deep::{Known, Look, is_worth_it};

/// What is in flight gets so long: longer, and the connections would stand still for what a migration would cut off.
const DRAIN_LIMIT: Duration = Duration::from_millis(500);

/// CRIU gets so many seconds to stop the tasks, in place of ten: who waits within the kernel keeps all others waiting.
const STOP_LIMIT: NonZeroU32 = NonZeroU32::new(2).expect("not zero");

/// Less private memory is written into the images as it is: it costs less than to leave it out.
const LITTLE_BYTES: u64 = 4 << 20;

/// CRIU's log of a try that failed, in the folder of its work.
const LOG: &str = "deep-check.log";

/// How long the instance stood still.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stood {
    /// No task ran.
    pub service: Duration,
    /// No connection carried data.
    pub communication: Duration,
}

/// What came of a try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tried {
    /// CRIU can write it down. The images say which files it needs at its next host.
    Fine(Vec<NeededFile>),
    /// It cannot.
    Refused {
        /// Why, in one line for an operator.
        why: String,
        /// CRIU's log.
        log: PathBuf,
    },
    /// Something else came in between, which does not say that a migration would fail.
    Prevented(String),
}

/// Tries the dump of an instance that nobody moves.
pub async fn check(agent: Shared, instance: Arc<Instance>, to: String) -> anyhow::Result<(Tried, Stood)> {
    if instance.home.record.machine.is_some() {
        bail!(
            "{} is a virtual machine: CRIU has no part in its move, and there is nothing that only a deep check finds",
            instance.name()
        );
    }
    instance.begin_move()?;
    let driven = agent.controls.begin(instance.name(), &to, Stage::Open);
    // Nobody is told of its steps.
    let (progress, _) = mpsc::channel(1);
    let tried = try_dump(&agent, &instance, &to, &driven.control, &progress).await;
    instance.end_move();
    Ok(tried)
}

/// The same within a migration, if it is short beside the blackout that is allowed and was not tried with the same before.
pub async fn before_migration(
    agent: &Shared,
    instance: &Arc<Instance>,
    request: &Request,
    control: &Arc<Control>,
    progress: &mpsc::Sender<Progress>,
) -> Option<(Tried, Stood)> {
    if instance.home.record.machine.is_some() || !instance.is_whole() {
        return None;
    }
    let look = Look::at(instance).await.ok()?;
    let known = agent.deep_checks.get(instance.name());
    let to = &request.destination;
    if !is_worth_it(look, known.as_ref(), to, request.limits.max_blackout) {
        return None;
    }
    // What is refused anyway is refused without standing still.
    let blockers = super::obstacles::of_tasks(agent, instance).await;
    if !blockers.is_empty() || agent.peers.connect(to).await.is_err() {
        return None;
    }
    Some(try_dump(agent, instance, to, control, progress).await)
}

/// Tries the dump of an instance that is marked as moving, and remembers what came of it. The instance runs on, whatever that is.
async fn try_dump(
    agent: &Shared,
    instance: &Arc<Instance>,
    to: &str,
    control: &Arc<Control>,
    progress: &mpsc::Sender<Progress>,
) -> (Tried, Stood) {
    let before = Look::at(instance).await;
    let (tried, stood) = attempts(agent, instance, to, control, progress).await;
    match (&tried, before) {
        // What was opened meanwhile is another fingerprint.
        (Tried::Fine(_), Ok(look)) => {
            let known = Known {
                fingerprint: look.fingerprint,
                destination: to.to_owned(),
                stood: stood.service,
                memory: look.memory(),
            };
            let here: Vec<String> = agent
                .instances
                .all()
                .iter()
                .map(|one| one.name().to_owned())
                .collect();
            agent.deep_checks.note(instance.name(), known, &here);
        }
        (Tried::Refused { .. }, _) => agent.deep_checks.forget(instance.name()),
        _ => {}
    }
    (tried, stood)
}

/// As many attempts as the program makes necessary by changing its objects.
async fn attempts(
    agent: &Shared,
    instance: &Arc<Instance>,
    to: &str,
    control: &Arc<Control>,
    progress: &mpsc::Sender<Progress>,
) -> (Tried, Stood) {
    let request = Request {
        destination: to.to_owned(),
        drain_timeout: DRAIN_LIMIT,
        limits: Limits::default(),
        max_bandwidth: None,
        post_copy: false,
        no_reset: false,
        method: Default::default(),
        transport: Default::default(),
        tuning: Default::default(),
    };
    let mut stood = Stood::default();
    let mut attempt = 1;
    loop {
        let mut source = Source::new(agent, instance, &request, control, progress);
        source.holds = attempt > 1;
        let result = source.write_down().await;
        let log = instance.home.paths.work.join("dump.log");
        // What stands still goes on before anything is looked at.
        let (service, communication) = source.go_on(result.as_ref().err()).await;
        let tried = match &result {
            Ok(images) => needed(images),
            Err(failure) => judge(failure, instance, &log),
        };
        stood.service += service;
        stood.communication += communication;
        match result {
            Err(Failure::Changed) if attempt < ATTEMPTS => attempt += 1,
            _ => return (tried, stood),
        }
    }
}

/// What the images say of files. Images that are not understood do not say that a migration would fail.
fn needed(images: &FileImages) -> Tried {
    Tried::Fine(images.needed().unwrap_or_else(|error| {
        tracing::warn!(%error, "the files that the instance has open are not compared");
        Vec::new()
    }))
}

/// What a failure says of the instance. CRIU's log is kept where the next dump does not overwrite it.
fn judge(failure: &Failure, instance: &Instance, log: &Path) -> Tried {
    let error = match failure {
        Failure::Error(error) => error,
        Failure::Changed => {
            return Tried::Prevented("the program changed its verbs objects meanwhile".to_owned());
        }
        Failure::CannotPause(why) => return Tried::Prevented(why.clone()),
    };
    let complaint = error
        .downcast_ref::<verbatim_container::Error>()
        .and_then(verbatim_container::Error::complaint);
    let why = match complaint {
        Some(complaint) if !complaint.passes => complaint.why,
        Some(complaint) => return Tried::Prevented(complaint.why),
        None => return Tried::Prevented(format!("{error:#}")),
    };
    let kept = instance.home.paths.work.join(LOG);
    let log = match std::fs::copy(log, &kept) {
        Ok(_) => kept,
        Err(error) => {
            tracing::warn!(log = %log.display(), %error, "CRIU's log is not kept");
            log.to_owned()
        }
    };
    Tried::Refused { why, log }
}

impl Source {
    /// Everything up to the images; those of files.
    async fn write_down(&mut self) -> Result<FileImages, Failure> {
        let control = Arc::clone(&self.control);
        tokio::select! {
            result = self.until_drained() => result?,
            () = control.cancelled() => return Err(cancelled().into()),
        }
        // From here on nothing is cut off: what the processes have given away must not be lost.
        self.quiesce().await?;
        self.dump_without_memory().await?;
        let images = FileImages::read(&self.instance.home.paths.images);
        self.pass(Point::SourceDeep).await?;
        Ok(images.unwrap_or_else(|error| {
            tracing::warn!(%error, "CRIU's images of files cannot be read");
            FileImages::default()
        }))
    }

    async fn until_drained(&mut self) -> Result<(), Failure> {
        let to = self.request.destination.clone();
        if self.is_machine() {
            return Err(anyhow::anyhow!("CRIU has no part in the move of a virtual machine").into());
        }
        self.instance.settled().await;
        if !self.instance.is_whole() {
            let missing = anyhow::anyhow!("memory of its last place is still missing");
            return Err(missing.into());
        }
        // What the destination knows decides how it is written down.
        self.agent.peers.connect(&to).await?;
        let parties = Parties {
            instance: self.instance.name().to_owned(),
            source: self.agent.name().to_owned(),
            destination: to,
        };
        self.agent
            .journal
            .write(self.session, Role::Source, What::Opened(parties))
            .context("the journal cannot be written")?;
        self.step(verbatim_session::Phase::Freeze, "DeepCheck");
        self.takes_all().await?;
        self.take_turn().await?;
        if self.holds {
            self.hold().await?;
            self.take_turn().await?;
        }
        self.prepare_partners().await?;
        self.start_criu().await?;
        let suspended = self.intercept().await?;
        let unreliable = self.processes.iter().any(|process| {
            let qps = process.road_map.contexts.iter().flat_map(|context| &context.qps);
            qps.into_iter().any(|qp| qp.qp_type == QpType::Uc)
        });
        if unreliable {
            self.drain(&suspended, true).await?;
        }
        match self.drain(&suspended, false).await? {
            undrained if undrained.is_empty() => Ok(()),
            undrained => Err(anyhow::anyhow!(
                "its connections had not come to rest after {} ms: {}",
                DRAIN_LIMIT.as_millis(),
                undrained.left.join("; ")
            )
            .into()),
        }
    }

    /// A keeper of the RNIC connections, and runc and CRIU before anything that they do.
    async fn start_criu(&mut self) -> anyhow::Result<()> {
        let (config, session) = (self.agent.config.clone(), self.session);
        let keeper = tokio::task::spawn_blocking(move || Keeper::start(&config, session));
        self.keeper = Some(keeper.await.context("starting a keeper panicked")??);
        let (to, paths) = (&self.request.destination, self.instance.home.paths.clone());
        let (init, runtime) = (self.instance.init_pid(), self.agent.config.runtime_dir.clone());
        let looked = tokio::task::spawn_blocking(move || {
            // A link among old ones to images before would be taken for this dump's.
            paths.clear_images().context("old images cannot be removed")?;
            let private_bytes = private::bytes_of_tree(init);
            if private_bytes > MOST_BYTES {
                bail!(
                    "it has {} MiB of private memory, and CRIU can leave {} MiB out of its images",
                    private_bytes >> 20,
                    MOST_BYTES >> 20
                );
            }
            let lazy = private_bytes > LITTLE_BYTES;
            let in_images = shared::bytes_of_tree(init) + if lazy { 0 } else { private_bytes };
            match private::lack_of_room(&runtime, in_images) {
                Some(lack) => bail!("{lack}"),
                None => Ok(lazy),
            }
        });
        let lazy = looked.await.context("looking at memory panicked")??;
        let paths = &self.instance.home.paths;
        let checkpoint = CheckpointConfig {
            name: self.record().name.clone(),
            images: paths.images.clone(),
            work: paths.work.clone(),
            parent: None,
            lazy,
            network: self.agent.peers.can(to, NETWORK).then(|| paths.network.clone()),
            rnics: !self.record().rnics.is_empty(),
            terminals: self.agent.peers.can(to, TERMINALS),
            stop_limit: Some(STOP_LIMIT),
        };
        self.checkpoint = Some(Checkpoint::prepare(&self.agent.tools, checkpoint).await?);
        Ok(())
    }

    /// Freezes the instance and has its images written.
    async fn dump_without_memory(&mut self) -> anyhow::Result<()> {
        let checkpoint = self.checkpoint.take().context("the dump was not prepared")?;
        self.timeline.frozen();
        self.detached = true;
        let home = &self.instance.home;
        let dumped = checkpoint.freeze_and_dump_with(|| home.detach()).await?;
        tracing::debug!("tried the dump: {}", dumped.timings());
        self.dumped = Some(Dumped::Container(Box::new(dumped)));
        Ok(())
    }

    /// The way back, and the end of the session; how long no task ran, and no connection carried data.
    async fn go_on(mut self, failure: Option<&Failure>) -> (Duration, Duration) {
        let why = match failure {
            None => anyhow::anyhow!("a deep check, which is always rolled back"),
            Some(Failure::Error(error)) => anyhow::anyhow!("a deep check: {error:#}"),
            Some(Failure::CannotPause(why)) => anyhow::anyhow!("a deep check: {why}"),
            Some(Failure::Changed) => anyhow::anyhow!("a deep check: the program changed its verbs objects"),
        };
        // Before that is written down, which takes as long as a disk does: nobody was asked to decide, so that an agent that comes after
        // this one undoes it all the same.
        self.undo().await;
        self.roll_back(&why).await;
        self.close();
        self.watches.values().for_each(JoinHandle::abort);
        let (_, service, communication, _) = self.timeline.totals();
        (service, communication)
    }
}
