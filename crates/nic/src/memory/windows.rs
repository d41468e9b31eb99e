//! Memory windows: keys that open a part of a region to partners (IBA Vol 1 §10.6.7).
//!
//! | | type 1 | type 2 (2B) |
//! | --- | --- | --- |
//! | starts | unbound, its key allows nothing | the same |
//! | bound | again and again, each time with another key; length 0 unbinds | when it is free, never with length 0 |
//! | lets in | every queue pair of its protection domain | the queue pair that bound it |
//! | ends | by another bind | by a local or remote invalidation, or with its queue pair |

use verbatim_device::control::{Access, MwBound, MwState, MwType};

use super::regions::{Denied, Domain, Entry, Regions};
use crate::table::Unavailable;

/// Rights that a window can give.
const GIVEN: Access = Access::REMOTE_READ
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_ATOMIC);

/// A memory window.
#[derive(Debug)]
pub struct Window {
    pub pd: u32,
    pub mw_type: MwType,
    bound: Option<Bound>,
}

/// What a window opens.
#[derive(Debug, Clone, Copy)]
struct Bound {
    /// The key of the region behind it, which stays for as long as windows are bound to it.
    region: u32,
    /// In the terms of the region.
    start: u64,
    length: u64,
    access: Access,
    /// Partners' addresses are offsets from `start`.
    zero_based: bool,
    /// Type 2: the only queue pair that it lets in.
    qpn: Option<u32>,
}

/// What a program asks for.
#[derive(Debug, Clone, Copy)]
pub struct BindWanted {
    /// The window, by the key that it has.
    pub window: u32,
    /// The key that it gets.
    pub rkey: u32,
    /// The region.
    pub lkey: u32,
    pub start: u64,
    pub length: u64,
    pub access: Access,
}

impl Window {
    pub fn new(pd: u32, mw_type: MwType) -> Self {
        Self {
            pd,
            mw_type,
            bound: None,
        }
    }

    /// The region behind the window and the address in its terms, if `rights` on the range are given to `domain`.
    #[inline]
    pub(super) fn check(
        &self,
        domain: Domain,
        address: u64,
        length: u64,
        rights: Access,
    ) -> Result<(u32, u64), Denied> {
        let bound = self.bound.as_ref().ok_or(Denied::NoSuchKey)?;
        if self.pd != domain.pd || bound.qpn.is_some_and(|qpn| qpn != domain.qpn) {
            return Err(Denied::WrongDomain);
        }
        let at = match bound.zero_based {
            true => Some(address),
            false => address.checked_sub(bound.start),
        };
        let at = at.filter(|at| *at <= bound.length && length <= bound.length - at);
        let at = at.ok_or(Denied::OutOfRange)?;
        if !bound.access.contains(rights) {
            return Err(Denied::MissingRight);
        }
        Ok((bound.region, bound.start + at))
    }
}

impl Regions {
    /// Adds a window and gives its first key, the one that is asked for if one is.
    pub fn insert_window(&mut self, window: Window, key: Option<u32>) -> Result<u32, Unavailable> {
        let key = self.insert_entry(Entry::Window(window), key)?;
        self.windows += 1;
        Ok(key)
    }

    /// The window with this number, whatever the low eight bits of its key are.
    pub fn window(&self, number: u32) -> Option<&Window> {
        match self.numbered(number)? {
            (_, Entry::Window(window)) => Some(window),
            (_, Entry::Region(_)) => None,
        }
    }

    /// How a window is.
    pub fn window_state(&self, number: u32) -> Option<MwState> {
        let (variant, entry) = self.numbered(number)?;
        let Entry::Window(window) = entry else { return None };
        let bound = window.bound.map(|bound| MwBound {
            lkey: bound.region,
            address: bound.start,
            length: bound.length,
            access: match bound.zero_based {
                true => bound.access | Access::ZERO_BASED,
                false => bound.access,
            },
            qpn: bound.qpn,
        });
        Some(MwState {
            rkey: number << 8 | u32::from(*variant),
            bound,
        })
    }

    /// Ends what a window opens, and gives it this key.
    pub fn set_unbound(&mut self, rkey: u32) {
        self.unbind(rkey >> 8);
        if let Some((variant, Entry::Window(_))) = self.numbered_mut(rkey >> 8) {
            *variant = rkey as u8;
        }
    }

