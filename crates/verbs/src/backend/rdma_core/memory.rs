//! Memory regions and windows.

use std::ffi::{c_int, c_void};

use verbatim_device::control::{Access, MwType};

use super::device::RdmaCoreDevice;
use super::ffi;
use super::live::Live;
use super::objects::{Mr, Mw};
use super::windows::Noted;
use crate::backend::{PhysicalMrChange, PhysicalMrInit};
use crate::error::VerbsError;
use crate::tables::key_slot;

/// What a region's rights are to the library. That its addresses start at 0 is said by its `iova`.
fn mr_access(access: Access) -> u32 {
    (access - Access::ZERO_BASED).bits()
}

impl RdmaCoreDevice {
    pub fn register(&self, init: &PhysicalMrInit<'_>) -> Result<(u32, u32), VerbsError> {
        let functions = self.functions();
        let pd = self.objects.pds.get(init.pd)?;
        let memory = &init.memory;
        // SAFETY: the protection domain is held. The library and the kernel check the memory, which is the program's.
        let mr = unsafe {
            (functions.ibv_reg_mr_iova2)(
                pd.get("reg_mr")?.as_ptr(),
                memory.address as *mut c_void,
                memory.length as usize,
                memory.iova,
                mr_access(init.access),
            )
        };
        let mr = self.library().made("reg_mr", mr)?;
        // SAFETY: just made.
        let (lkey, rkey) = unsafe { (mr.as_ref().lkey, mr.as_ref().rkey) };
        let mr = Mr {
            // SAFETY: just made.
            live: unsafe { Live::new(self.opened.clone(), mr, functions.ibv_dereg_mr) },
            pds: vec![pd].into(),
        };
        self.objects.mrs.insert(lkey, mr);
        Ok((lkey, rkey))
    }

    pub fn reregister(&self, lkey: u32, change: &PhysicalMrChange<'_>) -> Result<(), VerbsError> {
        const VERB: &str = "rereg_mr";
        let mr = self.objects.mrs.get(lkey)?;
        let pd = change.pd.map(|pd| self.objects.pds.get(pd)).transpose()?;
        let held_pd = pd.as_ref().map(|pd| pd.get(VERB)).transpose()?;
        let mut flags = 0;
        if held_pd.is_some() {
            flags |= ffi::REREG_PD;
        }
        if change.access.is_some() {
            flags |= ffi::REREG_ACCESS;
        }
        if change.memory.is_some() {
            flags |= ffi::REREG_TRANSLATION;
        }
        let (address, length) = change
            .memory
            .as_ref()
            .map_or((0, 0), |memory| (memory.address, memory.length));
        let held = mr.live.get(VERB)?;
        // SAFETY: region and protection domain are held; the memory is checked by the library and the kernel.
        let returned = unsafe {
            (self.functions().ibv_rereg_mr)(
                held.as_ptr(),
                flags,
                held_pd.as_ref().map_or(std::ptr::null_mut(), |pd| pd.as_ptr()),
                address as *mut c_void,
                length as usize,
                mr_access(change.access.unwrap_or_default()) as c_int,
            )
        };
        // Its own errors are negative numbers (ibv_rereg_mr(3)), with `errno`.
        self.check(VERB, if returned == 0 { 0 } else { -1 })?;
        drop(held_pd);
        mr.pds.lock().extend(pd);
        // SAFETY: the region is held.
        let now = unsafe { (*held.as_ptr()).lkey };
        if now != lkey {
            return Err(VerbsError::Unsupported(format!(
                "{} has given region {lkey:#x} the key {now:#x}; deregister it, and register it anew",
                self.name
            )));
        }
        Ok(())
    }

    pub fn make_mw(&self, pd: u32, mw_type: MwType) -> Result<u32, VerbsError> {
        const VERB: &str = "alloc_mw";
        self.functions();
        let pd = self.objects.pds.get(pd)?;
        // SAFETY: the device is open.
        let ops = unsafe { &(*self.opened.context()).ops };
        let (Some(alloc), Some(dealloc)) = (ops.alloc_mw, ops.dealloc_mw) else {
            return Err(VerbsError::Unsupported(format!(
                "{} has no memory windows",
                self.name
            )));
        };
        // SAFETY: the protection domain is held.
        let mw = unsafe { alloc(pd.get(VERB)?.as_ptr(), mw_type as c_int) };
        let mw = self.library().made(VERB, mw)?;
        // SAFETY: just made.
        let (rkey, live) = unsafe { ((*mw.as_ptr()).rkey, Live::new(self.opened.clone(), mw, dealloc)) };
        let mw = Mw {
            live,
            mw_type,
            noted: Noted::unbound(rkey).into(),
            pd,
        };
        self.objects.mws.insert(key_slot(rkey), mw);
        Ok(rkey)
    }
}
