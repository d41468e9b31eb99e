//! The destination's part of a session.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use futures_util::future::join_all;
use rustix::fs::OFlags;
use verbatim_channel::{Answer, MEMORY_DIR, Order, RoadMap};
use verbatim_container::{Link, Restore, RestoreConfig, Restored};

use super::{ProcessKeys, decode, encode, in_time};
use crate::agent::Shared;
use crate::faults::Point;
use crate::guests::{Guest, unexpected};
use crate::instances::home::{Home, Paths};
use crate::instances::record::Record;
use crate::instances::{Instance, Reservation};
use crate::journal::{Event, Role};
use crate::memory::beneath;
use crate::memory::place::Placer;
use crate::proto::file_part::Folder;
use crate::proto::{ConnectRequest, FilePart, NewQp, OpenRequest, PreSetupReply, PreSetupRequest};
use crate::report::milliseconds;
use crate::standby::StandbyContext;

/// How long the restored processes may take to come for their contexts.
const RETURN_TIMEOUT: Duration = Duration::from_secs(30);

/// Sessions in which this host is the destination.
#[derive(Default)]
pub struct Destinations(Mutex<HashMap<u64, Arc<tokio::sync::Mutex<Destination>>>>);

impl Destinations {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<tokio::sync::Mutex<Destination>>>> {
        self.0.lock().expect("no panic under this lock")
    }

    /// The session of that number.
    pub fn get(&self, session: u64) -> anyhow::Result<Arc<tokio::sync::Mutex<Destination>>> {
        self.lock()
            .get(&session)
            .cloned()
            .context("there is no such session here (any more)")
    }

    /// Opens a session: the place for the instance is made, and reserved.
    pub async fn open(agent: &Shared, request: &OpenRequest) -> anyhow::Result<()> {
        let record: Record =
            serde_json::from_str(&request.instance).context("a malformed instance record")?;
        if let Some(blocker) = blockers(agent, &record, request.memory_bytes).into_iter().next() {
            bail!(blocker);
        }
        let reservation = agent.instances.reserve(record.name.as_str())?;
        if let Some(gone) = agent.instances.get(record.name.as_str()) {
            // It was here before and left; its name is free again.
            agent.instances.remove(&gone);
        }
        agent.journal.write(
            request.session,
            Role::Destination,
            Event::Opened,
            record.name.as_str(),
            &request.source,
        )?;
        let paths = Paths::new(&agent.config.runtime_dir, record.name.as_str());
        let destination = Arc::new(tokio::sync::Mutex::new(Destination {
            agent: Arc::clone(agent),
            session: request.session,
            source: request.source.clone(),
            runtime: Placer::new(paths.folder),
            images: Placer::new(paths.images),
            home: None,
            _reservation: reservation,
            contexts: Vec::new(),
            keys: Vec::new(),
            restore: None,
            restored: None,
            instance: None,
            guests: Vec::new(),
            resumed: false,
        }));
        // Known before anything is made, so that whoever undoes the session meanwhile waits for it and then undoes it.
        let mut opening = destination.lock().await;
        agent
            .destinations
            .lock()
            .insert(request.session, Arc::clone(&destination));
        let maker = Arc::clone(agent);
        let made = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Handle::current();
            let _inside = runtime.enter();
            Home::create(&maker.config, record, Link::Detached, &maker.guests, &maker)
        })
        .await
        .context("making the instance's place panicked")
        .and_then(|made| made);
        match made {
            Ok(home) => {
                opening.home = Some(home);
                Ok(())
            }
            Err(error) => {
                agent.destinations.close(request.session);
                Err(error)
            }
        }
    }

    /// Undoes a session that was not committed, and forgets it.
    pub async fn abort(agent: &Shared, session: u64) {
        let Some(destination) = agent.destinations.lock().get(&session).cloned() else {
            return;
        };
        destination.lock().await.abort().await;
        agent.destinations.lock().remove(&session);
    }

    /// Forgets a session that has come to its end.
    pub fn close(&self, session: u64) {
        self.lock().remove(&session);
    }
}

