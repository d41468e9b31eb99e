//! The daemon of a host: all its volumes.

mod deciding;
mod lent;
mod listeners;
mod orders;
mod places;
mod resolving;
mod together;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::Mutex;
use verbatim_mirror::decision::{Role, Sidecar};

use crate::control::{Row, VhostUser};
use crate::device::Device;
use crate::disk::Disks;
use crate::faults::Hook;
use crate::folder::{Folder, Settings};
use crate::peer::destination::Incoming;
use crate::store::Store;
use crate::tls::Hosts;
use crate::transport::{Rnic, Wanted};
use crate::vhost_user;
use crate::volume::Volume;
use lent::Lent;
use together::Following;

/// A sidecar that could not be written is written again after this time.
const AGAIN: Duration = Duration::from_millis(200);

/// What a daemon is told when it starts.
#[derive(Debug, Clone)]
pub struct Config {
    /// The host's name in hosts.json and in its certificate.
    pub name: String,
    /// The volumes are in it.
    pub state_dir: PathBuf,
    /// The sockets are in it.
    pub runtime_dir: PathBuf,
    /// hosts.json and tls/ are in it; without them volumes do not move.
    pub config_dir: PathBuf,
    /// On which port the daemons of all hosts listen for each other.
    pub port: u16,
    /// On which port clients of other hosts are served, by TLS.
    pub nbd_port: Option<u16>,
    /// How many threads wait for disks.
    pub threads: usize,
    /// How the copies go of volumes that move from here, if the command does not say.
    pub copy_transport: Wanted,
    /// The RNIC that copies go by; the one that has this host's address if not given.
    pub copy_device: Option<String>,
    /// What is called at the points of [`crate::faults`].
    pub hook: Hook,
}

impl Config {
    /// Where orders are taken.
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

/// What is known of one volume. Whoever changes what is on its disk has the lock.
#[derive(Default)]
struct State {
    sidecar: Option<Sidecar>,
    settings: Settings,
    /// Where its data are to go, while there is no copy here.
    place: Option<PathBuf>,
    /// While it is served here.
    volume: Option<Arc<Volume>>,
    /// From the first offer on.
    incoming: Option<Arc<Incoming>>,
    /// While it is a block device of this machine.
    device: Option<Device>,
    /// While virtual machines are taken by vhost-user-blk.
    vhost_user: Option<vhost_user::Server>,
    /// The instance that has it for itself, as a device or as a disk of its virtual machine.
    holder: Option<String>,
    /// While a virtual machine has it.
    lent: Option<Lent>,
    /// While it is copied for a session of the agents.
    following: Option<Following>,
    /// Takes clients; aborted when that ends.
    listener: Option<tokio::task::JoinHandle<()>>,
}

impl State {
    /// Whether another host has a connection by which it fills this copy.
    fn is_being_filled(&self) -> bool {
        let incoming = self.incoming.as_ref();
        incoming.is_some_and(|incoming| incoming.is_connected())
    }
}

struct Entry {
    name: String,
    folder: Folder,
    state: Mutex<State>,
}

struct Daemon {
    config: Config,
    hosts: Option<Hosts>,
    disks: Disks,
    /// A number of this process.
    incarnation: u128,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
}

/// Runs until it is told to stop, by SIGTERM or SIGINT.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let make = |path: &PathBuf| {
        std::fs::create_dir_all(path).with_context(|| format!("cannot make {}", path.display()))
    };
    make(&config.state_dir)?;
    make(&config.runtime_dir.join("volumes"))?;
    let _lock = lock(&config)?;
    let hosts = match config.config_dir.join("hosts.json").exists() {
        true => Some(Hosts::load(&config.config_dir)?),
        false => None,
    };
    let daemon = Arc::new(Daemon {
        disks: Disks::new(config.threads),
        hosts,
        incarnation: rand::random(),
        entries: Mutex::default(),
        config,
    });
    for name in Folder::names(&daemon.config.state_dir)? {
        let entry = daemon.entry(&name).await?;
        let mut state = entry.state.lock().await;
        let opened: anyhow::Result<()> = (|| {
            state.sidecar = entry.folder.sidecar()?;
            state.settings = entry.folder.settings()?;
            // One that cannot be served, below, is none that is expected.
            if state.sidecar.is_none() {
                state.place = entry.folder.place()?;
            }
            // The process before this one may have been ended between a rename and its sync.
            if let Some(sidecar) = &state.sidecar {
                entry.folder.write_sidecar(sidecar)?;
            }
            if let Err(error) = daemon.lend_again(&entry, &mut state) {
                tracing::error!("volume {name} is not lent again: {error:#}");
            }
            daemon.serve(&entry, &mut state)
        })();
        if let Err(error) = opened {
            // The others are served all the same.
            tracing::error!("volume {name} is not served: {error:#}");
            state.sidecar = None;
            state.lent = None;
            continue;
        }
        let is_deciding = matches!(
            &state.sidecar,
            Some(Sidecar {
                role: Role::Deciding { .. },
                ..
            })
        );
        drop(state);
        if is_deciding {
            let daemon = daemon.clone();
            tokio::spawn(async move { daemon.resolve(&entry).await });
        }
    }
    listeners::run(daemon).await
}

