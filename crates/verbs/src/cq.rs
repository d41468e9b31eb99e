//! Completion queues: the fake one first, then the RNIC's (MigrRDMA §3.4).

mod owners;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize};

use verbatim_device::layout::Cqe;
use verbatim_device::ring::Armed;

use self::owners::Owners;
use crate::backend::{CompletionRing, Completions, CqPlace};
use crate::channel::CompChannel;
use crate::context::Context;
use crate::error::VerbsError;
use crate::lock::{Mutex, MutexGuard};
use crate::qp::{CompletionSide, SendQueue};
use crate::unacked::Unacked;
use crate::vain;
use crate::work::RECV_BIT;
use crate::work::{Completion, WC_SUCCESS, WC_WITH_INV, Wc};

/// After so many polls in a row that found nothing, a poll lets others run ([`vain`]): where RNICs are software, they may need
/// this very CPU to make the completion.
const IDLE_POLLS: u32 = 32;

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    context: Arc<Context>,
    /// Its number within the context.
    number: u32,
    entries: AtomicU32,
    /// Where its events go.
    channel: Option<Arc<CompChannel>>,
    pub(crate) completion_events: Unacked,
    pub(crate) async_events: Unacked,
    cookie: AtomicUsize,
    /// Queue pairs that use it, each counted once per direction; changed under the context's lock.
    pub(crate) users: AtomicUsize,
    pub(crate) place: Mutex<CqPlace>,
    pub(crate) queue: Mutex<CompletionQueue>,
    /// A queue pair of it has requests that wait for room.
    pub(crate) backlog: Arc<AtomicBool>,
}

/// Who a physical number's completions belong to.
#[derive(Debug)]
struct Owner {
    side: Arc<CompletionSide>,
    send: Arc<Mutex<SendQueue>>,
}

/// What the queue's lock protects.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    ring: Option<Completions>,
    /// Completions that were taken from a ring before the program asked for them, or that no RNIC made.
    fake: VecDeque<Completion>,
    /// The program asks for an event, and there is no ring that could be told.
    armed: Option<Armed>,
    owners: Owners<Owner>,
    idle_polls: u32,
}

/// What a completion has beside its [`Wc`]. That goes where the caller wants it at once: copies of what was just written field by field
/// wait for the writes.
#[derive(Debug, Clone, Copy)]
struct Stamp {
    timestamp_ns: u64,
    solicited: bool,
}

impl Stamp {
    fn with(self, wc: Wc) -> Completion {
        Completion {
            wc,
            timestamp_ns: self.timestamp_ns,
            solicited: self.solicited,
        }
    }
}

/// Whether it is what an armed queue waits for.
fn fires(completion: &Completion, armed: Armed) -> bool {
    armed == Armed::Any || completion.solicited || completion.wc.status != WC_SUCCESS
}

impl CompletionQueue {
    /// Takes the next completion.
    #[inline(always)]
    fn next(&mut self, to: &mut Wc) -> Option<Stamp> {
        if self.fake.is_empty() {
            return self.next_real(to);
        }
        let Completion {
            wc,
            timestamp_ns,
            solicited,
        } = self.fake.pop_front()?;
        *to = wc;
        Some(Stamp {
            timestamp_ns,
            solicited,
        })
    }

    #[inline(always)]
    fn next_real(&mut self, to: &mut Wc) -> Option<Stamp> {
        match self.ring.as_mut()? {
            Completions::Soft(ring) => next_of(ring, &mut self.owners, to),
            Completions::System(ring) => next_of_other(ring, &mut self.owners, to),
            Completions::Other(ring) => next_of_other(&mut **ring, &mut self.owners, to),
        }
    }

    /// Moves all that the RNIC has completed to the fake queue. How many.
    pub fn sweep(&mut self) -> usize {
        let before = self.fake.len();
        let mut wc = Wc::default();
        while let Some(stamp) = self.next_real(&mut wc) {
            self.fake.push_back(stamp.with(wc));
        }
        self.fake.len() - before
    }

    /// Asks for an event. True: there is reason for it now, and nobody else will make it.
    fn arm(&mut self, wanted: Armed) -> bool {
        if self.fake.iter().any(|completion| fires(completion, wanted)) {
            return true;
        }
        match &mut self.ring {
            Some(ring) => _ = ring.arm(wanted == Armed::Solicited),
            None if self.armed == Some(Armed::Any) => {}
            None => self.armed = Some(wanted),
        }
        false
    }

