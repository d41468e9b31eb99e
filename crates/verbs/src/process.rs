//! What all devices of one process share.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use verbatim_adopt::Adopter;
use verbatim_channel::{MEMORY_DIR, RUNTIME_DIR, RUNTIME_DIR_VARIABLE};

use crate::backend::{Device, soft};
use crate::context::{Context, DeviceInfo};
use crate::control_gate::ControlGate;
use crate::error::VerbsError;
use crate::helper;
use crate::qp::Qp;
use crate::tables::key_slot;

/// The verbs state of one process. Programs have one ([`Process::global`]); tests make their own.
#[derive(Debug)]
pub struct Process {
    runtime: PathBuf,
    adopter: OnceLock<Option<Adopter>>,
    pub(crate) control: ControlGate,
    road_map_version: AtomicU64,
    pub(crate) registry: Mutex<Registry>,
    pub(crate) helper: Mutex<Option<helper::Handle>>,
    devices: Mutex<Vec<DeviceInfo>>,
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
        Arc::new(Self {
            runtime: runtime.to_owned(),
            adopter: OnceLock::new(),
            control: ControlGate::default(),
            road_map_version: AtomicU64::new(0),
            registry: Mutex::default(),
            helper: Mutex::default(),
            devices: Mutex::default(),
        })
    }

    /// The runtime folder.
    pub fn runtime(&self) -> &Path {
        &self.runtime
    }

    /// The devices that there are: the software RNIC, if it answers at its socket in the runtime folder.
    pub fn devices(&self) -> Vec<DeviceInfo> {
        let mut known = self.devices.lock();
        if known.is_empty()
            && let Ok(device) = soft::open(&self.runtime)
        {
            let (attr, _) = device.attributes();
            known.push(DeviceInfo {
                name: attr.name.clone(),
                guid: attr.node_guid,
            });
        }
        known.clone()
    }

    /// Opens a device and starts the helper thread if there is an agent to listen to.
    pub fn open(self: &Arc<Self>, name: &str) -> Result<Arc<Context>, VerbsError> {
        let missing = || VerbsError::NoDevice {
            name: name.to_owned(),
            runtime: self.runtime.display().to_string(),
        };
        if !self.devices().iter().any(|device| device.name == name) {
            return Err(missing());
        }
        self.open_on(|| soft::open(&self.runtime))
    }

    /// Opens a device of any backend.
    pub(crate) fn open_on(
        self: &Arc<Self>,
        open: impl FnOnce() -> Result<Arc<dyn Device>, VerbsError>,
    ) -> Result<Arc<Context>, VerbsError> {
        let _pass = self.control.enter();
        let device = open()?;
        let mut registry = self.registry.lock();
        let id = registry.next_context;
        registry.next_context += 1;
        let context = Arc::new(Context::new(self.clone(), id, device));
        registry.contexts.insert(id, context.clone());
        drop(registry);
        self.changed();
        helper::ensure(self);
        Ok(context)
    }

    /// Who moves registered memory; `None` where the runtime folder cannot hold it.
    pub(crate) fn adopter(&self) -> Option<&Adopter> {
        self.adopter
            .get_or_init(|| Adopter::new(&self.runtime.join(MEMORY_DIR)).ok())
            .as_ref()
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

    /// All contexts, by id.
    pub(crate) fn contexts(&self) -> Vec<Arc<Context>> {
        self.registry.lock().contexts.values().cloned().collect()
    }

    /// To be called when the program ends: stops the helper thread and removes the file of adopted memory.
    pub fn cleanup(&self) {
        if let Some(helper) = self.helper.lock().take() {
            helper.stop();
        }
        if let Some(adopter) = self.adopter_in_use() {
            adopter.cleanup();
        }
    }
}