/// Why the instance cannot come to this host.
pub fn blockers(agent: &Shared, record: &Record, memory_bytes: u64) -> Vec<String> {
    let mut blockers: Vec<_> = agent.instances.conflict(record).into_iter().collect();
    if agent.instances.is_reserved(record.name.as_str()) {
        blockers.push(format!(
            "an instance {} is being made or cleared there right now",
            record.name
        ));
    }
    match rustix::fs::statvfs(&agent.config.runtime_dir) {
        Ok(space) => {
            let free = space.f_bavail * space.f_frsize;
            // Images and the files beside the memory need some room, too.
            let needed = memory_bytes + memory_bytes / 8 + (64 << 20);
            if free < needed {
                blockers.push(format!(
                    "{} there has {} MiB free and {} MiB are needed; enlarge that tmpfs",
                    agent.config.runtime_dir.display(),
                    free >> 20,
                    needed >> 20
                ));
            }
        }
        Err(errno) => blockers.push(format!("the free memory there is unknown: {errno}")),
    }
    blockers
}

/// One session, at its destination.
pub struct Destination {
    agent: Shared,
    session: u64,
    source: String,
    home: Option<Home>,
    _reservation: Reservation,
    runtime: Placer,
    images: Placer,
    /// By process, in the order of its contexts.
    contexts: Vec<(u32, StandbyContext)>,
    keys: ProcessKeys,
    restore: Option<Restore>,
    restored: Option<Restored>,
    /// Set by the commit.
    instance: Option<Arc<Instance>>,
    /// Those that have claimed their contexts.
    guests: Vec<Guest>,
    /// Their requests reach the RNIC.
    resumed: bool,
}

impl Destination {
    fn home(&self) -> anyhow::Result<&Home> {
        self.home
            .as_ref()
            .context("the session was undone or is committed already")
    }

    /// Puts a part of a file in its place.
    pub fn place(&mut self, part: &FilePart) -> anyhow::Result<u64> {
        self.home()?;
        let placer = match part.folder() {
            Folder::Runtime => &mut self.runtime,
            Folder::Images => &mut self.images,
        };
        placer
            .place(part)
            .with_context(|| format!("cannot write {}", part.path))
    }

    /// Makes the standby contexts.
    pub async fn pre_setup(&mut self, request: &PreSetupRequest) -> anyhow::Result<PreSetupReply> {
        self.agent.faults.pass(Point::DestinationPreSetup)?;
        let road_maps: Vec<RoadMap> = decode(&request.road_maps)?;
        let home = self.home()?;
        let (nic, name) = (self.agent.config.nic_socket(), home.record.name.to_string());
        let folder = home.paths.folder.clone();
        // Also a process without any context waits at the gate, and is to be claimed.
        let mut keys: BTreeMap<u32, Vec<_>> = road_maps.iter().map(|map| (map.pid, Vec::new())).collect();
        self.contexts = tokio::task::spawn_blocking(move || {
            let mut contexts = Vec::new();
            for road_map in &road_maps {
                let path = Path::new(MEMORY_DIR).join(road_map.pid.to_string());
                // Missing is right if nothing is adopted; if something is, the RNIC's request fails and says so.
                let memory = beneath::open(&folder, &path, OFlags::RDWR)?;
                for record in &road_map.contexts {
                    contexts.push((
                        road_map.pid,
                        StandbyContext::build(&nic, &name, record, memory.as_ref())?,
                    ));
                }
            }
            anyhow::Ok(contexts)
        })
        .await
        .context("making standby contexts panicked")??;
        let mut qps = Vec::new();
        for (pid, context) in &self.contexts {
            keys.entry(*pid).or_default().extend_from_slice(context.keys());
            qps.extend(context.qps().iter().map(|qp| NewQp {
                pid: *pid,
                qpn: qp.qpn,
                physical_qpn: qp.physical_qpn,
                sq_psn: qp.sq_psn,
            }));
        }
        self.keys = keys.into_iter().collect();
        Ok(PreSetupReply {
            qps,
            keys: encode(&self.keys),
        })
    }

