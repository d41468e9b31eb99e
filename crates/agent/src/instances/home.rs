//! The place of an instance on one host.
//!
//! ```text
//!  instances/NAME/   the runtime folder: /run/verbatim inside. It moves with the instance, but for the sockets
//!    agent.sock        guest libraries ↔ this agent
//!    nic.sock          guest libraries ↔ the RNIC of this host
//!    gate              where a quiesced process waits
//!    lib/ mem/ stdout tmp/ shm/
//!    (NAME/ is a file system of its own, and so is the mem/ of a virtual machine: [`crate::own_files`])
//!  bundles/NAME/     config.json and mounts, made anew on each host
//!  net/NAME          the network namespace
//!  images/NAME/      CRIU's images, during a move
//!  private/NAME/     private memory of tasks that have come here, until they have all of it
//!  disks/NAME/       its volumes, each mounted on a folder of its name, or with a socket in it; a folder is there as long as the volume is the instance's
//!  swaps/NAME/       its swap disks: a folder of each, with its socket, as long as there is a process that serves it
//!  records/NAME      what an agent that comes after this one must know
//! ```

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use verbatim_channel::{GATE_NAME, Gate, MEMORY_DIR, RUNTIME_DIR, SOCKET_NAME};
use verbatim_container::{
    Bundle, BundleConfig, Contents, FolderMount, Link, Network, NetworkConfig, NetworkError,
};
use verbatim_device::control::SOCKET_NAME as NIC_SOCKET_NAME;
use verbatim_session::recovery::{self, Brought};

use super::filling;
use super::machine;
use super::machine::Origin;
use super::machine::RAM;
use super::machine::guest::Guest;
use super::record::Record;
use super::storage::devices;
use super::swap::Swaps;
use super::volumes::{Disks, Form};
use crate::beneath;
use crate::config::Config;
use crate::forwarding::Forward;
use crate::guests::{Guests, Resolver};
use crate::nic_listeners::NicListeners;
use crate::own_files;
use crate::whole;

/// Where the program's standard output and error go, in the runtime folder.
pub const OUTPUT_NAME: &str = "stdout";

/// The folder of the guest library, which nobody writes to, in the runtime folder.
pub const LIBRARY_DIR: &str = "lib";

/// Where the guest library is in the runtime folder.
const LIBRARY: &str = "lib/libverbatim.so";

/// Folders of the runtime folder that are mounted in the container, or that the agent goes into by their paths.
const MOUNTED: &[&str] = &["tmp", "shm", MEMORY_DIR, LIBRARY_DIR];

/// Paths of one instance on this host.
#[derive(Debug, Clone)]
pub struct Paths {
    /// The runtime folder.
    pub folder: PathBuf,
    /// The bundle.
    pub bundle: PathBuf,
    /// The network namespace.
    pub network: PathBuf,
    /// CRIU's images.
    pub images: PathBuf,
    /// Private memory that the tasks have not been given yet.
    pub private: PathBuf,
    /// CRIU's logs.
    pub work: PathBuf,
    /// Its volumes.
    pub disks: Disks,
    /// Its swap disks.
    pub swaps: Swaps,
    /// What an agent that comes after this one must know.
    pub record: PathBuf,
    /// The folder of that.
    records: PathBuf,
}

/// What is kept of a running instance in case its agent dies.
#[derive(Serialize, Deserialize)]
pub struct Kept {
    /// What it is.
    pub record: Record,
    /// Its first process, in the host's PID namespace.
    pub init_pid: i32,
    /// It is frozen, and another host may be running it.
    #[serde(default)]
    pub undecided: Option<Undecided>,
    /// How it came here. An agent of an earlier release did not write that down.
    #[serde(default)]
    pub arrival: Option<Arrival>,
}

impl Kept {
    /// Whose the tasks are.
    pub fn tasks(&self) -> recovery::Record {
        recovery::Record {
            brought: match self.arrival {
                Some(Arrival::Started) => Brought::Started,
                Some(Arrival::By(session)) => Brought::By(session),
                None => Brought::NotSaid,
            },
            held_by: self.undecided.as_ref().map(|undecided| undecided.session),
        }
    }
}

