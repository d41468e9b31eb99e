//! Completion queues: the fake one first, then the RNIC's (MigrRDMA §3.4).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use parking_lot::Mutex;
use verbatim_device::layout::Cqe;

use crate::backend::{CompletionRing, CqPlace};
use crate::context::Context;
use crate::error::VerbsError;
use crate::qp::{CompletionSide, RECV_BIT, SendQueue};
use crate::tables::Radix24;
use crate::work::{Completion, WC_SUCCESS, Wc};

/// After so many polls in a row that found nothing, a poll lets others run: where RNICs are software, they may need
/// this very CPU to make the completion.
const IDLE_POLLS: u32 = 32;

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    context: Arc<Context>,
    /// Its number within the context.
    number: u32,
    entries: u32,
    /// Queue pairs that use it, each counted once per direction; changed under the context's lock.
    pub(crate) users: AtomicUsize,
    pub(crate) place: Mutex<CqPlace>,
    pub(crate) queue: Mutex<CompletionQueue>,
    /// A queue pair of it has requests that wait for room.
    pub(crate) backlog: Arc<AtomicBool>,
}

/// Who a physical number's completions belong to.
type Owner = (Arc<CompletionSide>, Arc<Mutex<SendQueue>>);

/// What the queue's lock protects.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    ring: Option<Box<dyn CompletionRing>>,
    /// Completions that were taken from a ring before the program asked for them.
    fake: VecDeque<Completion>,
    /// By physical number.
    owners: Radix24<Option<Owner>>,
    idle_polls: u32,
}

impl CompletionQueue {
    #[inline]
    fn next(&mut self) -> Option<Completion> {
        if !self.fake.is_empty() {
            return self.fake.pop_front();
        }
        self.next_real()
    }

    #[inline]
    fn next_real(&mut self) -> Option<Completion> {
        let ring = self.ring.as_mut()?;
        loop {
            let cqe = ring.pop()?;
            // A number that nobody has belonged to a queue pair that was destroyed.
            let owner = self.owners.get(cqe.qpn).and_then(Option::as_ref);
            if let Some(completion) = owner.and_then(|(side, _)| complete(side, &cqe)) {
                return Some(completion);
            }
        }
    }

    /// Moves all that the RNIC has completed to the fake queue. How many.
    pub fn sweep(&mut self) -> usize {
        let before = self.fake.len();
        while let Some(completion) = self.next_real() {
            self.fake.push_back(completion);
        }
        self.fake.len() - before
    }

    /// Forgets all completions of a queue pair, as destroying or resetting it does.
    pub fn purge(&mut self, virtual_qpn: u32) {
        self.sweep();
        self.fake.retain(|completion| completion.wc.qp_num != virtual_qpn);
    }

    pub fn add_owner(&mut self, physical_qpn: u32, side: Arc<CompletionSide>, send: Arc<Mutex<SendQueue>>) {
        *self.owners.at_mut(physical_qpn) = Some((side, send));
    }

    pub fn remove_owner(&mut self, physical_qpn: u32) {
        *self.owners.at_mut(physical_qpn) = None;
    }

    /// Forgets all physical numbers, before those of another RNIC come.
    pub fn clear_owners(&mut self) {
        self.owners = Radix24::new();
    }

    pub fn attach(&mut self, ring: Box<dyn CompletionRing>) {
        self.ring = Some(ring);
    }

    /// Lets go of the ring after taking everything out of it.
    pub fn detach(&mut self) {
        self.sweep();
        self.ring = None;
    }

    fn backlogged(&self) -> Vec<Arc<Mutex<SendQueue>>> {
        self.owners
            .iter()
            .flatten()
            .filter(|(side, _)| side.backlog.load(Relaxed))
            .map(|(_, send)| send.clone())
            .collect()
    }
}

/// Translates a completion and retires its request.
#[inline]
fn complete(side: &CompletionSide, cqe: &Cqe) -> Option<Completion> {
    let is_recv = cqe.wr_id & RECV_BIT != 0;
    let shadow = if is_recv { &side.recv } else { &side.send };
    let wr_id = shadow.retire(cqe.wr_id & !RECV_BIT)?;
    if cqe.status != WC_SUCCESS {
        side.failed.store(true, Relaxed);
    } else if is_recv {
        side.received.fetch_add(1, Relaxed);
    }
    Some(Completion {
        wc: Wc {
            wr_id,
            status: cqe.status,
            opcode: cqe.opcode,
            vendor_err: cqe.vendor_err,
            byte_len: cqe.byte_len,
            imm: cqe.imm,
            qp_num: side.qpn,
            src_qp: cqe.src_qpn,
            wc_flags: cqe.wc_flags,
            pkey_index: 0,
            slid: 0,
            sl: cqe.sl as u8,
            dlid_path_bits: 0,
        },
        timestamp_ns: cqe.timestamp_ns,
    })
}

impl Cq {
    pub(crate) fn new(
        context: Arc<Context>,
        number: u32,
        place: CqPlace,
        ring: Box<dyn CompletionRing>,
    ) -> Self {
        Self {
            context,
            number,
            entries: place.entries,
            users: AtomicUsize::new(0),
            place: Mutex::new(place),
            queue: Mutex::new(CompletionQueue {
                ring: Some(ring),
                fake: VecDeque::new(),
                owners: Radix24::new(),
                idle_polls: 0,
            }),
            backlog: Arc::new(AtomicBool::new(false)),
        }
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its number within the context.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The RNIC's number.
    pub(crate) fn physical(&self) -> u32 {
        self.place.lock().cq
    }

    /// How many completions it holds.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Takes completions, as many as there are and `out` holds; how many. Never blocks; a series of polls that find
    /// nothing yields the CPU.
    pub fn poll(&self, out: &mut [Wc]) -> usize {
        let mut taken = 0;
        let mut queue = self.queue.lock();
        while taken < out.len() {
            let Some(completion) = queue.next() else { break };
            out[taken] = completion.wc;
            taken += 1;
        }
        self.after_poll(queue, taken > 0);
        taken
    }

    /// Takes one completion with its time, as [`Self::poll`].
    pub fn poll_one(&self) -> Option<Completion> {
        let mut queue = self.queue.lock();
        let completion = queue.next();
        self.after_poll(queue, completion.is_some());
        completion
    }

    #[inline]
    fn after_poll(&self, mut queue: parking_lot::MutexGuard<'_, CompletionQueue>, found: bool) {
        let backlogged = if self.backlog.load(Relaxed) {
            self.take_backlog(&queue)
        } else {
            Vec::new()
        };
        queue.idle_polls = if found { 0 } else { queue.idle_polls + 1 };
        let idle = queue.idle_polls >= IDLE_POLLS;
        if idle {
            queue.idle_polls = 0;
        }
        drop(queue);
        for send in backlogged {
            send.lock().pump();
        }
        if idle {
            crate::sys::yield_now();
        }
    }

    #[cold]
    fn take_backlog(&self, queue: &CompletionQueue) -> Vec<Arc<Mutex<SendQueue>>> {
        // Cleared first: who has still no room sets it again.
        self.backlog.store(false, Relaxed);
        queue.backlogged()
    }

    /// Destroys it; `EBUSY` while a queue pair uses it.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.context.destroy_cq(self)
    }
}
