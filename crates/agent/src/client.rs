//! The command line's side of `api.sock`.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint};

use crate::peers::reason;
use crate::proto::control_client::ControlClient;
use crate::proto::migrate_event::Event;
use crate::proto::{
    AttachRequest, CancelRequest, CheckReply, CheckRequest, DetachRequest, ExecRequest, ForgetSessionRequest,
    Instance, ListRequest, LogsRequest, MigrateRequest, PauseReply, PauseRequest, PreCopyRound,
    RemoveRequest, ResolveSessionRequest, ResumePausedRequest, RunRequest, Session, SessionsRequest,
    VersionReply, WaitReply, WaitRequest,
};
use crate::protocol::{self, PROTOCOLS};

/// A connection to one agent.
#[derive(Clone)]
pub struct Client {
    inner: ControlClient<Channel>,
    version: VersionReply,
}

/// What a migration tells while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MigrationEvent {
    /// A phase began.
    Phase(String),
    /// Something else worth telling.
    Note(String),
    /// How a round of pre-copy goes.
    PreCopy(PreCopyRound),
    /// The report, [`crate::report::Migration`] as JSON; the last event.
    Report(String),
}

fn told<T>(result: Result<tonic::Response<T>, tonic::Status>) -> anyhow::Result<T> {
    result
        .map(tonic::Response::into_inner)
        .map_err(|status| anyhow::anyhow!("{}", reason(&status)))
}