    /// Connects the standby queue pairs.
    pub async fn connect(&mut self, request: ConnectRequest) -> anyhow::Result<()> {
        let own_gid = self.agent.gid();
        let mut contexts = std::mem::take(&mut self.contexts);
        let owners: HashMap<u32, u32> = contexts
            .iter()
            .flat_map(|(pid, context)| context.qps().iter().map(|qp| (qp.physical_qpn, *pid)))
            .collect();
        let tables: HashMap<u32, u32> = self
            .keys
            .iter()
            .enumerate()
            .map(|(index, (pid, _))| (*pid, index as u32))
            .collect();
        let connected = tokio::task::spawn_blocking(move || {
            let connect = || {
                for peer in request.peers {
                    let remote: verbatim_channel::Endpoint =
                        peer.remote.context("a peer without address")?.try_into()?;
                    let (_, context) = contexts
                        .iter_mut()
                        .find(|(_, context)| {
                            context
                                .qps()
                                .iter()
                                .any(|qp| qp.physical_qpn == peer.physical_qpn)
                        })
                        .context("no such standby queue pair")?;
                    context.connect(peer.physical_qpn, remote, peer.rq_psn)?;
                    // Both ends are in the instance: the other one's keys are new, too.
                    let owner = owners.get(&remote.qpn).filter(|_| remote.gid == own_gid);
                    if let Some(table) = owner.and_then(|pid| tables.get(pid)) {
                        context.set_key_table(peer.physical_qpn, *table);
                    }
                }
                anyhow::Ok(())
            };
            let result = connect();
            (contexts, result)
        });
        let (contexts, result) = connected
            .await
            .context("connecting standby queue pairs panicked")?;
        self.contexts = contexts;
        result
    }

    /// Makes the bundle and starts runc and CRIU, which wait for the images.
    pub async fn prepare_restore(&mut self) -> anyhow::Result<()> {
        let config = self.agent.config.clone();
        let home = self
            .home
            .take()
            .context("the session was undone or is committed already")?;
        let (home, made) = tokio::task::spawn_blocking(move || {
            let made = home.make_bundle(&config);
            (home, made)
        })
        .await
        .context("making the bundle panicked")?;
        let restore = RestoreConfig {
            name: home.record.name.clone(),
            bundle: home.paths.bundle.clone(),
            images: home.paths.images.clone(),
            work: home.paths.work.clone(),
        };
        self.home = Some(home);
        made?;
        self.restore = Some(Restore::prepare(&self.agent.tools, restore).await?);
        Ok(())
    }

    /// Restores the tasks, which do not run yet; says how many milliseconds that took.
    pub async fn restore(&mut self) -> anyhow::Result<f64> {
        let begun = Instant::now();
        if self.agent.faults.pass(Point::DestinationRestore)? {
            let inventory: PathBuf = self.home()?.paths.images.join("inventory.img");
            File::options().write(true).open(&inventory)?.set_len(3)?;
        }
        let restore = self.restore.take().context("the restore was not prepared")?;
        self.restored = Some(restore.restore().await?);
        Ok(milliseconds(begun.elapsed()))
    }

    /// The decision: lets the tasks run. An error means that they have not run, and will not.
    pub async fn commit(&mut self) -> anyhow::Result<()> {
        if self.instance.is_some() {
            // The answer to an earlier request was lost.
            return Ok(());
        }
        self.agent.faults.pass(Point::DestinationCommit)?;
        let restored = self.restored.take().context("nothing was restored")?;
        let home = self.home()?;
        let gate = home.gate()?;
        // Before CRIU is told, so that whoever asks again gets the right answer, whatever happens to this agent.
        self.write(Event::Committed)?;
        let mut attached = Ok(());
        let resumed = match restored.resume_with(|| attached = home.attach()).await {
            Ok(resumed) => resumed,
            Err(error) => {
                self.write(Event::RolledBack)?;
                return Err(error.into());
            }
        };
        // From here on there is no way back; what fails is told, and the instance stays.
        let opened = gate.open_up().context("the gate does not open");
        let written = self.write(Event::Running);
        for failed in [attached, opened, written].into_iter().filter_map(Result::err) {
            tracing::error!(
                error = format!("{failed:#}"),
                "the instance has arrived, but not all is well"
            );
        }
        let home = self.home.take().context("the session was undone")?;
        for qp in self.contexts.iter().flat_map(|(_, context)| context.qps()) {
            // A number that an earlier queue pair took along when it left is this one's now.
            self.agent.forwarding.remove(qp.physical_qpn);
        }
        let init_pid = resumed.init.pid();
        let init = async { Ok(resumed.settled().await?) };
        let instance = Instance::start(home, init_pid, init, true);
        self.agent.instances.insert(Arc::clone(&instance));
        self.instance = Some(instance);
        Ok(())
    }

    fn write(&self, event: Event) -> anyhow::Result<()> {
        let name = self.home()?.record.name.as_str();
        let written = self
            .agent
            .journal
            .write(self.session, Role::Destination, event, name, &self.source);
        written.context("the journal cannot be written")
    }

