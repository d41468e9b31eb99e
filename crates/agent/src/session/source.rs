//! The source's part of a session: it drives.
//!
//! [`migrate`] is the whole story. What an attempt has done, and would have to undo, is kept in [`Source`]; its steps are
//! in [`pre_copy`], [`prepare`], [`stop`] and [`commit`], the way back in [`undo`].

mod commit;
mod connections;
mod pre_copy;
mod prepare;
mod stop;
mod undo;

use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tonic::transport::Channel;
use verbatim_channel::RoadMap;
use verbatim_container::{Checkpoint, Dumped};

use crate::agent::Shared;
use crate::guests::Guest;
use crate::instances::home::LIBRARY_DIR;
use crate::instances::record::Record;
use crate::instances::{Instance, Reservation};
use crate::journal::{Event, Role};
use crate::memory::convergence::{Convergence, Limits};
use crate::memory::send::Sender;
use crate::peers::reason;
use crate::proto::peer_client::PeerClient;
use crate::proto::{NewQp, PreCopyRound, SessionId};
use crate::report::{Bytes, Migration, Outcome, Phase, PreCopy, Timeline, milliseconds};
use crate::session::ProcessKeys;

use connections::Connection;
pub use connections::{describe, memory_bytes, partners_of};

/// How often a migration starts anew because the program changed its objects meanwhile.
const ATTEMPTS: u32 = 3;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// Where to.
    pub destination: String,
    /// The limit of wait-before-stop.
    pub drain_timeout: Duration,
    /// Those of pre-copy.
    pub limits: Limits,
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

/// Why an attempt failed.
#[derive(Debug)]
enum Failure {
    /// The program made, changed or destroyed objects after the pre-setup: worth another attempt.
    Changed,
    /// Anything else.
    Error(anyhow::Error),
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::Error(error.into())
    }
}

/// One process of the instance.
struct Process {
    guest: Guest,
    road_map: RoadMap,
}

/// A partner's host.
struct PartnerHost {
    host: String,
    client: PeerClient<Channel>,
    /// Indices of its connections.
    connections: Vec<usize>,
}

/// One attempt: what it knows, and what it has done.
struct Source {
    agent: Shared,
    instance: Arc<Instance>,
    request: Request,
    session: u64,
    progress: mpsc::Sender<Progress>,
    timeline: Timeline,
    bytes: Bytes,
    convergence: Convergence,
    converged: bool,
    intercepted: u64,
    replayed: u64,

    processes: Vec<Process>,
    connections: Vec<Connection>,
    destination: Option<PeerClient<Channel>>,
    partners: Vec<PartnerHost>,
    /// Their ends tell the other agents that this one is gone.
    watches: Vec<JoinHandle<()>>,
    files: Sender,
    new_qps: Vec<NewQp>,
    keys: ProcessKeys,

    suspended: bool,
    checkpoint: Option<Checkpoint>,
    /// The RNIC connections of processes that wait at the gate.
    quiesced: Vec<(u32, Vec<std::os::fd::OwnedFd>)>,
    gate_closed: bool,
    detached: bool,
    dumped: Option<Dumped>,
    /// From the commit until the old place is cleared.
    reservation: Option<Reservation>,
    /// The instance is the destination's.
    committed: bool,
}

/// Moves an instance. Whoever drops the receiver of `progress` cancels, up to the commit.
pub async fn migrate(
    agent: Shared,
    instance: Arc<Instance>,
    request: Request,
    progress: mpsc::Sender<Progress>,
) -> anyhow::Result<Migration> {
    instance.begin_move()?;
    let mut attempt = 1;
    loop {
        let mut source = Source::new(&agent, &instance, &request, &progress);
        let result = source.attempt().await;
        match result {
            Err(Failure::Changed) if attempt < ATTEMPTS => {
                source.undo().await;
                source.note("the program changed its verbs objects meanwhile; starting again");
                attempt += 1;
            }
            result => {
                let error = match result {
                    Ok(()) => None,
                    Err(Failure::Changed) => Some(format!(
                        "the program changed its verbs objects during each of {ATTEMPTS} attempts; try again later"
                    )),
                    Err(Failure::Error(error)) => Some(format!("{error:#}")),
                };
                return Ok(source.finish(error).await);
            }
        }
    }
}

