//! The send queue: requests of the contract's shape become a chain of `struct ibv_send_wr`, posted as one.

use std::ffi::c_int;
use std::sync::Arc;

use verbatim_device::control::{Access, MwBound, MwType, QpType};
use verbatim_device::layout::{self, SendWqe, Sge};
use verbatim_device::ring::Body;

use super::ffi;
use super::live::{OwnedHeld, Pin};
use super::objects::{Objects, Qp};
use super::windows::Noted;
use crate::backend::{Refused, SendRing};
use crate::error::VerbsError;
use crate::tables::key_slot;
use crate::work::{self, SendOpcode};

const COMPARE_SWAP: u8 = SendOpcode::CompareSwap as u8;
const FETCH_ADD: u8 = SendOpcode::FetchAdd as u8;
/// The last opcode that every library's `post_send` knows. Later ones (ATOMIC WRITE) are for `ibv_wr_*` only, and librxe
/// posts them wrongly from a list.
const LAST_OPCODE: u32 = SendOpcode::SendWithInvalidate as u32;

/// A request that waits to be posted, and where its data start in the buffers. It lies where the library reads it, and its place is
/// used again: what an opcode does not use is whatever an earlier request has left there.
#[repr(C)]
struct Request {
    /// The first member, so that a pointer to it is one to the whole.
    wr: ffi::ibv_send_wr,
    first_sge: usize,
    first_byte: usize,
    /// The address handle's number, or what a bind needs to find its objects.
    names: Names,
}

impl Request {
    fn new() -> Self {
        Self {
            wr: ffi::ibv_send_wr {
                wr_id: 0,
                next: std::ptr::null_mut(),
                sg_list: std::ptr::null_mut(),
                num_sge: 0,
                opcode: 0,
                send_flags: 0,
                imm_data: 0,
                wr: ffi::ibv_send_wr_target {
                    atomic: ffi::ibv_send_wr_atomic {
                        remote_addr: 0,
                        compare_add: 0,
                        swap: 0,
                        rkey: 0,
                    },
                },
                remote_srqn: 0,
                bind_mw: ffi::ibv_send_wr_bind {
                    mw: std::ptr::null_mut(),
                    rkey: 0,
                    bind_info: ffi::ibv_mw_bind_info {
                        mr: std::ptr::null_mut(),
                        addr: 0,
                        length: 0,
                        mw_access_flags: 0,
                    },
                },
            },
            first_sge: 0,
            first_byte: 0,
            names: Names::Nothing,
        }
    }

    fn is_message(&self) -> bool {
        SendOpcode::from_raw(self.wr.opcode).is_some_and(SendOpcode::is_two_sided)
    }
}

/// What a request names that the library wants as a pointer.
#[derive(Clone, Copy)]
enum Names {
    Nothing,
    AddressHandle(u32),
    Window {
        mw_rkey: u32,
        lkey: u32,
    },
    /// It is found by the RNIC: what is invalidated.
    Key(u32),
}

/// The end of a send queue.
pub struct Sends {
    /// The first, since what is dropped while it is pinned is not destroyed.
    pin: Pin<ffi::ibv_qp>,
    qp: Arc<Qp>,
    objects: Arc<Objects>,
    /// Places for requests, of which the first `used` have one.
    requests: Vec<Request>,
    used: usize,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// Here to spare allocations, and empty between calls.
    kept: Vec<Kept>,
}

// SAFETY: the pointers in the requests, and what is kept, are made and used within one call; what is left of them nobody reads.
unsafe impl Send for Sends {}

impl std::fmt::Debug for Sends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let requests = self.used;
        f.debug_struct("Sends")
            .field("qp", &self.qp.number)
            .field("requests", &requests)
            .finish()
    }
}

/// The objects that a posting needs, kept from being destroyed until it is over.
enum Kept {
    AddressHandle(OwnedHeld<ffi::ibv_ah>),
    Window(OwnedHeld<ffi::ibv_mw>, Option<OwnedHeld<ffi::ibv_mr>>),
}

impl Sends {
    pub fn new(qp: Arc<Qp>, objects: Arc<Objects>) -> Result<Self, VerbsError> {
        Ok(Self {
            pin: qp.live.pin("post_send")?,
            qp,
            objects,
            requests: Vec::new(),
            used: 0,
            sges: Vec::new(),
            inline: Vec::new(),
            kept: Vec::new(),
        })
    }