    /// Takes the arming back.
    fn disarm(&mut self) -> Option<Armed> {
        let told = self.ring.as_mut().and_then(|ring| ring.disarm());
        match (told, self.armed.take()) {
            (Some(Armed::Any), _) | (_, Some(Armed::Any)) => Some(Armed::Any),
            (told, kept) => told.or(kept),
        }
    }

    /// Forgets all completions of a queue pair, as destroying or resetting it does.
    pub fn purge(&mut self, virtual_qpn: u32) {
        self.sweep();
        self.fake.retain(|completion| completion.wc.qp_num != virtual_qpn);
    }

    pub fn add_owner(&mut self, physical_qpn: u32, side: Arc<CompletionSide>, send: Arc<Mutex<SendQueue>>) {
        self.owners.add(physical_qpn, Owner { side, send });
    }

    pub fn remove_owner(&mut self, physical_qpn: u32) {
        self.owners.remove(physical_qpn);
    }

    /// Forgets all physical numbers, before those of another RNIC come.
    pub fn clear_owners(&mut self) {
        self.owners = Owners::default();
    }

    /// Goes on with another ring, or the same again. True: the program waits for an event, and nobody else will make it.
    #[must_use]
    pub fn attach(&mut self, mut ring: Box<dyn CompletionRing>) -> bool {
        let armed = self.armed.take();
        let missed = armed.is_some_and(|armed| ring.arm(armed == Armed::Solicited));
        self.ring = Some(ring.into());
        missed
    }

    /// Lets go of the ring after taking everything out of it; what the program waits for is kept. True: it has come, and
    /// the RNIC has not told of it.
    #[must_use]
    pub fn detach(&mut self) -> bool {
        let armed = self.disarm();
        self.sweep();
        self.ring = None;
        let fires = armed.is_some_and(|armed| self.fake.iter().any(|completion| fires(completion, armed)));
        self.armed = armed.filter(|_| !fires);
        fires
    }

    /// All that the RNIC has completed and nobody has polled, and what the program waits for; both stay. The third: it has come,
    /// and the RNIC has not told of it.
    pub fn look(&mut self) -> (Vec<Completion>, Option<Armed>, bool) {
        let armed = self.disarm();
        self.sweep();
        let fires = armed.is_some_and(|armed| self.fake.iter().any(|completion| fires(completion, armed)));
        let armed = armed.filter(|_| !fires);
        // What has come since gets an event, too: one too many does no harm.
        let late = match (&mut self.ring, armed) {
            (Some(ring), Some(armed)) => ring.arm(armed == Armed::Solicited),
            (_, armed) => {
                self.armed = armed;
                false
            }
        };
        (self.fake.iter().copied().collect(), armed, fires || late)
    }

    /// Becomes, of a new queue, what another one was.
    pub fn refill(&mut self, completions: impl IntoIterator<Item = Completion>, armed: Option<Armed>) {
        self.fake.extend(completions);
        if let Some(armed) = armed {
            self.arm(armed);
        }
    }

    fn backlogged(&self) -> Vec<Arc<Mutex<SendQueue>>> {
        self.owners
            .iter()
            .filter(|owner| owner.side.backlog.load(Relaxed))
            .map(|owner| owner.send.clone())
            .collect()
    }
}

#[inline(always)]
fn next_of(
    ring: &mut (impl CompletionRing + ?Sized),
    owners: &mut Owners<Owner>,
    to: &mut Wc,
) -> Option<Stamp> {
    loop {
        let cqe = ring.pop()?;
        // A number that nobody has belonged to a queue pair that was destroyed.
        let owner = owners.get(cqe.qpn);
        if let Some(stamp) = owner.and_then(|owner| complete(&owner.side, &cqe, to)) {
            return Some(stamp);
        }
    }
}

/// Apart, so that each is laid out for its ring.
#[inline(never)]
fn next_of_other(
    ring: &mut (impl CompletionRing + ?Sized),
    owners: &mut Owners<Owner>,
    to: &mut Wc,
) -> Option<Stamp> {
    next_of(ring, owners, to)
}