    /// Gives the processes their contexts; says how many RECVs were posted again.
    pub async fn claim(&mut self) -> anyhow::Result<u64> {
        let instance = self.instance.as_ref().context("the session is not committed")?;
        let mut by_process: HashMap<u32, Vec<StandbyContext>> = HashMap::new();
        for (pid, context) in std::mem::take(&mut self.contexts) {
            by_process.entry(pid).or_default().push(context);
        }
        for (pid, _) in &self.keys {
            by_process.entry(*pid).or_default();
        }
        let key_tables: Vec<_> = self.keys.iter().map(|(_, keys)| keys.clone()).collect();
        let (agent, session) = (&self.agent, self.session);
        let claims = by_process.into_iter().map(|(pid, contexts)| {
            let (fds, contexts): (Vec<_>, Vec<_>) =
                contexts.into_iter().map(StandbyContext::hand_over).unzip();
            let key_tables = key_tables.clone();
            async move {
                let guest = tokio::time::timeout(RETURN_TIMEOUT, agent.guests.returned(instance.name(), pid))
                    .await
                    .with_context(|| {
                        format!("process {pid} has not come for its contexts in {RETURN_TIMEOUT:?}")
                    })?;
                let order = Order::Claim {
                    session,
                    contexts,
                    key_tables,
                };
                let answer = in_time("claiming contexts", guest.order(order, fds)).await?.0;
                let Answer::Claimed { replayed_receives } = answer else {
                    return Err(unexpected(&answer, "Claimed"));
                };
                agent.guests.claimed(&guest);
                // What it has missed while it was away, and what was known here before it came.
                let endpoints = agent.datagrams.all();
                if !endpoints.is_empty() {
                    let order = Order::Moved { endpoints };
                    in_time("telling where datagrams go", guest.order(order, Vec::new())).await?;
                }
                anyhow::Ok((guest, replayed_receives))
            }
        });
        let mut replayed = 0;
        let mut guests = Vec::new();
        let mut failed = None;
        for claimed in join_all(claims).await {
            match claimed {
                Ok((guest, receives)) => {
                    replayed += receives;
                    guests.push(guest);
                }
                Err(error) => failed = Some(error),
            }
        }
        // Those that have their contexts are resumed, whatever became of the others.
        self.guests = guests;
        if let Some(error) = failed {
            return Err(error);
        }
        Ok(replayed)
    }

    /// Lets the processes' requests reach the RNIC; says how many had been intercepted.
    pub async fn resume(&mut self) -> anyhow::Result<u64> {
        let session = self.session;
        let resumed = self.guests.iter().map(|guest| async move {
            let answer = in_time("resuming", guest.order(Order::Resume { session }, Vec::new()))
                .await?
                .0;
            match answer {
                Answer::Resumed { intercepted } => Ok(intercepted),
                other => Err(unexpected(&other, "Resumed")),
            }
        });
        let mut intercepted = 0;
        for resumed in join_all(resumed).await {
            intercepted += resumed?;
        }
        self.resumed = true;
        if let Some(instance) = &self.instance {
            instance.settled().await;
            instance.end_move();
        }
        Ok(intercepted)
    }

    /// Undoes everything. If it is committed there is no way back: then what is left to do for it is done.
    async fn abort(&mut self) {
        if self.instance.is_some() {
            return self.finish_alone().await;
        }
        if let Some(restored) = self.restored.take()
            && let Err(error) = restored.abort().await
        {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "undoing a restore"
            );
        }
        if let Some(restore) = self.restore.take()
            && let Err(error) = restore.cancel().await
        {
            tracing::warn!(
                error = format!("{:#}", anyhow::Error::from(error)),
                "cancelling a restore"
            );
        }
        self.contexts.clear();
        if let Some(home) = self.home.take() {
            let name = home.record.name.to_string();
            let _ = tokio::task::spawn_blocking(move || home.remove()).await;
            let written = self.agent.journal.write(
                self.session,
                Role::Destination,
                Event::RolledBack,
                &name,
                &self.source,
            );
            if let Err(error) = written {
                tracing::warn!(%error, "the journal cannot be written");
            }
        }
    }

    /// The source is gone after its decision.
    async fn finish_alone(&mut self) {
        if self.resumed {
            return;
        }
        if let Err(error) = self.claim().await {
            tracing::error!(
                error = format!("{error:#}"),
                "the arrived processes do not have their queues"
            );
        }
        if let Err(error) = self.resume().await {
            tracing::error!(
                error = format!("{error:#}"),
                "the arrived processes' requests stay intercepted"
            );
        }
    }
}
