//! The source's part of a session: it drives.
//!
//! [`migrate`] is the whole story. What an attempt has done, and would have to undo, is kept in [`Source`]; its steps are
//! in [`transport`], [`pre_copy`], [`track`], [`pre_dump`], [`turn`], [`prepare`] with [`partners`], [`stop`] with [`settle`] or [`pause`], and [`commit`], with [`volumes`] beside them, the way back
//! in [`undo`]; the dump tried beforehand in [`deep`]; what is different for a virtual machine in [`machine`] and [`post_copy`]. How many attempts there are says [`attempts`]. Who decides what, and when, is the machine's in [`decision`].

mod ahead;
mod attempts;
mod cm;
mod commit;
mod connections;
mod decision;
mod deep;
mod files;
mod images;
mod machine;
mod made_again;
pub mod obstacles;
mod participants;
mod partners;
mod pause;
mod plan;
mod post_copy;
mod pre_copy;
mod pre_dump;
mod prepare;
mod settle;
mod stop;
mod track;
mod transport;
mod turn;
mod undo;
pub mod volumes;

use std::collections::HashMap;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use verbatim_channel::{MEMORY_DIR, MadeAgain, RoadMap};
use verbatim_container::{Checkpoint, NeededFile};
use verbatim_netns::Reader;
use verbatim_session::Role;
use verbatim_session::decision::source::Event;
use verbatim_session::record::Note;
use verbatim_tracking::Ranges;

use crate::agent::Shared;
use crate::allocator;
use crate::faults::Point;
use crate::gids::Gid;
use crate::guests::Guest;
use crate::held::Hold;
use crate::instances::home::LIBRARY_DIR;
use crate::instances::machine::leaving::Leaving;
use crate::instances::record::Record;
use crate::instances::tasks::Dumped;
use crate::instances::{Instance, Reservation};
use crate::keeper::Keeper;
use crate::memory::convergence::{Convergence, Limits};
use crate::memory::others::Others;
use crate::memory::pace::Pace;
use crate::memory::parts::Route;
use crate::memory::send::Sender;
use crate::memory::transport as memory_transport;
use crate::method::{Choice, Wanted};
use crate::proto::peer_client::PeerClient;
use crate::proto::{NewQp, PreCopyRound, SessionId};
use crate::report::{Bytes, Migration, Outcome, Paused, Phase, PreCopy, Timeline, milliseconds};
use crate::session::control::Control;
use crate::session::driver::{Driver, Step};
use crate::session::members::Settled;
use crate::session::{PAUSE, ProcessKeys, told};
use crate::turns::Turn;

use ahead::Ahead;
use attempts::Failure;
pub use attempts::{begin, migrate};
use connections::Connection;
pub use connections::{blockers, describe, describe_own, memory_bytes};
use decision::Decision;
pub use deep::{Tried, check};
pub use files::huge_pages;
use images::Images;
pub use machine::{look_into_images, uncompared, unknown as machine_unknown};
use participants::PartnerHost;
pub use track::{goes_beside_images, private_note};
pub use transport::transport_note;

/// How long each of the two steps after the decision may take before the rest goes on without those who do not answer.
const FINISH_LIMIT: Duration = Duration::from_secs(20);

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// Where to.
    pub destination: String,
    /// The limit of wait-before-stop.
    pub drain_timeout: Duration,
    /// Those of pre-copy.
    pub limits: Limits,
    /// How fast memory is sent while the program runs, in bytes per second.
    pub max_bandwidth: Option<NonZeroU64>,
    /// Of a virtual machine: what rounds do not bring comes after the decision.
    pub post_copy: bool,
    /// Rather roll back than reset connections that no process has accepted.
    pub no_reset: bool,
    /// How connections are brought to a stop.
    pub method: Wanted,
    /// How memory goes while the program runs.
    pub transport: memory_transport::Wanted,
    /// That, in detail.
    pub tuning: memory_transport::Tuning,
}

/// What a watcher is told while it runs.
#[derive(Debug, Clone)]
pub enum Progress {
    /// A phase began.
    Phase(Phase),
    /// Something else worth telling.
    Note(String),
    /// How a round of pre-copy goes.
    PreCopy(PreCopyRound),
}

