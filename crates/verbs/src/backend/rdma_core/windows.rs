//! What memory windows open.
//!
//! Libraries do not tell, so what was posted is noted: binds and invalidations, and the invalidations of peers as they arrive. A queue
//! pair that has not failed has executed what was posted to it by the time that it is drained. Of one that has failed nobody knows.
//!
//! A window that was made again is bound by a request that the program does not see, while nothing else is posted yet.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use verbatim_device::control::{MwBound, MwState, MwType, QpState, QpType};

use super::device::RdmaCoreDevice;
use super::ffi;
use super::live::OwnedHeld;
use super::markers::MARK_BIT;
use super::objects::{Cq, Mw, Objects, Qp};
use super::sends::positive;
use crate::backend::Device;
use crate::error::VerbsError;
use crate::tables::key_slot;
use crate::work::{SEND_SIGNALED, SendOpcode, WC_IP_CSUM_OK, WC_SUCCESS, WC_WITH_IMM, WC_WITH_INV, Wc};

/// The hidden bind. Should anybody else take its completion, it is a marker that nobody waits for.
const HIDDEN_BIND: u64 = MARK_BIT | (MARK_BIT - 1);
/// An RNIC needs microseconds for it.
const LIMIT: Duration = Duration::from_secs(5);
const VERB: &str = "restore_mw";

/// What was last posted of a window.
#[derive(Debug, Clone, Copy)]
pub struct Noted {
    /// With the tag of the last bind.
    pub rkey: u32,
    pub bound: Option<MwBound>,
    /// The queue pair that has bound it.
    pub by: u32,
}

impl Noted {
    /// Of a new window.
    pub fn unbound(rkey: u32) -> Self {
        let (bound, by) = (None, 0);
        Self { rkey, bound, by }
    }
}

impl Objects {
    /// A window of type 2 has lost what it was bound to, if the key is still its own.
    pub fn note_invalidation(&self, rkey: u32) {
        let Some(mw) = self.mws.find(key_slot(rkey)) else {
            return;
        };
        let mut noted = mw.noted.lock();
        if noted.rkey == rkey {
            noted.bound = None;
        }
    }
}

impl Objects {
    /// Notes the invalidation of which a completion tells; its flags, as the header has them. The kernel's rxe gives its own flag for an
    /// invalidation to programs, where libibverbs has that of a checksum, which rxe never looks at.
    #[cold]
    pub fn invalidated_by(&self, wc: &Wc) -> u32 {
        let is_rxes = wc.wc_flags & (WC_WITH_INV | WC_WITH_IMM | WC_IP_CSUM_OK) == WC_IP_CSUM_OK
            && self.mws.find(key_slot(wc.imm)).is_some();
        let flags = match is_rxes {
            true => wc.wc_flags & !WC_IP_CSUM_OK | WC_WITH_INV,
            false => wc.wc_flags,
        };
        if flags & WC_WITH_INV != 0 {
            self.note_invalidation(wc.imm);
        }
        flags
    }
}

/// What can be said of a window.
enum Known {
    Is(MwState),
    /// Why not, in words for an operator.
    Not(&'static str),
}

impl RdmaCoreDevice {
    pub fn state_of_mw(&self, rkey: u32) -> Result<MwState, VerbsError> {
        let mw = self.objects.mws.get(key_slot(rkey))?;
        match self.known_of(&mw) {
            Known::Is(state) => Ok(state),
            Known::Not(why) => Err(VerbsError::Unsupported(format!(
                "memory window {rkey:#x} of {} {why}",
                self.name
            ))),
        }
    }

    /// Why a process that has such windows cannot be moved.
    pub fn blocked_by_windows(&self) -> Option<String> {
        let windows = self.objects.mws.all();
        windows.iter().find_map(|mw| match self.known_of(mw) {
            Known::Is(_) => None,
            Known::Not(why) => Some(format!(
                "its memory window {:#x} of {} {why}: that cannot be moved",
                mw.noted.lock().rkey,
                self.name
            )),
        })
    }

