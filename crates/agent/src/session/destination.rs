//! The destination's part of a session.

mod claim;
mod decision;
pub mod landed;
mod post_copy;
mod recover;
mod room;
mod set_up;
mod tried;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use verbatim_bulk::Incoming;
use verbatim_channel::{ClaimedContext, MovedEndpoint};
use verbatim_container::{Contents, Link, RestoreConfig};
use verbatim_fill::Filler;
use verbatim_netns::State as NetworkState;
use verbatim_session::decision::Outcome;
use verbatim_session::decision::destination::{Destination as Machine, Event, State};
use verbatim_session::record::{Note, Parties, What};
use verbatim_session::recovery::Touches;
use verbatim_session::{Phase, Role};

use super::ProcessKeys;
use super::made_again::{AllMade, Made, ToMake};
use super::open_files;
use super::volumes;
use super::writer::Writer;
use crate::agent::Shared;
use crate::faults::Point;
use crate::gids::gid_of;
use crate::guests::Guest;
use crate::instances::filling;
use crate::instances::home::{Arrival, Home, Paths};
use crate::instances::machine::arriving::Arriving;
use crate::instances::machine::{Origin, RAM, leaving};
use crate::instances::record::Record;
use crate::instances::tasks::{Restore, Restored};
use crate::instances::{Instance, Reservation, machine, network, storage, volumes as disks};
use crate::keeper::Keeper;
use crate::memory::place::Placer;
use crate::mtu;
use crate::proto::file_part::Folder;
use crate::proto::{ConnectRequest, FilePart, OpenRequest};
use crate::report::milliseconds;
use crate::session::rnics;
use crate::standby::StandbyContext;
use crate::trial::Ahead;
use crate::turns::Turn;
use crate::whole;
use post_copy::Lacking;

/// How long the place that the instance had here before may take to be cleared.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(10);
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
        // It may have left a moment ago, and its old place is still being cleared.
        let cleared = agent.instances.unreserved(record.name.as_str());
        let _ = tokio::time::timeout(CLEAR_TIMEOUT, cleared).await;
        if let Some(blocker) = blockers(agent, &record, request).into_iter().next() {
            bail!(blocker);
        }
        let fit = machine::fits::compare(agent, &record, &request.machine).await;
        if let Some(blocker) = fit.blockers.into_iter().next() {
            bail!(blocker);
        }
        if agent
            .journal
            .standing(request.session, Role::Destination)
            .is_some()
        {
            bail!("a session of that number was opened here already");
        }
        let parties = Parties {
            instance: record.name.to_string(),
            source: request.source.clone(),
            destination: agent.name().to_owned(),
        };
        let (journal, session) = (&agent.journal, request.session);
        journal.write(session, Role::Destination, What::Opened(parties))?;
        let opened = Self::make(agent, session, record, request).await;
        if let Err(error) = &opened {
            volumes::settle(agent, session, Role::Destination, Outcome::RolledBack);
            journal.failed(session, Role::Destination, error);
            journal.write(session, Role::Destination, What::Closed(Outcome::RolledBack))?;
        }
        opened
    }

    async fn make(agent: &Shared, session: u64, record: Record, request: &OpenRequest) -> anyhow::Result<()> {
        volumes::note(agent, session, Role::Destination, &record).await?;
        agent.faults.pass(Point::DestinationOpen).await?;
        let reservation = agent.instances.reserve(record.name.as_str())?;
        if let Some(gone) = agent.instances.get(record.name.as_str()) {
            // It was here before and left; its name is free again.
            agent.instances.remove(&gone);
        }
        // Another request may have claimed them meanwhile.
        room::claim(agent, &reservation, &record, request)?;
        let prealloc = record.prealloc;
        let paths = Paths::new(&agent.config.runtime_dir, record.name.as_str());
        let mut destination = Destination::new(agent, session, &paths, Machine::begin(), Some(reservation));
        if prealloc {
            // In a hole the kernel would have to find a page when the guest touches it.
            destination.runtime = Placer::new(paths.folder.clone()).writing_zeroes();
        }
        let destination = Arc::new(tokio::sync::Mutex::new(destination));
        // Known before anything is made, so that whoever undoes the session meanwhile waits for it and then undoes it.
        let mut opening = destination.lock().await;
        {
            let mut destinations = agent.destinations.lock();
            agent.watched.ensure(session)?;
            destinations.insert(session, Arc::clone(&destination));
        }
        let maker = Arc::clone(agent);
        let made = tokio::task::spawn_blocking(move || {
            let runtime = tokio::runtime::Handle::current();
            let _inside = runtime.enter();
            Home::create(
                &maker.config,
                record,
                Arrival::By(session),
                Link::Detached,
                &maker.nic_listeners,
                &maker.guests,
                &maker,
            )
        })
        .await
        .context("making the instance's place panicked")
        .and_then(|made| made);
        if made.is_err() {
            agent.destinations.close(session);
        }
        opening.home = Some(made?);
        opening.may_lack = request.post_copy;
        opening.path_mtu = request.path_mtu;
        Ok(())
    }

    /// The source wants no more of a session.
    pub async fn abort(agent: &Shared, session: u64) {
        Self::hear(agent, session, Event::Abort).await;
    }

    /// The source is gone. A session that was not committed is undone; of one that was, what is left to do is done.
    pub async fn source_is_lost(agent: &Shared, session: u64) {
        Self::hear(agent, session, Event::SourceLost).await;
    }

    async fn hear(agent: &Shared, session: u64, event: Event) {
        let Some(destination) = agent.destinations.lock().get(&session).cloned() else {
            return;
        };
        let mut destination = destination.lock().await;
        destination.decide(event).await;
        if destination.is_over() {
            agent.destinations.close(session);
        }
    }

    /// Makes a session known that an earlier agent took part in.
    pub fn insert(
        agent: &Shared,
        session: u64,
        destination: Destination,
    ) -> Arc<tokio::sync::Mutex<Destination>> {
        let destination = Arc::new(tokio::sync::Mutex::new(destination));
        agent
            .destinations
            .lock()
            .insert(session, Arc::clone(&destination));
        destination
    }

    /// Whether this host has lost records of the session, and asks the others what was decided.
    pub fn is_asking(&self, session: u64) -> bool {
        let Ok(destination) = self.get(session) else {
            return false;
        };
        // One that is busy does not ask.
        destination
            .try_lock()
            .is_ok_and(|destination| destination.machine.state() == State::Asking)
    }

    /// Forgets a session that has come to its end.
    pub fn close(&self, session: u64) {
        self.lock().remove(&session);
    }
}

