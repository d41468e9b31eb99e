//! An opened device and the objects made on it.

use std::collections::BTreeMap;
use std::net::Ipv6Addr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};

use parking_lot::{Mutex, RwLock};
use verbatim_device::control::{DeviceAttr, PortAttr};
use verbatim_device::gids::counterpart;

use crate::ah::Ah;
use crate::async_events::{AsyncEvent, AsyncQueue};
use crate::backend::{CqPlace, Device, DeviceInfo};
use crate::channel::CompChannel;
use crate::cq::Cq;
use crate::datagrams::Datagrams;
use crate::dm::Dm;
use crate::dump::Standing;
use crate::error::VerbsError;
use crate::mr::Mr;
use crate::mw::{Mw, Windows};
use crate::pd::Pd;
use crate::process::{Home, Process};
use crate::qp::Qp;
use crate::retired::Retired;
use crate::srq::Srq;
use crate::tables::KeyTable;

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
    /// The GID table of the RNIC where it is now, of one that has moved.
    physical_gids: RwLock<Option<Vec<[u8; 16]>>>,
    is_movable: bool,
    /// The RNIC is gone for ever.
    pub(crate) dead: AtomicBool,
    pub(crate) async_queue: AsyncQueue,
    pub(crate) objects: Mutex<Objects>,
    /// Held by who destroys a queue pair until nobody knows its number any more, and by who has made one. An RNIC may give
    /// the number again at once: then the completions of the old one must be gone before the new one owns it.
    pub(crate) numbers: Mutex<()>,
    /// Where datagrams go and come from.
    pub(crate) datagrams: Arc<Datagrams>,
    /// How often it has moved.
    pub(crate) moves: AtomicU32,
    /// The keys of its windows, of use when it has moved.
    pub(crate) windows: Arc<Windows>,
    /// Every local key; used when something has moved.
    pub(crate) lkeys: Arc<KeyTable>,
    /// Its physical queue pairs that are no longer used.
    pub(crate) retired: Retired,
    /// What stands still, since a dump was taken ([`crate::dump`]).
    pub(crate) standing: Mutex<Option<Standing>>,
    /// Held by who takes events from the RNIC until the program can see them.
    taking_events: Mutex<()>,
}

/// The record of what there is: what the road map tells.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    pub pds: BTreeMap<u32, Arc<Pd>>,
    /// By virtual local key.
    pub mrs: BTreeMap<u32, Arc<Mr>>,
    pub cqs: BTreeMap<u32, Arc<Cq>>,
    pub qps: BTreeMap<u32, Arc<Qp>>,
    pub srqs: BTreeMap<u32, Arc<Srq>>,
    pub ahs: BTreeMap<u32, Arc<Ah>>,
    /// By the slot of their key.
    pub mws: BTreeMap<u32, Arc<Mw>>,
    pub dms: Vec<Arc<Dm>>,
    pub channels: BTreeMap<u32, Arc<CompChannel>>,
    pub next_pd: u32,
    pub next_cq: u32,
    pub next_channel: u32,
    pub next_srq: u32,
    /// Keys are translated, since the context has moved.
    pub moved: bool,
}

impl Context {
    /// Opens a device of this program's host: of [`Process::global`].
    pub fn open(name: &str) -> Result<Arc<Self>, VerbsError> {
        Process::global().open(name)
    }

    /// Of a program that knows another RNIC, with that and with how often the program has moved.
    pub(crate) fn new(
        process: Arc<Process>,
        id: u32,
        device: Arc<dyn Device>,
        home: Option<(&Home, u32)>,
    ) -> Result<Self, VerbsError> {
        let (device_attr, port_attr) = device.attributes();
        let (mut device_attr, mut port_attr) = (device_attr.clone(), port_attr.clone());
        let now = port_attr.gid_table();
        if let Some((home, _)) = home {
            device_attr.node_guid = home.node_guid;
            port_attr.gids.clone_from(&home.gids);
        }
        let context = Self {
            process,
            id,
            is_movable: device.blocker().is_none(),
            device: RwLock::new(Some(device)),
            device_attr,
            port_attr,
            physical_gids: RwLock::default(),
            dead: AtomicBool::new(false),
            async_queue: AsyncQueue::new()?,
            objects: Mutex::default(),
            numbers: Mutex::default(),
            retired: Retired::default(),
            datagrams: Arc::default(),
            moves: AtomicU32::new(0),
            windows: Arc::default(),
            lkeys: Arc::new(KeyTable::new()),
            standing: Mutex::default(),
            taking_events: Mutex::default(),
        };
        if let Some((_, moves)) = home {
            context.moves.store(moves, SeqCst);
            context.objects.lock().moved = true;
            context.find_own_ways(&now);
        }
        Ok(context)
    }

