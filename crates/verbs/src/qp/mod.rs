//! Queue pairs.
//!
//! ```text
//!  post_send ── suspended? ──► interception buffer ─┐ replay, in order
//!      │                                            ▼
//!      └────────────────────────────────────► send ring (position) ──► completion (position)
//!  post_recv ─► shadow (whole RECV) ──┬─────► recv ring (position) ──►        │
//!                                     └ replay of what no message consumed    ▼
//!                                                        CompletionSide: position → wr_id, retired
//! ```
//! A queue's positions are `u64` counters that only rise: they go on over moves and RESETs, so that a completion of
//! another life can be told.

mod control;
mod create;
mod intercept;
mod keys;
mod markers;
#[cfg(test)]
mod number_tests;
mod recv;
mod send;
mod shadow;
mod standby;

use std::ops::DerefMut;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use verbatim_device::control::{QpCap, QpState, QpType};
use verbatim_device::layout::Sge;

pub(crate) use control::{Control, key_table};
pub use create::QpInit;
pub(crate) use intercept::Copied;
pub(crate) use recv::RecvQueue;
pub(crate) use send::SendQueue;
pub(crate) use shadow::{CompletionSide, Fronts};
pub(crate) use standby::Standby;

use crate::backend::{QpEnds, QpPlace, Refused};
use crate::context::Context;
use crate::cq::Cq;
use crate::error::PostError;
use crate::lock::{self, ArcMutexGuard, MutexGuard};
use crate::pd::Pd;
use crate::srq::Srq;
use crate::tables::Keys;
use crate::unacked::Unacked;
use crate::work::{MAX_SGE, RecvWr, SendWr};

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    context: Arc<Context>,
    pd: Arc<Pd>,
    send_cq: Arc<Cq>,
    recv_cq: Arc<Cq>,
    srq: Option<Arc<Srq>>,
    number: u32,
    qp_type: QpType,
    signal_all: bool,
    cap: QpCap,
    pub(crate) side: Arc<CompletionSide>,
    pub(crate) control: Mutex<Control>,
    pub(crate) send: Arc<lock::Mutex<SendQueue>>,
    pub(crate) recv: lock::Mutex<RecvQueue>,
    pub(crate) async_events: Unacked,
    cookie: AtomicUsize,
}

impl Qp {
    /// The virtual number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Where send completions go.
    pub fn send_cq(&self) -> &Arc<Cq> {
        &self.send_cq
    }

    /// Where receive completions go.
    pub fn recv_cq(&self) -> &Arc<Cq> {
        &self.recv_cq
    }

    /// Where its RECVs come from, if not from an own queue.
    pub fn srq(&self) -> Option<&Arc<Srq>> {
        self.srq.as_ref()
    }

    /// Whether every send request makes a completion.
    pub fn signal_all(&self) -> bool {
        self.signal_all
    }

    /// For the caller's own use.
    pub fn set_cookie(&self, cookie: usize) {
        self.cookie.store(cookie, Relaxed);
    }

    /// What was set last, or 0.
    pub fn cookie(&self) -> usize {
        self.cookie.load(Relaxed)
    }

    /// The program has acknowledged an asynchronous event of it.
    pub fn ack_async_event(&self) {
        self.async_events.ack(1);
    }

    /// The transport.
    pub fn qp_type(&self) -> QpType {
        self.qp_type
    }

    /// Its limits: at least those that were asked for.
    pub fn cap(&self) -> &QpCap {
        &self.cap
    }

    /// The state that the program has taken it to last; [`Self::query`] asks the RNIC.
    pub fn state(&self) -> QpState {
        self.control.lock().attr.state
    }