    /// Whether one of type 2 is bound to that queue pair, whose place another one cannot take then.
    pub fn has_window_of(&self, qpn: u32) -> bool {
        let of_it = |mw: &Arc<Mw>| mw.noted.lock().bound.is_some_and(|bound| bound.qpn == Some(qpn));
        self.objects.mws.all().iter().any(of_it)
    }

    fn known_of(&self, mw: &Mw) -> Known {
        let Noted { rkey, bound, by } = *mw.noted.lock();
        let unbound = Known::Is(MwState { rkey, bound: None });
        let Some(bound) = bound else { return unbound };
        let state = self.query_qp(by).map(|attr| attr.state);
        match (state, bound.qpn) {
            (Ok(QpState::Rts), _) => {}
            // Nobody gets in by a queue pair that is gone or has failed.
            (Err(_) | Ok(QpState::Err | QpState::Reset), Some(_)) => return unbound,
            (Err(_) | Ok(QpState::Err | QpState::Reset | QpState::Sqe), _) => {
                return Known::Not(
                    "was bound by a queue pair that has failed or is gone since, and nobody knows whether it is",
                );
            }
            _ => {
                return Known::Not(
                    "is bound, and its queue pair cannot bind it again in the state in which that is",
                );
            }
        }
        match self.binder(mw, bound.qpn) {
            Some(_) => Known::Is(MwState {
                rkey,
                bound: Some(bound),
            }),
            None => {
                Known::Not("is bound, and no queue pair of its protection domain is in RTS, to bind it again")
            }
        }
    }

    /// The queue pair by which it can be bound: this one, or any.
    fn binder(&self, mw: &Mw, qpn: Option<u32>) -> Option<Arc<Qp>> {
        let can = |qp: &Arc<Qp>| {
            qp.qp_type != QpType::Ud
                && Arc::ptr_eq(&qp.pd, &mw.pd)
                && self
                    .query_qp(qp.number)
                    .is_ok_and(|attr| attr.state == QpState::Rts)
        };
        match qpn {
            Some(qpn) => self.objects.qps.find(qpn).filter(can),
            None => self.objects.qps.all().into_iter().find(can),
        }
    }

