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
//! - [`transmit`]: sends the packet at `next`, as long as the window lets it; [`local`]: what needs no packet.
//! - [`acknowledge`]: answers move `ack`, and requests that it passes are complete.
//! - [`retry`]: NAKs and timeouts set `next` back to `ack`: since any packet can be made again from its PSN and the
//!   program's memory, nothing that was sent is kept.
//! - [`repair`]: what is sent again without that. [`window`] and [`rtt`]: how much may be under way, and for how long.
//!
//! A READ of many packets is asked for in pieces of a part of the window, each with a request of its own (to the
//! responder they are so many READs in a row). So the data that the partner may send at a time is bounded, which no
//! acknowledgement does for READ.
//!
//! A request that fails (local or remote) is marked, and fails the queue pair when it has become the oldest one: those
//! before it still complete as usual.

mod acknowledge;
mod image;
mod local;
mod repair;
mod retry;
mod rtt;
mod transmit;
mod window;
mod wqe;

use std::collections::VecDeque;
use std::time::Duration;

pub(super) use self::image::RequesterImage;
use self::repair::Repair;
use self::rtt::Rtt;
use self::window::Window;
use self::wqe::Wqe;
use crate::gather::retire_failed;
use crate::held::Held;
use crate::link::Link;
use crate::{Counters, Host, Mtu, Outstanding, Psn, QpAttributes, QpConfig, Time, WcStatus};

/// Room for requests that a queue pair keeps when it has none under way.
const MOST_IDLE_REQUESTS: usize = 8;

/// What the attributes say to the requester.
#[derive(Clone, Copy, Debug, Default)]
struct Settings {
    /// `None`: never.
    ack_timeout: Option<Duration>,
    retry_cnt: u8,
    rnr_retry: u8,
    max_rd_atomic: u8,
    mtu: Mtu,
}

/// A packet whose answer tells the round trip.
#[derive(Clone, Copy, Debug)]
struct Timed {
    psn: Psn,
    at: Time,
    /// [`Requester::delivered`] at that time.
    delivered: u32,
}

/// Requests taken off the ring, and how far they are.
#[derive(Debug)]
pub(super) struct Requester {
    config: QpConfig,
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
    /// The first PSN after the last packet that asked for an acknowledgement.
    asked: Psn,
    /// The last turn has ended before there was nothing more to send.
    has_more: bool,
    /// The last PSN of each READ request and atomic that is under way, oldest first.
    reads: VecDeque<Psn>,
    /// Message bytes between `ack` and `next`.
    in_flight_bytes: u64,
    window: Window,
    rtt: Rtt,
    timed: Option<Timed>,
    /// Packets acknowledged, modulo 2^32.
    delivered: u32,
    retries_left: u8,
    rnr_retries_left: u8,
    /// When sending began again at the oldest PSN because of a NAK, if nothing has been acknowledged since.
    recovering: Option<Time>,
    /// When the gap at the oldest PSN was found.
    gap_since: Option<Time>,
    repair: Repair,
    /// The partner misses this PSN, and data before it have not come: it is sent again when they have.
    missing: Option<Psn>,
    /// The latest repair was none: it asks how things are.
    probing: bool,
    /// The window is not cut for losses before this PSN: they were cut for together.
    cut_until: Psn,
    /// Answers with data that came too early.
    held: Held,
    /// Requests up to this PSN are acknowledged, but an answer with data before it is missing.
    acknowledged_early: Option<Psn>,
    congestion_at: Option<Time>,
    /// Timeouts in a row.
    backoff: u32,
    /// When to ask how things are.
    retry_deadline: Option<Time>,
    /// When the program's ACK timeout is over.
    stall_deadline: Option<Time>,
    rnr_deadline: Option<Time>,
    /// What was left of it when time stood still.
    rnr_left: Option<Duration>,
    /// Why exactly the oldest request has failed.
    vendor_err: u32,
}

