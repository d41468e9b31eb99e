//! Keys of requests: from those that the program knows to those that the RNICs know, and back.

use std::collections::HashMap;

use verbatim_device::layout::{SendWqe, WR_BIND_MW, WR_LOCAL_INV};

use super::intercept::Copied;
use crate::mw::Windows;
use crate::tables::{Keys as _, RecentKey};
use crate::work::SendOpcode;

const SEND: u8 = SendOpcode::Send as u8;
const SEND_WITH_IMM: u8 = SendOpcode::SendWithImm as u8;
const SEND_WITH_INVALIDATE: u8 = SendOpcode::SendWithInvalidate as u8;

/// The half of [`SendWqe::swap`] in which a bind has the local key.
const LOW: u64 = 0xffff_ffff;

/// Puts in the keys that the RNICs know. Remote keys are the other end's, but for binds and local invalidation, which name
/// this process's own.
#[inline]
pub fn translate_head(
    wqe: &mut SendWqe,
    windows: &Windows,
    lkeys: Option<&RecentKey>,
    rkeys: Option<&RecentKey>,
) {
    match (wqe.opcode, lkeys, rkeys) {
        (WR_LOCAL_INV, ..) => wqe.imm = windows.physical(wqe.imm),
        (WR_BIND_MW, Some(table), _) => {
            let lkey = table.physical(wqe.swap as u32).unwrap_or(0);
            wqe.swap = wqe.swap & !LOW | u64::from(lkey);
            (wqe.rkey, wqe.imm) = (windows.physical(wqe.rkey), windows.physical(wqe.imm));
        }
        (WR_BIND_MW, None, _) => {}
        // They name no remote memory.
        (SEND | SEND_WITH_IMM, ..) => {}
        (SEND_WITH_INVALIDATE, _, Some(table)) => wqe.imm = table.physical(wqe.imm).unwrap_or(wqe.imm),
        (_, _, Some(table)) => wqe.rkey = table.physical(wqe.rkey).unwrap_or(wqe.rkey),
        (_, _, None) => {}
    }
}

/// The way back, for requests that are taken out of a ring. What [`translate_head`] could not translate has become no key,
/// or was let be, and so it is here.
pub struct VirtualKeys<'a> {
    windows: &'a Windows,
    lkeys: Option<HashMap<u32, u32>>,
    rkeys: Option<HashMap<u32, u32>>,
}

impl<'a> VirtualKeys<'a> {
    pub fn new(windows: &'a Windows, lkeys: Option<&RecentKey>, rkeys: Option<&RecentKey>) -> Self {
        let reversed = |keys: Option<&RecentKey>| keys.map(RecentKey::reversed);
        Self {
            windows,
            lkeys: reversed(lkeys),
            rkeys: reversed(rkeys),
        }
    }

    /// Puts in the keys that the program knows.
    pub fn put_into(&self, request: &mut Copied) {
        let windows = self.windows;
        if request.wqe.opcode == WR_LOCAL_INV {
            request.wqe.imm = windows.known(request.wqe.imm);
        }
        if let Some(lkeys) = &self.lkeys {
            let virtual_key = |physical: u32| lkeys.get(&physical).copied().unwrap_or(0);
            for sge in request.sges_mut() {
                sge.lkey = virtual_key(sge.lkey);
            }
            let wqe = &mut request.wqe;
            if wqe.opcode == WR_BIND_MW {
                wqe.swap = wqe.swap & !LOW | u64::from(virtual_key(wqe.swap as u32));
                (wqe.rkey, wqe.imm) = (windows.known(wqe.rkey), windows.known(wqe.imm));
            }
        }
        if let Some(rkeys) = &self.rkeys {
            let virtual_key = |physical: u32| rkeys.get(&physical).copied().unwrap_or(physical);
            let wqe = &mut request.wqe;
            match wqe.opcode {
                WR_LOCAL_INV | WR_BIND_MW | SEND | SEND_WITH_IMM => {}
                SEND_WITH_INVALIDATE => wqe.imm = virtual_key(wqe.imm),
                _ => wqe.rkey = virtual_key(wqe.rkey),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use verbatim_device::layout::Sge;
    use verbatim_device::ring::Body;

    use super::super::with_local_keys;
    use super::*;
    use crate::tables::KeyTable;

    fn keys(pairs: &[(u32, u32)]) -> RecentKey {
        let table = KeyTable::new();
        for (virtual_key, physical) in pairs {
            table.set(*virtual_key, *physical);
        }
        RecentKey::new(Arc::new(table))
    }

    proptest! {
        /// There and back again; what the tables do not know, too, if it is no other key by chance.
        #[test]
        fn the_way_back_ends_where_the_way_began(
            opcode in prop::sample::select(vec![0u8, 1, 2, 3, 4, 5, 6, WR_LOCAL_INV, WR_BIND_MW, 9, 15]),
            local in 0u32..3,
            remote in 0u32..3,
        ) {
            let lkeys = keys(&[(0x100, 0x700), (0x200, 0x100)]);
            let rkeys = keys(&[(0x100, 0x900), (0x200, 0x100)]);
            let windows = Windows::default();
            windows.set(0x100, 0x800);
            windows.set(0x200, 0x100);
            let (lkey, rkey) = (local << 8, remote << 8);
            // An unknown remote key is let be: as any number that is none of another region's.
            prop_assume!(remote > 0);
            let wqe = SendWqe {
                opcode,
                rkey,
                imm: rkey,
                swap: 5 << 32 | u64::from(lkey),
                ..SendWqe::default()
            };
            let sge = Sge { address: 1, length: 2, lkey };
            for (lkeys, rkeys) in [
                (Some(&lkeys), Some(&rkeys)),
                (None, Some(&rkeys)),
                (Some(&lkeys), None),
                (None, None),
            ] {
                let mut physical = wqe;
                translate_head(&mut physical, &windows, lkeys, rkeys);
                let mut back = with_local_keys(lkeys, &[sge], |sges| Copied::new(&physical, Body::Sges(sges)));
                VirtualKeys::new(&windows, lkeys, rkeys).put_into(&mut back);
                prop_assert_eq!(back.wqe, wqe);
                prop_assert_eq!(&*back.sges_mut(), &[sge]);
            }
        }
    }
}
