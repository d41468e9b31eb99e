//! Hidden requests that tell that all before them are done.
//!
//! A completion finishes all requests before it, and a program need not signal its last ones. Who has to know posts a marker
//! behind them: a request that is signaled and that no program sees. On a connection it is a WRITE of no bytes, whose key
//! nobody looks at (IBA Vol 1 C9-88); the other end has to allow remote writes, else it breaks the connection
//! ([`crate::qp::Qp::allow_markers`]). A datagram goes to the device itself, to a number that no queue pair has.
//!
//! On a reliable connection it is fenced: it leaves when all READs and ATOMICs before it are answered (IBA Vol 1 §10.8.3.3). Else a lost
//! answer has the READ repeated behind the marker, and there rxe of Linux 6.12 refuses it and breaks the connection: it answers by the length of
//! the newest request, which is none (`read_reply`; docs/rnic-assumptions.md).
//!
//! A marker has its own place: a send queue is made with one slot more than the program sees, and a completion queue with
//! some entries more, of which each marker under way takes one. There is at most one under way for each queue pair. It
//! outlives the drain that posted it where that was given up.

use std::ffi::c_int;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};

use verbatim_device::control::{AddressVector, QpType};

use super::ffi;
use super::live::Live;
use super::objects::{Cq, Qp};
use super::sends::positive;
use crate::work::{RECV_BIT, SEND_FENCE, SEND_SIGNALED, SendOpcode, WC_SUCCESS, Wc};

/// In a `wr_id`: it is a marker, and the rest says how many requests are before it.
pub const MARK_BIT: u64 = 1 << 62;
/// No region has it, and nobody looks.
const NO_KEY: u32 = 0x7fff_ff01;
/// A queue pair number that no RNIC gives: the last one before that of multicast.
const NOBODY: u32 = 0x00ff_fffe;

/// Whether this is the `wr_id` of a marker.
#[inline]
pub fn is_mark(wr_id: u64) -> bool {
    wr_id & (MARK_BIT | RECV_BIT) == MARK_BIT
}

/// The markers of one queue pair, and with them the room in its send queue.
#[derive(Debug)]
pub struct Marks {
    /// How many of the program's requests fit now.
    limit: AtomicU32,
    /// How many the program may have outstanding.
    shown: u32,
    /// What the library's queue has room for.
    physical: u32,
    /// The `wr_id` of the one under way, or 0.
    under_way: AtomicU64,
    failed: AtomicBool,
}

impl Marks {
    pub fn new(shown: u32, physical: u32) -> Self {
        Self {
            limit: shown.into(),
            shown,
            physical,
            under_way: AtomicU64::new(0),
            failed: AtomicBool::new(false),
        }
    }

    #[inline]
    pub fn limit(&self) -> u32 {
        self.limit.load(Relaxed)
    }

    /// Whether one has failed.
    pub fn failed(&self) -> bool {
        self.failed.load(Acquire)
    }

    /// One that is about to be posted behind so many requests; false if it has to wait.
    fn begin(&self, wr_id: u64, outstanding: u32) -> bool {
        let free = self.under_way.load(Acquire) == 0 && outstanding < self.physical;
        if free {
            self.limit.store(self.shown.min(self.physical - 1), Relaxed);
            self.under_way.store(wr_id, Release);
        }
        free
    }

    /// It is over, or was never posted; false if it is not the one under way.
    pub fn end(&self, wr_id: u64, succeeded: bool) -> bool {
        let is_it = self.under_way.load(Acquire) == wr_id;
        if is_it {
            self.failed.fetch_or(!succeeded, Release);
            self.limit.store(self.shown, Relaxed);
            self.under_way.store(0, Release);
        }
        is_it
    }

    /// The queue is empty again, or gone: whether one was under way.
    fn forget(&self) -> bool {
        self.failed.store(false, Release);
        let under_way = self.under_way.swap(0, Release) != 0;
        self.limit.store(self.shown, Relaxed);
        under_way
    }
}

impl Cq {
    /// Keeps an entry for a marker; false if all are taken.
    fn take_entry(&self) -> bool {
        self.spare
            .fetch_update(Acquire, Relaxed, |spare| spare.checked_sub(1))
            .is_ok()
    }

    fn give_entry(&self) {
        self.spare.fetch_add(1, Release);
    }

    /// Takes the completion of a marker, of which nobody is told.
    #[cold]
    pub fn take_mark(&self, wc: &Wc) {
        let owners = self.owners.read();
        let owner = owners.get(wc.qp_num).and_then(Option::as_ref);
        // Of a queue pair that is gone or was reset, the entry was given back then.
        if owner.is_some_and(|owner| owner.note_mark(wc.wr_id, wc.status == WC_SUCCESS)) {
            self.give_entry();
        }
    }
}

