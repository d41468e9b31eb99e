//! The send queue: requests of the contract's shape become a chain of `struct ibv_send_wr`, posted as one.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use verbatim_device::control::{MwType, QpType};
use verbatim_device::layout::{self, SendWqe, Sge};
use verbatim_device::ring::Body;

use super::ffi;
use super::live::OwnedHeld;
use super::objects::{Objects, Qp};
use crate::backend::{Refused, SendRing};
use crate::tables::key_slot;
use crate::work::{self, SendOpcode};

const COMPARE_SWAP: u8 = SendOpcode::CompareSwap as u8;
const FETCH_ADD: u8 = SendOpcode::FetchAdd as u8;
/// The last opcode that every library's `post_send` knows. Later ones (ATOMIC WRITE) are for `ibv_wr_*` only, and librxe
/// posts them wrongly from a list.
const LAST_OPCODE: u32 = SendOpcode::SendWithInvalidate as u32;

/// A request that waits to be posted, and where its data start in the chain's buffers.
struct Request {
    wr: ffi::ibv_send_wr,
    first_sge: usize,
    first_byte: usize,
    /// The address handle's number, or what a bind needs to find its objects.
    names: Names,
}

impl Request {
    fn is_message(&self) -> bool {
        SendOpcode::from_raw(self.wr.opcode).is_some_and(SendOpcode::is_two_sided)
    }
}

/// What a request names that the library wants as a pointer.
#[derive(Clone, Copy)]
enum Names {
    Nothing,
    AddressHandle(u32),
    Window { mw_rkey: u32, lkey: u32 },
}

/// The end of a send queue.
pub struct Sends {
    qp: Arc<Qp>,
    objects: Arc<Objects>,
    requests: Vec<Request>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// Both are here to spare allocations, and empty between calls.
    chain: Vec<ffi::ibv_send_wr>,
    kept: Vec<Kept>,
}

// SAFETY: the pointers in the requests are null; those in the chain, and what is kept, are made and forgotten within one
// call.
unsafe impl Send for Sends {}

impl std::fmt::Debug for Sends {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let requests = self.requests.len();
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
    pub fn new(qp: Arc<Qp>, objects: Arc<Objects>) -> Self {
        Self {
            qp,
            objects,
            requests: Vec::new(),
            sges: Vec::new(),
            inline: Vec::new(),
            chain: Vec::new(),
            kept: Vec::new(),
        }
    }

    /// Finds what a request names; `EINVAL` if it was destroyed.
    fn find(&self, names: Names) -> Result<Kept, c_int> {
        match names {
            Names::Nothing => unreachable!("the caller asks for those that name something"),
            Names::AddressHandle(ah) => {
                let held = self.objects.ahs.find(ah).and_then(|ah| ah.live.hold_owned());
                held.map(Kept::AddressHandle).ok_or(libc::EINVAL)
            }
            Names::Window { mw_rkey, lkey } => {
                let mw = self.objects.mws.find(key_slot(mw_rkey));
                let mw = mw.and_then(|mw| {
                    mw.was_bound.store(true, Relaxed);
                    mw.live.hold_owned()
                });
                let mw = mw.ok_or(libc::EINVAL)?;
                let mr = self.objects.mrs.find(lkey).and_then(|mr| mr.live.hold_owned());
                if mr.is_none() && lkey != 0 {
                    return Err(libc::EINVAL);
                }
                Ok(Kept::Window(mw, mr))
            }
        }
    }

    /// Posts everything; how many were taken, and why the next was not.
    fn post(&mut self) -> Result<(), (usize, c_int)> {
        let mut chain = std::mem::take(&mut self.chain);
        let mut kept = std::mem::take(&mut self.kept);
        let mut first = 0;
        let outcome = loop {
            if first == self.requests.len() {
                break Ok(());
            }
            match self.post_run(first, &mut chain, &mut kept) {
                Ok(taken) => first += taken,
                Err(refused) => break Err(refused),
            }
            chain.clear();
        };
        chain.clear();
        kept.clear();
        (self.chain, self.kept) = (chain, kept);
        outcome
    }