    /// The RNIC's GIDs from now on. Each of the program's stands for one of them: which, and for which of the program's.
    pub(crate) fn find_own_ways(&self, now: &[[u8; 16]]) -> Vec<([u8; 16], [u8; 16])> {
        let known = self.port_attr.gid_table();
        let own = known.iter().filter_map(|gid| {
            let index = counterpart(&known, *gid, now)?;
            Some((now[index], *gid))
        });
        let own: Vec<_> = own.collect();
        *self.physical_gids.write() = Some(now.to_vec());
        self.datagrams.arrive(own.clone());
        own
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

    /// The RNIC's index of the GID that the program knows by `index`.
    pub(crate) fn physical_gid_index(&self, index: u8) -> Result<u8, VerbsError> {
        let now = self.physical_gids.read();
        // What the program may not know, the RNIC refuses.
        let (Some(now), Some(known)) = (&*now, self.gid(index.into())) else {
            return Ok(index);
        };
        match counterpart(&self.port_attr.gid_table(), known, now) {
            Some(index) => Ok(index as u8),
            None => Err(VerbsError::Invalid(format!(
                "nothing takes the place of the GID of index {index}, {}, where the program is now",
                Ipv6Addr::from(known)
            ))),
        }
    }

    /// The GID of that index at the RNIC.
    pub(crate) fn physical_gid(&self, index: u8) -> Option<[u8; 16]> {
        match &*self.physical_gids.read() {
            Some(now) => now.get(usize::from(index)).copied(),
            None => self.gid(index.into()),
        }
    }

    /// Whether it may ever be on another RNIC. The numbers and keys of one that may not are this RNIC's for ever: nothing
    /// is translated, nothing is looked up by them, and those of two such RNICs may be the same.
    pub(crate) fn is_movable(&self) -> bool {
        self.is_movable
    }

    /// What `ibv_context.async_fd` is: readable when there is an asynchronous event. The program may make it non-blocking.
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.async_queue.fd()
    }

    /// Waits for an asynchronous event (ibv_get_async_event(3)). If it concerns a queue, it must be acknowledged there.
    /// `EAGAIN` if the descriptor is non-blocking and there is none; `EINTR` after a signal.
    pub fn get_async_event(&self) -> Result<AsyncEvent, VerbsError> {
        self.async_queue.next()
    }

    /// Whether its RNIC is gone for ever, noticed yet or not.
    pub(crate) fn has_lost_rnic(&self) -> bool {
        self.is_dead() || self.device.read().as_ref().is_some_and(|device| device.is_gone())
    }

    /// Whether its RNIC is gone for ever.
    pub fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    pub(crate) fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// The physical device.
    pub(crate) fn device(&self) -> Result<Arc<dyn Device>, VerbsError> {
        self.device.read().clone().ok_or_else(|| match self.is_dead() {
            // It died while the process had let go of it, and was never taken up.
            true => VerbsError::Channel {
                verb: "use of the device",
                peer: "software RNIC",
                source: verbatim_seqpacket::Error::Closed,
            },
            false => VerbsError::Gone {
                object: format!("context {}", self.id),
            },
        })
    }

    /// What the program calls it.
    pub(crate) fn device_name(&self) -> &str {
        &self.device_attr.name
    }

    /// Takes the physical device away.
    pub(crate) fn take_device(&self) -> Option<Arc<dyn Device>> {
        self.device.write().take()
    }

    /// Puts a physical device in.
    pub(crate) fn set_device(&self, device: Arc<dyn Device>) {
        self.process.watch_device(self.id, &*device);
        *self.device.write() = Some(device);
    }

    /// As an RNIC's answer to `verb` that never comes.
    pub(crate) fn dead(&self, verb: &'static str) -> VerbsError {
        VerbsError::Refused {
            verb,
            errno: libc::EIO,
            message: "the device's RNIC is gone".to_owned(),
        }
    }

    /// Destroys something at the RNIC. If that is gone, so is all that it had.
    pub(crate) fn destroy_physically(
        &self,
        destroy: impl FnOnce(&dyn Device) -> Result<(), VerbsError>,
    ) -> Result<(), VerbsError> {
        match self.device().and_then(|device| destroy(&*device)) {
            Err(error) if error.is_loss_of_device() => Ok(()),
            outcome => outcome,
        }
    }

    /// Makes address handles for where datagram queue pairs have moved to, while there is an RNIC.
    pub(crate) fn make_ways(&self) {
        let Ok(device) = self.device() else { return };
        let ahs: Vec<_> = self.objects.lock().ahs.values().cloned().collect();
        ahs.iter().for_each(|ah| ah.make_ways(&*device));
    }

    /// Puts what the RNIC has said where the program finds it.
    pub(crate) fn take_events(&self, device: &dyn Device) {
        let _taking = self.taking_events.lock();
        while let Some(event) = device.next_async_event() {
            self.deliver(event);
        }
    }