/// How an instance came to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Arrival {
    /// It was started there.
    Started,
    /// This session has brought it.
    By(u64),
}

/// A decision that is not known yet.
#[derive(Clone, Serialize, Deserialize)]
pub struct Undecided {
    /// The session.
    pub session: u64,
    /// Who was asked.
    pub destination: String,
    /// Where the proxy is found that holds the frozen tasks.
    pub held: PathBuf,
    /// Forwarding entries that are right if it runs there: by the number of the queue pair here.
    pub forward: Vec<(u32, Forward)>,
}

impl Paths {
    /// Those of the instance `name` below the agent's runtime folder.
    pub fn new(runtime_dir: &Path, name: &str) -> Self {
        Self {
            folder: runtime_dir.join("instances").join(name),
            bundle: runtime_dir.join("bundles").join(name),
            network: runtime_dir.join("net").join(name),
            images: runtime_dir.join("images").join(name),
            private: runtime_dir.join("private").join(name),
            work: runtime_dir.join("criu").join(name),
            disks: Disks::new(runtime_dir, name),
            swaps: Swaps::new(runtime_dir, name),
            record: runtime_dir.join("records").join(name),
            records: runtime_dir.join("records"),
        }
    }

    /// Removes all images, and keeps their folder. A link among them to images before would be taken for the next dump's.
    pub fn clear_images(&self) -> io::Result<()> {
        let entries = match std::fs::read_dir(&self.images) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                std::fs::remove_dir_all(entry.path())?;
            } else {
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// The place of an instance on this host, with or without the running container.
pub struct Home {
    /// What it is.
    pub record: Record,
    /// Where its things are.
    pub paths: Paths,
    /// How it came here, if that is known.
    arrival: Option<Arrival>,
    parts: Mutex<Parts>,
    /// Whether it has volumes, or swap disks. Who takes them, or gives them back, has the lock.
    has_volumes: Mutex<bool>,
    /// It was removed, and what stands at its paths may be another one's. Who removes something of it has the lock.
    is_removed: Mutex<bool>,
}

/// What a home is made of, and loses when it is removed.
#[derive(Default)]
struct Parts {
    network: Option<Network>,
    bundle: Option<Bundle>,
    service: Option<JoinHandle<()>>,
    /// Who knows the socket at which the RNIC accepts the instance's programs.
    nic_listeners: Option<Arc<NicListeners>>,
}

impl Home {
    /// Makes the runtime folder, with nothing but the sockets in it, and the network.
    pub fn create(
        config: &Config,
        record: Record,
        arrival: Arrival,
        link: Link,
        nic: &Arc<NicListeners>,
        guests: &Guests,
        resolver: &Arc<impl Resolver>,
    ) -> anyhow::Result<Self> {
        let paths = Paths::new(&config.runtime_dir, record.name.as_str());
        let home = Self {
            record,
            paths,
            arrival: Some(arrival),
            parts: Mutex::default(),
            has_volumes: Mutex::new(false),
            is_removed: Mutex::default(),
        };
        match home.fill(config, link, nic, guests, resolver) {
            Ok(()) => Ok(home),
            Err(error) => {
                home.remove();
                Err(error)
            }
        }
    }

    /// Takes the place of an instance that an earlier agent of this host left running. Programs that are connected
    /// to the RNIC stay so; their guest libraries come back to the new socket by themselves. There may be no RNIC yet.
    pub fn open(
        config: &Config,
        record: Record,
        arrival: Option<Arrival>,
        nic: &Arc<NicListeners>,
        guests: &Guests,
        resolver: &Arc<impl Resolver>,
    ) -> anyhow::Result<Self> {
        let paths = Paths::new(&config.runtime_dir, record.name.as_str());
        let home = Self {
            record,
            paths,
            arrival,
            parts: Mutex::default(),
            has_volumes: Mutex::new(true),
            is_removed: Mutex::default(),
        };
        home.listen(guests, resolver)?;
        nic.take_over(home.record.name.as_str(), &home.nic_socket());
        home.parts().nic_listeners = Some(Arc::clone(nic));
        home.parts().network = Some(Network::open(&home.network_config(config))?);
        home.parts().bundle = Some(Bundle::open(&home.paths.bundle)?);
        Ok(home)
    }

    /// Removes what an agent that died may have left of the instance `name`, whose container is gone.
    pub fn clear(config: &Config, nic: &NicListeners, name: &str) -> anyhow::Result<()> {
        nic.remove(name);
        let paths = Paths::new(&config.runtime_dir, name);
        Bundle::clear(&paths.bundle)?;
        Network::clear(&paths.network)?;
        paths.disks.give_back()?;
        paths.swaps.give_back()?;
        filling::give_up(&paths);
        own_files::clear(&paths.folder, MEMORY_DIR, RAM)
            .with_context(|| format!("cannot remove {}", paths.folder.display()))?;
        for path in [&paths.images, &paths.private, &paths.work] {
            remove_tree(path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        match std::fs::remove_file(&paths.record) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", paths.record.display()))
            }
            _ => Ok(()),
        }
    }

    /// Writes down that the instance lives here, for an agent that may come after this one.
    ///
    /// `undecided`: another host may be running it; what is here stays frozen until that is known.
    pub fn keep_record(&self, init_pid: i32, undecided: Option<Undecided>) -> anyhow::Result<()> {
        let kept = Kept {
            record: self.record.clone(),
            init_pid,
            undecided,
            arrival: self.arrival,
        };
        std::fs::create_dir_all(&self.paths.records)?;
        // In one piece or not at all: an agent that dies meanwhile must not lose the instance.
        whole::write_json(&self.paths.record, &kept)
    }

    fn parts(&self) -> std::sync::MutexGuard<'_, Parts> {
        self.parts.lock().expect("no panic under this lock")
    }

    fn fill(
        &self,
        config: &Config,
        link: Link,
        nic: &Arc<NicListeners>,
        guests: &Guests,
        resolver: &Arc<impl Resolver>,
    ) -> anyhow::Result<()> {
        let folder = &self.paths.folder;
        filling::give_up(&self.paths);
        remove_tree(&self.paths.private)?;
        // Remains of an earlier attempt.
        own_files::clear(folder, MEMORY_DIR, RAM)?;
        for path in [&self.paths.images, &self.paths.work] {
            remove_tree(path)?;
        }
        for path in [folder, &self.paths.images, &self.paths.work] {
            let made = whole::explained(path, std::fs::create_dir_all(path));
            made.with_context(|| format!("cannot make {}", path.display()))?;
        }
        // The container's programs may be of any user. Where a tmpfs is mounted there, it has this mode, too.
        std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755))?;
        self.mount_files(config)?;
        self.listen(guests, resolver)?;
        let name = self.record.name.as_str();
        if self.record.rnics.is_empty() && self.record.machine.is_none() {
            nic.add(name, &self.nic_socket())?;
        } else if let Err(error) = nic.add_for_later(name, &self.nic_socket()) {
            // It has RNICs of its own, or none, and this host may have none of ours.
            tracing::debug!(
                instance = name,
                error = format!("{error:#}"),
                "it has no software RNIC"
            );
        }
        self.parts().nic_listeners = Some(Arc::clone(nic));
        self.parts().network = Some(Network::create(&self.network_config(config), link)?);
        Ok(())
    }

    /// Mounts the file systems that are its own: one for the files that it writes, and one for a guest's RAM.
    fn mount_files(&self, config: &Config) -> anyhow::Result<()> {
        let folder = &self.paths.folder;
        let bytes = match self.record.files {
            0 => config.instance_files,
            bytes => bytes,
        };
        let cannot = |folder: &Path| format!("cannot mount a tmpfs at {}", folder.display());
        own_files::mount(folder, bytes, true).with_context(|| cannot(folder))?;
        if let Some(Guest::Qemu(arguments)) = &self.record.machine {
            let memory = folder.join(MEMORY_DIR);
            std::fs::create_dir_all(&memory).with_context(|| format!("cannot make {}", memory.display()))?;
            own_files::mount(&memory, arguments.ram(), false).with_context(|| cannot(&memory))?;
        }
        Ok(())
    }

    /// Removes the RAM of a guest that has ended here.
    pub fn drop_ram(&self) {
        if self.record.machine.is_none() {
            return;
        }
        let dropped = self.while_there(|paths| own_files::remove_ram(&paths.folder, RAM));
        if let Some(Err(error)) = dropped {
            tracing::warn!(instance = %self.record.name, %error, "the RAM stays in memory until it is removed");
        }
    }

    /// Makes this agent's socket in the runtime folder, and serves it.
    fn listen(&self, guests: &Guests, resolver: &Arc<impl Resolver>) -> anyhow::Result<()> {
        // Programs in the container may be of any user; the folder is theirs alone. Where an earlier agent left it, they
        // are running.
        let agent =
            beneath::listen(&self.paths.folder, SOCKET_NAME).context("cannot listen for guest libraries")?;
        self.parts().service =
            Some(guests.serve(agent, Some(self.record.name.to_string()), Arc::clone(resolver))?);
        Ok(())
    }

    /// Where the RNIC accepts the instance's programs.
    fn nic_socket(&self) -> PathBuf {
        self.paths.folder.join(NIC_SOCKET_NAME)
    }

    fn network_config(&self, config: &Config) -> NetworkConfig {
        NetworkConfig {
            path: self.paths.network.clone(),
            address: self.record.address,
            prefix: self.record.prefix,
            gateway: None,
            bridge: config.bridge.clone(),
            mtu: config.mtu,
            tap: self.record.machine.is_some(),
            further: config.filters_addresses.then(|| self.record.further.clone()),
        }
    }

    /// Addresses that the instance gave itself, from which nothing leaves it ([`Network::filtered`]).
    pub fn filtered_addresses(&self) -> Result<Vec<IpAddr>, NetworkError> {
        let parts = self.parts();
        parts.network.as_ref().map_or(Ok(Vec::new()), Network::filtered)
    }

    /// What its programs make of their network namespace; nothing of a virtual machine's.
    pub fn network_contents(&self) -> Result<Option<Contents>, NetworkError> {
        let parts = self.parts();
        parts.network.as_ref().map_or(Ok(None), Network::contents)
    }

    /// Puts the guest library and the gate into the folder of a new instance, or the guest's RAM. `origin` is nothing to a container.
    pub fn furnish(&self, config: &Config, origin: Origin) -> anyhow::Result<()> {
        if self.record.machine.is_none() {
            let library = self.paths.folder.join(LIBRARY);
            verbatim_jail::folders::make_open(library.parent().expect("it has a folder"))?;
            whole::explained(&library, std::fs::copy(&config.library, &library)).with_context(|| {
                format!(
                    "cannot copy the guest library {}; build it, or name it with --library",
                    config.library.display()
                )
            })?;
        }
        let memory = self.paths.folder.join(MEMORY_DIR);
        std::fs::create_dir_all(&memory)?;
        std::fs::set_permissions(&memory, PermissionsExt::from_mode(0o1777))?;
        Gate::open(&self.paths.folder.join(GATE_NAME), true).context("cannot make the gate")?;
        std::fs::set_permissions(
            self.paths.folder.join(GATE_NAME),
            PermissionsExt::from_mode(0o666),
        )?;
        let output = std::fs::File::create(self.output())?;
        // As programs know it.
        output.set_permissions(PermissionsExt::from_mode(0o644))?;
        if self.record.machine.is_none() {
            // The program opens it by its name, whoever it runs as.
            let (user, group) = self.record.workload.user();
            std::os::unix::fs::fchown(&output, Some(user), Some(group))?;
        }
        match &self.record.machine {
            Some(Guest::Qemu(arguments)) if origin != Origin::Attached => {
                machine::make_ram(&self.paths.folder, arguments.ram(), self.record.prealloc)
            }
            _ => Ok(()),
        }
    }

    /// Makes the bundle; the runtime folder's content is complete as far as paths are concerned. `origin` is nothing to a
    /// container.
    pub fn make_bundle(&self, config: &Config, origin: Origin) -> anyhow::Result<()> {
        // Folders of it become mounts of the container. Where the instance comes from, its programs could put links there.
        beneath::must_be_folders(&self.paths.folder, MOUNTED)?;
        *self.has_volumes.lock().expect("no panic under this lock") = true;
        self.paths.disks.expect(&self.record.volumes)?;
        self.paths.swaps.expect(&self.record.swap)?;
        let bundle = BundleConfig {
            name: self.record.name.clone(),
            dir: self.paths.bundle.clone(),
            runtime: self.paths.folder.clone(),
            netns: self.paths.network.clone(),
            cgroup_parent: config.cgroup_parent.clone(),
            preload: Some(Path::new(RUNTIME_DIR).join(LIBRARY)),
            rnics: self.record.rnics.iter().map(|rnic| rnic.name.clone()).collect(),
            devices: Vec::new(),
            folders: self.folders(),
        };
        let made = match &self.record.machine {
            None => Bundle::create(&bundle, &self.record.workload)?,
            Some(guest) => {
                let bundle = BundleConfig {
                    preload: None,
                    devices: [
                        &machine::DEVICES.map(str::to_owned)[..],
                        &devices::names(&self.record.workload),
                    ]
                    .concat(),
                    ..bundle
                };
                let workload = devices::without(&self.record.workload);
                Bundle::create(&bundle, &machine::started(guest, &workload, origin)?)?
            }
        };
        self.parts().bundle = Some(made);
        Ok(())
    }

    /// What its container has of volumes and swap disks.
    fn folders(&self) -> Vec<FolderMount> {
        let volumes = self.record.volumes.iter().map(|mounted| FolderMount {
            source: self.paths.disks.of(&mounted.volume),
            inside: mounted.inside.clone(),
            // What is in a folder with a socket is the daemon's.
            writable: mounted.writable && self.record.machine.is_none(),
        });
        let swaps = self.record.swap.iter().map(|disk| FolderMount {
            source: self.paths.swaps.of(&disk.name),
            inside: disk.inside(),
            writable: false,
        });
        // A mount in the runtime folder is not seen in the container by itself.
        let has_ram = matches!(self.record.machine, Some(Guest::Qemu(_)));
        let memory = has_ram.then(|| FolderMount {
            source: self.paths.folder.join(MEMORY_DIR),
            inside: Path::new(RUNTIME_DIR).join(MEMORY_DIR),
            writable: true,
        });
        volumes.chain(swaps).chain(memory).collect()
    }

    /// Takes its volumes from this host's daemon, and mounts them, or has them served to its virtual machine; and starts who serves its swap disks. On
    /// an error it has none of them. `by`: the session, not decided yet, in which it comes here.
    pub fn take_volumes(&self, config: &Config, by: Option<u64>) -> anyhow::Result<()> {
        let mut has = self.has_volumes.lock().expect("no panic under this lock");
        *has = true;
        let (record, disks) = (&self.record, &self.paths.disks);
        disks.take(record.name.as_str(), &record.volumes, Form::of(record), by)?;
        let taken = self.paths.swaps.take(config, &record.swap, by);
        if taken.is_err() {
            disks.give_back()?;
        }
        taken
    }

    /// Gives them back; the container must be gone, or ending.
    pub fn give_volumes_back(&self) {
        let mut has = self.has_volumes.lock().expect("no panic under this lock");
        if !std::mem::take(&mut *has) {
            // Another instance of this name may have some by now.
            return;
        }
        if let Err(error) = self.paths.disks.give_back() {
            tracing::warn!(instance = %self.record.name, error = format!("{error:#}"), "a volume is not given back");
        }
        if let Err(error) = self.paths.swaps.give_back() {
            tracing::warn!(instance = %self.record.name, error = format!("{error:#}"), "a swap disk is left");
        }
    }

    /// Lets the instance's traffic flow, here.
    pub fn attach(&self) -> anyhow::Result<()> {
        Ok(self
            .parts()
            .network
            .as_ref()
            .context("the instance's network is gone")?
            .attach()?)
    }

    /// Holds the instance's traffic back, here.
    pub fn detach(&self) -> anyhow::Result<()> {
        Ok(self
            .parts()
            .network
            .as_ref()
            .context("the instance's network is gone")?
            .detach()?)
    }

    /// Holds new TCP connections to the instance back.
    pub fn refuse_connections(&self) -> anyhow::Result<()> {
        let parts = self.parts();
        let network = parts.network.as_ref().context("the instance's network is gone")?;
        Ok(network.refuse_connections()?)
    }

    /// Ends that.
    pub fn take_connections(&self) -> anyhow::Result<()> {
        let parts = self.parts();
        let network = parts.network.as_ref().context("the instance's network is gone")?;
        Ok(network.take_connections()?)
    }

    /// Whether connections to it are on their way to a process that accepts.
    pub fn are_connections_arriving(&self) -> anyhow::Result<bool> {
        let parts = self.parts();
        let network = parts.network.as_ref().context("the instance's network is gone")?;
        Ok(network.are_connections_arriving()?)
    }

    /// Whether connections that its processes have closed are still sending what is left of them.
    pub fn are_connections_closing(&self) -> anyhow::Result<bool> {
        let parts = self.parts();
        let network = parts.network.as_ref().context("the instance's network is gone")?;
        Ok(network.are_connections_closing()?)
    }

    /// Its listeners with connections that no process has accepted yet, and how many.
    pub fn unaccepted(&self) -> anyhow::Result<Vec<(SocketAddr, u32)>> {
        let parts = self.parts();
        let network = parts.network.as_ref().context("the instance's network is gone")?;
        Ok(network.unaccepted()?)
    }

    /// The directory of its bundle.
    pub fn bundle(&self) -> &Path {
        &self.paths.bundle
    }

    /// Where the program's output is.
    pub fn output(&self) -> PathBuf {
        self.paths.folder.join(OUTPUT_NAME)
    }

    /// The gate.
    pub fn gate(&self) -> anyhow::Result<Gate> {
        Gate::open(&self.paths.folder.join(GATE_NAME), false).context("cannot open the gate")
    }

    /// Does something with what stands at its paths, which is its own until it is removed; nothing afterwards.
    pub fn while_there<R>(&self, work: impl FnOnce(&Paths) -> R) -> Option<R> {
        let is_removed = self.is_removed.lock().expect("no panic under this lock");
        (!*is_removed).then(|| work(&self.paths))
    }

    /// Takes everything away; the container must be gone. What cannot be removed is logged: it is in nobody's way but
    /// that of an instance with the same name, which would clear it.
    pub fn remove(&self) {
        let mut is_removed = self.is_removed.lock().expect("no panic under this lock");
        *is_removed = true;
        let Parts {
            network,
            bundle,
            service,
            nic_listeners,
        } = std::mem::take(&mut *self.parts());
        if let Some(service) = service {
            service.abort();
        }
        if let Some(listeners) = nic_listeners {
            listeners.remove(self.record.name.as_str());
        }
        let mut failed = Vec::new();
        if let Some(Err(error)) = bundle.map(Bundle::remove) {
            failed.push(error.to_string());
        }
        self.give_volumes_back();
        if let Some(Err(error)) = network.map(Network::delete) {
            failed.push(error.to_string());
        }
        if let Err(error) = std::fs::remove_file(&self.paths.record)
            && error.kind() != io::ErrorKind::NotFound
        {
            failed.push(format!("cannot remove {}: {error}", self.paths.record.display()));
        }
        filling::give_up(&self.paths);
        if let Err(error) = own_files::clear(&self.paths.folder, MEMORY_DIR, RAM) {
            failed.push(format!("cannot remove {}: {error}", self.paths.folder.display()));
        }
        for path in [&self.paths.images, &self.paths.private, &self.paths.work] {
            if let Err(error) = remove_tree(path) {
                failed.push(format!("cannot remove {}: {error}", path.display()));
            }
        }
        if !failed.is_empty() {
            tracing::warn!(instance = %self.record.name, "left behind: {}", failed.join("; "));
        }
    }
}