impl Requester {
    pub fn new(config: QpConfig) -> Requester {
        Requester {
            config,
            settings: Settings::default(),
            queue: VecDeque::new(),
            cursor: 0,
            ack: Psn::default(),
            next: Psn::default(),
            high: Psn::default(),
            end: Psn::default(),
            asked: Psn::default(),
            has_more: false,
            reads: VecDeque::new(),
            in_flight_bytes: 0,
            window: Window::default(),
            rtt: Rtt::default(),
            timed: None,
            delivered: 0,
            retries_left: 0,
            rnr_retries_left: 0,
            recovering: None,
            gap_since: None,
            repair: Repair::default(),
            missing: None,
            probing: false,
            cut_until: Psn::default(),
            held: Held::default(),
            acknowledged_early: None,
            congestion_at: None,
            backoff: 0,
            retry_deadline: None,
            stall_deadline: None,
            rnr_deadline: None,
            rnr_left: None,
            vendor_err: 0,
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
            mtu: attributes.path_mtu.unwrap_or_default(),
        };
        self.limit_window();
        self.restore_retries();
    }

    pub fn set_window(&mut self, bytes: u32) {
        if bytes != self.config.window_bytes {
            self.config.window_bytes = bytes;
            self.limit_window();
        }
    }

    fn limit_window(&mut self) {
        let by_bytes = self.config.window_bytes / self.settings.mtu.bytes();
        self.window.limit(by_bytes.min(self.config.window_packets));
    }

    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    /// The queue pair goes to RTS for the first time.
    pub fn start(&mut self, first: Psn) {
        (self.ack, self.next, self.high, self.end) = (first, first, first, first);
        (self.cut_until, self.asked) = (first, first);
    }

    pub fn is_drained(&self) -> bool {
        self.queue.is_empty()
    }

    /// The oldest PSN without an answer, and the first that was never sent.
    pub fn progress(&self) -> (Psn, Psn) {
        (self.ack, self.high)
    }

    /// What was taken off the ring and is not complete, oldest first.
    pub fn outstanding(&self) -> impl Iterator<Item = Outstanding> {
        self.queue.iter().map(|wqe| Outstanding {
            wr_id: wqe.request.wr_id,
            first: wqe.first,
            packets: wqe.packets,
            executed: wqe.executed,
        })
    }

    pub fn next_timeout(&self) -> Option<Time> {
        match (self.retry_deadline, self.rnr_deadline) {
            (Some(retry), Some(rnr)) => Some(retry.min(rnr)),
            (retry, rnr) => retry.or(rnr),
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
            let vendor_err = std::mem::take(&mut self.vendor_err);
            retire_failed(&wqe.request, wqe.opcode, (status, vendor_err), wqe.len, host);
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

    /// Has this PSN been sent, or is it the next to be: can the partner be there?
    pub fn has_sent(&self, expected: Psn) -> bool {
        expected.offset_from(self.ack) <= self.high.offset_from(self.ack)
    }

    /// The partner says that it has executed everything before `to`. READs and atomics among that are complete by their
    /// data alone.
    pub fn note_executed(&mut self, to: Psn, host: &mut impl Host, counters: &mut Counters) {
        if self.acknowledge(to, host, counters).is_err() {
            self.note_early_acknowledge(to.sub(1));
        }
    }

    /// Fails the oldest request because the partner is stopped for too long; the next one of the ring, if there is none
    /// and it may be taken. Says whether there was one.
    pub fn give_up(&mut self, vendor_err: u32, may_start: bool, link: &Link, host: &mut impl Host) -> bool {
        if self.queue.is_empty() && may_start {
            self.take_next(link, host);
        }
        if !self.has_failed() {
            self.vendor_err = vendor_err;
        }
        self.fail(WcStatus::RetryExcErr);
        self.has_failed()
    }

    fn restore_retries(&mut self) {
        self.retries_left = self.settings.retry_cnt;
        self.rnr_retries_left = self.settings.rnr_retry;
    }
}
