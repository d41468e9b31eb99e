//! The daemon of a host: all its volumes.

mod both;
mod data;
mod deciding;
mod deleting;
mod devices;
mod keeping;
mod lent;
mod listeners;
mod opening;
mod orders;
mod places;
mod resolving;
mod space;
mod together;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::sync::Mutex;
use verbatim_mirror::decision::{AgentSession, Role, SessionId, Sidecar};

use crate::callers::{CLIENTS, ORDERS_OF_ONE, Orders, Places, Repeated};
use crate::control::{Row, VhostUser};
use crate::device::Device;
use crate::disk::Disks;
use crate::faults::Hook;
use crate::folder::{Folder, Noted, Place, Settings};
use crate::peer::destination::Incoming;
use crate::reserve::Reserve;
use crate::store::{Closed, Store};
use crate::tls::Hosts;
use crate::transport::{Rnic, Wanted};
use crate::vhost_user;
use crate::volume::Volume;
use data::keep_private;
pub use devices::{end_all_waiting, end_waiting};
use lent::Lent;
use orders::has_ended;
use together::Following;

/// Limit for another host's question to wait for a volume that is busy. It is less than what that host waits for an answer.
const BUSY: Duration = Duration::from_secs(7);

/// Pause before a question is repeated whose answer decided nothing.
const AGAIN: Duration = Duration::from_millis(200);

/// Settings of a daemon.
#[derive(Debug, Clone)]
pub struct Config {
    /// The host's name in hosts.json and in its certificate.
    pub name: String,
    /// The folder of the volumes.
    pub state_dir: PathBuf,
    /// The folder of the sockets.
    pub runtime_dir: PathBuf,
    /// The folder of hosts.json and tls/; without these volumes do not move.
    pub config_dir: PathBuf,
    /// The port on which the daemons of all hosts listen for each other.
    pub port: u16,
    /// The port on which clients of other hosts are served, by TLS.
    pub nbd_port: Option<u16>,
    /// Space that copies leave free on the file system of the volumes' folder; `None`: a share of it.
    pub reserve: Option<u64>,
    /// How long the rest of a copy is kept whose source has not come back.
    pub keep_incomplete: Duration,
    /// Limit of the threads that wait for disks.
    pub threads: usize,
    /// Transport for copies of volumes that move from here, if the command names none.
    pub copy_transport: Wanted,
    /// The RNIC for copies; by default the one that has this host's address.
    pub copy_device: Option<String>,
    /// Called at the points of [`crate::faults`].
    pub hook: Hook,
}

impl Config {
    /// The socket on which orders are taken.
    pub fn control_socket(&self) -> PathBuf {
        self.runtime_dir.join("volumes.sock")
    }

    fn vhost_user_socket(&self, name: &str) -> PathBuf {
        self.runtime_dir
            .join("volumes")
            .join(format!("{name}.vhost-user"))
    }

    fn nbd_socket(&self, name: &str) -> PathBuf {
        self.runtime_dir.join("volumes").join(format!("{name}.sock"))
    }
}

/// The state of one volume. Changes on its disk are made under this lock only.
#[derive(Default)]
struct State {
    sidecar: Option<Sidecar>,
    /// Number of times that the sidecar was written.
    written: u64,
    /// The reason why the copy is unknown; then there is no sidecar here.
    unknown: Option<String>,
    /// Failures of its folder that were logged: other hosts ask again several times a second.
    failures: Repeated,
    /// It is not known because this one comes from a backup, and how often the data have seen it written.
    restored: Option<(Sidecar, u64)>,
    /// The reason why the copy is not served, though its sidecar says that it serves.
    unserved: Option<String>,
    /// A task retries both: reading an unknown copy, and serving an unserved one.
    is_tried_again: bool,
    /// A trouble that only an operator can resolve.
    alarm: Option<String>,
    /// The questions whose answers have contradicted an operator.
    contradicted: Vec<SessionId>,
    /// The attempt whose data this process had completely on the disk when it was asked; nothing was received
    /// since.
    whole: Option<SessionId>,
    settings: Settings,
    /// The place for its data, while there is no copy here.
    place: Option<Place>,
    /// Notes on its data.
    noted: Option<Noted>,
    /// Its data, while they are open.
    store: Option<Arc<Store>>,
    /// Set when its data were let go: tasks that still use them keep them claimed.
    closing_data: Option<Closed>,
    /// The served volume.
    volume: Option<Arc<Volume>>,
    /// The closed volume, while it has requests at the disk.
    closing: Option<Arc<Volume>>,
    /// A random number of the attempt that fills it: what was acknowledged in another one may be gone.
    attempt: u128,
    /// Time at which a source was connected last to the rest of an attempt.
    left_at: Option<Instant>,
    /// A task waits until that rest is given back.
    is_watched: bool,
    /// The attempt that fills it, the bytes that the copy had allocated before, and its limit.
    filling: Option<(SessionId, u64, Option<Arc<Reserve>>)>,
    /// The arriving copy, from the first offer on.
    incoming: Option<Arc<Incoming>>,
    /// Its block device on this machine.
    device: Option<Device>,
    /// The message about a device that was lost.
    lost_device: Option<String>,
    /// The vhost-user-blk server, while it accepts virtual machines.
    vhost_user: Option<vhost_user::Server>,
    /// Nothing had been written to it when it was lent, as far as is known.
    fresh: Option<bool>,
    /// The instance that has exclusive use of it, as a device or as a disk of its virtual machine.
    holder: Option<String>,
    /// Set while a virtual machine has it.
    lent: Option<Lent>,
    /// Set while it is copied for a session of the agents.
    following: Option<Following>,
    /// Accepts clients; aborted when that ends.
    listener: Option<tokio::task::JoinHandle<()>>,
}