/// Translates a completion and retires its request.
#[inline(always)]
fn complete(side: &CompletionSide, cqe: &Cqe, to: &mut Wc) -> Option<Stamp> {
    let is_recv = cqe.wr_id & RECV_BIT != 0;
    let position = cqe.wr_id & !RECV_BIT;
    let front = side
        .datagrams
        .as_deref()
        .filter(|ways| is_recv && ways.translates());
    // Before its slot may be another's.
    let front = front.map(|ways| match &side.shared {
        Some(shared) => (ways, shared.front(position)),
        None => (ways, side.recv.front(position)),
    });
    let wr_id = if !is_recv {
        side.send.retire(position)?
    } else if let Some(shared) = &side.shared {
        shared.retire(position)?
    } else {
        side.recv.retire(position)?
    };
    if cqe.status != WC_SUCCESS {
        side.failed.store(true, Relaxed);
    } else if is_recv {
        side.count_received();
    }
    *to = Wc {
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
    };
    if cqe.wc_flags & WC_WITH_INV != 0 {
        to.imm = side.windows.known(to.imm);
    }
    if let Some((ways, front)) = front {
        ways.show(to, front);
    }
    Some(Stamp {
        timestamp_ns: cqe.timestamp_ns,
        solicited: cqe.solicited != 0,
    })
}

