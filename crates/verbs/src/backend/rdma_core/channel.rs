//! Completion channels: the kernel's own descriptors.
//!
//! Events are acknowledged to the library as soon as they are read, since the objects above count for themselves what the
//! program has not acknowledged.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::SeqCst;

use parking_lot::Mutex;
use verbatim_device::ring;

use super::ffi::ibv_comp_channel;
use super::live::Live;
use crate::backend::EventChannel;
use crate::error::VerbsError;

/// What a completion queue was asked for and no event has come of yet.
#[derive(Debug, Default)]
pub struct Armed(AtomicU8);

const SOLICITED: u8 = 1;
const ANY: u8 = 2;

impl Armed {
    /// The stronger wish stays.
    pub fn note(&self, solicited_only: bool) {
        self.0
            .fetch_max(if solicited_only { SOLICITED } else { ANY }, SeqCst);
    }

    pub fn take(&self) -> Option<ring::Armed> {
        match self.0.swap(0, SeqCst) {
            0 => None,
            SOLICITED => Some(ring::Armed::Solicited),
            _ => Some(ring::Armed::Any),
        }
    }
}

/// A completion channel.
#[derive(Debug)]
pub struct Channel {
    live: Live<ibv_comp_channel>,
    number: u32,
    /// Those that send their events here, by number, and what these say.
    cqs: Mutex<HashMap<u32, (u32, Arc<Armed>)>>,
    /// Events that no RNIC made. Who asks for an event finds them; the descriptor does not tell of them, since it is the
    /// kernel's. They are made for an RNIC that is gone, whose descriptor is readable for ever, and for a queue with
    /// completions in it, which a program that has armed it looks at before it waits.
    injected: Mutex<VecDeque<u32>>,
}

impl Channel {
    pub fn new(live: Live<ibv_comp_channel>, number: u32) -> Self {
        Self {
            live,
            number,
            cqs: Mutex::default(),
            injected: Mutex::default(),
        }
    }

    /// For the library, as long as this exists.
    pub fn pointer(&self) -> *mut ibv_comp_channel {
        let held = self.live.hold().expect("it is destroyed when self is dropped");
        held.as_ptr()
    }

    pub fn add(&self, cq: u32, event: u32, armed: Arc<Armed>) {
        self.cqs.lock().insert(cq, (event, armed));
    }

    pub fn remove(&self, cq: u32) {
        self.cqs.lock().remove(&cq);
    }
}

impl EventChannel for Channel {
    fn number(&self) -> u32 {
        self.number
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is alive, and with it its descriptor, as long as self.
        unsafe { BorrowedFd::borrow_raw((*self.pointer()).fd) }
    }

    fn next(&self) -> Result<u32, VerbsError> {
        if let Some(cq) = self.injected.lock().pop_front() {
            return Ok(cq);
        }
        let library = self.live.opened().library();
        let functions = library.functions();
        let (mut cq, mut number) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the channel is alive as long as self. The queue cannot be destroyed before its event is acknowledged, which
        // is done at once.
        let number = unsafe {
            if (functions.ibv_get_cq_event)(self.pointer(), &mut cq, &mut number) != 0 {
                // Many libraries leave `errno` as read(2) did, which is what the caller wants: EAGAIN, EINTR, EIO.
                let source = std::io::Error::from_raw_os_error(library.errno());
                // An RNIC that is gone ends a wait; what was made for it meanwhile counts.
                return self.injected.lock().pop_front().ok_or(VerbsError::Os {
                    call: "ibv_get_cq_event",
                    source,
                });
            }
            (functions.ibv_ack_cq_events)(cq, 1);
            number as usize as u32
        };
        // Of a queue that is gone, nobody knows what it says: neither do the objects above.
        let cqs = self.cqs.lock();
        Ok(cqs.get(&number).map_or(0, |(event, armed)| {
            armed.take();
            *event
        }))
    }

    fn inject(&self, event: u32) {
        self.injected.lock().push_back(event);
    }
}
