//! The service that an agent offers to the command line on its host.

mod checks;
mod logs;
mod machines;
mod sessions;

use std::num::NonZeroU64;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status};
use verbatim_container::{Bind, ContainerName, Link, Workload};

use crate::PROTOCOLS;
use crate::agent::{Shared, status};
use crate::instances::filling;
use crate::instances::home::{Arrival, Home, Paths};
use crate::instances::machine;
use crate::instances::machine::Origin;
use crate::instances::machine::guest::Guest;
use crate::instances::machine::trouble;
use crate::instances::record::{Record, parse_address, parse_addresses};
use crate::instances::recovery;
use crate::instances::shown;
use crate::instances::start;
use crate::instances::{Instance as HostInstance, Recovering, Reservation, State};
use crate::instances::{swap, volumes};
use crate::memory::convergence::Limits;
use crate::own_files;
use crate::pause;
use crate::proto::control_server::Control;
use crate::proto::migrate_event::Event;
use crate::proto::*;
use crate::protocol;
use crate::session::control::Stage;
use crate::session::source::{self, Progress};
use crate::standby::is_connected;

/// The limit of wait-before-stop if none is asked for.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// The service of one agent.
pub struct ControlService(pub Shared);

type Reply<T> = Result<Response<T>, Status>;

fn reply<T>(result: anyhow::Result<T>) -> Reply<T> {
    result.map(Response::new).map_err(|error| status(&error))
}

/// A bundle's annotation of the addresses that it may send from beside its own, by commas.
const ADDRESSES: &str = "org.verbatim.addresses";