    /// Finds what a request names; `EINVAL` if it was destroyed.
    fn find(&self, names: Names) -> Result<Kept, c_int> {
        match names {
            Names::Nothing | Names::Key(_) => unreachable!("the caller asks for those that name an object"),
            Names::AddressHandle(ah) => {
                let held = self.objects.ahs.find(ah).and_then(|ah| ah.live.hold_owned());
                held.map(Kept::AddressHandle).ok_or(libc::EINVAL)
            }
            Names::Window { mw_rkey, lkey } => {
                let mw = self.objects.mws.find(key_slot(mw_rkey));
                let mw = mw.and_then(|mw| mw.live.hold_owned()).ok_or(libc::EINVAL)?;
                let mr = self.objects.mrs.find(lkey).and_then(|mr| mr.live.hold_owned());
                if mr.is_none() && lkey != 0 {
                    return Err(libc::EINVAL);
                }
                Ok(Kept::Window(mw, mr))
            }
        }
    }

    /// Posts everything; how many were taken, and why the next was not.
    #[inline]
    fn post(&mut self) -> Result<(), (usize, c_int)> {
        if let [request] = &self.requests[..self.used]
            && request.wr.opcode <= LAST_OPCODE
            && matches!(request.names, Names::Nothing)
        {
            // Most posts: nothing to chain, nothing to find.
            return self.post_list(0, 1);
        }
        self.post_several()
    }

    #[inline(never)]
    fn post_several(&mut self) -> Result<(), (usize, c_int)> {
        let mut kept = std::mem::take(&mut self.kept);
        let mut first = 0;
        let outcome = loop {
            if first == self.used {
                break Ok(());
            }
            match self.post_run(first, &mut kept) {
                Ok(taken) => first += taken,
                Err(refused) => break Err(refused),
            }
        };
        kept.clear();
        self.kept = kept;
        outcome
    }

    /// Posts from `first` on, up to the end or the first bind of a type 1 window, for which there is a verb of its own. How
    /// many were taken, at least one.
    fn post_run(&mut self, first: usize, kept: &mut Vec<Kept>) -> Result<usize, (usize, c_int)> {
        let mut refused = None;
        let mut count = 0;
        for index in first..self.used {
            let Request { wr, names, .. } = &self.requests[index];
            if wr.opcode > LAST_OPCODE {
                refused = Some((index, libc::EOPNOTSUPP));
                break;
            }
            if !matches!(names, Names::Nothing | Names::Key(_)) {
                match self.find(*names) {
                    Ok(Kept::Window(mw, mr)) if is_type_1(&mw) => {
                        if count == 0 {
                            let bound = self.bind_type_1(wr, &mw, mr.as_ref());
                            return bound.map(|()| 1).map_err(|errno| (first, errno));
                        }
                        break;
                    }
                    Ok(found) => {
                        point(&mut self.requests[index].wr, &found);
                        kept.push(found);
                    }
                    Err(errno) => {
                        refused = Some((index, errno));
                        break;
                    }
                }
            }
            count += 1;
        }
        if count > 0 {
            self.post_list(first, count)
                .map_err(|(index, errno)| (first + index, errno))?;
        }
        match refused {
            Some(refused) => Err(refused),
            None => Ok(count),
        }
    }