    /// Posts send requests, in order, up to the first that is refused: its index and why. Those before it are posted.
    #[inline]
    pub fn post_send<'a>(
        &self,
        requests: impl IntoIterator<Item = SendWr<'a>>,
    ) -> Result<(), (usize, PostError)> {
        let mut queue = self.send.lock();
        let mut outcome = Ok(());
        let mut pushed = 0;
        for request in requests {
            if let Err(error) = queue.push(&request) {
                outcome = Err((pushed, error));
                break;
            }
            pushed += 1;
        }
        queue.publish().map_err(|refused| refused.of(pushed))?;
        outcome
    }

    /// Posts receive requests, as [`Self::post_send`].
    #[inline]
    pub fn post_recv<'a>(
        &self,
        requests: impl IntoIterator<Item = RecvWr<'a>>,
    ) -> Result<(), (usize, PostError)> {
        if self.srq.is_some() {
            return Err((0, PostError::Invalid));
        }
        let mut queue = self.recv.lock();
        let mut outcome = Ok(());
        let mut pushed = 0;
        for request in requests {
            if let Err(error) = queue.push(&request) {
                outcome = Err((pushed, error));
                break;
            }
            pushed += 1;
        }
        queue.publish().map_err(|refused| refused.of(pushed))?;
        outcome
    }

    /// Starts a batch of send requests that become visible together, or not at all (`ibv_wr_start`). Other threads that
    /// post to this queue pair wait until the batch is over.
    #[inline]
    pub fn batch(&self) -> SendBatch<'_> {
        Batch::new(self.send.lock())
    }

    /// As [`Self::batch`], for a caller that keeps the batch across calls.
    pub fn owned_batch(&self) -> OwnedSendBatch {
        Batch::new(self.send.lock_arc())
    }

    /// Lets go of everything that lies in the RNIC's memory.
    pub(crate) fn detach(&self) {
        self.send.lock().detach();
        self.recv.lock().detach();
    }

    /// Goes on where its RNIC would not destroy it.
    fn attach_again(&self, place: &QpPlace) {
        let ends = self.context.device().and_then(|device| device.qp_ends(place));
        let Ok(QpEnds { send, recv }) = ends else { return };
        let mut queue = self.send.lock();
        queue.attach_again(send);
        queue.pump();
        drop(queue);
        if self.srq.is_none() {
            let mut queue = self.recv.lock();
            queue.attach_again(recv);
            queue.catch_up();
        }
    }
}

impl Refused {
    /// Of so many requests, which is the first that was not posted, and why.
    fn of(self, pushed: usize) -> (usize, PostError) {
        (pushed - self.count as usize, PostError::Refused(self.errno))
    }
}

/// A batch that borrows its queue pair.
pub type SendBatch<'a> = Batch<MutexGuard<'a, SendQueue>>;

/// A batch that keeps its queue alive.
pub type OwnedSendBatch = Batch<ArcMutexGuard<SendQueue>>;

/// Send requests that become visible together. Dropping it without [`Batch::complete`] takes them back.
#[derive(Debug)]
#[must_use = "dropped without `complete`, the requests are taken back"]
pub struct Batch<G: DerefMut<Target = SendQueue>> {
    queue: G,
    start: Option<send::Mark>,
}

impl<G: DerefMut<Target = SendQueue>> Batch<G> {
    #[inline]
    fn new(queue: G) -> Self {
        let start = Some(queue.mark());
        Self { queue, start }
    }

    /// Adds a request. One that is refused leaves the others as they are.
    #[inline]
    pub fn push(&mut self, request: &SendWr<'_>) -> Result<(), PostError> {
        self.queue.push(request)
    }

    /// Posts all (`ibv_wr_complete`). An RNIC's library may refuse them from one on: how many were not posted, and why.
    #[inline]
    pub fn complete(mut self) -> Result<(), (u32, PostError)> {
        self.start = None;
        let published = self.queue.publish();
        published.map_err(|refused| (refused.count, PostError::Refused(refused.errno)))
    }

    /// Takes all back (`ibv_wr_abort`).
    pub fn abort(self) {}
}

impl<G: DerefMut<Target = SendQueue>> Drop for Batch<G> {
    fn drop(&mut self) {
        if let Some(start) = self.start.take() {
            self.queue.rewind(start);
        }
    }
}

/// Gives `take` the entries with the keys that the RNIC knows. An unknown key becomes one that no region has, so that it
/// fails as an unknown key does and cannot be another region's by chance.
#[inline]
pub(crate) fn with_local_keys<R>(
    keys: Option<&impl Keys>,
    sges: &[Sge],
    take: impl FnOnce(&[Sge]) -> R,
) -> R {
    let Some(keys) = keys else { return take(sges) };
    // Most requests have one; clearing room for `MAX_SGE` would cost as much as the rest.
    if let [sge] = sges {
        return take(&[translate(keys, sge)]);
    }
    let mut space = [Sge::default(); MAX_SGE];
    let translated = &mut space[..sges.len()];
    for (to, from) in translated.iter_mut().zip(sges) {
        *to = translate(keys, from);
    }
    take(translated)
}

#[inline]
fn translate(keys: &impl Keys, sge: &Sge) -> Sge {
    Sge {
        lkey: keys.physical(sge.lkey).unwrap_or(0),
        ..*sge
    }
}