/// Why the instance cannot come to this host.
pub fn blockers(agent: &Shared, record: &Record, request: &OpenRequest) -> Vec<String> {
    let mut blockers: Vec<_> = agent.instances.conflict(record).into_iter().collect();
    if agent.instances.is_reserved(record.name.as_str()) {
        blockers.push(format!(
            "an instance {} is being made or cleared there right now",
            record.name
        ));
    }
    blockers.extend(room::lacking(agent, record, request));
    blockers.extend(network::narrower(request.link_mtu, agent.config.mtu));
    blockers.extend(tokio::task::block_in_place(|| {
        mtu::lacking(&agent.config.nic_socket(), agent.name(), request.path_mtu)
    }));
    let huge_pages = request.huge_pages.iter().map(|of| (of.kib, of.pages)).collect();
    let lack = tokio::task::block_in_place(|| verbatim_container::lack_of_huge_pages(&huge_pages));
    blockers.extend(lack);
    blockers.extend(rnics::lacking(agent, record));
    blockers.extend(machine::lacking(record));
    if record.machine.is_none() {
        blockers.extend(record.workload.lacking());
        blockers.extend(tokio::task::block_in_place(|| {
            record.workload.differing(&open_files::read(&request.open_files))
        }));
    }
    blockers.extend(storage::unseen(&request.witnesses));
    blockers.extend(storage::devices::others(&request.devices));
    blockers.extend(tokio::task::block_in_place(|| {
        storage::images::others(&request.images)
    }));
    if !record.volumes.is_empty() {
        blockers.extend(disks::lacking(record));
        let paths = Paths::new(&agent.config.runtime_dir, record.name.as_str());
        blockers.extend(paths.disks.lacking());
    }
    for host in record.swap.iter().flat_map(|disk| disk.servers()) {
        if agent.peers.directory().host(host).is_none() {
            blockers.push(format!(
                "the memory server {host} is not in that host's hosts.json"
            ));
        }
    }
    blockers
}