    /// Posts so many from `first` on, at least one, as one list. What they name was found, and is kept.
    #[inline]
    fn post_list(&mut self, first: usize, count: usize) -> Result<(), (usize, c_int)> {
        let sges = self.sges.as_mut_ptr();
        let requests = &mut self.requests[first..first + count];
        for Request {
            wr,
            first_sge,
            first_byte,
            ..
        } in requests.iter_mut()
        {
            wr.sg_list = sges.wrapping_add(*first_sge);
            if wr.send_flags & work::SEND_INLINE != 0 && wr.num_sge > 0 {
                // SAFETY: its entry, which `push` has made.
                unsafe { (*wr.sg_list).address = self.inline[*first_byte..].as_ptr() as u64 };
            }
        }
        let base = requests.as_mut_ptr();
        for index in 1..count {
            // SAFETY: both are among the requests.
            unsafe { (*base.add(index - 1)).wr.next = &raw mut (*base.add(index)).wr };
        }
        let qp = self.pin.as_ptr();
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is pinned, so it and its device are alive; the list ends with `count` requests, and they, their entries,
        // their inline data and the objects that they name are good until the call returns. The library copies what it needs longer.
        let returned = unsafe {
            (*base.add(count - 1)).wr.next = std::ptr::null_mut();
            match (*(*qp).context).ops.post_send {
                Some(post) => post(qp, &raw mut (*base).wr, &mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if returned == 0 {
            return Ok(());
        }
        Err((position_in(base, count, bad.cast()), positive(returned)))
    }

    /// ibv_bind_mw(3): the library makes the next remote key by itself, as the objects above do.
    fn bind_type_1(
        &self,
        wr: &ffi::ibv_send_wr,
        mw: &OwnedHeld<ffi::ibv_mw>,
        mr: Option<&OwnedHeld<ffi::ibv_mr>>,
    ) -> Result<(), c_int> {
        let qp = self.pin.as_ptr();
        let mut bind_info = wr.bind_mw.bind_info;
        bind_info.mr = mr.map_or(std::ptr::null_mut(), |mr| mr.as_ptr());
        let mut bind = ffi::ibv_mw_bind {
            wr_id: wr.wr_id,
            send_flags: wr.send_flags,
            bind_info,
        };
        // SAFETY: the queue pair is pinned, window and region are held, so they and their device are alive.
        let returned = unsafe {
            match (*(*qp).context).ops.bind_mw {
                Some(post) => post(qp, mw.as_ptr(), &mut bind),
                None => libc::EOPNOTSUPP,
            }
        };
        match returned {
            0 => Ok(()),
            errno => Err(positive(errno)),
        }
    }

    /// Notes what the first `taken` requests, which were posted, do to windows.
    #[inline(never)]
    fn note_windows(&self, taken: usize) {
        for Request { wr, names, .. } in &self.requests[..taken] {
            match *names {
                Names::Nothing | Names::AddressHandle(_) => {}
                Names::Key(rkey) => self.objects.note_invalidation(rkey),
                Names::Window { mw_rkey, lkey } => {
                    let Some(mw) = self.objects.mws.find(key_slot(mw_rkey)) else {
                        continue;
                    };
                    let ffi::ibv_mw_bind_info {
                        addr: address,
                        length,
                        mw_access_flags,
                        ..
                    } = wr.bind_mw.bind_info;
                    let bound = MwBound {
                        lkey,
                        address,
                        length,
                        access: Access::from_bits_truncate(mw_access_flags),
                        qpn: (mw.mw_type == MwType::Two).then_some(self.qp.number),
                    };
                    *mw.noted.lock() = Noted {
                        rkey: wr.bind_mw.rkey,
                        bound: (length > 0).then_some(bound),
                        by: self.qp.number,
                    };
                }
            }
        }
    }

    fn truncate(&mut self, count: usize) {
        let Some(first) = self.requests[..self.used].get(count) else {
            return;
        };
        self.sges.truncate(first.first_sge);
        self.inline.truncate(first.first_byte);
        self.used = count;
    }

    /// Fills in what a request has that is not all in `wr.rdma`.
    #[inline(never)]
    fn fill_unusual(wr: &mut ffi::ibv_send_wr, wqe: &SendWqe, qp_type: QpType) -> Names {
        match wqe.opcode {
            layout::WR_BIND_MW => {
                // A bind has its new key in its own place, and librxe refuses it if this is not 0.
                wr.imm_data = 0;
                wr.wr.rdma = ffi::ibv_send_wr_rdma {
                    remote_addr: 0,
                    rkey: wqe.rkey,
                };
                wr.bind_mw = ffi::ibv_send_wr_bind {
                    mw: std::ptr::null_mut(),
                    rkey: wqe.imm,
                    bind_info: ffi::ibv_mw_bind_info {
                        mr: std::ptr::null_mut(),
                        addr: wqe.remote_address,
                        length: wqe.compare_add,
                        mw_access_flags: (wqe.swap >> 32) as u32,
                    },
                };
                Names::Window {
                    mw_rkey: wqe.rkey,
                    lkey: wqe.swap as u32,
                }
            }
            layout::WR_LOCAL_INV => Names::Key(wqe.imm),
            _ if qp_type == QpType::Ud => {
                wr.wr.ud = ffi::ibv_send_wr_ud {
                    ah: std::ptr::null_mut(),
                    remote_qpn: wqe.remote_qpn,
                    remote_qkey: wqe.remote_qkey,
                };
                Names::AddressHandle(wqe.ah)
            }
            _ => {
                wr.wr.atomic = ffi::ibv_send_wr_atomic {
                    remote_addr: wqe.remote_address,
                    compare_add: wqe.compare_add,
                    swap: wqe.swap,
                    rkey: wqe.rkey,
                };
                Names::Nothing
            }
        }
    }
}

fn is_type_1(mw: &OwnedHeld<ffi::ibv_mw>) -> bool {
    // SAFETY: the window is held; its type never changes.
    unsafe { (*mw.as_ptr()).r#type == MwType::One as c_int }
}

/// Puts pointers where the request has names.
fn point(wr: &mut ffi::ibv_send_wr, found: &Kept) {
    match found {
        Kept::AddressHandle(ah) => wr.wr.ud.ah = ah.as_ptr(),
        Kept::Window(mw, mr) => {
            // SAFETY: of a bind, whose target was made as this member of the union.
            let rkey = unsafe { wr.wr.rdma.rkey };
            // SAFETY: the window is held. Libraries look in the window for the key that it has now, and with type 2 it is
            // the program that writes it there; the objects above keep it in the request.
            unsafe { (*mw.as_ptr()).rkey = rkey };
            wr.bind_mw.mw = mw.as_ptr();
            if let Some(mr) = mr {
                wr.bind_mw.bind_info.mr = mr.as_ptr();
            }
        }
    }
}

/// Libraries return an errno; some once returned it negative.
pub fn positive(returned: c_int) -> c_int {
    returned.abs()
}

/// Which of `count` requests from `base` on `bad` points to; the first, if to none.
pub fn position_in<T>(base: *const T, count: usize, bad: *const T) -> usize {
    let offset = (bad as usize).wrapping_sub(base as usize) / size_of::<T>();
    if offset < count { offset } else { 0 }
}

/// By the flags that are the contract's, the library's.
const FLAGS: [u8; 16] = {
    let pairs = [
        (layout::SEND_FENCE, work::SEND_FENCE),
        (layout::SEND_SIGNALED, work::SEND_SIGNALED),
        (layout::SEND_SOLICITED, work::SEND_SOLICITED),
        (layout::SEND_INLINE, work::SEND_INLINE),
    ];
    let mut all = [0; 16];
    let mut flags = 0;
    while flags < all.len() {
        let mut pair = 0;
        while pair < pairs.len() {
            if flags as u8 & pairs[pair].0 != 0 {
                all[flags] |= pairs[pair].1 as u8;
            }
            pair += 1;
        }
        flags += 1;
    }
    all
};

#[inline]
fn flags_to_c(flags: u8) -> u32 {
    FLAGS[usize::from(flags) % FLAGS.len()].into()
}

impl SendRing for Sends {
    #[inline]
    fn room(&self) -> u32 {
        let outstanding = self.qp.progress.send.outstanding() + self.used as u32;
        self.qp.progress.marks.limit().saturating_sub(outstanding)
    }

    #[inline(always)]
    fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        let (first_sge, first_byte) = (self.sges.len(), self.inline.len());
        match body {
            Body::Sges([sge]) => self.sges.push(*sge),
            Body::Sges(sges) => self.sges.extend_from_slice(sges),
            Body::Inline(pieces) => {
                pieces
                    .iter()
                    .for_each(|piece| self.inline.extend_from_slice(piece));
                // The address is filled in when the buffer does not move any more.
                self.sges.push(Sge {
                    address: 0,
                    length: (self.inline.len() - first_byte) as u32,
                    lkey: 0,
                });
            }
        }
        if self.used == self.requests.len() {
            self.requests.push(Request::new());
        }
        let request = &mut self.requests[self.used];
        self.used += 1;
        (request.first_sge, request.first_byte) = (first_sge, first_byte);
        let wr = &mut request.wr;
        wr.wr_id = wqe.wr_id;
        wr.num_sge = (self.sges.len() - first_sge) as c_int;
        wr.opcode = wqe.opcode.into();
        wr.send_flags = flags_to_c(wqe.flags);
        wr.imm_data = wqe.imm;
        let is_usual = !matches!(
            wqe.opcode,
            layout::WR_BIND_MW | layout::WR_LOCAL_INV | COMPARE_SWAP | FETCH_ADD
        );
        request.names = if is_usual && self.qp.qp_type != QpType::Ud {
            wr.wr.rdma = ffi::ibv_send_wr_rdma {
                remote_addr: wqe.remote_address,
                rkey: wqe.rkey,
            };
            Names::Nothing
        } else {
            Self::fill_unusual(wr, wqe, self.qp.qp_type)
        };
    }

    fn unpush(&mut self, count: u32) {
        self.truncate(self.used.saturating_sub(count as usize));
    }

    #[inline]
    fn publish(&mut self) -> Result<(), Refused> {
        let Some(first) = self.requests[..self.used].first() else {
            return Ok(());
        };
        self.qp.progress.send.start_at(first.wr.wr_id);
        let outcome = self.post();
        let taken = outcome.map_or_else(|(taken, _)| taken, |()| self.used);
        if let Some(last) = taken.checked_sub(1) {
            self.qp.progress.send.posted_up_to(self.requests[last].wr.wr_id);
            if !matches!(
                self.requests[last].names,
                Names::Nothing | Names::AddressHandle(_)
            ) || taken > 1
            {
                self.note_windows(taken);
            }
        }
        let refused = outcome.map_err(|(_, errno)| Refused {
            count: (self.used - taken) as u32,
            messages: self.requests[taken..self.used]
                .iter()
                .filter(|request| request.is_message())
                .count() as u32,
            errno,
        });
        self.truncate(0);
        refused
    }

    fn unfinished(&self) -> u32 {
        self.qp.progress.send.outstanding()
    }

    fn mark(&mut self) -> bool {
        self.qp.mark(&self.objects.own)
    }

    fn reset(&mut self) {
        self.truncate(0);
        self.qp.progress.send.reset();
        self.qp.forget_marks();
    }
}