impl Source {
    fn new(
        agent: &Shared,
        instance: &Arc<Instance>,
        request: &Request,
        progress: &mpsc::Sender<Progress>,
    ) -> Self {
        let session = rand::random();
        let folder = instance.home.paths.folder.clone();
        let trusted = std::path::PathBuf::from(LIBRARY_DIR);
        Self {
            agent: Arc::clone(agent),
            instance: Arc::clone(instance),
            request: request.clone(),
            session,
            progress: progress.clone(),
            timeline: Timeline::default(),
            bytes: Bytes::default(),
            convergence: Convergence::default(),
            converged: false,
            intercepted: 0,
            replayed: 0,
            processes: Vec::new(),
            connections: Vec::new(),
            destination: None,
            partners: Vec::new(),
            watches: Vec::new(),
            files: Sender::new(
                session,
                crate::proto::file_part::Folder::Runtime,
                folder,
                Some(trusted),
            ),
            new_qps: Vec::new(),
            keys: Vec::new(),
            suspended: false,
            checkpoint: None,
            quiesced: Vec::new(),
            gate_closed: false,
            detached: false,
            dumped: None,
            reservation: None,
            committed: false,
        }
    }

    fn id(&self) -> SessionId {
        SessionId {
            session: self.session,
        }
    }

    /// The other side undoes the session when this call ends; it ends with this agent or with `watches`.
    async fn watch(&mut self, host: &str, mut client: PeerClient<Channel>) -> anyhow::Result<()> {
        let mut alive = told(host, "watch the session", client.watch(self.id()).await)?;
        self.watches.push(tokio::spawn(async move {
            while let Ok(Some(_)) = alive.message().await {}
        }));
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
        // Telling must not make the blackout longer: whoever does not read in time misses it.
        let _ = self.progress.try_send(Progress::Phase(phase));
    }

    fn note(&self, text: &str) {
        let _ = self.progress.try_send(Progress::Note(text.to_owned()));
    }

    fn journal(&self, event: Event) {
        let written = self.agent.journal.write(
            self.session,
            Role::Source,
            event,
            self.record().name.as_str(),
            &self.request.destination,
        );
        if let Err(error) = written {
            tracing::warn!(%error, "the journal cannot be written");
        }
    }

    /// The whole attempt.
    async fn attempt(&mut self) -> Result<(), Failure> {
        let progress = self.progress.clone();
        tokio::select! {
            // When the operator turns away, the rest is dropped at an await; what was done is noted in `self`.
            result = self.until_suspended() => result?,
            () = progress.closed() => return Err(cancelled().into()),
        }
        // From here on a step that was begun is not cut off: what it is given back must not be lost.
        self.until_commit().await?;
        self.commit().await?;
        Ok(self.after_commit().await?)
    }

    /// Everything up to where nothing is in flight any more.
    async fn until_suspended(&mut self) -> Result<(), Failure> {
        self.open().await?;
        self.enter(Phase::PreCopy);
        self.pre_copy().await?;
        self.enter(Phase::PreSetup);
        self.pre_setup().await?;
        self.wait_before_stop().await
    }

    /// The rest of what can be undone.
    async fn until_commit(&mut self) -> anyhow::Result<()> {
        self.enter(Phase::DumpRDMA);
        self.quiesce().await?;
        self.still_wanted()?;
        self.enter(Phase::DumpOthers);
        self.freeze().await?;
        self.still_wanted()?;
        self.enter(Phase::Transfer);
        self.stop_and_copy().await?;
        self.still_wanted()?;
        self.enter(Phase::FullRestore);
        self.restore().await?;
        self.still_wanted()
    }

    fn still_wanted(&self) -> anyhow::Result<()> {
        if self.progress.is_closed() {
            return Err(cancelled());
        }
        Ok(())
    }

    /// What is left to do when the instance is the destination's.
    async fn after_commit(&mut self) -> anyhow::Result<()> {
        self.enter(Phase::RestoreRDMA);
        let claimed = self.claim_and_switch().await;
        self.enter(Phase::Replay);
        let resumed = self.resume().await;
        self.timeline.leave();
        self.reclaim().await;
        claimed.and(resumed)
    }

    /// Undoes what must be undone and writes the report.
    async fn finish(mut self, error: Option<String>) -> Migration {
        let outcome = if self.committed {
            Outcome::Committed
        } else {
            self.undo().await;
            self.instance.end_move();
            Outcome::RolledBack
        };
        self.journal(if self.committed {
            Event::Closed
        } else {
            Event::RolledBack
        });
        for watch in self.watches.drain(..) {
            watch.abort();
        }
        let (phases_ms, service, communication, total) = self.timeline.totals();
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
            },
            connections: self.connections.len(),
            intercepted_wrs: self.intercepted,
            replayed_wrs: self.replayed,
        }
    }
}

/// A call's failure in words, with whom it concerned.
fn told<T>(who: &str, what: &str, result: Result<tonic::Response<T>, tonic::Status>) -> anyhow::Result<T> {
    match result {
        Ok(response) => Ok(response.into_inner()),
        Err(status) => bail!("{who} could not {what}: {}", reason(&status)),
    }
}

fn cancelled() -> anyhow::Error {
    anyhow::anyhow!("cancelled by the operator")
}