    /// Its memory windows.
    pub(crate) fn mws(&self) -> Vec<Arc<Mw>> {
        self.objects.lock().mws.values().cloned().collect()
    }

    /// Its shared receive queues, by number.
    pub(crate) fn srqs(&self) -> Vec<Arc<Srq>> {
        self.objects.lock().srqs.values().cloned().collect()
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
        let pd = Arc::new(Pd::new(self.clone(), objects.next_pd, physical));
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
        let outcome = self.destroy_physically(|device| device.dealloc_pd(pd.physical.load(SeqCst)));
        if outcome.is_err() {
            self.objects.lock().pds.insert(pd.number, removed);
        }
        self.process.changed();
        outcome
    }

    /// Makes a completion channel.
    pub fn create_comp_channel(self: &Arc<Self>) -> Result<Arc<CompChannel>, VerbsError> {
        CompChannel::create(self)
    }

    /// Gives the program on-chip memory (ibv_alloc_dm(3)), aligned to a power of two.
    pub fn alloc_dm(self: &Arc<Self>, length: u64, log_align: u32) -> Result<Arc<Dm>, VerbsError> {
        Dm::alloc(self, length, log_align)
    }

    /// Makes a completion queue with at least so many entries, whose events go to `channel`.
    pub fn create_cq(
        self: &Arc<Self>,
        entries: u32,
        channel: Option<&Arc<CompChannel>>,
    ) -> Result<Arc<Cq>, VerbsError> {
        let _pass = self.process.control.enter();
        if channel.is_some_and(|channel| !Arc::ptr_eq(channel.context(), self)) {
            return Err(VerbsError::Invalid(
                "the completion channel is another device's".to_owned(),
            ));
        }
        let device = self.device()?;
        let mut objects = self.objects.lock();
        objects.next_cq += 1;
        let number = objects.next_cq;
        drop(objects);
        let place = device.create_cq(entries, channel.map(|channel| (channel.physical(), number)))?;
        self.add_cq(&*device, number, place, channel)
    }

    /// A completion queue that the RNIC has made, by its number for the program.
    pub(crate) fn add_cq(
        self: &Arc<Self>,
        device: &dyn Device,
        number: u32,
        place: CqPlace,
        channel: Option<&Arc<CompChannel>>,
    ) -> Result<Arc<Cq>, VerbsError> {
        let ring = device.cq_end(&place)?;
        let cq = Arc::new(Cq::new(self.clone(), number, place, ring, channel.cloned()));
        if let Some(channel) = channel {
            channel.add(&cq);
        }
        self.objects.lock().cqs.insert(cq.number(), cq.clone());
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
        if let Some(channel) = cq.channel() {
            channel.remove(cq);
        }
        // Before it is destroyed: its end uses it until that is gone.
        let fires = cq.queue.lock().detach();
        let outcome = self.destroy_physically(|device| device.destroy_cq(cq.physical()));
        match outcome {
            Ok(()) => {}
            Err(_) => {
                cq.attach_again(fires);
                if let Some(channel) = cq.channel() {
                    channel.add(&removed);
                }
                self.objects.lock().cqs.insert(cq.number(), removed);
            }
        }
        self.process.changed();
        outcome
    }

    /// Closes the device. The RNIC destroys what the program has left on it; the objects cannot be used after it.
    pub fn close(&self) -> Result<(), VerbsError> {
        let _pass = self.process.control.enter();
        // What stood still is destroyed with the rest.
        self.standing.lock().take();
        let objects = std::mem::take(&mut *self.objects.lock());
        let mut registry = self.process.registry.lock();
        registry.contexts.remove(&self.id);
        registry
            .qps
            .retain(|qpn, qp| objects.qps.get(qpn).is_none_or(|ours| !Arc::ptr_eq(ours, qp)));
        drop(registry);
        for qp in objects.qps.values() {
            qp.detach();
        }
        for cq in objects.cqs.values() {
            _ = cq.queue.lock().detach();
        }
        for srq in objects.srqs.values() {
            srq.close();
        }
        // Before its regions' pages are given back: what the RNIC may write to is the program's memory until then.
        self.take_device();
        for mr in objects.mrs.values() {
            mr.give_pages_back(&self.process);
        }
        *self.process.dm_bytes.lock() -= objects.dms.iter().map(|dm| dm.length()).sum::<u64>();
        self.process.changed();
        Ok(())
    }
}

pub(crate) fn busy(users: &AtomicUsize, object: impl Fn() -> String) -> Result<(), VerbsError> {
    match users.load(SeqCst) {
        0 => Ok(()),
        users => Err(VerbsError::Busy {
            object: object(),
            users,
        }),
    }
}