/// Two daemons with the same volumes would be two copies.
fn lock(config: &Config) -> anyhow::Result<std::fs::File> {
    let path = config.state_dir.join(".lock");
    let file = std::fs::File::create(&path).with_context(|| format!("cannot make {}", path.display()))?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .with_context(|| format!("{} is used by another daemon", config.state_dir.display()))?;
    Ok(file)
}

impl Daemon {
    /// What is known of that volume; made if nothing is.
    async fn entry(&self, name: &str) -> anyhow::Result<Arc<Entry>> {
        let folder = Folder::new(&self.config.state_dir, name)?;
        let mut entries = self.entries.lock().await;
        let entry = entries.entry(name.to_owned()).or_insert_with(|| {
            Arc::new(Entry {
                name: name.to_owned(),
                folder,
                state: Mutex::default(),
            })
        });
        Ok(entry.clone())
    }

    /// Serves it if its sidecar says so, to clients if it is attached, and to the virtual machine that has it.
    fn serve(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) -> anyhow::Result<()> {
        let Some(sidecar) = state.sidecar.as_ref().filter(|sidecar| sidecar.may_serve()) else {
            return Ok(());
        };
        let length = sidecar.length;
        self.open(entry, state, length)?;
        if let (true, None, Some(volume)) = (state.settings.attached, &state.listener, &state.volume) {
            let socket = self.config.nbd_socket(&entry.name);
            state.listener = Some(listeners::nbd(&socket, &entry.name, volume.clone())?);
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
        Ok(())
    }

    /// Opens its data, unless they are open.
    fn open(&self, entry: &Entry, state: &mut State, length: u64) -> anyhow::Result<()> {
        if state.volume.is_none() {
            let path = entry.folder.data(&state.settings);
            let store = Store::open(&path, length);
            let store = store.with_context(|| format!("cannot open {}", path.display()))?;
            let volume = Volume::new(store, length, self.disks.clone(), self.config.hook);
            state.volume = Some(volume);
        }
        Ok(())
    }

    /// This host's, for copies.
    fn rnic(&self) -> Rnic {
        let hosts = self.hosts.as_ref();
        Rnic {
            runtime_dir: self.config.runtime_dir.clone(),
            name: self.config.copy_device.clone(),
            address: hosts.and_then(|hosts| hosts.address(&self.config.name).ok()),
        }
    }

    fn row(&self, entry: &Entry, state: &State) -> Option<Row> {
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
            migration: migration.and_then(|(status, _)| serde_json::to_value(status).ok()),
        })
    }

    /// Writes a sidecar until it is durable: until then nobody knows which of the two is on the disk.
    async fn write(&self, entry: &Entry, state: &mut State, sidecar: Sidecar) {
        while let Err(error) = tokio::task::block_in_place(|| entry.folder.write_sidecar(&sidecar)) {
            tracing::error!("volume {}: {error:#}; it is tried again", entry.name);
            tokio::time::sleep(AGAIN).await;
        }
        state.sidecar = Some(sidecar);
    }
}