impl Client {
    /// Connects to the agent at `socket` and agrees with it on a protocol.
    pub async fn connect(socket: &Path) -> anyhow::Result<Self> {
        let path: PathBuf = socket.to_owned();
        // The URI is not used: the connector knows the way.
        let channel =
            Endpoint::from_static("http://agent.invalid")
                .connect_with_connector(tower::service_fn(move |_| {
                    let path = path.clone();
                    async move {
                        Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(path).await?))
                    }
                }))
                .await
                .with_context(|| {
                    format!(
                        "cannot reach an agent at {}; is `verbatim agent` running?",
                        socket.display()
                    )
                })?;
        let mut inner = ControlClient::new(channel);
        let version = told(inner.version(protocol::ask_version()).await)?;
        protocol::read_version(PROTOCOLS, &version)?;
        Ok(Self { inner, version })
    }

    /// The agent's host.
    pub fn host(&self) -> &str {
        &self.version.host
    }

    /// Who and what the agent is.
    pub fn version(&self) -> &VersionReply {
        &self.version
    }

    /// Starts an instance.
    pub async fn run(&self, request: RunRequest) -> anyhow::Result<Instance> {
        let can = |name: &str| self.version.capabilities.iter().any(|can| can == name);
        if !request.volumes.is_empty() && !can(protocol::VOLUMES) {
            bail!(
                "the agent of {} does not know volumes; upgrade it",
                self.version.host
            );
        }
        if request.machine && !request.volumes.is_empty() && !can(protocol::MACHINE_VOLUMES) {
            bail!(
                "the agent of {} does not know volumes of virtual machines; upgrade it",
                self.version.host
            );
        }
        if !request.swap.is_empty() && !can(protocol::MACHINE_SWAP) {
            bail!(
                "the agent of {} does not know swap disks of virtual machines; upgrade it",
                self.version.host
            );
        }
        let wants = request.files > 0 || request.prealloc || !request.binds.is_empty();
        if wants && !can(protocol::INSTANCE_FILES) {
            bail!(
                "the agent of {} does not know --tmp-size, --prealloc and --bind; upgrade it",
                self.version.host
            );
        }
        if !request.further_addresses.is_empty() && !can(protocol::ADDRESS_FILTER) {
            bail!(
                "the agent of {} does not know --allow-address; upgrade it",
                self.version.host
            );
        }
        told(self.inner.clone().run(request).await)
    }

    /// Takes a QEMU that runs on the host for an instance.
    pub async fn attach(&self, request: AttachRequest) -> anyhow::Result<Instance> {
        told(self.inner.clone().attach(request).await)
    }

    /// Forgets such an instance.
    pub async fn detach(&self, name: &str) -> anyhow::Result<()> {
        let request = DetachRequest {
            name: name.to_owned(),
        };
        told(self.inner.clone().detach(request).await).map(drop)
    }

    /// Adds a command to an instance.
    pub async fn exec(&self, request: ExecRequest) -> anyhow::Result<()> {
        told(self.inner.clone().exec(request).await).map(drop)
    }

    /// The instances of the host.
    pub async fn list(&self) -> anyhow::Result<Vec<Instance>> {
        Ok(told(self.inner.clone().list(ListRequest {}).await)?.instances)
    }

    /// Gives an instance's output to `write`; with `follow`, until it ends or leaves the host.
    pub async fn logs(
        &self,
        name: &str,
        follow: bool,
        write: impl FnMut(&[u8]) -> std::io::Result<()>,
    ) -> anyhow::Result<()> {
        self.logs_and_notes(name, follow, write, |_| {}).await
    }

    /// The same; notes of the agent for the reader go to `note`.
    pub async fn logs_and_notes(
        &self,
        name: &str,
        follow: bool,
        mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
        note: impl Fn(&str),
    ) -> anyhow::Result<()> {
        let request = LogsRequest {
            name: name.to_owned(),
            follow,
        };
        let mut chunks = told(self.inner.clone().logs(request).await)?;
        while let Some(chunk) = chunks
            .message()
            .await
            .map_err(|status| anyhow::anyhow!("{}", reason(&status)))?
        {
            if !chunk.note.is_empty() {
                note(&chunk.note);
            }
            write(&chunk.data)?;
        }
        Ok(())
    }

    /// Waits until an instance ends or leaves the host.
    pub async fn wait(&self, name: &str) -> anyhow::Result<WaitReply> {
        told(
            self.inner
                .clone()
                .wait(WaitRequest {
                    name: name.to_owned(),
                })
                .await,
        )
    }

    /// Ends an instance and forgets it.
    pub async fn remove(&self, name: &str) -> anyhow::Result<()> {
        told(
            self.inner
                .clone()
                .remove(RemoveRequest {
                    name: name.to_owned(),
                })
                .await,
        )
        .map(drop)
    }

    /// What stands in the way of moving an instance; empty if nothing does. `deep`: then the dump is tried.
    pub async fn check(&self, name: &str, destination: &str, deep: bool) -> anyhow::Result<CheckReply> {
        let request = CheckRequest {
            name: name.to_owned(),
            destination: destination.to_owned(),
            deep,
        };
        told(self.inner.clone().check(request).await)
    }

    /// Rolls the migration of an instance back; returns where it runs on.
    pub async fn cancel(&self, name: &str) -> anyhow::Result<String> {
        let request = CancelRequest {
            name: name.to_owned(),
        };
        Ok(told(self.inner.clone().cancel(request).await)?.host)
    }

    /// Pauses connections of an instance, or the one of this queue pair.
    pub async fn pause(&self, name: &str, qpn: Option<u32>, limit_s: u32) -> anyhow::Result<PauseReply> {
        let request = PauseRequest {
            name: name.to_owned(),
            qpn,
            limit_s,
        };
        told(self.inner.clone().pause(request).await)
    }

    /// Lets them go on.
    pub async fn resume(&self, name: &str, qpn: Option<u32>, force: bool) -> anyhow::Result<PauseReply> {
        let request = ResumePausedRequest {
            name: name.to_owned(),
            qpn,
            force,
        };
        told(self.inner.clone().resume_paused(request).await)
    }

    /// The migrations in which the host takes or took part.
    pub async fn sessions(&self) -> anyhow::Result<Vec<Session>> {
        Ok(told(self.inner.clone().sessions(SessionsRequest {}).await)?.sessions)
    }

    /// Decides a session in the place of its hosts; returns what came of it.
    pub async fn resolve(&self, request: ResolveSessionRequest) -> anyhow::Result<String> {
        Ok(told(self.inner.clone().resolve(request).await)?.text)
    }

    /// Ends the host's part in a session that waits for others; returns what came of it.
    pub async fn forget(&self, request: ForgetSessionRequest) -> anyhow::Result<String> {
        Ok(told(self.inner.clone().forget(request).await)?.text)
    }

    /// Moves an instance and returns the report as JSON. Dropping the future before the commit cancels.
    pub async fn migrate(
        &self,
        request: MigrateRequest,
        mut watch: impl FnMut(MigrationEvent),
    ) -> anyhow::Result<String> {
        let mut events = told(self.inner.clone().migrate(request).await)?;
        while let Some(event) = events
            .message()
            .await
            .map_err(|status| anyhow::anyhow!("{}", reason(&status)))?
        {
            match event.event {
                Some(Event::Phase(phase)) => watch(MigrationEvent::Phase(phase)),
                Some(Event::Note(note)) => watch(MigrationEvent::Note(note)),
                Some(Event::PreCopy(round)) => watch(MigrationEvent::PreCopy(round)),
                Some(Event::Report(report)) => {
                    watch(MigrationEvent::Report(report.clone()));
                    return Ok(report);
                }
                None => {}
            }
        }
        bail!(
            "the agent of {} was lost during the migration; see `verbatim ps` where the instance is",
            self.host()
        )
    }
}
