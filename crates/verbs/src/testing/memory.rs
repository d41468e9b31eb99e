//! What an RNIC knows of memory: regions, and windows to them. The bytes are simulated: what programs register are addresses of
//! [`memory`], and nobody touches what is there.

use std::collections::BTreeMap;

use verbatim_device::control::{Access, MwBound, MwState, MwType};
use verbatim_roce::{AccessError, Bind};

/// Bytes of each end's memory.
pub const MEMORY: usize = 4096;

/// What the ends register: read-only, so that it is never adopted.
static ADDRESSES: Addresses = Addresses([0; 2 * MEMORY]);

#[repr(align(4096))]
struct Addresses([u8; 2 * MEMORY]);

/// Where the memory of an end starts.
pub fn memory(end: usize) -> u64 {
    (&raw const ADDRESSES.0) as u64 + (end * MEMORY) as u64
}

#[derive(Debug)]
pub struct Region {
    pub address: u64,
    pub length: u64,
    pub access: Access,
}

/// By their keys; windows by the upper 24 bits of theirs.
#[derive(Debug, Default)]
pub struct Memory {
    pub regions: BTreeMap<u32, Region>,
    pub windows: BTreeMap<u32, (MwType, MwState)>,
}

fn covers(address: u64, length: u64, start: u64, len: usize) -> bool {
    let end = start.checked_add(len as u64);
    start >= address && end.is_some_and(|end| end <= address + length)
}

impl Memory {
    /// Where the bytes lie in the simulated memory.
    pub fn local(&self, key: u32, start: u64, len: usize, rights: Access) -> Result<usize, AccessError> {
        let region = self.regions.get(&key).ok_or(AccessError)?;
        let inside = covers(region.address, region.length, start, len);
        match inside && region.access.contains(rights) {
            true => Ok((start - memory(0)) as usize),
            false => Err(AccessError),
        }
    }

    /// The same for a partner of that queue pair, who may have the key of a window.
    pub fn remote(
        &self,
        qpn: u32,
        key: u32,
        start: u64,
        len: usize,
        rights: Access,
    ) -> Result<usize, AccessError> {
        if self.regions.contains_key(&key) {
            return self.local(key, start, len, rights);
        }
        let (_, window) = self.windows.get(&(key >> 8)).ok_or(AccessError)?;
        let bound = window.bound.filter(|_| window.rkey == key).ok_or(AccessError)?;
        let inside = covers(bound.address, bound.length, start, len);
        match inside && bound.access.contains(rights) && bound.qpn.is_none_or(|bound| bound == qpn) {
            true => self.local(bound.lkey, start, len, Access::empty()),
            false => Err(AccessError),
        }
    }

    pub fn bind(&mut self, qpn: u32, bind: &Bind) -> Result<(), AccessError> {
        let region = self.regions.get(&bind.lkey.0).ok_or(AccessError)?;
        let inside = covers(region.address, region.length, bind.addr, bind.len as usize);
        let (mw_type, window) = self.windows.get_mut(&(bind.window.0 >> 8)).ok_or(AccessError)?;
        let taken = *mw_type == MwType::Two && window.bound.is_some();
        if taken || !inside || !region.access.contains(Access::MW_BIND) {
            return Err(AccessError);
        }
        window.rkey = bind.rkey.0;
        window.bound = Some(MwBound {
            lkey: bind.lkey.0,
            address: bind.addr,
            length: bind.len,
            access: Access::from_bits_truncate(bind.access.bits()),
            qpn: (*mw_type == MwType::Two).then_some(qpn),
        });
        Ok(())
    }

    /// Ends a window that this queue pair has bound.
    pub fn invalidate(&mut self, qpn: u32, rkey: u32) -> Result<(), AccessError> {
        let (_, window) = self.windows.get_mut(&(rkey >> 8)).ok_or(AccessError)?;
        let ours = window.rkey == rkey && window.bound.is_some_and(|bound| bound.qpn == Some(qpn));
        if !ours {
            return Err(AccessError);
        }
        window.bound = None;
        Ok(())
    }

    /// A queue pair goes, and with it the windows that only it can use.
    pub fn free_windows_of(&mut self, qpn: u32) {
        for (_, window) in self.windows.values_mut() {
            window.bound = window.bound.filter(|bound| bound.qpn != Some(qpn));
        }
    }
}