    /// Binds a window as another one was. Nothing else is posted to its queue pair, and nobody takes completions.
    pub fn bind_again(&self, state: &MwState) -> Result<(), VerbsError> {
        let mw = self.objects.mws.get(key_slot(state.rkey))?;
        let Some(bound) = state.bound else {
            return Ok(());
        };
        let missing = |what: &str| VerbsError::Gone {
            object: format!("{what} to which memory window {:#x} was bound", state.rkey),
        };
        let qp = self
            .binder(&mw, bound.qpn)
            .ok_or_else(|| missing("the queue pair"))?;
        let mr = self.objects.mrs.find(bound.lkey);
        let mr = mr
            .and_then(|mr| mr.live.hold_owned())
            .ok_or_else(|| missing("the region"))?;
        let held = mw.live.hold_owned().ok_or_else(|| missing("the window"))?;
        let refused = |errno: i32| VerbsError::Refused {
            verb: VERB,
            errno,
            message: format!(
                "the bind of memory window {:#x}: {}",
                state.rkey,
                std::io::Error::from_raw_os_error(errno)
            ),
        };
        let posted = match mw.mw_type {
            MwType::One => post_one(&qp, &held, &mr, &bound),
            MwType::Two => post_two(&qp, &held, &mr, &bound, state.rkey),
        };
        posted.map_err(refused)?;
        qp.cqs[0].hidden_bind(&qp).map_err(refused)?;
        if mw.mw_type == MwType::Two {
            // SAFETY: the window is held. The library leaves this to the program.
            unsafe { (*held.as_ptr()).rkey = state.rkey };
        }
        // SAFETY: as above.
        let rkey = unsafe { (*held.as_ptr()).rkey };
        if rkey != state.rkey {
            let known = state.rkey;
            let why = format!("memory window {known:#x} was bound to key {rkey:#x}");
            return Err(VerbsError::Invalid(why));
        }
        *mw.noted.lock() = Noted {
            rkey: state.rkey,
            bound: state.bound,
            by: qp.number,
        };
        Ok(())
    }
}

/// ibv_bind_mw(3), which takes the key behind the one that the window has.
fn post_one(
    qp: &Qp,
    mw: &OwnedHeld<ffi::ibv_mw>,
    mr: &OwnedHeld<ffi::ibv_mr>,
    bound: &MwBound,
) -> Result<(), i32> {
    let mut bind = ffi::ibv_mw_bind {
        wr_id: HIDDEN_BIND,
        send_flags: SEND_SIGNALED,
        bind_info: info(mr, bound),
    };
    let qp = qp.live.hold().ok_or(libc::EINVAL)?;
    // SAFETY: queue pair, window and region are held, so they and their device are alive.
    let returned = unsafe {
        match (*(*qp.as_ptr()).context).ops.bind_mw {
            Some(post) => post(qp.as_ptr(), mw.as_ptr(), &mut bind),
            None => libc::EOPNOTSUPP,
        }
    };
    match positive(returned) {
        0 => Ok(()),
        errno => Err(errno),
    }
}

/// A request, which says the key.
fn post_two(
    qp: &Qp,
    mw: &OwnedHeld<ffi::ibv_mw>,
    mr: &OwnedHeld<ffi::ibv_mr>,
    bound: &MwBound,
    rkey: u32,
) -> Result<(), i32> {
    let mut wr = ffi::ibv_send_wr {
        wr_id: HIDDEN_BIND,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: SendOpcode::BindMw as u32,
        send_flags: SEND_SIGNALED,
        imm_data: 0,
        wr: ffi::ibv_send_wr_target {
            rdma: ffi::ibv_send_wr_rdma {
                remote_addr: 0,
                rkey: 0,
            },
        },
        remote_srqn: 0,
        bind_mw: ffi::ibv_send_wr_bind {
            mw: mw.as_ptr(),
            rkey,
            bind_info: info(mr, bound),
        },
    };
    let qp = qp.live.hold().ok_or(libc::EINVAL)?;
    let mut bad = std::ptr::null_mut();
    // SAFETY: queue pair, window and region are held, so they and their device are alive; the request is whole and good until the call
    // returns.
    let returned = unsafe {
        match (*(*qp.as_ptr()).context).ops.post_send {
            Some(post) => post(qp.as_ptr(), &mut wr, &mut bad),
            None => libc::EOPNOTSUPP,
        }
    };
    match positive(returned) {
        0 => Ok(()),
        errno => Err(errno),
    }
}

fn info(mr: &OwnedHeld<ffi::ibv_mr>, bound: &MwBound) -> ffi::ibv_mw_bind_info {
    ffi::ibv_mw_bind_info {
        mr: mr.as_ptr(),
        addr: bound.address,
        length: bound.length,
        mw_access_flags: bound.access.bits(),
    }
}

impl Cq {
    /// Waits until the hidden bind of that queue pair is done. What else there is, is left to the program.
    fn hidden_bind(&self, qp: &Qp) -> Result<(), i32> {
        let held = self.live.hold().ok_or(libc::EINVAL)?;
        let begun = Instant::now();
        while begun.elapsed() < LIMIT {
            // SAFETY: the queue is held.
            let Some(wc) = (unsafe { poll(*held) }) else {
                std::thread::yield_now();
                continue;
            };
            match (wc.wr_id, wc.qp_num == qp.number) {
                (HIDDEN_BIND, true) if wc.status == WC_SUCCESS => return Ok(()),
                (HIDDEN_BIND, true) => return Err(libc::EIO),
                _ => self.left.lock().push_back(wc),
            }
        }
        Err(libc::ETIMEDOUT)
    }
}

/// Takes the next completion, whosever.
///
/// # Safety
/// `cq` is the library's queue, and stays alive until the call returns.
unsafe fn poll(cq: NonNull<ffi::ibv_cq>) -> Option<Wc> {
    let mut wc = Wc::default();
    // SAFETY: the caller's contract; the library fills at most the one entry that it is told of.
    let found = unsafe { (*(*cq.as_ptr()).context).ops.poll_cq?(cq.as_ptr(), 1, &mut wc) };
    (found > 0).then_some(wc)
}