impl Cq {
    pub(crate) fn new(
        context: Arc<Context>,
        number: u32,
        place: CqPlace,
        ring: Box<dyn CompletionRing>,
        channel: Option<Arc<CompChannel>>,
    ) -> Self {
        Self {
            context,
            number,
            entries: AtomicU32::new(place.entries),
            channel,
            completion_events: Unacked::default(),
            async_events: Unacked::default(),
            cookie: AtomicUsize::new(0),
            users: AtomicUsize::new(0),
            place: Mutex::new(place),
            queue: Mutex::new(CompletionQueue {
                ring: Some(ring.into()),
                fake: VecDeque::new(),
                armed: None,
                owners: Owners::default(),
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
        self.entries.load(Relaxed)
    }

    /// Where its events go.
    pub fn channel(&self) -> Option<&Arc<CompChannel>> {
        self.channel.as_ref()
    }

    /// For the caller's own use.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Relaxed);
    }

    /// What was set last, or 0.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Relaxed)
    }

    /// Takes completions, as many as there are and `out` holds; how many. Never blocks; a series of polls that find
    /// nothing yields the CPU, and naps while a software RNIC says that it gets none ([`vain`]).
    pub fn poll(&self, out: &mut [Wc]) -> usize {
        let mut taken = 0;
        let mut queue = self.queue.lock();
        while taken < out.len() && queue.next(&mut out[taken]).is_some() {
            taken += 1;
        }
        self.after_poll(queue, taken > 0);
        taken
    }

    /// Takes one completion with its time, as [`Self::poll`].
    pub fn poll_one(&self) -> Option<Completion> {
        let mut queue = self.queue.lock();
        let mut wc = Wc::default();
        let stamp = queue.next(&mut wc);
        self.after_poll(queue, stamp.is_some());
        let mut completion = stamp?.with(wc);
        if completion.timestamp_ns == 0 {
            // Its RNIC tells no time that we know.
            completion.timestamp_ns = crate::sys::monotonic_ns();
        }
        Some(completion)
    }

    #[inline]
    fn after_poll(&self, mut queue: MutexGuard<'_, CompletionQueue>, found: bool) {
        if found {
            queue.idle_polls = 0;
            vain::found();
        } else {
            queue.idle_polls += 1;
        }
        if queue.idle_polls >= IDLE_POLLS || self.backlog.load(Relaxed) {
            self.pump_or_pause(queue);
        }
    }

    #[cold]
    fn pump_or_pause(&self, mut queue: MutexGuard<'_, CompletionQueue>) {
        let idle = queue.idle_polls >= IDLE_POLLS;
        if idle {
            queue.idle_polls = 0;
        }
        // Cleared first: who has still no room sets it again.
        let backlogged = match self.backlog.swap(false, Relaxed) {
            true => queue.backlogged(),
            false => Vec::new(),
        };
        let is_starved = idle && queue.ring.as_ref().is_some_and(|ring| ring.is_starved());
        drop(queue);
        for send in backlogged {
            send.lock().pump();
        }
        if idle {
            vain::pause(std::ptr::from_ref(self).addr(), is_starved);
        }
    }

    /// Asks for one event, at the next completion, or at the next that is solicited or an error (ibv_req_notify_cq(3)).
    /// Without a channel there is nobody to tell.
    pub fn arm(&self, solicited_only: bool) {
        let Some(channel) = &self.channel else { return };
        let wanted = if solicited_only {
            Armed::Solicited
        } else {
            Armed::Any
        };
        if self.queue.lock().arm(wanted) {
            channel.inject(self);
        }
    }

    /// The program has acknowledged so many completion events.
    pub fn ack_events(&self, count: u32) {
        self.completion_events.ack(count);
    }

    /// The program has acknowledged an asynchronous event.
    pub fn ack_async_event(&self) {
        self.async_events.ack(1);
    }

    /// Gives it room for at least so many entries (ibv_resize_cq(3)); what is in it stays, in order.
    pub fn resize(&self, entries: u32) -> Result<(), VerbsError> {
        let process = self.context.process();
        let _pass = process.control.enter();
        let device = self.context.device()?;
        // Nobody polls meanwhile.
        let mut queue = self.queue.lock();
        let armed = queue.disarm();
        queue.ring = None;
        let mut place = self.place.lock();
        let resized = device.resize_cq(place.cq, entries);
        if let Ok(new) = &resized {
            *place = *new;
            self.entries.store(new.entries, Relaxed);
        }
        queue.ring = Some(device.cq_end(&place)?.into());
        drop(place);
        // What came while nobody was asked for an event gets one: one too many does no harm.
        let missed = armed.is_some_and(|armed| {
            let CompletionQueue { ring: Some(ring), .. } = &mut *queue else {
                return true;
            };
            ring.arm(armed == Armed::Solicited)
        });
        drop(queue);
        self.tell(missed);
        process.changed();
        resized.map(|_| ())
    }

    /// Adds completions that no RNIC makes.
    pub(crate) fn add_flushed(&self, completions: impl IntoIterator<Item = Wc>) {
        let mut queue = self.queue.lock();
        let before = queue.fake.len();
        let timestamp_ns = crate::sys::monotonic_ns();
        queue.fake.extend(completions.into_iter().map(|wc| Completion {
            wc,
            timestamp_ns,
            solicited: false,
        }));
        // All of them are errors, which every armed queue waits for.
        let fires = queue.fake.len() > before && queue.disarm().is_some();
        drop(queue);
        self.tell(fires);
    }

    /// Tells what nobody has polled, and what is armed. What it is armed for and has come makes its event now.
    pub(crate) fn look(&self) -> (Vec<Completion>, Option<Armed>) {
        let (completions, armed, fires) = self.queue.lock().look();
        self.tell(fires);
        (completions, armed)
    }

    /// It is between two RNICs, or its RNIC is gone: what that has written is taken, and armings are kept here.
    pub(crate) fn lose_ring(&self) {
        // The RNIC may have written a completion and not told of it.
        let fires = self.queue.lock().detach();
        self.tell(fires);
    }

    /// Makes the event that the program waits for, if `fires`.
    fn tell(&self, fires: bool) {
        if let Some(channel) = self.channel.as_ref().filter(|_| fires) {
            channel.inject(self);
        }
    }

    /// Goes on with another ring, or the same again.
    pub(crate) fn take_ring(&self, ring: Box<dyn CompletionRing>) {
        let missed = self.queue.lock().attach(ring);
        self.tell(missed);
    }

    /// Goes on where its RNIC would not destroy it; `fires` if what the program waits for has come.
    pub(crate) fn attach_again(&self, fires: bool) {
        let place = *self.place.lock();
        if let Ok(ring) = self.context.device().and_then(|device| device.cq_end(&place)) {
            self.take_ring(ring);
        }
        self.tell(fires);
    }

    /// Destroys it; `EBUSY` while a queue pair uses it. Waits until its events are acknowledged.
    pub fn destroy(&self) -> Result<(), VerbsError> {
        self.context.destroy_cq(self)?;
        self.completion_events.close();
        self.async_events.close();
        Ok(())
    }
}