    /// Posts from `first` on, up to the end or the first bind of a type 1 window, for which there is a verb of its own. How
    /// many were taken, at least one.
    fn post_run(
        &mut self,
        first: usize,
        chain: &mut Vec<ffi::ibv_send_wr>,
        kept: &mut Vec<Kept>,
    ) -> Result<usize, (usize, c_int)> {
        let mut refused = None;
        for (index, request) in self.requests.iter().enumerate().skip(first) {
            let mut wr = request.wr;
            if wr.opcode > LAST_OPCODE {
                refused = Some((index, libc::EOPNOTSUPP));
                break;
            }
            if !matches!(request.names, Names::Nothing) {
                match self.find(request.names) {
                    Ok(Kept::Window(mw, mr)) if is_type_1(&mw) => {
                        if chain.is_empty() {
                            let bound = self.bind_type_1(&wr, &mw, mr.as_ref());
                            return bound.map(|()| 1).map_err(|errno| (first, errno));
                        }
                        break;
                    }
                    Ok(found) => {
                        point(&mut wr, &found);
                        kept.push(found);
                    }
                    Err(errno) => {
                        refused = Some((index, errno));
                        break;
                    }
                }
            }
            chain.push(wr);
        }
        self.post_chain(first, chain)
            .map_err(|(index, errno)| (first + index, errno))?;
        match refused {
            Some(refused) => Err(refused),
            None => Ok(chain.len()),
        }
    }