impl Qp {
    /// Nothing is in its queues any more.
    pub fn forget_marks(&self) {
        if self.progress.marks.forget() {
            self.cqs[0].give_entry();
        }
    }

    /// Posts a marker behind all that was posted, unless nothing is outstanding, one is under way, or there is no room for
    /// it now. False: one has failed.
    pub fn mark(&self, own: &AddressVector) -> bool {
        let marks = &self.progress.marks;
        let send = &self.progress.send;
        let outstanding = send.outstanding();
        if outstanding == 0 || marks.failed() {
            return !marks.failed();
        }
        let wr_id = MARK_BIT | send.posted();
        // The entry first: a marker that is under way may complete at any time.
        if !self.cqs[0].take_entry() {
            return true;
        }
        if !marks.begin(wr_id, outstanding) {
            self.cqs[0].give_entry();
            return true;
        }
        if self.post_mark(wr_id, own).is_err() && marks.end(wr_id, true) {
            self.cqs[0].give_entry();
        }
        true
    }

    fn post_mark(&self, wr_id: u64, own: &AddressVector) -> Result<(), c_int> {
        let mut ah = self.marker_ah.lock();
        let mut wr = ffi::ibv_send_wr {
            wr_id,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: SendOpcode::Write as u32,
            send_flags: match self.qp_type {
                QpType::Rc => SEND_SIGNALED | SEND_FENCE,
                // There is no READ and no ATOMIC there.
                QpType::Uc | QpType::Ud => SEND_SIGNALED,
            },
            imm_data: 0,
            wr: ffi::ibv_send_wr_target {
                rdma: ffi::ibv_send_wr_rdma {
                    remote_addr: 0,
                    rkey: NO_KEY,
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
        };
        let held_ah;
        if self.qp_type == QpType::Ud {
            if ah.is_none() {
                *ah = Some(self.own_ah(own)?);
            }
            held_ah = ah.as_ref().and_then(Live::hold).ok_or(libc::EINVAL)?;
            wr.opcode = SendOpcode::Send as u32;
            wr.wr.ud = ffi::ibv_send_wr_ud {
                ah: held_ah.as_ptr(),
                remote_qpn: NOBODY,
                remote_qkey: 0,
            };
        }
        let qp = self.live.hold().ok_or(libc::EINVAL)?;
        let mut bad = std::ptr::null_mut();
        // SAFETY: the queue pair is held, so it and its device are alive, and so is the address handle; the request is whole
        // and good until the call returns.
        let returned = unsafe {
            match (*(*qp.as_ptr()).context).ops.post_send {
                Some(post) => post(qp.as_ptr(), &mut wr, &mut bad),
                None => libc::EOPNOTSUPP,
            }
        };
        match returned {
            0 => Ok(()),
            errno => Err(positive(errno)),
        }
    }

    /// The way to the device itself. It is the queue pair's own, so that the program may destroy all of its own.
    fn own_ah(&self, own: &AddressVector) -> Result<Live<ffi::ibv_ah>, c_int> {
        let opened = self.live.opened();
        let functions = opened.library().functions();
        let mut attr = super::convert::av_to_c(own);
        let pd = self.pd.hold().ok_or(libc::EINVAL)?;
        // SAFETY: the protection domain is held.
        let ah = unsafe { (functions.ibv_create_ah)(pd.as_ptr(), &mut attr) };
        let ah = std::ptr::NonNull::new(ah).ok_or_else(|| opened.library().errno())?;
        // SAFETY: just made.
        Ok(unsafe { Live::new(opened.clone(), ah, functions.ibv_destroy_ah) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_under_way_and_it_has_a_place_of_its_own() {
        let marks = Marks::new(8, 9);
        assert!(
            marks.begin(MARK_BIT | 8, 8),
            "the slot that the program does not see"
        );
        assert_eq!(marks.limit(), 8);
        assert!(!marks.begin(MARK_BIT | 9, 1));
        assert!(!marks.end(MARK_BIT | 9, true) && marks.end(MARK_BIT | 8, true));
        assert!(marks.begin(MARK_BIT, 1) && marks.forget() && !marks.forget());
    }

    #[test]
    fn where_there_is_no_slot_more_the_program_has_one_less_meanwhile() {
        let marks = Marks::new(8, 8);
        assert!(!marks.begin(MARK_BIT | 8, 8));
        assert!(marks.begin(MARK_BIT | 8, 7));
        assert_eq!(marks.limit(), 7);
        assert!(marks.end(MARK_BIT | 8, true));
        assert_eq!(marks.limit(), 8);
    }
}