/// One process of the instance.
struct Process {
    guest: Guest,
    road_map: RoadMap,
    /// Contexts that it makes again at the destination.
    made_again: Vec<MadeAgain>,
    /// What its ids of rdma_cm need at the destination, if it has a context for them.
    cm: Option<Vec<u8>>,
}

impl Process {
    /// Whether a queue pair is of a context that is made again.
    fn makes_again(&self, qpn: u32) -> bool {
        let contexts = self.road_map.contexts.iter();
        let of_qp = contexts.filter(|context| context.qps.iter().any(|qp| qp.qpn == qpn));
        let ids: Vec<u32> = of_qp.map(|context| context.id).collect();
        self.made_again.iter().any(|made| ids.contains(&made.id))
    }

    /// How many contexts of its RNIC it gives away: those that are made again stay with it.
    fn contexts(&self) -> usize {
        let kept = self.made_again.len();
        self.road_map.contexts.len().saturating_sub(kept) + usize::from(self.cm.is_some())
    }
}

/// One attempt: what it knows, and what it has done.
struct Source {
    agent: Shared,
    instance: Arc<Instance>,
    request: Request,
    session: u64,
    control: Arc<Control>,
    progress: mpsc::Sender<Progress>,
    timeline: Timeline,
    bytes: Bytes,
    convergence: Convergence,
    converged: bool,
    intercepted: u64,
    replayed: u64,
    settled: Settled,
    choice: Choice,
    paused: Paused,

    processes: Vec<Process>,
    connections: Vec<Connection>,
    /// The GID tables of this host's RNIC and of the destination's.
    gids: (Vec<Gid>, Vec<Gid>),
    destination: Option<PeerClient<Channel>>,
    partners: Vec<PartnerHost>,
    /// By host; their ends tell the other agents that this one is gone.
    watches: HashMap<String, JoinHandle<()>>,
    /// The instance's connections are this session's.
    turn: Option<Turn>,
    files: Sender,
    /// Of what is sent while the program runs.
    route: Route,
    /// Whether that is TLS, and why.
    transport: memory_transport::Choice,
    /// Why it must be.
    no_rdma: Option<String>,
    /// Private memory that was sent ahead.
    ahead: Ahead,
    /// What is made for each of the instance's queue pairs, by process and virtual number.
    new_qps: HashMap<(u32, u32), NewQp>,
    keys: ProcessKeys,
    /// Some end needs markers to know that all it was given is done.
    marks: bool,

    /// Nobody is told where its queue pairs are that are not connected yet.
    hold: Option<Hold>,
    /// The program's control verbs wait from the pre-setup on.
    holds: bool,
    suspended: bool,
    /// New TCP connections to it are held back.
    refuses_connections: bool,
    /// Connections of clients that are reset at the commit.
    reset_connections: usize,
    /// How long no task ran when the dump was tried before the first attempt, if it was.
    deep_check: Option<Duration>,
    /// Files that the destination must have, as far as that try has shown.
    needed_files: Vec<NeededFile>,
    /// Of a container.
    checkpoint: Option<Checkpoint>,
    /// Of a virtual machine, in its place.
    machine: Option<Leaving>,
    /// What of its RAM is not brought before the decision, once that is how it goes.
    left_behind: Option<Ranges>,
    /// The RNIC connections of processes that wait at the gate.
    quiesced: Vec<(u32, Vec<std::os::fd::OwnedFd>)>,
    /// It has copies of them.
    keeper: Option<Keeper>,
    gate_closed: bool,
    /// Who reads its network namespace, of a container.
    network: Option<Reader>,
    detached: bool,
    dumped: Option<Dumped>,
    /// What of it the destination has.
    images: Option<Images>,
    /// From the decision until the old place is cleared.
    reservation: Option<Reservation>,
    decision: Decision,
    /// What is still to be done then, if something is.
    unfinished: Option<Driver>,
}