impl State {
    /// Whether another host is connected to fill this copy.
    fn is_being_filled(&self) -> bool {
        let incoming = self.incoming.as_ref();
        incoming.is_some_and(|incoming| incoming.is_connected())
    }
}

struct Entry {
    name: String,
    folder: Folder,
    state: Mutex<State>,
    /// Its volume while clients of other hosts may use it, for tasks that must not wait for the lock.
    served: std::sync::Mutex<Option<Arc<Volume>>>,
    /// Places for these clients.
    remote: Arc<Places>,
    /// Places for orders about it.
    orders: Arc<Places>,
}

impl Entry {
    /// The state for another host's question, which ends when the volume stays busy: its disk may hang, and questions that wait take a thread and a
    /// connection each. The other host asks again.
    async fn state_soon(&self) -> anyhow::Result<tokio::sync::MutexGuard<'_, State>> {
        let state = tokio::time::timeout(BUSY, self.state.lock()).await;
        state.map_err(|_| {
            anyhow::anyhow!(
                "something is being done with {} here, and has not ended in {} s: its disk may hang",
                self.name,
                BUSY.as_secs()
            )
        })
    }
}

struct Daemon {
    config: Config,
    hosts: Option<Hosts>,
    disks: Disks,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
    orders: Orders,
    /// Notified when the daemon is to end.
    is_over: tokio::sync::Notify,
    /// The identity of the state folder; `None` where none can be written.
    state_folder: Option<String>,
    /// It hands its block devices over to the next one: it takes up none any more.
    hands_over: AtomicBool,
    /// No daemon is to come after this one.
    ends_for_good: AtomicBool,
}

/// Runs until SIGTERM, SIGINT or an order ends it.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let make = |path: &PathBuf| {
        std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
    };
    // Other daemons have sockets there, too.
    verbatim_jail::folders::reachable(&config.runtime_dir)
        .with_context(|| format!("cannot make {}", config.runtime_dir.display()))?;
    make(&config.state_dir)?;
    make(&config.runtime_dir.join("volumes"))?;
    let _lock = lock(&config)?;
    warn_of_missing(&config)?;
    // An earlier release made them readable for all users.
    keep_private(&config.state_dir);
    keep_private(&config.runtime_dir.join("volumes"));
    let hosts = match config.config_dir.join("hosts.json").exists() {
        true => Some(Hosts::load(&config.config_dir)?),
        false => None,
    };
    let daemon = Arc::new(Daemon {
        disks: Disks::new(config.threads),
        hosts,
        entries: Mutex::default(),
        orders: Orders::default(),
        is_over: tokio::sync::Notify::new(),
        hands_over: AtomicBool::new(false),
        ends_for_good: AtomicBool::new(false),
        state_folder: identity_of(&config.state_dir),
        config,
    });
    daemon.open_all().await?;
    daemon.end_strange_devices().await;
    listeners::run(daemon.clone()).await?;
    daemon.hand_over().await;
    daemon.rest().await;
    Ok(())
}

