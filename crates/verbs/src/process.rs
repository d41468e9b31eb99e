//! What all devices of one process share.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use verbatim_adopt::Adopter;
use verbatim_channel::{CM_CONTEXT, MEMORY_DIR, RUNTIME_DIR, RUNTIME_DIR_VARIABLE, SOCKET_NAME};
use verbatim_device::control::Gid;

use crate::backend::{self, Device, DeviceInfo, Provider};
use crate::cm_line::Cm;
use crate::context::Context;
use crate::control_gate::ControlGate;
use crate::error::VerbsError;
use crate::helper;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::tables::key_slot;
use crate::watch::{HungUp, Watch};

/// Limit for an answer of the software RNIC to a daemon's request, long enough to register much memory on a
/// busy machine. An RNIC that takes longer is taken to hang: the daemon's connection to it is closed, as if
/// the RNIC were gone. A program has no such limit: it waits for its agent.
const CONTROL_LIMIT: Duration = Duration::from_secs(60);

/// The verbs state of one process. Programs have one ([`Process::global`]); tests make their own.
#[derive(Debug)]
pub struct Process {
    runtime: PathBuf,
    /// An agent looks after it, where there is one.
    attended: bool,
    adopter: OnceLock<Option<Adopter>>,
    pub(crate) control: ControlGate,
    road_map_version: AtomicU64,
    pub(crate) registry: Mutex<Registry>,
    pub(crate) helper: Mutex<Option<helper::Handle>>,
    providers: Vec<Box<dyn Provider>>,
    /// What the helper thread sleeps on; none while the process is quiesced.
    watch: Mutex<Option<Arc<Watch>>>,
    /// On-chip memory in use.
    pub(crate) dm_bytes: Mutex<u64>,
    /// Connections by address and port.
    pub(crate) cm: Mutex<Cm>,
    /// The RNIC that it opened first.
    home: OnceLock<Home>,
    /// Its contexts have moved.
    moved: AtomicBool,
}

/// The RNIC that a program knows: a move changes neither GUID nor GIDs for it, of what it opens afterwards as little as of what it has.
#[derive(Debug, Clone)]
pub(crate) struct Home {
    pub node_guid: [u8; 8],
    pub gids: Vec<Gid>,
}

static GLOBAL: OnceLock<Arc<Process>> = OnceLock::new();

/// Everything that exists, by virtual number.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    pub contexts: BTreeMap<u32, Arc<Context>>,
    next_context: u32,
    pub qps: HashMap<u32, Arc<Qp>>,
    /// Slots of virtual local keys that new regions may not get.
    pub lkey_slots: HashSet<u32>,
    /// The same for remote keys. Those of regions that have moved stay here for ever, since a partner may still
    /// translate them.
    pub rkey_slots: HashSet<u32>,
}

impl Registry {
    /// Whether a new region may have these keys.
    pub fn keys_are_free(&self, lkey: u32, rkey: u32) -> bool {
        !self.lkey_slots.contains(&key_slot(lkey)) && !self.rkey_slots.contains(&key_slot(rkey))
    }
}