/// What a keeper has of a session at its destination.
#[derive(Serialize, Deserialize)]
pub(crate) enum Kept {
    /// A standby context, with its connection.
    Context { pid: u32, claimed: ClaimedContext },
    /// The rest.
    Session {
        keys: ProcessKeys,
        moved: Vec<MovedEndpoint>,
        partners: Vec<String>,
    },
    /// Contexts that the processes make again; only if there are some.
    ToMake(ToMake),
}

/// One session, at its destination.
pub struct Destination {
    agent: Shared,
    session: u64,
    home: Option<Home>,
    /// Of the name; an instance that has arrived needs none.
    _reservation: Option<Reservation>,
    machine: Machine,
    writer: Writer,
    /// Why the session cannot go on.
    why: String,
    paths: Paths,
    runtime: Placer,
    images: Placer,
    private: Placer,
    /// By which contents come, unless they come with their parts; lent to the call that places them.
    bulk: Option<Incoming>,
    /// The images lack private memory, which comes in a folder of its own.
    fills: bool,
    /// They give it to the tasks.
    filler: Option<Filler>,
    /// Of a virtual machine: RAM may come after the decision.
    may_lack: bool,
    /// What of it, and how.
    lacking: Lacking,
    /// By process, in the order of its contexts.
    contexts: Vec<(u32, StandbyContext)>,
    keys: ProcessKeys,
    /// Queue pairs of datagrams, which anybody may send to.
    moved: Vec<MovedEndpoint>,
    /// Contexts that the processes make again.
    to_make: ToMake,
    /// By process, what of it was made ahead. An agent that comes later has nothing of it.
    ahead: HashMap<u32, Ahead>,
    /// What they have made, once [`Destination::claim`] has asked them.
    made: Option<AllMade>,
    /// The partners' hosts.
    partners: Vec<String>,
    /// It has copies of the contexts' connections until they are claimed.
    keeper: Option<Keeper>,
    restore: Option<Restore>,
    /// How the network namespace was made here, of a container.
    network: Option<(Contents, NetworkState)>,
    /// The largest path MTU of the instance's queue pairs in bytes.
    path_mtu: u32,
    restored: Option<Restored>,
    /// The first of the restored processes, in the host's PID namespace.
    init_pid: Option<i32>,
    /// Set by the commit.
    instance: Option<Arc<Instance>>,
    /// Its connections are this session's until they work.
    turn: Option<Turn>,
    /// Those that have claimed their contexts, once [`Destination::claim`] has asked them.
    guests: Option<Vec<Guest>>,
    /// Processes that did not come.
    lost: Vec<u32>,
    /// Their requests reach the RNIC.
    resumed: bool,
    /// Something of what they had could not be made again.
    lost_rnic: bool,
    /// The volume daemon is being told what became of the session.
    is_told: bool,
    /// What of the tasks under the instance's name is this session's; nothing as long as that is not known.
    touches: Option<Touches>,
}

impl Destination {
    fn new(
        agent: &Shared,
        session: u64,
        paths: &Paths,
        machine: Machine,
        reservation: Option<Reservation>,
    ) -> Self {
        Self {
            agent: Arc::clone(agent),
            session,
            machine,
            writer: Writer::new(&agent.journal, session, Role::Destination),
            why: String::new(),
            runtime: Placer::new(paths.folder.clone()),
            images: Placer::new(paths.images.clone()),
            private: Placer::new(paths.private.clone()).writing_zeroes(),
            bulk: None,
            fills: false,
            filler: None,
            may_lack: false,
            lacking: Lacking::default(),
            paths: paths.clone(),
            home: None,
            _reservation: reservation,
            contexts: Vec::new(),
            keys: Vec::new(),
            moved: Vec::new(),
            to_make: ToMake::default(),
            ahead: HashMap::new(),
            made: None,
            partners: Vec::new(),
            keeper: None,
            restore: None,
            network: None,
            path_mtu: 0,
            restored: None,
            init_pid: None,
            instance: None,
            turn: None,
            guests: None,
            lost: Vec::new(),
            resumed: false,
            lost_rnic: false,
            is_told: false,
            touches: Some(Touches::ALL),
        }
    }

    fn home(&self) -> anyhow::Result<&Home> {
        self.home
            .as_ref()
            .context("the session was undone or is committed already")
    }