impl Source {
    fn new(
        agent: &Shared,
        instance: &Arc<Instance>,
        request: &Request,
        control: &Arc<Control>,
        progress: &mpsc::Sender<Progress>,
    ) -> Self {
        let session = rand::random();
        control.set_session(session);
        let folder = instance.home.paths.folder.clone();
        let trusted = std::path::PathBuf::from(LIBRARY_DIR);
        let pace = Pace::new(request.max_bandwidth);
        let route = Route {
            pace: Arc::new(match request.tuning.adapts {
                true => pace.beside(Others::new(agent.config.nic_socket())),
                false => pace,
            }),
            tuning: request.tuning,
            background: true,
            ..Route::default()
        };
        let kind = crate::proto::file_part::Folder::Runtime;
        let files = Sender::new(session, kind, folder, Some(trusted));
        Self {
            agent: Arc::clone(agent),
            instance: Arc::clone(instance),
            request: request.clone(),
            session,
            control: Arc::clone(control),
            progress: progress.clone(),
            timeline: Timeline::default(),
            bytes: Bytes::default(),
            convergence: Convergence::default(),
            converged: false,
            intercepted: 0,
            replayed: 0,
            settled: Settled::default(),
            choice: Choice::first(Wanted::default()),
            paused: Paused::default(),
            processes: Vec::new(),
            connections: Vec::new(),
            gids: Default::default(),
            destination: None,
            partners: Vec::new(),
            watches: HashMap::new(),
            turn: None,
            files: match instance.home.record.machine {
                // The RAM is sent separately, and other files beside it stay.
                Some(_) => files.without_what_is_in(MEMORY_DIR.as_ref()),
                None => files,
            }
            .by(&route),
            route,
            transport: memory_transport::Choice::tls("nothing was sent"),
            no_rdma: None,
            ahead: Ahead::default(),
            new_qps: HashMap::new(),
            keys: Vec::new(),
            marks: false,
            hold: None,
            holds: false,
            suspended: false,
            refuses_connections: false,
            reset_connections: 0,
            deep_check: None,
            needed_files: Vec::new(),
            checkpoint: None,
            machine: None,
            left_behind: None,
            quiesced: Vec::new(),
            keeper: None,
            gate_closed: false,
            network: None,
            detached: false,
            dumped: None,
            images: None,
            reservation: None,
            decision: Decision::new(agent, session),
            unfinished: None,
        }
    }

    fn id(&self) -> SessionId {
        SessionId {
            session: self.session,
        }
    }

    /// The other side undoes the session when this call ends; it ends with this agent or with `watches`.
    async fn watch(&mut self, host: &str, mut client: PeerClient<Channel>) -> anyhow::Result<()> {
        if self.watches.contains_key(host) {
            return Ok(());
        }
        let mut alive = told(host, "watch the session", client.watch(self.id()).await)?;
        let watch = tokio::spawn(async move { while let Ok(Some(_)) = alive.message().await {} });
        self.watches.insert(host.to_owned(), watch);
        Ok(())
    }

    fn record(&self) -> &Record {
        &self.instance.home.record
    }

    fn destination(&self) -> PeerClient<Channel> {
        self.destination
            .clone()
            .expect("opened before anything is asked of it")
    }

    fn enter(&mut self, phase: Phase) {
        self.timeline.enter(phase);
        self.step(phase.of_session(), phase.name());
        // Telling must not make the blackout longer: whoever does not read in time misses it.
        let _ = self.progress.try_send(Progress::Phase(phase));
    }

    fn step(&self, phase: verbatim_session::Phase, name: &str) {
        self.agent.journal.step(self.session, Role::Source, phase, name);
    }

    fn note(&self, text: &str) {
        let _ = self.progress.try_send(Progress::Note(text.to_owned()));
    }

    /// The session is at its end, which is written down in the background, however long the disk refuses.
    fn close(&mut self) {
        let decision = self.take_decision();
        tokio::spawn(decision.end(Event::Finished));
    }

    fn tell_how_it_went(&self, error: Option<&str>) {
        let note = Note {
            error: error.map(str::to_owned),
            pre_copy_bytes: Some(self.bytes.pre_copy),
            stop_and_copy_bytes: Some(self.bytes.stop_and_copy),
            ..Note::default()
        };
        if self.agent.journal.standing(self.session, Role::Source).is_some() {
            self.agent.journal.note(self.session, Role::Source, note);
        }
    }