/// Reports volumes that daemons have had since the last start of the machine, if the state folder has no volume at all: its file system may not be
/// mounted.
fn warn_of_missing(config: &Config) -> anyhow::Result<()> {
    if !Folder::names(&config.state_dir)?.is_empty() {
        return Ok(());
    }
    let notes = std::fs::read_dir(config.runtime_dir.join("volumes"));
    let name = |entry: std::fs::DirEntry| {
        let path = PathBuf::from(entry.file_name());
        let name = path.file_stem()?.to_str()?.to_owned();
        Folder::new(&config.state_dir, &name).ok().map(|_| name)
    };
    let names: BTreeSet<String> = notes.into_iter().flatten().flatten().filter_map(name).collect();
    if !names.is_empty() {
        let names: Vec<String> = names.into_iter().collect();
        tracing::error!(
            "{} has no volume, and a daemon on this machine had {}: is its file system not mounted? Mount it, and start the daemon again; nothing that \
             agents say of these volumes meanwhile is lost",
            config.state_dir.display(),
            names.join(", ")
        );
    }
    Ok(())
}

/// The identity of a state folder, by which the agent tells it from one that lies where its file system is not mounted. Made for a folder
/// that has none; `None` where that cannot be.
fn identity_of(state_dir: &Path) -> Option<String> {
    let path = state_dir.join(".identity");
    let read = || {
        let text = std::fs::read_to_string(&path)?;
        let text = text.trim();
        Ok::<_, std::io::Error>((!text.is_empty() && text.len() <= 64).then(|| text.to_owned()))
    };
    match read() {
        Ok(Some(identity)) => return Some(identity),
        Ok(None) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        // It has one, and another would be a lie.
        Err(error) => {
            tracing::warn!("the identity of {} cannot be read: {error}", state_dir.display());
            return None;
        }
    }
    let made = (|| {
        // In one piece: a file that is cut off is no identity.
        let beside = state_dir.join(".identity.new");
        let file = std::fs::File::create(&beside)?;
        std::io::Write::write_all(
            &mut &file,
            format!("{:032x}\n", rand::random::<u128>()).as_bytes(),
        )?;
        file.sync_all()?;
        std::fs::rename(&beside, &path)?;
        std::fs::File::open(state_dir)?.sync_all()
    })();
    if let Err(error) = made {
        tracing::warn!(
            "the state folder {} gets no identity: {error}",
            state_dir.display()
        );
    }
    read().ok().flatten()
}

/// Locks the state folder: two daemons with the same volumes would be two copies.
fn lock(config: &Config) -> anyhow::Result<std::fs::File> {
    let path = config.state_dir.join(".lock");
    let mut open = OpenOptions::new();
    let file = match open.write(true).create(true).truncate(false).open(&path) {
        // A read-only folder may have volumes with data elsewhere, and a lock file of an earlier daemon can
        // be locked.
        Err(error) if error.kind() == std::io::ErrorKind::ReadOnlyFilesystem => {
            let file = std::fs::File::open(&path).with_context(|| {
                format!(
                    "{} is read-only, and no daemon has ever used it: make it writable, or choose another --state-dir",
                    config.state_dir.display()
                )
            })?;
            tracing::error!(
                "{} is read-only: what has its data elsewhere is served, and nothing can move or be changed until it is writable",
                config.state_dir.display()
            );
            file
        }
        file => file.with_context(|| format!("cannot make {}", path.display()))?,
    };
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("{} is used by another daemon", config.state_dir.display()))?;
    Ok(file)
}

impl Daemon {
    /// The entry of this volume; made if there is none.
    async fn entry(&self, name: &str) -> anyhow::Result<Arc<Entry>> {
        let folder = Folder::new(&self.config.state_dir, name)?;
        let mut entries = self.entries.lock().await;
        let entry = entries.entry(name.to_owned()).or_insert_with(|| {
            Arc::new(Entry {
                name: name.to_owned(),
                folder,
                state: Mutex::default(),
                served: std::sync::Mutex::default(),
                remote: Places::new(CLIENTS),
                orders: Places::new(ORDERS_OF_ONE),
            })
        });
        Ok(entry.clone())
    }

    /// Serves the copy if its sidecar says so: to clients if it is attached, and to the virtual machine that
    /// has it.
    fn serve(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) -> anyhow::Result<()> {
        self.claim_data(entry, state)?;
        let Some(sidecar) = state.sidecar.as_ref().filter(|sidecar| sidecar.may_serve()) else {
            return self.find_promised_device(entry, state);
        };
        let length = sidecar.length;
        self.open(entry, state, length)?;
        if let (true, None, Some(volume)) = (state.settings.attached, &state.listener, &state.volume) {
            let socket = self.config.nbd_socket(&entry.name);
            state.listener = Some(listeners::nbd(&socket, &entry.name, volume.clone())?);
        }
        if let (true, Some(volume)) = (state.settings.attached, &state.volume) {
            *entry.served.lock().expect("no panic under this lock") = Some(volume.clone());
        }
        if let (true, None, Some(volume)) = (state.settings.vhost_user, &state.vhost_user, &state.volume) {
            let socket = self.config.vhost_user_socket(&entry.name);
            let listener = listeners::listen(&socket)?;
            state.vhost_user = Some(vhost_user::Server::new(
                listener,
                &socket,
                &entry.name,
                volume.clone(),
            ));
        }
        if let (Some(lent), Some(volume)) = (&state.lent, &state.volume) {
            lent.serve(volume);
        }
        self.find_device(entry, state)
    }

