//! Memory windows (IBA Vol 1 §10.6.7; ibv_alloc_mw(3), ibv_bind_mw(3)).
//!
//! A window's remote key has an index that stays and a tag, its low eight bits, that each bind changes.
//!
//! Binds are work requests, and who sends to the program can end a window: so only the RNIC knows how one is. It is asked when
//! nothing is in flight any more, and the RNIC to which the program moves is told.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use parking_lot::Mutex;
use verbatim_device::control::{Access, MwBound, MwState, MwType};

use crate::backend::Device;
use crate::context::Context;
use crate::error::{PostError, VerbsError};
use crate::maker::Was;
use crate::mr::{Mr, until_keys_are_free};
use crate::pd::Pd;
use crate::qp::Qp;
use crate::tables::{KeyTable, key_slot};
use crate::work::{MwBind, SendWr};

/// A memory window.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    mw_type: MwType,
    /// Of the last bind of type 1 that was posted; of type 2, as it was given.
    rkey: AtomicU32,
    /// What the RNIC that was let go of said of it, in the program's numbers.
    parked: Mutex<Option<MwState>>,
}

/// The keys of a context's windows, as far as the RNIC's differ.
#[derive(Debug)]
pub struct Windows {
    to_physical: KeyTable,
    to_virtual: KeyTable,
}

impl Default for Windows {
    fn default() -> Self {
        Self {
            to_physical: KeyTable::new(),
            to_virtual: KeyTable::new(),
        }
    }
}

impl Windows {
    pub(crate) fn set(&self, rkey: u32, physical: u32) {
        self.remove(rkey);
        self.to_physical.set_any_tag(rkey, physical);
        self.to_virtual.set_any_tag(physical, rkey);
    }

    fn remove(&self, rkey: u32) {
        let physical = self.physical(rkey);
        if self.known(physical) == rkey {
            self.to_virtual.remove(physical);
        }
        self.to_physical.remove(rkey);
    }

    /// The RNIC's key.
    pub fn physical(&self, rkey: u32) -> u32 {
        self.to_physical.physical(rkey).unwrap_or(rkey)
    }

    /// The program's key.
    pub fn known(&self, physical: u32) -> u32 {
        self.to_virtual.physical(physical).unwrap_or(physical)
    }
}

/// What a type 1 window is bound to.
#[derive(Debug, Clone, Copy)]
pub struct MwRange<'a> {
    /// The region; none with length 0.
    pub mr: Option<&'a Mr>,
    /// Start.
    pub address: u64,
    /// Length in bytes; 0 unbinds.
    pub length: u64,
    /// What the window allows.
    pub access: Access,
}