    async fn pass(&self, point: Point) -> anyhow::Result<bool> {
        self.agent.faults.pass(point).await
    }

    /// The whole attempt.
    async fn attempt(&mut self) -> Result<(), Failure> {
        let control = Arc::clone(&self.control);
        tokio::select! {
            // When the operator turns away, the rest is dropped at an await; what was done is noted in `self`.
            result = self.until_suspended() => result?,
            () = control.cancelled() => return Err(cancelled().into()),
        }
        // From here on a step is cut off only where nothing is given back that must not be lost.
        self.until_commit().await?;
        self.commit().await?;
        Ok(self.after_commit().await?)
    }

    /// Everything up to where nothing is in flight any more.
    async fn until_suspended(&mut self) -> Result<(), Failure> {
        self.pass(Point::SourceOpen).await?;
        self.open().await?;
        self.follow_volumes().await?;
        self.choose_transport().await;
        self.enter(Phase::PreCopy);
        self.volumes_are_there().await?;
        self.ahead.damaged = self.pass(Point::SourcePreCopy).await?;
        self.pre_copy().await?;
        self.enter(Phase::PreSetup);
        self.pass(Point::SourcePreSetup).await?;
        if let Err(failure) = self.pre_setup().await {
            let is_known = match &failure {
                Failure::Error(error) => error.is::<turn::StillMoved>(),
                Failure::CannotPause(_) => true,
                Failure::Changed => false,
            };
            // What is described may be gone by the time it is made again.
            return Err(match !is_known && self.has_changed().await {
                true => Failure::Changed,
                false => failure,
            });
        }
        self.sync_volumes().await?;
        match self.pauses() {
            true => self.pause().await,
            false => self.wait_before_stop().await,
        }
    }

    /// The rest of what can be undone.
    async fn until_commit(&mut self) -> anyhow::Result<()> {
        let control = Arc::clone(&self.control);
        self.enter(Phase::DumpRDMA);
        self.unless_cancelled(Point::SourceQuiesce).await?;
        self.quiesce().await?;
        self.enter(Phase::DumpOthers);
        if self.unless_cancelled(Point::SourceFreeze).await? {
            std::fs::remove_dir_all(&self.instance.home.paths.images)?;
        }
        self.freeze().await?;
        self.dumped().await?;
        let there = async {
            self.enter(Phase::Transfer);
            self.pass(Point::SourceTransfer).await?;
            let held = self.hold_volumes().await?;
            self.stop_and_copy().await?;
            held.await.context("handing the volumes over panicked")??;
            self.enter(Phase::FullRestore);
            self.pass(Point::SourceRestore).await?;
            self.restore().await?;
            self.pass(Point::SourceCommit).await.map(drop)
        };
        tokio::select! {
            result = there => result,
            () = control.cancelled() => Err(cancelled()),
        }
    }