    /// Makes a volume of the copy's data, and opens them if necessary.
    fn open(&self, entry: &Entry, state: &mut State, length: u64) -> anyhow::Result<()> {
        has_ended(entry, state)?;
        state.closing = None;
        if state.volume.is_none() {
            self.claim_data(entry, state)?;
            let store = state.store.clone().context("it has no data")?;
            let volume = Volume::new(store, length, self.disks.clone(), self.config.hook);
            state.volume = Some(volume);
        }
        Ok(())
    }

    /// The RNIC of this host, for copies.
    fn rnic(&self) -> Rnic {
        let hosts = self.hosts.as_ref();
        Rnic {
            runtime_dir: self.config.runtime_dir.clone(),
            name: self.config.copy_device.clone(),
            address: hosts.and_then(|hosts| hosts.address(&self.config.name).ok()),
        }
    }

    fn row(&self, entry: &Entry, state: &State) -> Option<Row> {
        if let Some(why) = &state.unknown {
            return Some(Row {
                name: entry.name.clone(),
                role: "unknown".to_owned(),
                data: state.settings.data.clone(),
                trouble: Some(why.clone()),
                ..Row::default()
            });
        }
        let Some(sidecar) = &state.sidecar else {
            return self.placed(entry, state);
        };
        let (role, other_host) = match &sidecar.role {
            Role::Serving => ("serving", None),
            Role::Deciding { to, .. } => ("deciding", Some(to.clone())),
            Role::Moved { to } => ("moved", Some(to.clone())),
            Role::Incoming { from, .. } => ("incoming", Some(from.clone())),
            Role::Incomplete => ("incomplete", None),
            Role::Held { to, .. } => ("held", Some(to.clone())),
            Role::Ready { from, .. } => ("ready", Some(from.clone())),
        };
        let closing = state.closing.as_ref().map(|volume| {
            format!(
                "{} requests that were under way when it was detached have not come back from the disk",
                volume.in_flight()
            )
        });
        let doubt = state
            .store
            .as_ref()
            .and_then(|store| store.doubt())
            .map(str::to_owned);
        let trouble = state
            .alarm
            .clone()
            .or(state.lost_device.clone())
            .or(closing)
            .or(doubt);
        let socket = self.config.nbd_socket(&entry.name);
        let uri = format!("nbd+unix:///{}?socket={}", entry.name, socket.display());
        let migration = state.volume.as_ref().and_then(|volume| volume.migration());
        Some(Row {
            name: entry.name.clone(),
            id: sidecar.id.into(),
            length_bytes: sidecar.length,
            generation: sidecar.generation,
            role: role.to_owned(),
            other_host,
            data: state.settings.data.clone(),
            waits: state.unserved.clone(),
            suspect: state.is_suspect(),
            fresh: state.holder.as_ref().and(state.fresh),
            attached: state.settings.attached,
            uri: state.listener.is_some().then_some(uri),
            device: state.device.as_ref().map(|device| device.path().to_owned()),
            vhost_user: state
                .vhost_user
                .as_ref()
                .map(|server| VhostUser::new(&entry.name, server.socket(), server.is_connected())),
            holder: state.holder.clone(),
            socket: state.lent.as_ref().map(|lent| lent.socket().to_owned()),
            copy: migration
                .as_ref()
                .and(state.volume.as_ref())
                .and_then(|volume| volume.carriage()),
            stalled: state.volume.as_ref().and_then(|volume| volume.stalled()),
            migration: migration.and_then(|(status, _)| serde_json::to_value(status).ok()),
            by: waits_for(sidecar),
            trouble,
            state_folder: None,
        })
    }
}

/// The session of the agents that decides about this copy.
fn waits_for(sidecar: &Sidecar) -> Option<AgentSession> {
    match &sidecar.role {
        Role::Held { by, .. } | Role::Ready { by, .. } => Some(*by),
        _ => None,
    }
}