/// A stream of answers.
type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl ControlService {
    async fn record(
        &self,
        request: &RunRequest,
        name: ContainerName,
        reservation: &Reservation,
    ) -> anyhow::Result<Record> {
        let (address, prefix) = self.address(&request.address, reservation).await?;
        let binds = shown::parse(&request.binds)?;
        let mut further = parse_addresses(&request.further_addresses)?;
        if request.prealloc && !request.machine {
            bail!("--prealloc needs --vm: only a virtual machine's memory can be allocated from the start");
        }
        if !request.bundle.is_empty() && !binds.is_empty() {
            bail!("--bind does not go with a bundle: add the mounts to its config.json");
        }
        let files = match request.files {
            0 => self.0.config.instance_files,
            bytes if bytes < own_files::LEAST => {
                bail!(
                    "an instance needs at least {} MiB for its files",
                    own_files::LEAST >> 20
                )
            }
            bytes => bytes,
        };
        let (virtual_machine, volumes, swap) = match request.machine {
            true if request.bundle.is_empty() && request.rnics.is_empty() => {
                let arguments = machine::arguments(&request.command, address).await?;
                let (arguments, volumes) = self.with_disks(&name, arguments, &request.volumes).await?;
                let (arguments, swap) = swap::with(arguments, &request.swap)?;
                (Some(arguments), volumes, swap)
            }
            true => bail!("a virtual machine has neither a bundle nor RNICs of this host's"),
            false if !request.swap.is_empty() => {
                bail!(
                    "a swap disk is for a virtual machine (--vm); a container swaps to what its host swaps to"
                )
            }
            false => (None, volumes::parse(&request.volumes)?, Vec::new()),
        };
        let mut workload = match (request.bundle.as_str(), request.command.as_slice()) {
            ("", _) if let Some(arguments) = &virtual_machine => {
                machine::workload(arguments, &request.environment)
            }
            ("", []) => bail!("there is nothing to run; give a command, or a bundle"),
            ("", args) => Workload::Command {
                args: args.to_vec(),
                env: request.environment.clone(),
                cwd: "/".into(),
                binds: hidden_program(&args[0]).into_iter().collect(),
            },
            (bundle, []) if request.environment.is_empty() => Workload::from_bundle(bundle.as_ref())?,
            _ => bail!("a bundle brings its own command and environment; change its config.json"),
        };
        if let Workload::Command { binds: shown, .. } = &mut workload {
            shown.retain(|known| binds.iter().all(|bind| bind.path != known.path));
            shown.extend(binds);
        }
        if let Some(named) = workload.annotation(ADDRESSES) {
            let named: Vec<_> = named.split(',').map(str::trim).collect();
            let named =
                parse_addresses(&named).with_context(|| format!("in the bundle's annotation {ADDRESSES}"))?;
            further.extend(named);
        }
        let record = Record {
            name,
            workload,
            address,
            prefix,
            visited: Default::default(),
            rnics: request
                .rnics
                .iter()
                .map(|name| verbatim_container::find_rnic(name))
                .collect::<Result<_, _>>()?,
            machine: virtual_machine.map(Guest::Qemu),
            volumes,
            swap,
            files,
            prealloc: request.prealloc,
            further,
        };
        if let Some(lack) = volumes::lacking(&record).first() {
            bail!("{lack}");
        }
        self.admit(&record, reservation)?;
        Ok(record)
    }

    /// Reserves the address, and memory for a guest's RAM. An error if another instance has the name or the
    /// address, or if the host lacks the memory.
    fn admit(&self, record: &Record, reservation: &Reservation) -> anyhow::Result<()> {
        let agent = &self.0;
        if let Some(conflict) = agent.instances.conflict(record) {
            bail!("{conflict}; choose another one");
        }
        let room = agent.room()?;
        let wanted = record.machine.as_ref().map(Guest::ram);
        let fits = |others: u64| {
            let promised = others + agent.behinds.bytes();
            // No memory is promised to a container: it uses free memory.
            wanted.and_then(|wanted| room.lack(agent.name(), record.name.as_str(), wanted, promised))
        };
        let claimed = agent
            .instances
            .claim(reservation, record, wanted.unwrap_or(0), fits);
        claimed.map_err(anyhow::Error::msg)
    }

    /// The address that was asked for, or a free one, and the length of its prefix.
    async fn address(
        &self,
        asked: &str,
        reservation: &Reservation,
    ) -> anyhow::Result<(std::net::Ipv4Addr, u8)> {
        match asked {
            "" => Ok((self.free_address(reservation).await?, 16)),
            text => parse_address(text),
        }
    }

    /// The next address of this host's own range that no instance has, here or moved from here. It stays
    /// reserved with the name.
    async fn free_address(&self, reservation: &Reservation) -> anyhow::Result<std::net::Ipv4Addr> {
        let own = self.0.peers.directory().own();
        let [a, b] = own.subnet()?;
        let pick = || {
            let range = (1..=254).map(|last| std::net::Ipv4Addr::new(a, b, own.number(), last));
            self.0.instances.pick_address(reservation, range)
        };
        if let Some(picked) = pick() {
            return Ok(picked);
        }
        const NONE: &str =
            "all 254 addresses of this host are taken, by instances here or by some that have left";
        let vacated = self.0.vacate().await;
        vacated.with_context(|| format!("{NONE}; whether these have ended is not known"))?;
        pick().with_context(|| format!("{NONE}; remove ended instances, or name an address by --address"))
    }

    async fn start(&self, request: RunRequest) -> anyhow::Result<Instance> {
        let name = ContainerName::new(request.name.clone())?;
        let reservation = self.0.instances.reserve(name.as_str())?;
        let record = self.record(&request, name, &reservation).await?;
        let mut notes = record.workload.notes();
        notes.extend(self.unseen(&record));
        let home = self.home(record, Origin::Started).await?;
        let started = match start::start(self.0.tools.runc(), &home).await {
            Ok(init) if home.record.machine.is_some() => self.let_run(&home, init).await,
            started => started,
        };
        match started {
            Ok(init) => {
                let pid = init.pid();
                let instance = HostInstance::start(home, pid, std::future::ready(Ok(init)), false);
                self.0.instances.insert(instance.clone());
                let mut described = self.describe(&instance).await;
                described.notes.extend(notes);
                Ok(described)
            }
            Err(error) => {
                let _ = tokio::task::spawn_blocking(move || home.remove()).await;
                Err(error)
            }
        }
    }

    /// A note on the host's mounts that an instance over its root file system does not see.
    fn unseen(&self, record: &Record) -> Option<String> {
        let Workload::Command { binds, .. } = &record.workload else {
            return None;
        };
        let config = &self.0.config;
        shown::unseen(&[&config.runtime_dir, &config.state_dir], binds)
    }

    /// The place of a new instance.
    async fn home(&self, record: Record, origin: Origin) -> anyhow::Result<Home> {
        let agent = self.0.clone();
        if let Some(old) = agent.instances.get(record.name.as_str()) {
            // Only one that has moved away can still have the name.
            agent.instances.remove(&old);
        }
        tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Handle::current();
            let _inside = runtime.enter();
            let home = Home::create(
                &agent.config,
                record,
                Arrival::Started,
                Link::Attached,
                &agent.nic_listeners,
                &agent.guests,
                &agent,
            )?;
            match home
                .furnish(&agent.config, origin)
                .and_then(|()| home.take_volumes(&agent.config, None))
                .and_then(|()| home.make_bundle(&agent.config, origin))
            {
                Ok(()) => Ok(home),
                Err(error) => {
                    home.remove();
                    Err(error)
                }
            }
        })
        .await?
    }

    fn is_in_doubt(&self, name: &str) -> bool {
        let control = self.0.controls.of_instance(name);
        control.is_some_and(|control| control.stage() == Stage::InDoubt)
    }

    async fn describe(&self, instance: &HostInstance) -> Instance {
        let record = &instance.home.record;
        let state = instance.state();
        let (mut connections, mut paused) = (0, 0);
        if state == State::Running
            && let Ok(described) = source::describe(&self.0, instance.name()).await
        {
            let contexts = described.iter().flat_map(|(_, road_map)| &road_map.contexts);
            let qps = contexts.flat_map(|context| &context.qps);
            for qp in qps.filter(|qp| is_connected(qp)) {
                connections += 1;
                paused += u32::from(qp.paused);
            }
        }
        let missing = filling::missing(instance).await;
        let asks = state == State::Running && missing.is_none();
        let troubles = match state {
            State::Running | State::Moving => trouble::of(instance, asks).await,
            State::Exited(_) | State::MovedTo(_) => Vec::new(),
        };
        Instance {
            name: instance.name().to_owned(),
            host: self.0.name().to_owned(),
            address: record.address.to_string(),
            prefix: record.prefix.into(),
            state: match &state {
                State::Running => "running".to_owned(),
                // It is frozen, and may run at its destination.
                State::Moving if self.is_in_doubt(instance.name()) => "in doubt".to_owned(),
                State::Moving => "moving".to_owned(),
                State::Exited(_) => "exited".to_owned(),
                State::MovedTo(host) => format!("moved to {host}"),
            },
            pid: if matches!(state, State::Running | State::Moving) {
                machines::pid(&instance.home.paths, instance.init_pid())
            } else {
                0
            },
            exit_status: match state {
                State::Exited(status) => Some(status),
                _ => None,
            },
            command: record.command(),
            connections,
            paused,
            missing: missing.map(|missing| Missing {
                bytes: missing.bytes,
                from: missing.from.unwrap_or_default(),
            }),
            notes: Vec::new(),
            troubles,
        }
    }

    /// One that this agent has not taken over yet.
    fn describe_recovering(&self, expected: &Recovering) -> Instance {
        let record = &expected.record;
        let name = record.name.as_str();
        let paths = Paths::new(&self.0.config.runtime_dir, name);
        let state = if self.is_in_doubt(name) {
            "in doubt"
        } else {
            "recovering"
        };
        Instance {
            name: name.to_owned(),
            host: self.0.name().to_owned(),
            address: record.address.to_string(),
            prefix: record.prefix.into(),
            state: state.to_owned(),
            pid: machines::pid(&paths, expected.pid),
            command: record.command(),
            ..Instance::default()
        }
    }

    async fn add_command(&self, request: ExecRequest) -> anyhow::Result<()> {
        let instance = recovery::find(&self.0, &request.name)?;
        let name = instance.name();
        match instance.state() {
            State::Running => {}
            State::Moving => bail!("{name} is being moved; add the command when that has ended"),
            State::Exited(status) => bail!("{name} has ended with status {status}"),
            State::MovedTo(host) => bail!("{name} lives on {host}; ask the agent there"),
        }
        if instance.home.record.machine.is_some() {
            bail!("{name} is a virtual machine: commands are added in its guest, by the guest's own means");
        }
        let (container, bundle) = (&instance.home.record.name, instance.home.bundle());
        let runc = self.0.tools.runc();
        runc.add(container, bundle, &request.command, &request.environment)
            .await?;
        Ok(())
    }

    async fn remove_instance(&self, name: &str) -> anyhow::Result<()> {
        let instance = recovery::find(&self.0, name)?;
        let _reservation = self.0.instances.reserve(name)?;
        match instance.state() {
            State::Moving => bail!("{name} is being moved; cancel that, or wait until it has ended"),
            State::MovedTo(_) => {}
            State::Running | State::Exited(_) => {
                self.end_attached(&instance).await?;
                self.0
                    .tools
                    .runc()
                    .delete(&instance.home.record.name, true)
                    .await?;
                let (agent, ended) = (self.0.clone(), instance.clone());
                tokio::task::spawn_blocking(move || {
                    ended.home.remove();
                    agent.instances.away.ended(ended.name())
                })
                .await?
                .unwrap_or_else(|error| tracing::warn!("{error:#}"));
            }
        }
        self.0.instances.remove(&instance);
        Ok(())
    }
}