    /// Posts a chain that was made of the requests from `first` on.
    fn post_chain(&mut self, first: usize, chain: &mut [ffi::ibv_send_wr]) -> Result<(), (usize, c_int)> {
        if chain.is_empty() {
            return Ok(());
        }
        for (wr, request) in chain.iter_mut().zip(&self.requests[first..]) {
            wr.sg_list = self.sges[request.first_sge..].as_mut_ptr();
            if wr.send_flags & work::SEND_INLINE != 0 && wr.num_sge > 0 {
                let bytes = self.inline[request.first_byte..].as_ptr();
                self.sges[request.first_sge].address = bytes as u64;
            }
        }
        let base = chain.as_mut_ptr();
        for index in 1..chain.len() {
            // SAFETY: both are inside of the chain.
            unsafe { (*base.add(index - 1)).next = base.add(index) };
        }
        let Some(qp) = self.qp.live.hold() else {
            return Err((0, libc::EINVAL));
        };
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is held, so it and its device are alive; the chain, its entries, their inline data and the
        // objects that it names (`kept`) are good until the call returns, and the library copies what it needs longer.
        let returned = unsafe {
            match (*(*qp.as_ptr()).context).ops.post_send {
                Some(post) => post(qp.as_ptr(), base, &mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        if returned == 0 {
            return Ok(());
        }
        Err((position_in(chain.as_ptr(), chain.len(), bad), positive(returned)))
    }

    /// ibv_bind_mw(3): the library makes the next remote key by itself, as the objects above do.
    fn bind_type_1(
        &self,
        wr: &ffi::ibv_send_wr,
        mw: &OwnedHeld<ffi::ibv_mw>,
        mr: Option<&OwnedHeld<ffi::ibv_mr>>,
    ) -> Result<(), c_int> {
        let qp = self.qp.live.hold().ok_or(libc::EINVAL)?;
        let mut bind_info = wr.bind_mw.bind_info;
        bind_info.mr = mr.map_or(std::ptr::null_mut(), |mr| mr.as_ptr());
        let mut bind = ffi::ibv_mw_bind {
            wr_id: wr.wr_id,
            send_flags: wr.send_flags,
            bind_info,
        };
        // SAFETY: queue pair, window and region are held, so they and their device are alive.
        let returned = unsafe {
            match (*(*qp.as_ptr()).context).ops.bind_mw {
                Some(post) => post(qp.as_ptr(), mw.as_ptr(), &mut bind),
                None => libc::EOPNOTSUPP,
            }
        };
        match returned {
            0 => Ok(()),
            errno => Err(positive(errno)),
        }
    }

    fn truncate(&mut self, count: usize) {
        let Some(first) = self.requests.get(count) else {
            return;
        };
        self.sges.truncate(first.first_sge);
        self.inline.truncate(first.first_byte);
        self.requests.truncate(count);
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

fn flags_to_c(flags: u8) -> u32 {
    let pairs = [
        (layout::SEND_FENCE, work::SEND_FENCE),
        (layout::SEND_SIGNALED, work::SEND_SIGNALED),
        (layout::SEND_SOLICITED, work::SEND_SOLICITED),
        (layout::SEND_INLINE, work::SEND_INLINE),
    ];
    pairs.iter().fold(
        0,
        |all, (ours, theirs)| if flags & ours != 0 { all | theirs } else { all },
    )
}

impl SendRing for Sends {
    fn room(&self) -> u32 {
        let outstanding = self.qp.progress.send.outstanding() + self.requests.len() as u32;
        self.qp.progress.marks.limit().saturating_sub(outstanding)
    }

    fn push(&mut self, wqe: &SendWqe, body: Body<'_>) {
        let (first_sge, first_byte) = (self.sges.len(), self.inline.len());
        match body {
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
        let mut names = Names::Nothing;
        let mut bind_info = ffi::ibv_mw_bind_info {
            mr: std::ptr::null_mut(),
            addr: 0,
            length: 0,
            mw_access_flags: 0,
        };
        let wr = match wqe.opcode {
            layout::WR_BIND_MW => {
                names = Names::Window {
                    mw_rkey: wqe.rkey,
                    lkey: wqe.swap as u32,
                };
                bind_info.addr = wqe.remote_address;
                bind_info.length = wqe.compare_add;
                bind_info.mw_access_flags = (wqe.swap >> 32) as u32;
                ffi::ibv_send_wr_target {
                    rdma: ffi::ibv_send_wr_rdma {
                        remote_addr: 0,
                        rkey: wqe.rkey,
                    },
                }
            }
            _ if self.qp.qp_type == QpType::Ud => {
                names = Names::AddressHandle(wqe.ah);
                ffi::ibv_send_wr_target {
                    ud: ffi::ibv_send_wr_ud {
                        ah: std::ptr::null_mut(),
                        remote_qpn: wqe.remote_qpn,
                        remote_qkey: wqe.remote_qkey,
                    },
                }
            }
            COMPARE_SWAP | FETCH_ADD => ffi::ibv_send_wr_target {
                atomic: ffi::ibv_send_wr_atomic {
                    remote_addr: wqe.remote_address,
                    compare_add: wqe.compare_add,
                    swap: wqe.swap,
                    rkey: wqe.rkey,
                },
            },
            _ => ffi::ibv_send_wr_target {
                rdma: ffi::ibv_send_wr_rdma {
                    remote_addr: wqe.remote_address,
                    rkey: wqe.rkey,
                },
            },
        };
        let wr = ffi::ibv_send_wr {
            wr_id: wqe.wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: (self.sges.len() - first_sge) as c_int,
            opcode: wqe.opcode.into(),
            send_flags: flags_to_c(wqe.flags),
            // A bind has its new key in its own place, and librxe refuses it if this is not 0.
            imm_data: if wqe.opcode == layout::WR_BIND_MW {
                0
            } else {
                wqe.imm
            },
            wr,
            remote_srqn: 0,
            bind_mw: ffi::ibv_send_wr_bind {
                mw: std::ptr::null_mut(),
                rkey: wqe.imm,
                bind_info,
            },
        };
        self.requests.push(Request {
            wr,
            first_sge,
            first_byte,
            names,
        });
    }

    fn unpush(&mut self, count: u32) {
        self.truncate(self.requests.len().saturating_sub(count as usize));
    }

    fn publish(&mut self) -> Result<(), Refused> {
        if let Some(first) = self.requests.first() {
            self.qp.progress.send.start_at(first.wr.wr_id);
        }
        let outcome = self.post();
        let taken = outcome.map_or_else(|(taken, _)| taken, |()| self.requests.len());
        if let Some(last) = taken.checked_sub(1) {
            self.qp.progress.send.posted_up_to(self.requests[last].wr.wr_id);
        }
        let refused = outcome.map_err(|(_, errno)| Refused {
            count: (self.requests.len() - taken) as u32,
            messages: self.requests[taken..]
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
