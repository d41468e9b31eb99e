//! The objects of one device, and which must outlive which.
//!
//! An object holds those that it was made from, so that they are destroyed after it, whatever the order in which a table
//! lets go of them.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, RwLock};
use verbatim_device::control::{AddressVector, MwType, QpAttr, QpCap, QpType, SrqAttr};

use super::channel::{Armed, Channel, Source};
use super::ffi::{ibv_ah, ibv_cq, ibv_mr, ibv_mw, ibv_pd, ibv_qp, ibv_srq};
use super::live::Live;
use super::progress::{Progress, QpProgress};
use super::windows::Noted;
use crate::error::VerbsError;
use crate::tables::Radix24;
use crate::work::Wc;

#[derive(Debug)]
pub struct Mr {
    pub live: Live<ibv_mr>,
    /// Those that it was ever in.
    pub pds: Mutex<Vec<Arc<Live<ibv_pd>>>>,
}

#[derive(Debug)]
pub struct Mw {
    pub live: Live<ibv_mw>,
    pub mw_type: MwType,
    /// What was last posted of it.
    pub noted: Mutex<Noted>,
    pub pd: Arc<Live<ibv_pd>>,
}

#[derive(Debug)]
pub struct Ah {
    pub live: Live<ibv_ah>,
    pub _pd: Arc<Live<ibv_pd>>,
}

/// By physical number, whose completions these are.
pub type Owners = Radix24<Option<Arc<QpProgress>>>;

#[derive(Debug)]
pub struct Cq {
    pub live: Live<ibv_cq>,
    pub number: u32,
    pub owners: RwLock<Owners>,
    /// Goes up after each change of those.
    pub owner_changes: AtomicU32,
    pub armed: Arc<Armed>,
    pub channel: Option<Arc<Source>>,
    /// Entries that the program does not know of, for markers.
    pub spare: AtomicU32,
    /// How many those are when no marker is under way.
    pub hidden: u32,
    /// Completions that were taken while nobody had its end.
    pub left: Mutex<VecDeque<Wc>>,
}

/// A completion channel.
#[derive(Debug)]
pub struct Comp {
    /// The kernel's.
    pub source: Arc<Source>,
    /// The program's that it is in.
    pub shell: Mutex<Weak<Channel>>,
}

#[derive(Debug)]
pub struct Srq {
    pub live: Live<ibv_srq>,
    pub attr: SrqAttr,
    pub progress: Arc<Progress>,
    pub _pd: Arc<Live<ibv_pd>>,
}

#[derive(Debug)]
pub struct Qp {
    pub live: Live<ibv_qp>,
    pub number: u32,
    pub qp_type: QpType,
    pub cap: QpCap,
    pub progress: Arc<QpProgress>,
    pub cqs: [Arc<Cq>; 2],
    pub srq: Option<Arc<Srq>>,
    pub pd: Arc<Live<ibv_pd>>,
    /// As it was told.
    pub attr: Mutex<QpAttr>,
    /// Where the markers of one for datagrams go.
    pub marker_ah: Mutex<Option<Live<ibv_ah>>>,
}

impl Qp {
    /// Its completions count from now on.
    pub fn own(&self) {
        for cq in &self.cqs {
            *cq.owners.write().at_mut(self.number) = Some(self.progress.clone());
            cq.owner_changes.fetch_add(1, Release);
        }
    }

    /// Its completions count no more.
    pub fn disown(&self) {
        for cq in &self.cqs {
            *cq.owners.write().at_mut(self.number) = None;
            cq.owner_changes.fetch_add(1, Release);
        }
    }
}

/// Objects of one kind, by number.
#[derive(Debug)]
pub struct Table<T> {
    kind: &'static str,
    objects: RwLock<HashMap<u32, Arc<T>>>,
}

impl<T> Table<T> {
    fn new(kind: &'static str) -> Self {
        Self {
            kind,
            objects: RwLock::default(),
        }
    }

    /// An errno would not tell which of several objects is meant.
    fn missing(&self, number: u32) -> VerbsError {
        VerbsError::Gone {
            object: format!("{} {number:#x}", self.kind),
        }
    }

    pub fn get(&self, number: u32) -> Result<Arc<T>, VerbsError> {
        self.find(number).ok_or_else(|| self.missing(number))
    }

    pub fn find(&self, number: u32) -> Option<Arc<T>> {
        self.objects.read().get(&number).cloned()
    }

    pub fn insert(&self, number: u32, object: T) -> Arc<T> {
        let object = Arc::new(object);
        self.objects.write().insert(number, object.clone());
        object
    }

    /// Takes it out, unless `destroy` fails. It is out before it is destroyed, since its number may be another's right
    /// after that.
    pub fn destroy(
        &self,
        number: u32,
        destroy: impl FnOnce(&T) -> Result<(), VerbsError>,
    ) -> Result<(), VerbsError> {
        let object = self.remove(number).ok_or_else(|| self.missing(number))?;
        destroy(&object).inspect_err(|_| _ = self.objects.write().insert(number, object.clone()))
    }

    /// All that there are.
    pub fn all(&self) -> Vec<Arc<T>> {
        self.objects.read().values().cloned().collect()
    }

    /// Takes it out.
    pub fn remove(&self, number: u32) -> Option<Arc<T>> {
        self.objects.write().remove(&number)
    }
}

/// Everything that was made on a device.
#[derive(Debug)]
pub struct Objects {
    pub qps: Table<Qp>,
    pub srqs: Table<Srq>,
    pub ahs: Table<Ah>,
    /// By the upper 24 bits of the remote key.
    pub mws: Table<Mw>,
    /// By local key.
    pub mrs: Table<Mr>,
    pub cqs: Table<Cq>,
    pub channels: Table<Comp>,
    pub pds: Table<Live<ibv_pd>>,
    last_number: AtomicU32,
    /// The way to the device itself.
    pub own: AddressVector,
}

impl Objects {
    pub fn new(own: AddressVector) -> Self {
        Self {
            qps: Table::new("queue pair"),
            srqs: Table::new("shared receive queue"),
            ahs: Table::new("address handle"),
            mws: Table::new("memory window of slot"),
            mrs: Table::new("memory region"),
            cqs: Table::new("completion queue"),
            channels: Table::new("completion channel"),
            pds: Table::new("protection domain"),
            last_number: AtomicU32::new(0),
            own,
        }
    }

    /// A number for an object to which the library gives none. 0 is never one.
    pub fn next_number(&self) -> u32 {
        loop {
            let number = self.last_number.fetch_add(1, Relaxed).wrapping_add(1);
            if number != 0 {
                return number;
            }
        }
    }
}