fn remove_tree(path: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instance of `folder`, whose agent's library is there as well.
    fn furnished(folder: &Path) -> (Home, Config) {
        let config = Config {
            name: "src".to_owned(),
            runtime_dir: folder.to_owned(),
            state_dir: folder.join("state"),
            hosts: folder.join("hosts.json"),
            tls: folder.to_owned(),
            library: folder.join("libverbatim.so"),
            program: folder.join("verbatim"),
            criu_plugin: folder.join("plugin.so"),
            memory_device: None,
            instance_files: own_files::LEAST,
            memory_overcommit: 1.0,
            bridge: String::new(),
            mtu: None,
            filters_addresses: true,
            confirm_peers: Default::default(),
            cgroup_parent: folder.to_owned(),
        };
        let record = serde_json::json!({
            "name": "web",
            "workload": {"Command": {"args": [], "env": [], "cwd": "/", "binds": []}},
            "address": "10.77.1.5",
            "prefix": 16,
        });
        let home = Home {
            record: serde_json::from_value(record).unwrap(),
            paths: Paths::new(folder, "web"),
            arrival: Some(Arrival::Started),
            parts: Mutex::default(),
            has_volumes: Mutex::new(false),
            is_removed: Mutex::default(),
        };
        std::fs::create_dir_all(&home.paths.folder).unwrap();
        std::fs::write(&config.library, "this release").unwrap();
        home.furnish(&config, Origin::Started).unwrap();
        (home, config)
    }

    #[test]
    fn an_instance_keeps_the_library_that_it_started_with() {
        let folder = tempfile::tempdir().unwrap();
        let (home, config) = furnished(folder.path());
        let library = home.paths.folder.join(LIBRARY);
        let has = || std::fs::read_to_string(&library).unwrap();
        assert_eq!(has(), "this release");
        // An upgrade writes over the file, or puts another in its place.
        std::fs::write(&config.library, "the next release").unwrap();
        assert_eq!(has(), "this release");
        std::fs::remove_file(&config.library).unwrap();
        assert_eq!(has(), "this release");
    }

    #[test]
    fn a_record_says_whose_the_tasks_are_and_one_of_an_earlier_release_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let (home, _) = furnished(folder.path());
        let read = |home: &Home| -> Kept {
            serde_json::from_slice(&std::fs::read(&home.paths.record).unwrap()).unwrap()
        };
        home.keep_record(7, None).unwrap();
        assert_eq!(read(&home).tasks().brought, Brought::Started);
        let came = Home {
            arrival: Some(Arrival::By(u64::MAX)),
            ..home
        };
        let undecided = Undecided {
            session: 9,
            destination: "b".to_owned(),
            held: PathBuf::new(),
            forward: Vec::new(),
        };
        came.keep_record(7, Some(undecided)).unwrap();
        let tasks = read(&came).tasks();
        assert_eq!((tasks.brought, tasks.held_by), (Brought::By(u64::MAX), Some(9)));
        let mut earlier: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&came.paths.record).unwrap()).unwrap();
        earlier.as_object_mut().unwrap().remove("arrival").unwrap();
        let earlier: Kept = serde_json::from_value(earlier).unwrap();
        assert_eq!(earlier.tasks().brought, Brought::NotSaid);
        assert_eq!(earlier.tasks().held_by, Some(9));
    }

    #[test]
    fn no_image_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let paths = Paths::new(folder.path(), "web");
        paths.clear_images().unwrap();
        std::fs::create_dir_all(paths.images.join("pre-dump/1")).unwrap();
        std::fs::write(paths.images.join("pre-dump/1/pages-1.img"), "x").unwrap();
        std::fs::write(paths.images.join("core-1.img"), "x").unwrap();
        std::os::unix::fs::symlink("pre-dump/1", paths.images.join("parent")).unwrap();
        paths.clear_images().unwrap();
        assert_eq!(std::fs::read_dir(&paths.images).unwrap().count(), 0);
    }
}