    /// Passes a point after the decision, where a failure is no way back: what fails is tried again.
    async fn pass_at_last(&self, point: Point) {
        while let Err(error) = self.pass(point).await {
            tracing::warn!("{error:#}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Passes a point before a step that is not cut off.
    async fn unless_cancelled(&self, point: Point) -> anyhow::Result<bool> {
        tokio::select! {
            biased;
            () = self.control.cancelled() => Err(cancelled()),
            passed = self.pass(point) => passed,
        }
    }

    /// What is left to do when the instance is the destination's.
    async fn after_commit(&mut self) -> anyhow::Result<()> {
        let partners = self
            .partners
            .iter()
            .map(|partner| (partner.host.clone(), Some(partner.client.clone())));
        let to = (self.request.destination.clone(), self.destination.clone());
        let mut driver = Driver::new(&self.agent, self.session, to, partners);
        if self.makes_again().is_none() {
            driver.made_nothing_again();
        }
        self.enter(Phase::RestoreRDMA);
        self.pass_at_last(Point::SourceSwitch).await;
        let (switched, all_switched) = driver.take(Step::Switch, FINISH_LIMIT).await;
        if let Some((new_qps, keys)) = driver.made() {
            self.new_qps
                .extend(new_qps.into_iter().map(|new| ((new.pid, new.qpn), new)));
            self.keys = keys;
            self.agent.forwarding.insert(self.forwarding());
        }
        self.enter(Phase::Replay);
        self.pass_at_last(Point::SourceResume).await;
        let (resumed, all_resumed) = driver.take(Step::Resume, FINISH_LIMIT).await;
        self.timeline.resumed();
        self.timeline.leave();
        self.replayed += switched + resumed;
        self.intercepted += resumed;
        self.step(verbatim_session::Phase::Reclaim, "Reclaim");
        self.reclaim().await;
        let lost_nothing = driver.must_have_lost_nothing();
        if let Err(error) = all_switched.and(all_resumed) {
            self.unfinished = Some(driver);
            return Err(error.context(
                "the instance has moved, but not all of its connections work yet; this goes on, see `verbatim sessions`",
            ));
        }
        lost_nothing
    }

    /// Undoes what must be undone and writes the report.
    async fn finish(mut self, error: Option<String>) -> Migration {
        let outcome = if self.is_committed() {
            self.tell_how_it_went(error.as_deref());
            Outcome::Committed
        } else {
            let why = error
                .as_deref()
                .unwrap_or("the attempt did not come to the decision");
            self.roll_back(&anyhow::anyhow!("{why}")).await;
            self.tell_how_it_went(None);
            // Cut off, and let go on.
            self.settled = Settled::default();
            self.paused = Paused::default();
            self.instance.end_move();
            // What a deep check said was not all.
            self.agent.deep_checks.forget(self.instance.name());
            Outcome::RolledBack
        };
        match self.unfinished.take() {
            None => self.close(),
            Some(driver) => {
                let decision = self.take_decision();
                let watches = std::mem::take(&mut self.watches);
                tokio::spawn(async move {
                    driver.finish().await;
                    decision.end(Event::Finished).await;
                    watches.values().for_each(JoinHandle::abort);
                });
            }
        }
        for (_, watch) in self.watches.drain() {
            watch.abort();
        }
        let (phases_ms, service, communication, total) = self.timeline.totals();
        allocator::return_freed_memory();
        Migration {
            instance: self.instance.name().to_owned(),
            source: self.agent.name().to_owned(),
            destination: self.request.destination,
            outcome,
            error,
            phases_ms,
            service_blackout_ms: milliseconds(service),
            communication_blackout_ms: milliseconds(communication),
            total_ms: milliseconds(total),
            bytes: self.bytes,
            pre_copy: PreCopy {
                rounds: self.convergence.rounds().to_vec(),
                converged: self.converged,
                predicted_blackout_ms: milliseconds(
                    self.convergence.predicted_blackout().unwrap_or_default(),
                ),
                private_bytes: self.convergence.private_bytes(),
                pre_dumps: self.ahead.pre_dumps().to_vec(),
                private_in_one_piece: self.ahead.why_not().map(str::to_owned),
                private_tracked: self.ahead.report(),
                private_not_tracked: self.ahead.why_not_tracked().map(str::to_owned),
            },
            connections: self.connections.len(),
            intercepted_wrs: self.intercepted,
            replayed_wrs: self.replayed,
            unfinished_replayed_wrs: self.settled.replayed,
            unfinished_completed_wrs: self.settled.completed,
            memory_transport: self.transport.transport,
            memory_transport_reason: self.transport.reason,
            rdma_bytes: self.route.bulk.bytes(),
            post_copy_bytes: self.left_behind.map_or(0, |left| left.bytes()),
            method: self.choice.method,
            method_reason: self.choice.reason,
            paused: self.paused,
            reset_connections: match outcome {
                Outcome::Committed => self.reset_connections,
                Outcome::RolledBack => 0,
            },
            deep_check_ms: self.deep_check.map(milliseconds),
        }
    }
}

fn cancelled() -> anyhow::Error {
    anyhow::anyhow!("cancelled by the operator")
}
