//! What is remembered of requests that were given to an RNIC, until their completion is taken.
//!
//! Written by whoever posts (under the queue's lock), read by whoever polls (under the completion queue's lock). The two
//! never touch one slot at a time: a slot is reused only when `retired` has passed it, and the RNIC completes only what
//! was published after the slot was written.

use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use verbatim_device::layout::Sge;

use crate::datagrams::{Datagrams, Front};
use crate::mw::Windows;
use crate::srq::Slots;

/// Where the first entries of RECVs are, by slot; as [`Shadow`], written by who posts and read by who polls.
#[derive(Debug, Default)]
pub struct Fronts(Box<[[AtomicU64; 2]]>);

impl Fronts {
    pub fn new(slots: usize) -> Self {
        Self((0..slots).map(|_| Default::default()).collect())
    }

    #[inline]
    pub fn note(&self, slot: usize, sges: &[Sge]) {
        if let Some([address, rest]) = self.0.get(slot) {
            let first = sges.first().copied().unwrap_or_default();
            address.store(first.address, Relaxed);
            rest.store(u64::from(first.lkey) << 32 | u64::from(first.length), Relaxed);
        }
    }

    pub fn get(&self, slot: usize) -> Front {
        self.0.get(slot).map_or_else(Front::default, |[address, rest]| {
            let rest = rest.load(Relaxed);
            Front {
                address: address.load(Relaxed),
                lkey: (rest >> 32) as u32,
                length: rest as u32,
            }
        })
    }
}

/// The `wr_id`s of one queue, by position.
#[derive(Debug)]
pub struct Shadow {
    wr_ids: Box<[AtomicU64]>,
    /// Of datagram RECVs: where the first entry is.
    fronts: Fronts,
    /// All before this position have completed.
    retired: AtomicU64,
    /// Positions before this one belong to the time before a RESET: their completions are nobody's.
    floor: AtomicU64,
}

impl Shadow {
    pub fn new(capacity: u32) -> Self {
        let slots = capacity.max(1).next_power_of_two();
        Self {
            wr_ids: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            fronts: Fronts::default(),
            retired: AtomicU64::new(0),
            floor: AtomicU64::new(0),
        }
    }

    /// As [`Self::new`], for the RECVs of a datagram queue pair.
    pub fn with_fronts(capacity: u32) -> Self {
        let shadow = Self::new(capacity);
        Self {
            fronts: Fronts::new(shadow.wr_ids.len()),
            ..shadow
        }
    }

    /// Notes where the first entry of the RECV at `position` is, if that counts here.
    #[inline]
    pub fn note_front(&self, position: u64, sges: &[Sge]) {
        self.fronts
            .note(position as usize & (self.wr_ids.len() - 1), sges);
    }

    /// What was noted for the RECV at `position`, which is not retired yet.
    pub fn front(&self, position: u64) -> Front {
        self.fronts.get(position as usize & (self.wr_ids.len() - 1))
    }

    #[inline]
    fn slot(&self, position: u64) -> &AtomicU64 {
        &self.wr_ids[position as usize & (self.wr_ids.len() - 1)]
    }

    /// Notes a request that is about to be given to the RNIC at `position`.
    #[inline]
    pub fn note(&self, position: u64, wr_id: u64) {
        self.slot(position).store(wr_id, Relaxed);
    }

    /// The program's `wr_id` of the request at `position`, which has not completed.
    #[inline]
    pub fn wr_id(&self, position: u64) -> u64 {
        self.slot(position).load(Relaxed)
    }

    /// The request at `position` has completed, and with it all before; its `wr_id`. `None` if it is none of this life.
    #[inline]
    pub fn retire(&self, position: u64) -> Option<u64> {
        if position < self.floor.load(Relaxed) {
            return None;
        }
        let wr_id = self.wr_id(position);
        self.retired.store(position + 1, Release);
        Some(wr_id)
    }

    /// All before this position have completed.
    #[inline]
    pub fn retired(&self) -> u64 {
        self.retired.load(Acquire)
    }

    /// Everything before `position` is done without further completions: what was not signaled, after a drain.
    pub fn settle(&self, position: u64) {
        self.retired.store(position, Release);
    }

    /// A new life starts at `position`.
    pub fn reset(&self, position: u64) {
        self.floor.store(position, Relaxed);
        self.settle(position);
    }
}

/// The completion side of a queue pair: what a completion queue knows of it.
#[derive(Debug)]
pub struct CompletionSide {
    /// Virtual number.
    pub qpn: u32,
    pub send: Shadow,
    pub recv: Shadow,
    /// In the place of `recv`, of a queue pair with a shared receive queue.
    pub shared: Option<Arc<Slots>>,
    /// Of a datagram queue pair: the ways of its context.
    pub datagrams: Option<Arc<Datagrams>>,
    /// The keys of its context's windows.
    pub windows: Arc<Windows>,
    /// Messages received since creation or RESET (`n_recv`).
    pub received: AtomicU64,
    /// A request has failed: the RNIC has taken the queue pair to ERR.
    pub failed: AtomicBool,
    /// Requests wait for room in the ring.
    pub backlog: AtomicBool,
}

impl CompletionSide {
    /// One more message was received. Who polls holds the lock of the queue that all RECVs of this queue pair complete to.
    #[inline]
    pub fn count_received(&self) {
        self.received.store(self.received.load(Relaxed) + 1, Relaxed);
    }
}