impl Process {
    /// Of this program, with the runtime folder that the environment names.
    pub fn global() -> &'static Arc<Self> {
        GLOBAL.get_or_init(|| {
            let runtime = std::env::var_os(RUNTIME_DIR_VARIABLE).unwrap_or_else(|| RUNTIME_DIR.into());
            Self::new(Path::new(&runtime))
        })
    }

    /// This program's, if it was ever used.
    pub(crate) fn existing_global() -> Option<&'static Arc<Self>> {
        GLOBAL.get()
    }

    /// With its own runtime folder.
    pub fn new(runtime: &Path) -> Arc<Self> {
        Self::with(runtime, true)
    }

    /// As [`Self::new`], of a program that no agent looks after, an agent itself for one: it does not move, and what it connects to
    /// is where its number says.
    pub fn unattended(runtime: &Path) -> Arc<Self> {
        Self::with(runtime, false)
    }

    fn with(runtime: &Path, attended: bool) -> Arc<Self> {
        Arc::new(Self {
            runtime: runtime.to_owned(),
            attended,
            adopter: OnceLock::new(),
            control: ControlGate::default(),
            road_map_version: AtomicU64::new(0),
            registry: Mutex::default(),
            helper: Mutex::default(),
            providers: backend::providers(runtime, (!attended).then_some(CONTROL_LIMIT)),
            watch: Mutex::default(),
            dm_bytes: Mutex::default(),
            cm: Mutex::default(),
            home: OnceLock::new(),
            moved: AtomicBool::new(false),
        })
    }

    /// Where the agent's socket is; none if no agent looks after it.
    pub(crate) fn agent_socket(&self) -> Option<PathBuf> {
        self.attended.then(|| self.runtime.join(SOCKET_NAME))
    }

    /// The runtime folder.
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The devices that there are, of all backends.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        let mut found: Vec<DeviceInfo> = Vec::new();
        for device in self.providers.iter().flat_map(|provider| provider.devices()) {
            if !found.iter().any(|other| other.name == device.name) {
                found.push(device);
            }
        }
        found
    }

    /// Opens a device and starts the helper thread.
    pub fn open(self: &Arc<Self>, name: &str) -> Result<Arc<Context>, VerbsError> {
        let has = |provider: &dyn Provider| provider.devices().iter().any(|device| device.name == name);
        let provider = self
            .providers
            .iter()
            .find(|provider| has(provider.as_ref()))
            .ok_or_else(|| VerbsError::NoDevice {
                name: name.to_owned(),
                runtime: self.runtime.display().to_string(),
            })?;
        self.open_on(|| provider.open(name))
    }

    /// Whether there is a device at which programs connect by address and port.
    pub(crate) fn has_cm_device(&self) -> bool {
        self.providers.iter().any(|provider| provider.has_cm())
    }

    /// Opens a context of it, which is none of the program's devices.
    pub(crate) fn open_cm_device(&self) -> Result<Arc<dyn Device>, VerbsError> {
        let provider = self.providers.iter().find(|provider| provider.has_cm());
        provider
            .map(|provider| provider.open(""))
            .ok_or_else(|| VerbsError::NoDevice {
                name: "rdma_cm".to_owned(),
                runtime: self.runtime.display().to_string(),
            })?
    }

    /// The RNIC that the program knows, if `device` is of another one: the program has moved since it saw the first.
    pub(crate) fn home_of(&self, device: &dyn Device) -> Option<&Home> {
        if !self.attended || device.blocker().is_some() {
            return None;
        }
        let (attr, port) = device.attributes();
        let home = self.home.get_or_init(|| Home {
            node_guid: attr.node_guid,
            gids: port.gids.clone(),
        });
        // An RNIC that was started again may have other addresses.
        let is_other = home.node_guid != attr.node_guid;
        let has_moved = self.moved.load(SeqCst) && home.gids != port.gids;
        (is_other || has_moved).then_some(home)
    }

    /// Its contexts are at another RNIC now.
    pub(crate) fn has_moved(&self) {
        self.moved.store(true, SeqCst);
    }

    /// Opens a device of any backend.
    pub(crate) fn open_on(
        self: &Arc<Self>,
        open: impl FnOnce() -> Result<Arc<dyn Device>, VerbsError>,
    ) -> Result<Arc<Context>, VerbsError> {
        let _pass = self.control.enter();
        let device = open()?;
        let contexts = self.contexts();
        let moves = contexts.iter().map(|context| context.moves.load(SeqCst));
        let moves = moves.max().unwrap_or_default().max(1);
        let home = self.home_of(&*device).map(|home| (home, moves));
        let mut registry = self.registry.lock();
        let id = registry.next_context;
        registry.next_context += 1;
        let context = Arc::new(Context::new(self.clone(), id, device.clone(), home)?);
        registry.contexts.insert(id, context.clone());
        drop(registry);
        self.changed();
        self.watch_device(id, &*device);
        helper::ensure(self);
        Ok(context)
    }

    /// What the helper thread sleeps on, with all devices in it.
    pub(crate) fn watch(&self) -> Result<Arc<Watch>, VerbsError> {
        let mut watch = self.watch.lock();
        if let Some(watch) = watch.as_ref().filter(|watch| watch.is_ours()) {
            return Ok(watch.clone());
        }
        let new = Arc::new(Watch::new()?);
        *watch = Some(new.clone());
        drop(watch);
        for context in self.contexts() {
            if let Ok(device) = context.device() {
                new.add_device(context.id(), &*device);
            }
        }
        let line = self.cm.lock().own().and_then(|line| line.device().cloned());
        if let Some(device) = line {
            new.add_device(CM_CONTEXT, &*device);
        }
        Ok(new)
    }

    /// The helper thread sleeps on this device too.
    pub(crate) fn watch_device(&self, context: u32, device: &dyn Device) {
        if let Some(watch) = self.watch.lock().as_ref().filter(|watch| watch.is_ours()) {
            watch.add_device(context, device);
        }
    }

    /// Takes what the RNICs have said since.
    pub(crate) fn look_after_devices(&self) {
        if let Ok(watch) = self.watch() {
            let ready = watch.wait(Some(Duration::ZERO));
            self.look_after(&ready.contexts, &watch);
        }
    }

    /// Takes what the RNICs of these contexts have said.
    pub(crate) fn look_after(&self, contexts: &[(u32, HungUp)], watch: &Watch) {
        for (id, hung_up) in contexts {
            if *id == CM_CONTEXT {
                // Closed with its RNIC, which ends the watch, too.
                if self.cm.lock().look_after() {
                    self.changed();
                }
                continue;
            }
            let context = self.registry.lock().contexts.get(id).cloned();
            if let Some(context) = context {
                context.look_after(watch, *hung_up);
            }
        }
    }

    /// Lets go of what the helper thread sleeps on.
    pub(crate) fn forget_watch(&self) {
        *self.watch.lock() = None;
    }

    /// Who moves registered memory; `None` where the runtime folder cannot hold it.
    pub(crate) fn adopter(&self) -> Option<&Adopter> {
        self.adopter
            .get_or_init(|| Adopter::new(&self.runtime.join(MEMORY_DIR)).ok())
            .as_ref()
    }

    /// The file of adopted memory, by device and inode number, if there is one.
    pub(crate) fn memory_file(&self) -> Option<(u64, u64)> {
        let file = self.adopter_in_use()?.open_file().ok()??;
        let stat = rustix::fs::fstat(&file).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// The adopter, if it was ever needed.
    pub(crate) fn adopter_in_use(&self) -> Option<&Adopter> {
        self.adopter.get()?.as_ref()
    }

    /// The road map has changed.
    pub(crate) fn changed(&self) {
        self.road_map_version.fetch_add(1, SeqCst);
    }

    /// How often the road map has changed.
    pub(crate) fn road_map_version(&self) -> u64 {
        self.road_map_version.load(SeqCst)
    }

    /// The queue pair of that virtual number.
    pub(crate) fn qp(&self, qpn: u32) -> Option<Arc<Qp>> {
        self.registry.lock().qps.get(&qpn).cloned()
    }

    /// All queue pairs, by number.
    pub(crate) fn qps(&self) -> Vec<Arc<Qp>> {
        let mut qps: Vec<_> = self.registry.lock().qps.values().cloned().collect();
        qps.sort_by_key(|qp| qp.number());
        qps
    }

    /// All shared receive queues.
    pub(crate) fn srqs(&self) -> impl Iterator<Item = Arc<Srq>> {
        self.contexts().into_iter().flat_map(|context| context.srqs())
    }

    /// All contexts, by id.
    pub(crate) fn contexts(&self) -> Vec<Arc<Context>> {
        self.registry.lock().contexts.values().cloned().collect()
    }

    /// To be called when the program ends: stops the helper thread and removes the file of adopted memory.
    pub fn cleanup(&self) {
        if let Some(helper) = self.helper.lock().take() {
            helper.stop(self);
        }
        if let Some(adopter) = self.adopter_in_use() {
            adopter.cleanup();
        }
    }
}
