//! Memory windows (IBA Vol 1 §10.6.7; ibv_alloc_mw(3), ibv_bind_mw(3)).
//!
//! A window's remote key has an index that stays and a tag, its low eight bits, that each bind changes.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};

use verbatim_device::control::{Access, MwType};

use crate::error::{PostError, VerbsError};
use crate::mr::{Mr, until_keys_are_free};
use crate::pd::Pd;
use crate::qp::Qp;
use crate::tables::key_slot;
use crate::work::{MwBind, SendWr};

/// A memory window.
#[derive(Debug)]
pub struct Mw {
    pd: Arc<Pd>,
    mw_type: MwType,
    /// Of the last bind of type 1 that was posted; of type 2, as it was given.
    rkey: AtomicU32,
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
        let mw = Arc::new(Self {
            pd: pd.clone(),
            mw_type,
            rkey: AtomicU32::new(rkey),
        });
        let mut objects = pd.context.objects.lock();
        objects.mws.insert(key_slot(rkey), mw.clone());
        pd.users.fetch_add(1, SeqCst);
        drop(objects);
        process.changed();
        Ok(mw)
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
        if let Err(error) = context.destroy_physically(|device| device.dealloc_mw(self.rkey())) {
            context.objects.lock().mws.insert(slot, removed);
            return Err(error);
        }
        if context.is_movable() {
            process.registry.lock().rkey_slots.remove(&slot);
        }
        self.pd.users.fetch_sub(1, SeqCst);
        process.changed();
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