    /// Removes a window, bound or not.
    pub fn remove_window(&mut self, number: u32) -> Option<Window> {
        self.window(number)?;
        self.unbind(number);
        self.windows -= 1;
        match self.remove_entry(number)? {
            Entry::Window(window) => Some(window),
            Entry::Region(_) => unreachable!("it was a window"),
        }
    }

    /// Binds a window for a queue pair: all checks of IBA Vol 1 §10.6.7.2 first, then the change.
    pub fn bind(&mut self, domain: Domain, wanted: &BindWanted) -> Result<(), Denied> {
        let number = wanted.window >> 8;
        // By number only, as when it is deallocated: a program knows the key of its last bind, which may have failed, or
        // the one that the window was allocated with.
        let window = self.window(number).ok_or(Denied::NoSuchKey)?;
        if wanted.rkey >> 8 != number {
            return Err(Denied::NoSuchKey);
        }
        if window.pd != domain.pd {
            return Err(Denied::WrongDomain);
        }
        let zero_based = wanted.access.contains(Access::ZERO_BASED);
        let access = wanted
            .access
            .difference(Access::ZERO_BASED | Access::MW_BIND | Access::LOCAL_WRITE);
        match window.mw_type {
            MwType::One if zero_based => return Err(Denied::MissingRight),
            MwType::Two if window.bound.is_some() => return Err(Denied::InUse),
            MwType::Two if wanted.length == 0 => return Err(Denied::OutOfRange),
            MwType::One | MwType::Two => {}
        }
        let qpn = (window.mw_type == MwType::Two).then_some(domain.qpn);
        let mut bound = None;
        if wanted.length > 0 {
            let region = self.get(wanted.lkey).ok_or(Denied::NoSuchKey)?;
            if region.pd != domain.pd {
                return Err(Denied::WrongDomain);
            }
            let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            let allowed = region.access.contains(Access::MW_BIND)
                && !region.access.contains(Access::ZERO_BASED)
                && GIVEN.contains(access)
                && (!writes || region.access.contains(Access::LOCAL_WRITE));
            if !allowed {
                return Err(Denied::MissingRight);
            }
            if !region.contains(wanted.start, wanted.length) {
                return Err(Denied::OutOfRange);
            }
            bound = Some(Bound {
                region: wanted.lkey,
                start: wanted.start,
                length: wanted.length,
                access,
                zero_based,
                qpn,
            });
        }
        self.unbind(number);
        if bound.is_some() {
            let region = self.get_mut(wanted.lkey).expect("it was just there");
            region.windows += 1;
        }
        if let Some(qpn) = qpn {
            self.by_qp.insert((qpn, number));
        }
        let (variant, entry) = self.numbered_mut(number).expect("it was just there");
        *variant = wanted.rkey as u8;
        if let Entry::Window(window) = entry {
            window.bound = bound;
        }
        Ok(())
    }

    /// Ends the key of a type 2 window, for the queue pair that bound it (or, by a SEND with invalidate, its partner).
    pub fn invalidate(&mut self, domain: Domain, rkey: u32) -> Result<(), Denied> {
        let window = match self.find(rkey) {
            Some(Entry::Window(window)) => window,
            // Regions of programs stay valid until they are deregistered.
            Some(Entry::Region(_)) => return Err(Denied::MissingRight),
            None => return Err(Denied::NoSuchKey),
        };
        if window.pd != domain.pd {
            return Err(Denied::WrongDomain);
        }
        if window.mw_type == MwType::One {
            return Err(Denied::MissingRight);
        }
        match window.bound.as_ref().map(|bound| bound.qpn) {
            None => Err(Denied::NoSuchKey),
            Some(Some(qpn)) if qpn != domain.qpn => Err(Denied::WrongDomain),
            Some(_) => {
                self.unbind(rkey >> 8);
                Ok(())
            }
        }
    }

    /// A queue pair goes: its type 2 windows are free.
    pub fn free_windows_of(&mut self, qpn: u32) {
        while let Some((_, number)) = self.by_qp.range((qpn, 0)..=(qpn, u32::MAX)).next().copied() {
            self.unbind(number);
        }
    }

    fn unbind(&mut self, number: u32) {
        let Some((_, Entry::Window(window))) = self.numbered_mut(number) else {
            return;
        };
        let Some(bound) = window.bound.take() else { return };
        if let Some(region) = self.get_mut(bound.region) {
            region.windows -= 1;
        }
        if let Some(qpn) = bound.qpn {
            self.by_qp.remove(&(qpn, number));
        }
    }
}