    /// Puts a part of a file in its place; `landed` is its content, if that came by RDMA.
    pub fn place(&mut self, part: &FilePart, landed: Option<&[u8]>) -> anyhow::Result<u64> {
        self.home()?;
        if part.folder() == Folder::Private && !self.fills {
            self.expect_private()?;
        }
        let placer = match part.folder() {
            Folder::Runtime => &mut self.runtime,
            Folder::Images => &mut self.images,
            Folder::Private => &mut self.private,
        };
        let placed = placer.place(part, landed);
        whole::explained(&placer.place_of(&part.path), placed)
            .with_context(|| format!("cannot write {:?}", String::from_utf8_lossy(&part.path)))
    }

    /// Private memory comes. From now on its folder says that it is missing to the tasks.
    fn expect_private(&mut self) -> anyhow::Result<()> {
        let folder = &self.paths.private;
        let made = whole::explained(folder, std::fs::create_dir_all(folder));
        made.with_context(|| format!("cannot make {}", folder.display()))?;
        self.fills = true;
        Ok(())
    }

    /// Connects the standby queue pairs.
    pub async fn connect(&mut self, request: ConnectRequest) -> anyhow::Result<()> {
        self.begin(Phase::Prepare, "Connect", Point::DestinationConnect)
            .await?;
        self.partners = request.partners.clone();
        let made = request.made.iter().cloned().map(Made::try_from);
        self.to_make.connections = made.collect::<anyhow::Result<_>>()?;
        // They may ask what was decided, also an agent that comes after this one.
        let partners = Note {
            partners: request.partners.clone(),
            ..Note::default()
        };
        self.agent.journal.note(self.session, Role::Destination, partners);
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
                    let gid = gid_of(peer.gid)?;
                    match peer.paused {
                        true => context.expect_image(peer.physical_qpn, gid, remote)?,
                        false => context.connect(peer.physical_qpn, gid, remote, peer.rq_psn)?,
                    }
                    // Both ends are in the instance: the other one's keys are new, too.
                    let is_here = context.gids().contains(&remote.gid);
                    let owner = owners.get(&remote.qpn).filter(|_| is_here);
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
        result?;
        self.keep().await
    }

    /// Gives copies of the contexts to a keeper: from the commit on the instance needs them, whatever happens to this
    /// agent.
    async fn keep(&mut self) -> anyhow::Result<()> {
        let (config, session) = (self.agent.config.clone(), self.session);
        let keeper = tokio::task::spawn_blocking(move || Keeper::start(&config, session));
        let keeper = self
            .keeper
            .insert(keeper.await.context("starting a keeper panicked")??);
        let session = Kept::Session {
            keys: self.keys.clone(),
            moved: self.moved.clone(),
            partners: self.partners.clone(),
        };
        keeper.keep(&session, &[])?;
        if !self.to_make.is_empty() {
            keeper.keep(&Kept::ToMake(self.to_make.clone()), &[])?;
        }
        for (pid, context) in &self.contexts {
            let (connection, claimed) = context.hand_over()?;
            let pid = *pid;
            keeper.keep(&Kept::Context { pid, claimed }, &[connection.as_fd()])?;
        }
        Ok(())
    }

    /// Makes the bundle and starts runc and CRIU, which wait for the images.
    pub async fn prepare_restore(&mut self) -> anyhow::Result<()> {
        if self
            .begin(Phase::Prepare, "PrepareRestore", Point::DestinationPrepareRestore)
            .await?
        {
            filling::lose_some(&self.paths)?;
        }
        let config = self.agent.config.clone();
        let home = self
            .home
            .take()
            .context("the session was undone or is committed already")?;
        let (home, made) = tokio::task::spawn_blocking(move || {
            let made = home.make_bundle(&config, Origin::Arriving);
            (home, made)
        })
        .await
        .context("making the bundle panicked")?;
        if home.record.machine.is_some() {
            let home = self.home.insert(home);
            made?;
            if !home.record.volumes.is_empty() || !home.record.swap.is_empty() {
                // QEMU connects when it starts.
                let config = &self.agent.config;
                tokio::task::block_in_place(|| home.take_volumes(config, Some(self.session)))?;
            }
            let prepared = Arriving::prepare(&self.agent.tools, home, self.may_lack).await;
            let (arriving, lacks) = prepared?;
            self.lacking = lacks.map_or(Lacking::Nothing, Lacking::Prepared);
            let elsewhere = arriving.ram_elsewhere();
            // Before anything of it can fail.
            self.restore = Some(Restore::Machine(arriving));
            if let Some(file) = elsewhere.context("cannot open the RAM")? {
                self.runtime.stand_in(std::path::Path::new(RAM), file);
            }
            return Ok(());
        }
        let restore = RestoreConfig {
            name: home.record.name.clone(),
            bundle: home.paths.bundle.clone(),
            images: home.paths.images.clone(),
            work: home.paths.work.clone(),
            lazy: self.fills,
            network: home.paths.network.clone(),
            rnics: !home.record.rnics.is_empty(),
        };
        self.home = Some(home);
        made?;
        if self.fills {
            let (agent, paths) = (Arc::clone(&self.agent), self.paths.clone());
            let started = tokio::task::spawn_blocking(move || filling::start(&agent, &paths));
            self.filler = Some(started.await.context("starting who gives memory panicked")??);
        }
        let contents = self.home()?.network_contents()?;
        self.network = tokio::task::spawn_blocking(move || {
            let contents = contents.map(|contents| contents.as_made().map(|made| (contents, made)));
            contents.transpose()
        })
        .await
        .context("reading the network namespace panicked")??;
        let restore = verbatim_container::Restore::prepare(&self.agent.tools, restore).await?;
        self.restore = Some(Restore::Container(restore));
        Ok(())
    }