/// A program that lies where an instance has folders of its own is shown to it all the same.
fn hidden_program(program: &str) -> Option<Bind> {
    let path = Path::new(program);
    let hidden = ["/tmp", "/run", "/dev"]
        .iter()
        .any(|folder| path.starts_with(folder));
    (hidden && path.is_file()).then(|| Bind {
        path: path.to_owned(),
        writable: false,
    })
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn run(&self, request: Request<RunRequest>) -> Reply<Instance> {
        reply(self.start(request.into_inner()).await)
    }

    async fn list(&self, _: Request<ListRequest>) -> Reply<ListReply> {
        // Before the others: one that is taken over meanwhile is among those.
        let mut recovering = recovery::unsettled(&self.0);
        let all = self.0.instances.all();
        let here = all
            .iter()
            .filter(|instance| !matches!(instance.state(), State::MovedTo(_)));
        let mut instances =
            futures_util::future::join_all(here.map(|instance| self.describe(instance))).await;
        recovering.retain(|expected| {
            all.iter()
                .all(|known| known.name() != expected.record.name.as_str())
        });
        instances.extend(
            recovering
                .iter()
                .map(|expected| self.describe_recovering(expected)),
        );
        instances.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(Response::new(ListReply { instances }))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Reply<ExecReply> {
        reply(
            self.add_command(request.into_inner())
                .await
                .map(|()| ExecReply {}),
        )
    }

    async fn attach(&self, request: Request<AttachRequest>) -> Reply<Instance> {
        reply(self.attach_machine(request.into_inner()).await)
    }

    async fn detach(&self, request: Request<DetachRequest>) -> Reply<DetachReply> {
        let name = request.into_inner().name;
        reply(self.detach_machine(&name).await.map(|()| DetachReply {}))
    }

    type LogsStream = Answers<LogsChunk>;

    async fn logs(&self, request: Request<LogsRequest>) -> Reply<Self::LogsStream> {
        let LogsRequest { name, follow } = request.into_inner();
        let instance = recovery::find(&self.0, &name).map_err(|error| status(&error))?;
        Ok(Response::new(Box::pin(logs::stream(instance, follow))))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Reply<WaitReply> {
        let found = recovery::find(&self.0, &request.into_inner().name);
        let instance = found.map_err(|error| status(&error))?;
        let mut states = instance.watch();
        let ended = states
            .wait_for(|state| matches!(state, State::Exited(_) | State::MovedTo(_)))
            .await;
        match ended.map(|state| state.clone()) {
            Ok(State::Exited(exit_status)) => Ok(Response::new(WaitReply {
                exit_status: Some(exit_status),
                moved_to: None,
            })),
            Ok(State::MovedTo(host)) => Ok(Response::new(WaitReply {
                exit_status: None,
                moved_to: Some(host),
            })),
            Ok(_) | Err(_) => Err(Status::unavailable("the instance is gone")),
        }
    }

    async fn remove(&self, request: Request<RemoveRequest>) -> Reply<RemoveReply> {
        reply(
            self.remove_instance(&request.into_inner().name)
                .await
                .map(|()| RemoveReply {}),
        )
    }

    type MigrateStream = Answers<MigrateEvent>;

    async fn migrate(&self, request: Request<MigrateRequest>) -> Reply<Self::MigrateStream> {
        let request = request.into_inner();
        let instance = recovery::find(&self.0, &request.name).map_err(|error| status(&error))?;
        let drain_timeout = request
            .drain_timeout_ms
            .map_or(DRAIN_TIMEOUT, |limit| Duration::from_millis(limit.into()));
        let given = |ms: u32| (ms > 0).then(|| Duration::from_millis(ms.into()));
        let limits = Limits {
            max_blackout: given(request.max_blackout_ms),
            max_time: given(request.max_pre_copy_ms).unwrap_or(Limits::default().max_time),
            strict: request.strict,
        };
        let what = source::Request {
            destination: request.destination,
            drain_timeout,
            limits,
            max_bandwidth: NonZeroU64::new(request.max_bytes_per_second),
            post_copy: request.post_copy,
            no_reset: request.no_reset,
            method: request.method.parse().map_err(tonic::Status::invalid_argument)?,
            transport: request
                .memory_transport
                .parse()
                .map_err(tonic::Status::invalid_argument)?,
            tuning: request
                .memory_tuning
                .parse()
                .map_err(tonic::Status::invalid_argument)?,
        };
        let (events, receiver) = mpsc::channel(64);
        let (progress, mut steps) = mpsc::channel(64);
        let agent = self.0.clone();
        let driven = source::begin(&agent, &instance, &what).map_err(|error| status(&error))?;
        let control = Arc::clone(&driven.control);
        let migration = tokio::spawn(source::migrate(agent, instance, what, driven, progress));
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    step = steps.recv() => match step {
                        Some(step) => {
                            let event = match step {
                                Progress::Phase(phase) => Event::Phase(phase.name().to_owned()),
                                Progress::Note(note) => Event::Note(note),
                                Progress::PreCopy(round) => Event::PreCopy(round),
                            };
                            let _ = events.send(Ok(MigrateEvent { event: Some(event) })).await;
                        }
                        None => break,
                    },
                    // The command line is gone; if that is too late, it is too late.
                    () = events.closed() => {
                        let _ = control.cancel();
                        break;
                    }
                }
            }
            drop(steps);
            let end = match migration.await {
                Ok(report) => Ok(MigrateEvent {
                    event: Some(Event::Report(serde_json::to_string(&report).expect("plain data"))),
                }),
                Err(error) => Err(Status::internal(format!("the migration panicked: {error}"))),
            };
            let _ = events.send(end).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Reply<CheckReply> {
        let request = request.into_inner();
        reply(checks::check(&self.0, &request.name, &request.destination, request.deep).await)
    }

    async fn cancel(&self, request: Request<CancelRequest>) -> Reply<CancelReply> {
        reply(sessions::cancel(&self.0, &request.into_inner().name).await)
    }

    async fn sessions(&self, _: Request<SessionsRequest>) -> Reply<SessionsReply> {
        Ok(Response::new(SessionsReply {
            sessions: sessions::all(&self.0),
        }))
    }

    async fn resolve(&self, request: Request<ResolveSessionRequest>) -> Reply<ResolveSessionReply> {
        let text = sessions::resolve(&self.0, request.into_inner()).await;
        reply(text.map(|text| ResolveSessionReply { text }))
    }

    async fn forget(&self, request: Request<ForgetSessionRequest>) -> Reply<ForgetSessionReply> {
        let text = sessions::forget(&self.0, &request.into_inner()).await;
        reply(text.map(|text| ForgetSessionReply { text }))
    }

    async fn pause(&self, request: Request<PauseRequest>) -> Reply<PauseReply> {
        let (agent, request) = (self.0.clone(), request.into_inner());
        let limit = Duration::from_secs(request.limit_s.into());
        // Not cut off in the middle when the command line goes away.
        let paused =
            tokio::spawn(async move { pause::pause(&agent, &request.name, request.qpn, limit).await });
        reply(paused.await.unwrap_or_else(|error| Err(error.into())))
    }

    async fn resume_paused(&self, request: Request<ResumePausedRequest>) -> Reply<PauseReply> {
        let (agent, request) = (self.0.clone(), request.into_inner());
        let resumed =
            tokio::spawn(
                async move { pause::resume(&agent, &request.name, request.qpn, request.force).await },
            );
        reply(resumed.await.unwrap_or_else(|error| Err(error.into())))
    }

    async fn version(&self, request: Request<VersionRequest>) -> Reply<VersionReply> {
        let (protocol, versions) = protocol::answer_version(PROTOCOLS, request.get_ref());
        Ok(Response::new(VersionReply {
            host: self.0.name().to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol,
            oldest: versions.oldest,
            newest: versions.newest,
            runtime_dir: self.0.config.runtime_dir.display().to_string(),
            capabilities: protocol::capabilities(),
        }))
    }
}
