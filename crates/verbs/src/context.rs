//! An opened device and the objects made on it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::{Mutex, RwLock};
use verbatim_device::control::{DeviceAttr, PortAttr};

use crate::backend::Device;
use crate::cq::Cq;
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::pd::Pd;
use crate::process::Process;
use crate::qp::Qp;
use crate::tables::KeyTable;

/// A device that can be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Its name, `verbatim0`.
    pub name: String,
    /// Its GUID in network byte order.
    pub guid: [u8; 8],
}

/// The devices of this program's host: of [`Process::global`].
pub fn devices() -> Vec<DeviceInfo> {
    Process::global().devices()
}

/// An opened device.
#[derive(Debug)]
pub struct Context {
    process: Arc<Process>,
    id: u32,
    /// The physical context; `None` only while the process is quiesced, when no control verb runs.
    device: RwLock<Option<Arc<dyn Device>>>,
    /// As the program saw them first; a move does not change them.
    device_attr: DeviceAttr,
    port_attr: PortAttr,
    pub(crate) objects: Mutex<Objects>,
    /// Every local key; used when something has moved.
    pub(crate) lkeys: Arc<KeyTable>,
}

/// The record of what there is: what the road map tells.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub pds: BTreeMap<u32, Arc<Pd>>,
    /// By virtual local key.
    pub mrs: BTreeMap<u32, Arc<Mr>>,
    pub cqs: BTreeMap<u32, Arc<Cq>>,
    pub qps: BTreeMap<u32, Arc<Qp>>,
    next_pd: u32,
    next_cq: u32,
    /// Keys are translated, since the context has moved.
    pub moved: bool,
}

impl Context {
    /// Opens a device of this program's host: of [`Process::global`].
    pub fn open(name: &str) -> Result<Arc<Self>, VerbsError> {
        Process::global().open(name)
    }

    pub(crate) fn new(process: Arc<Process>, id: u32, device: Arc<dyn Device>) -> Self {
        let (device_attr, port_attr) = device.attributes();
        let (device_attr, port_attr) = (device_attr.clone(), port_attr.clone());
        Self {
            process,
            id,
            device: RwLock::new(Some(device)),
            device_attr,
            port_attr,
            objects: Mutex::default(),
            lkeys: Arc::new(KeyTable::new()),
        }
    }

    /// Its number within the process.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// What the device is and can do.
    pub fn device_attr(&self) -> &DeviceAttr {
        &self.device_attr
    }

    /// Its only port.
    pub fn port_attr(&self) -> &PortAttr {
        &self.port_attr
    }

    /// An entry of the port's GID table, in network byte order.
    pub fn gid(&self, index: usize) -> Option<[u8; 16]> {
        self.port_attr.gids.get(index).map(|entry| entry.gid)
    }

    pub(crate) fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The physical device.
    pub(crate) fn device(&self) -> Result<Arc<dyn Device>, VerbsError> {
        self.device.read().clone().ok_or_else(|| VerbsError::Gone {
            object: format!("context {}", self.id),
        })
    }

    /// Takes the physical device away.
    pub(crate) fn take_device(&self) -> Option<Arc<dyn Device>> {
        self.device.write().take()
    }

    /// Puts a physical device in.
    pub(crate) fn set_device(&self, device: Arc<dyn Device>) {
        *self.device.write() = Some(device);
    }

    /// The keys' translation, if this context has moved.
    pub(crate) fn moved_keys(&self) -> Option<Arc<KeyTable>> {
        self.objects.lock().moved.then(|| self.lkeys.clone())
    }

    /// Makes a protection domain.
    pub fn alloc_pd(self: &Arc<Self>) -> Result<Arc<Pd>, VerbsError> {
        let _pass = self.process.control.enter();
        let physical = self.device()?.alloc_pd()?;
        let mut objects = self.objects.lock();
        objects.next_pd += 1;
        let pd = Arc::new(Pd {
            context: self.clone(),
            number: objects.next_pd,
            physical: AtomicU32::new(physical),
            users: AtomicUsize::new(0),
        });
        objects.pds.insert(pd.number, pd.clone());
        self.process.changed();
        Ok(pd)
    }

    pub(crate) fn dealloc_pd(&self, pd: &Pd) -> Result<(), VerbsError> {
        let _pass = self.process.control.enter();
        let object = || format!("protection domain {}", pd.number);
        let mut objects = self.objects.lock();
        busy(&pd.users, object)?;
        let removed = objects.pds.remove(&pd.number);
        let removed = removed.ok_or_else(|| VerbsError::Gone { object: object() })?;
        drop(objects);
        let outcome = self.device()?.dealloc_pd(pd.physical.load(SeqCst));
        if outcome.is_err() {
            self.objects.lock().pds.insert(pd.number, removed);
        }
        self.process.changed();
        outcome
    }

    /// Makes a completion queue with at least so many entries.
    pub fn create_cq(self: &Arc<Self>, entries: u32) -> Result<Arc<Cq>, VerbsError> {
        let _pass = self.process.control.enter();
        let device = self.device()?;
        let place = device.create_cq(entries)?;
        let ring = device.cq_end(&place)?;
        let mut objects = self.objects.lock();
        objects.next_cq += 1;
        let cq = Arc::new(Cq::new(self.clone(), objects.next_cq, place, ring));
        objects.cqs.insert(cq.number(), cq.clone());
        self.process.changed();
        Ok(cq)
    }

    pub(crate) fn destroy_cq(&self, cq: &Cq) -> Result<(), VerbsError> {
        let _pass = self.process.control.enter();
        let object = || format!("completion queue {}", cq.number());
        let mut objects = self.objects.lock();
        busy(&cq.users, object)?;
        let removed = objects.cqs.remove(&cq.number());
        let removed = removed.ok_or_else(|| VerbsError::Gone { object: object() })?;
        drop(objects);
        let outcome = self.device()?.destroy_cq(cq.physical());
        match outcome {
            Ok(()) => cq.queue.lock().detach(),
            Err(_) => _ = self.objects.lock().cqs.insert(cq.number(), removed),
        }
        self.process.changed();
        outcome
    }

    /// Closes the device. The RNIC destroys what the program has left on it; the objects cannot be used after it.
    pub fn close(&self) -> Result<(), VerbsError> {
        let _pass = self.process.control.enter();
        let objects = std::mem::take(&mut *self.objects.lock());
        let mut registry = self.process.registry.lock();
        registry.contexts.remove(&self.id);
        registry.qps.retain(|qpn, _| !objects.qps.contains_key(qpn));
        drop(registry);
        for qp in objects.qps.values() {
            qp.detach();
        }
        for cq in objects.cqs.values() {
            cq.queue.lock().detach();
        }
        for mr in objects.mrs.values() {
            mr.give_pages_back(&self.process);
        }
        self.take_device();
        self.process.changed();
        Ok(())
    }
}

fn busy(users: &AtomicUsize, object: impl Fn() -> String) -> Result<(), VerbsError> {
    match users.load(SeqCst) {
        0 => Ok(()),
        users => Err(VerbsError::Busy {
            object: object(),
            users,
        }),
    }
}