    /// Restores the tasks, which do not run yet; says how many milliseconds that took.
    pub async fn restore(&mut self) -> anyhow::Result<f64> {
        let begun = Instant::now();
        if self
            .begin(Phase::Restore, "FullRestore", Point::DestinationRestore)
            .await?
        {
            let home = self.home()?;
            let first: PathBuf = home.paths.images.join(match home.record.machine {
                Some(_) => leaving::DEVICES,
                None => "inventory.img",
            });
            File::options().write(true).open(&first)?.set_len(3)?;
        }
        let home = self.home()?;
        if home.record.machine.is_none() && !home.record.volumes.is_empty() {
            // What CRIU opens is on them.
            let config = &self.agent.config;
            tokio::task::block_in_place(|| home.take_volumes(config, Some(self.session)))?;
        }
        self.lacks_nothing()?;
        self.place_network().await?;
        self.runtime.let_go();
        let restore = self.restore.take().context("the restore was not prepared")?;
        // A task that waits for memory that never came would be waited for, and CRIU with it.
        let refused = filling::refused(self.filler.as_ref());
        // The link may be another one since the queue pairs were made.
        let narrow = mtu::still_lacking(
            self.agent.config.nic_socket(),
            self.agent.name().to_owned(),
            self.path_mtu,
        );
        let (restored, narrow) = tokio::select! {
            (restored, narrow) = async { tokio::join!(restore.restore(), narrow) } => (restored?, narrow),
            why = refused => bail!("the tasks' memory is not all there: {why}"),
        };
        // Kept before anything else is looked at, so that it is undone.
        let init = restored.pid();
        self.restored = Some(restored);
        // Restoring changes times: sockets are bound again, and files mapped.
        tokio::task::block_in_place(|| self.runtime.stamp())
            .context("the times of the instance's files cannot be set")?;
        if let Some(narrow) = narrow? {
            bail!("{narrow}");
        }
        if let Some(init) = init
            && self.home()?.record.machine.is_none()
        {
            let images = self.home()?.paths.images.clone();
            let joined = tokio::task::spawn_blocking(move || network::join_groups(init, &images));
            joined.await.context("joining multicast groups panicked")??;
        }
        self.decide(Event::Restored).await;
        Ok(milliseconds(begun.elapsed()))
    }

    /// Makes of the network namespace what it was at the source, which tasks and their sockets need.
    async fn place_network(&mut self) -> anyhow::Result<()> {
        let Some((contents, made)) = self.network.take() else {
            return Ok(());
        };
        let images = self.home()?.paths.images.clone();
        let placed = tokio::task::spawn_blocking(move || match network::read(&images)? {
            Some(wanted) => Ok(contents.place(&wanted, &made)?),
            None => Ok(()),
        });
        placed.await.context("making the network namespace panicked")?
    }

    fn contexts_are_alive(&self) -> anyhow::Result<()> {
        if !self.contexts.iter().all(|(_, context)| context.is_alive()) {
            bail!("the software RNIC there was restarted, and what was prepared at it is lost; try again");
        }
        Ok(())
    }

    /// A step begins that may be refused.
    async fn begin(&self, phase: Phase, step: &str, point: Point) -> anyhow::Result<bool> {
        self.agent
            .journal
            .step(self.session, Role::Destination, phase, step);
        self.agent.faults.pass(point).await
    }
}
