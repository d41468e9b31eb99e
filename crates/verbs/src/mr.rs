//! Memory regions.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use verbatim_adopt::{AdoptError, Backing, Token};
use verbatim_channel::SegmentRecord;
use verbatim_device::control::Access;

use crate::backend::{Device, PhysicalMrInit};
use crate::error::VerbsError;
use crate::nap;
use crate::pd::Pd;
use crate::process::Process;
use crate::tables::key_slot;

/// How often a region is registered anew because its keys collide with virtual ones.
const MAX_COLLISIONS: usize = 64;

/// A memory region.
#[derive(Debug)]
pub struct Mr {
    pd: Arc<Pd>,
    lkey: u32,
    rkey: u32,
    pub(crate) address: u64,
    pub(crate) length: u64,
    pub(crate) iova: u64,
    pub(crate) access: Access,
    /// Where the bytes are.
    pub(crate) segments: Vec<SegmentRecord>,
    /// The RNIC's local key.
    pub(crate) physical_lkey: AtomicU32,
    /// The claim on the pages in the memory file; taken when the region goes.
    token: Mutex<Option<Token>>,
}

impl Mr {
    /// The virtual local key.
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// The virtual remote key.
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Start in the program's address space.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    pub(crate) fn register(
        pd: &Arc<Pd>,
        address: u64,
        length: u64,
        iova: u64,
        access: Access,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let _pass = process.control.enter();
        let device = pd.context.device()?;
        let (segments, token) = adopt(process, address, length)?;
        let registered = register_physically(pd, &*device, &segments, address, length, iova, access);
        let (lkey, rkey) = match registered {
            Ok(keys) => keys,
            Err(error) => {
                release(process, token);
                return Err(error);
            }
        };
        let mr = Arc::new(Self {
            pd: pd.clone(),
            lkey,
            rkey,
            address,
            length,
            iova,
            access,
            segments,
            physical_lkey: AtomicU32::new(lkey),
            token: Mutex::new(token),
        });
        pd.context.lkeys.set(lkey, lkey);
        let mut objects = pd.context.objects.lock();
        objects.mrs.insert(lkey, mr.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        process.changed();
        Ok(mr)
    }

    /// Deregisters it and gives its pages back to the program.
    pub fn dereg(&self) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        let process = context.process();
        let _pass = process.control.enter();
        let removed = context.objects.lock().mrs.remove(&self.lkey);
        let removed = removed.ok_or_else(|| VerbsError::Gone {
            object: format!("memory region {:#x}", self.lkey),
        })?;
        if let Err(error) = context.device()?.dereg_mr(self.physical_lkey.load(SeqCst)) {
            context.objects.lock().mrs.insert(self.lkey, removed);
            return Err(error);
        }
        context.lkeys.remove(self.lkey);
        let mut registry = process.registry.lock();
        registry.lkey_slots.remove(&key_slot(self.lkey));
        // The keys of a region that has moved stay taken, see `Registry::rkey_slots`.
        if self.physical_lkey.load(SeqCst) == self.lkey {
            registry.rkey_slots.remove(&key_slot(self.rkey));
        }
        drop(registry);
        self.pd.users.fetch_sub(1, SeqCst);
        self.give_pages_back(process);
        process.changed();
        Ok(())
    }

    /// Turns the region's pages into the program's private memory again.
    pub(crate) fn give_pages_back(&self, process: &Process) {
        release(process, self.token.lock().take());
    }
}

/// Moves the region's pages into the memory file, where that is possible.
fn adopt(
    process: &Process,
    address: u64,
    length: u64,
) -> Result<(Vec<SegmentRecord>, Option<Token>), VerbsError> {
    let as_it_is = || {
        let segment = SegmentRecord {
            address,
            length,
            offset: None,
        };
        (vec![segment], None)
    };
    let Some(adopter) = process.adopter().filter(|_| length > 0) else {
        return Ok(as_it_is());
    };
    match nap::while_asleep(adopter, |adopter| {
        adopter.adopt(address as usize, length as usize)
    }) {
        Ok(adoption) => {
            let segments = adoption
                .segments
                .into_iter()
                .map(|(range, backing)| SegmentRecord {
                    address: range.start,
                    length: range.end - range.start,
                    offset: match backing {
                        Backing::File { offset } => Some(offset),
                        Backing::Process => None,
                    },
                });
            Ok((segments.collect(), Some(adoption.token)))
        }
        Err(error) if error.leaves_process_access() && !matches!(error, AdoptError::Closed) => Ok(as_it_is()),
        Err(error) => Err(VerbsError::Memory(error)),
    }
}

fn release(process: &Process, token: Option<Token>) {
    if let (Some(adopter), Some(token)) = (process.adopter_in_use(), token) {
        nap::while_asleep(adopter, |adopter| adopter.release(token));
    }
}

/// Registers at the RNIC, again and again until the keys collide with no virtual ones.
fn register_physically(
    pd: &Pd,
    device: &dyn Device,
    segments: &[SegmentRecord],
    address: u64,
    length: u64,
    iova: u64,
    access: Access,
) -> Result<(u32, u32), VerbsError> {
    let process = pd.context.process();
    let in_file = segments.iter().any(|segment| segment.offset.is_some());
    let file = match process.adopter_in_use().filter(|_| in_file) {
        Some(adopter) => adopter.open_file().map_err(VerbsError::Memory)?,
        None => None,
    };
    let init = PhysicalMrInit {
        pd: pd.physical.load(SeqCst),
        address,
        length,
        iova,
        access,
        segments,
        file: file.as_ref(),
    };
    let mut collided = Vec::new();
    let outcome = loop {
        let (lkey, rkey) = match device.reg_mr(&init) {
            Ok(keys) => keys,
            Err(error) => break Err(error),
        };
        let mut registry = process.registry.lock();
        if registry.keys_are_free(lkey, rkey) {
            registry.lkey_slots.insert(key_slot(lkey));
            registry.rkey_slots.insert(key_slot(rkey));
            break Ok((lkey, rkey));
        }
        drop(registry);
        collided.push(lkey);
        if collided.len() == MAX_COLLISIONS {
            break Err(VerbsError::Refused {
                verb: "reg_mr",
                errno: libc::ENOMEM,
                message: format!("{MAX_COLLISIONS} keys in a row are those of regions that have moved"),
            });
        }
    };
    for lkey in collided {
        // Nobody has seen these; if the RNIC will not let go of one, it keeps it until the context is closed.
        let _ = device.dereg_mr(lkey);
    }
    outcome
}
