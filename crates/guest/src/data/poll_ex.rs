//! Completions one by one: `ibv_start_poll`, `ibv_next_poll`, `ibv_end_poll`, and the functions that read the current
//! one (`ibv_create_cq_ex`(3)).
//!
//! Between start and end the queue belongs to one thread, unless the program promised that there is only one
//! (`IBV_CREATE_CQ_ATTR_SINGLE_THREADED`).

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_uint};

use parking_lot::RawMutex;
use parking_lot::lock_api::RawMutex as _;
use verbatim_verbs::Completion;

use crate::abi::*;
use crate::clock::now_ns;
use crate::ffi::{Errno, data_path};
use crate::handles::CqHandle;

/// The completion that is being read.
pub struct Poller {
    /// Held from start to end.
    lock: RawMutex,
    single_threaded: bool,
    state: UnsafeCell<State>,
}

/// What the lock protects.
#[derive(Default)]
struct State {
    current: Completion,
    started: bool,
}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Poller")
    }
}

impl Poller {
    /// Without its lock if the program promised that one thread polls.
    pub fn new(single_threaded: bool) -> Self {
        Self {
            lock: RawMutex::INIT,
            single_threaded,
            state: UnsafeCell::default(),
        }
    }

    fn lock(&self) {
        if !self.single_threaded {
            self.lock.lock();
        }
    }

    /// # Safety
    /// This thread has locked it.
    unsafe fn unlock(&self) {
        if !self.single_threaded {
            // SAFETY: the caller's contract.
            unsafe { self.lock.unlock() };
        }
    }
}

/// Takes the next completion: 0, or `ENOENT` if there is none.
///
/// # Safety
/// `cq` is alive and polled by this thread.
unsafe fn advance(cq: *mut ibv_cq_ex, handle: &CqHandle) -> Result<(), Errno> {
    let completion = handle.core.cq.poll_one().ok_or(Errno::NO_ENTRY)?;
    // SAFETY: the caller's contract: nobody else looks into the cell, and the members are this thread's.
    unsafe {
        (*cq).status = completion.wc.status;
        (*cq).wr_id = completion.wc.wr_id;
        *handle.core.poller.state.get() = State {
            current: completion,
            started: true,
        };
    }
    Ok(())
}

fn code(outcome: Result<(), Errno>) -> c_int {
    outcome.map_or_else(Errno::raw, |()| 0)
}

/// # Safety
/// `cq` is alive, `attr` NULL or valid.
unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let start = || {
        // SAFETY: the caller's contract.
        let (handle, comp_mask) = unsafe {
            (
                CqHandle::lend(cq)?,
                attr.as_ref().map_or(0, |attr| attr.comp_mask),
            )
        };
        if comp_mask != 0 {
            return Err(Errno::INVALID);
        }
        let poller = &handle.core.poller;
        poller.lock();
        // SAFETY: locked by this thread just now.
        unsafe { advance(cq, handle).inspect_err(|_| poller.unlock()) }
    };
    data_path(|| code(start()), || libc::EIO)
}

/// # Safety
/// `cq` is alive and polled by this thread.
unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller's contract.
    let next = || unsafe { advance(cq, CqHandle::lend(cq)?) };
    data_path(|| code(next()), || libc::EIO)
}

/// After a start that failed it does nothing, as programs call it then, too.
///
/// # Safety
/// `cq` is alive and polled by this thread.
unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    let end = || {
        // SAFETY: the caller's contract.
        let Ok(handle) = (unsafe { CqHandle::lend(cq) }) else {
            return;
        };
        let poller = &handle.core.poller;
        // SAFETY: the caller's contract: what was started was locked by this thread, whose cell it is.
        unsafe {
            if std::mem::take(&mut (*poller.state.get()).started) {
                poller.unlock();
            }
        }
    };
    data_path(end, || ());
}

/// Reads the current completion.
///
/// # Safety
/// `cq` is alive and polled by this thread.
#[inline]
unsafe fn current(cq: *mut ibv_cq_ex) -> Completion {
    // SAFETY: the caller's contract; a copy.
    unsafe { CqHandle::lend(cq) }.map_or(Completion::default(), |handle| unsafe {
        (*handle.core.poller.state.get()).current
    })
}

/// The functions that read one member of the current completion.
macro_rules! readers {
    ($($name:ident: $type:ty = |$completion:ident| $value:expr;)*) => {$(
        /// # Safety
        /// `cq` is alive and polled by this thread.
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: the caller's contract.
            let $completion = unsafe { current(cq) };
            $value
        }
    )*};
}

readers! {
    read_opcode: c_uint = |completion| completion.wc.opcode;
    read_vendor_err: u32 = |completion| completion.wc.vendor_err;
    read_byte_len: u32 = |completion| completion.wc.byte_len;
    read_imm_data: u32 = |completion| completion.wc.imm;
    read_qp_num: u32 = |completion| completion.wc.qp_num;
    read_src_qp: u32 = |completion| completion.wc.src_qp;
    read_wc_flags: c_uint = |completion| completion.wc.wc_flags;
    read_slid: u32 = |completion| completion.wc.slid.into();
    read_sl: u8 = |completion| completion.wc.sl;
    read_dlid_path_bits: u8 = |completion| completion.wc.dlid_path_bits;
    read_completion_ts: u64 = |completion| completion.timestamp_ns;
    read_completion_wallclock_ns: u64 = |completion| wall_clock_ns(completion.timestamp_ns);
}

/// The time of day at which the monotonic clock showed that.
fn wall_clock_ns(timestamp_ns: u64) -> u64 {
    let since_ns = now_ns(libc::CLOCK_MONOTONIC).saturating_sub(timestamp_ns);
    now_ns(libc::CLOCK_REALTIME).saturating_sub(since_ns)
}

/// A completion queue with the functions that we have; one that asks for others is not made.
pub fn extended_cq(cq: ibv_cq) -> ibv_cq_ex {
    ibv_cq_ex {
        context: cq.context,
        channel: cq.channel,
        cq_context: cq.cq_context,
        handle: cq.handle,
        cqe: cq.cqe,
        mutex: cq.mutex,
        cond: cq.cond,
        comp_events_completed: cq.comp_events_completed,
        async_events_completed: cq.async_events_completed,
        comp_mask: 0,
        status: 0,
        wr_id: 0,
        start_poll: Some(start_poll),
        next_poll: Some(next_poll),
        end_poll: Some(end_poll),
        read_opcode: Some(read_opcode),
        read_vendor_err: Some(read_vendor_err),
        read_byte_len: Some(read_byte_len),
        read_imm_data: Some(read_imm_data),
        read_qp_num: Some(read_qp_num),
        read_src_qp: Some(read_src_qp),
        read_wc_flags: Some(read_wc_flags),
        read_slid: Some(read_slid),
        read_sl: Some(read_sl),
        read_dlid_path_bits: Some(read_dlid_path_bits),
        read_completion_ts: Some(read_completion_ts),
        read_cvlan: None,
        read_flow_tag: None,
        read_tm_info: None,
        read_completion_wallclock_ns: Some(read_completion_wallclock_ns),
    }
}