impl Mw {
    pub(crate) fn alloc(pd: &Arc<Pd>, mw_type: MwType) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let _pass = process.control.enter();
        let device = pd.context.device()?;
        let physical_pd = pd.physical.load(SeqCst);
        let rkey = until_keys_are_free(
            "alloc_mw",
            || device.alloc_mw(physical_pd, mw_type),
            |rkey| {
                let claim = || process.registry.lock().rkey_slots.insert(key_slot(*rkey));
                !pd.context.is_movable() || claim()
            },
            |rkey| _ = device.dealloc_mw(rkey),
        )?;
        Ok(Self::assemble(pd, mw_type, rkey))
    }

    /// As [`Self::alloc`], with that key, bound as another one was. The caller is alone with the context, or has entered its
    /// gate.
    pub(crate) fn alloc_as(
        pd: &Arc<Pd>,
        mw_type: MwType,
        rkey: u32,
        state: &MwState,
    ) -> Result<Arc<Self>, VerbsError> {
        let process = pd.context.process();
        let device = pd.context.device()?;
        let free = process.registry.lock().rkey_slots.insert(key_slot(rkey));
        if !free {
            return Err(VerbsError::Refused {
                verb: "restore_object",
                errno: libc::EEXIST,
                message: format!("key {rkey:#x} is that of another region or window of this process"),
            });
        }
        let made = device.alloc_mw_as(pd.physical.load(SeqCst), mw_type, rkey);
        let restored = made.and_then(|()| {
            let restored = device.restore_mw(state);
            restored.inspect_err(|_| _ = device.dealloc_mw(rkey))
        });
        if let Err(error) = restored {
            process.registry.lock().rkey_slots.remove(&key_slot(rkey));
            return Err(error);
        }
        Ok(Self::assemble(pd, mw_type, rkey))
    }

    fn assemble(pd: &Arc<Pd>, mw_type: MwType, rkey: u32) -> Arc<Self> {
        let mw = Arc::new(Self {
            pd: pd.clone(),
            mw_type,
            rkey: AtomicU32::new(rkey),
            parked: Mutex::default(),
        });
        let mut objects = pd.context.objects.lock();
        objects.mws.insert(key_slot(rkey), mw.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        pd.context.process().changed();
        mw
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Its type.
    pub fn mw_type(&self) -> MwType {
        self.mw_type
    }

    /// Its remote key: of the last bind by [`Qp::bind_mw`], else as it was given.
    pub fn rkey(&self) -> u32 {
        self.rkey.load(Relaxed)
    }

    /// Deallocates it, bound or not.
    pub fn dealloc(&self) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        let process = context.process();
        let _pass = process.control.enter();
        let slot = key_slot(self.rkey());
        let removed = context.objects.lock().mws.remove(&slot);
        let removed = removed.ok_or_else(|| VerbsError::Gone {
            object: format!("memory window {:#x}", self.rkey()),
        })?;
        if let Err(error) =
            context.destroy_physically(|device| device.dealloc_mw(context.windows.physical(self.rkey())))
        {
            context.objects.lock().mws.insert(slot, removed);
            return Err(error);
        }
        context.windows.remove(self.rkey());
        if context.is_movable() {
            process.registry.lock().rkey_slots.remove(&slot);
        }
        self.pd.users.fetch_sub(1, SeqCst);
        process.changed();
        Ok(())
    }

    /// Asks the RNIC, which is about to be let go of, how it is.
    pub(crate) fn park(&self, device: &dyn Device) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        let state = device.query_mw(context.windows.physical(self.rkey()))?;
        let bound = state.bound.map(|bound| {
            let objects = context.objects.lock();
            let mut regions = objects.mrs.values();
            let region = regions.find(|mr| mr.physical_lkey.load(SeqCst) == bound.lkey);
            let lkey = region.map_or(bound.lkey, |mr| mr.lkey());
            drop(objects);
            let of_number = |physical| {
                let mut qps = context.process().qps().into_iter();
                qps.find(|qp| {
                    Arc::ptr_eq(qp.context(), context) && qp.control.lock().physical_qpn() == physical
                })
            };
            let qpn = bound.qpn.and_then(|qpn| Some(of_number(qpn)?.number()));
            MwBound { lkey, qpn, ..bound }
        });
        *self.parked.lock() = Some(MwState {
            rkey: context.windows.known(state.rkey),
            bound,
        });
        Ok(())
    }

    /// How it was when it was parked, and the upper 24 bits of its key.
    pub(crate) fn was(&self) -> Option<(u32, Was)> {
        let MwState { rkey, bound } = (*self.parked.lock())?;
        let bound = bound.is_some();
        Some((key_slot(self.rkey()), Was { rkey, bound }))
    }

    /// Has another RNIC, whose window has the index of `physical_rkey`, make it what it was. All that it is bound to is there
    /// already. `qps`: the other RNIC's queue pairs, by the numbers that the program knows.
    pub(crate) fn restore(
        &self,
        device: &dyn Device,
        physical_rkey: u32,
        qps: &HashMap<u32, u32>,
    ) -> Result<(), VerbsError> {
        let context = &self.pd.context;
        context.windows.set(self.rkey(), physical_rkey);
        let Some(state) = self.parked.lock().take() else {
            return Ok(());
        };
        let bound = state.bound.and_then(|bound| {
            // What it was bound to is gone: so is what it opened.
            let region = context.objects.lock().mrs.get(&bound.lkey)?.clone();
            let qpn = match bound.qpn {
                Some(qpn) => Some(*qps.get(&qpn)?),
                None => None,
            };
            let lkey = region.physical_lkey.load(SeqCst);
            Some(MwBound { lkey, qpn, ..bound })
        });
        device.restore_mw(&MwState {
            rkey: context.windows.physical(state.rkey),
            bound,
        })
    }
}

impl Context {
    /// Windows of queue pairs that another one has replaced at the RNIC are that one's from now on: new number by old one.
    pub(crate) fn rebind_windows(&self, numbers: &HashMap<u32, u32>) -> Result<(), VerbsError> {
        let device = self.device()?;
        for mw in self.mws().iter().filter(|mw| mw.mw_type == MwType::Two) {
            let state = device.query_mw(self.windows.physical(mw.rkey()))?;
            let Some(bound) = state.bound else { continue };
            let qpn = bound.qpn.and_then(|old| numbers.get(&old).copied());
            if qpn.is_some() {
                device.restore_mw(&MwState {
                    bound: Some(MwBound { qpn, ..bound }),
                    ..state
                })?;
            }
        }
        Ok(())
    }
}

impl Qp {
    /// Binds a type 1 window (ibv_bind_mw(3)) by a request of this queue pair. The window's new remote key, which it has
    /// from now on, whether or not the bind will succeed.
    pub fn bind_mw(&self, mw: &Mw, wr_id: u64, flags: u32, range: &MwRange<'_>) -> Result<u32, PostError> {
        if mw.mw_type != MwType::One || !Arc::ptr_eq(mw.pd(), self.pd()) {
            return Err(PostError::Invalid);
        }
        let lkey = match range.mr {
            Some(mr) if Arc::ptr_eq(&mr.pd(), self.pd()) => mr.lkey(),
            None if range.length == 0 => 0,
            _ => return Err(PostError::Invalid),
        };
        // Binds of one window through several queue pairs at once are as undefined as on hardware.
        let mut batch = self.batch();
        let mw_rkey = mw.rkey();
        let new_rkey = mw_rkey & !0xff | mw_rkey.wrapping_add(1) & 0xff;
        let bind = MwBind {
            mw_rkey,
            new_rkey,
            lkey,
            address: range.address,
            length: range.length,
            access: range.access,
        };
        batch.push(&SendWr::bind(wr_id, flags, &bind))?;
        batch.complete().map_err(|(_, error)| error)?;
        mw.rkey.store(new_rkey, Relaxed);
        Ok(new_rkey)
    }
}
