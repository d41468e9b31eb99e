//! The requester: turns send requests into packets and answers into completions (IBA §9.7.3 and §9.7.5).
//!
//! Every request owns a range of PSNs (a READ the range of its response packets), so the whole state of what is under
//! way is four PSNs over a queue of requests:
//!
//! ```text
//!        ack       next            high        end
//!    ─────┼──────────┼───────────────┼───────────┼──────►  PSN
//!     done│ sent, no │ sent before,  │ not sent  │ not yet
//!         │ answer   │ to be resent  │ yet       │ taken off the ring
//! ```
//!
//! - [`transmit`]: sends the packet at `next`, as long as the window lets it.
//! - [`acknowledge`]: answers move `ack`, and requests that it passes are complete.
//! - [`retry`]: NAKs and timeouts set `next` back to `ack` (go back N, IBA §9.7.5.2.4): since any packet can be made
//!   again from its PSN and the program's memory, nothing that was sent is kept.
//!
//! A READ of many packets is asked for in pieces of a part of the window, each with a request of its own (to the
//! responder they are so many READs in a row). So the data that the partner may send at a time is bounded, which no
//! acknowledgement does for READ.
//!
//! A request that fails (local or remote) is marked, and fails the queue pair when it has become the oldest one: those
//! before it still complete as usual.

mod acknowledge;
mod retry;
mod transmit;
mod window;
mod wqe;

use std::collections::VecDeque;
use std::time::Duration;

use self::window::Window;
use self::wqe::Wqe;
use super::RcConfig;
use crate::{Completion, Counters, Host, Psn, QpAttributes, Queue, Time, WcStatus};

/// What the attributes say to the requester.
#[derive(Clone, Copy, Debug, Default)]
struct Settings {
    /// `None`: never.
    ack_timeout: Option<Duration>,
    retry_cnt: u8,
    rnr_retry: u8,
    max_rd_atomic: u8,
}

/// Requests taken off the ring, and how far they are.
#[derive(Debug)]
pub(super) struct Requester {
    config: RcConfig,
    settings: Settings,
    queue: VecDeque<Wqe>,
    /// Index into the queue of the request that `next` lies in; its length if `next` is `end`.
    cursor: usize,
    /// The oldest PSN without an answer.
    ack: Psn,
    /// The next PSN to send.
    next: Psn,
    /// The first PSN that was never sent.
    high: Psn,
    /// The first PSN after the last request.
    end: Psn,
    /// The last PSN of each READ request that is under way, oldest first.
    reads: VecDeque<Psn>,
    window: Window,
    retries_left: u8,
    rnr_retries_left: u8,
    /// Went back because of a NAK, and nothing has been acknowledged since: more such NAKs are echoes.
    recovering: bool,
    ack_deadline: Option<Time>,
    rnr_deadline: Option<Time>,
}

impl Requester {
    pub fn new(config: RcConfig) -> Requester {
        Requester {
            config,
            settings: Settings::default(),
            queue: VecDeque::new(),
            cursor: 0,
            ack: Psn::default(),
            next: Psn::default(),
            high: Psn::default(),
            end: Psn::default(),
            reads: VecDeque::new(),
            window: Window::default(),
            retries_left: 0,
            rnr_retries_left: 0,
            recovering: false,
            ack_deadline: None,
            rnr_deadline: None,
        }
    }

    /// Takes over attributes that may change while the queue pair runs.
    pub fn configure(&mut self, attributes: &QpAttributes) {
        let code = u32::from(attributes.timeout.unwrap_or(0));
        let ack_timeout = Duration::from_nanos(4096) * (1 << code);
        self.settings = Settings {
            ack_timeout: (code != 0).then(|| ack_timeout.max(self.config.min_ack_timeout)),
            retry_cnt: attributes.retry_cnt.unwrap_or(0),
            rnr_retry: attributes.rnr_retry.unwrap_or(0),
            max_rd_atomic: attributes.max_rd_atomic.unwrap_or(0),
        };
        let by_bytes = self.config.window_bytes / attributes.path_mtu.unwrap_or_default().bytes();
        self.window.limit(by_bytes.min(self.config.window_packets));
        self.restore_retries();
    }

    /// The queue pair goes to RTS for the first time.
    pub fn start(&mut self, first: Psn) {
        (self.ack, self.next, self.high, self.end) = (first, first, first, first);
    }

    pub fn is_drained(&self) -> bool {
        self.queue.is_empty()
    }

    pub fn next_timeout(&self) -> Option<Time> {
        match (self.ack_deadline, self.rnr_deadline) {
            (Some(ack), Some(rnr)) => Some(ack.min(rnr)),
            (ack, rnr) => ack.or(rnr),
        }
    }

    /// Has the oldest request failed? Then the queue pair must go into the error state.
    pub fn has_failed(&self) -> bool {
        self.queue.front().is_some_and(|wqe| wqe.failure.is_some())
    }

    /// Completes everything that was taken off the ring, without executing it: the oldest with its own failure, the
    /// others as flushed.
    pub fn flush(&mut self, host: &mut impl Host, counters: &mut Counters) {
        let mut failure = self.queue.front().and_then(|wqe| wqe.failure);
        while let Some(wqe) = self.queue.pop_front() {
            let status = failure.take().unwrap_or(WcStatus::WrFlushErr);
            match status {
                WcStatus::WrFlushErr => counters.req_cqe_flush_error += 1,
                _ => counters.req_cqe_error += 1,
            }
            retire(&wqe, status, host);
        }
        *self = Requester {
            settings: self.settings,
            window: self.window,
            ..Requester::new(self.config)
        };
    }

    /// Fails the oldest request.
    fn fail(&mut self, status: WcStatus) {
        if let Some(wqe) = self.queue.front_mut() {
            wqe.failure.get_or_insert(status);
        }
    }

    fn restore_retries(&mut self) {
        self.retries_left = self.settings.retry_cnt;
        self.rnr_retries_left = self.settings.rnr_retry;
        self.recovering = false;
    }

    /// Starts the time in which an answer has to come, if one is due.
    fn rearm(&mut self, now: Time) {
        let due = self.ack != self.high && self.rnr_deadline.is_none();
        self.ack_deadline = self
            .settings
            .ack_timeout
            .filter(|_| due)
            .map(|timeout| now + timeout);
    }
}

/// Gives a request's slot back, and its completion where one is due.
fn retire(wqe: &Wqe, status: WcStatus, host: &mut impl Host) {
    host.retire_sends(1);
    if wqe.request.signaled || status != WcStatus::Success {
        host.complete(Completion {
            queue: Queue::Send,
            wr_id: wqe.request.wr_id,
            status,
            opcode: wqe.opcode,
            byte_len: wqe.len,
            imm: None,
            solicited: false,
        });
    }
}
