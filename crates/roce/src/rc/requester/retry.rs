//! Sending again: what (IBA §9.7.5.2.4, §9.9.2), and when.
//!
//! - READ data that shows a gap: what is missing is asked for at once ([`super::repair`]).
//! - A NAK for a gap: at once. What is before the gap has arrived; what is behind it the partner has thrown away, as the
//!   standard wants, so all of it is sent again (go back N). More NAKs for the same gap are echoes, unless they come so
//!   late that they must be about what was sent again. A partner of an earlier release has kept what is behind the gap: its
//!   acknowledgement then goes beyond what was sent again, and sending goes on from there.
//! - Nothing for a while, by the round trips that were seen ([`super::rtt`]): one packet, to ask how things are. The
//!   answer shows whether the rest is to be sent again. If there is none twice, the window is closed as well. A partner
//!   is a process that may have to wait for a core, so this counts as no retry, and the while doubles each time.
//! - No progress for the program's own ACK timeout: that is a retry, and they are counted. NAKs alone do not put it off.
//! - An RNR NAK: after the time that it says, with one packet first.

use super::Requester;
use super::wqe::Wqe;
use crate::wire::aeth::rnr_delay;
use crate::{Counters, Psn, Time, WcStatus};

/// So many single packets are sent to ask how things are before the window is closed.
const MOST_PROBES: u32 = 2;

/// `rnr_retry` for "without end".
const RNR_RETRY_INFINITE: u8 = 7;

impl Requester {
    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time, counters: &mut Counters) {
        let is_due = |deadline: Option<Time>| deadline.is_some_and(|deadline| deadline <= now);
        if is_due(self.rnr_deadline) {
            self.rnr_deadline = None;
            self.rearm(now);
        }
        if !is_due(self.retry_deadline) {
            return;
        }
        if is_due(self.stall_deadline) {
            counters.local_ack_timeout_err += 1;
            if self.retries_left == 0 {
                counters.retry_exceeded_err += 1;
                return self.fail(WcStatus::RetryExcErr);
            }
            self.retries_left -= 1;
            self.stall_deadline = self.settings.ack_timeout.map(|timeout| now + timeout);
        } else {
            counters.early_retransmits += 1;
            if self.backoff < MOST_PROBES {
                self.backoff += 1;
                self.probing = true;
                return self.repair(now);
            }
        }
        self.probing = false;
        self.recovering = None;
        self.window.on_timeout();
        let since = self.gap_since;
        self.go_back();
        // What comes of it tells at least so much of the round trip.
        self.gap_since = since.or(Some(now));
        self.backoff += 1;
        self.arm_retry(now);
    }

    /// Starts the time in which there has to be progress, if something is under way.
    pub(super) fn rearm(&mut self, now: Time) {
        self.backoff = 0;
        if self.ack == self.high || self.rnr_deadline.is_some() {
            self.retry_deadline = None;
            self.stall_deadline = None;
            return;
        }
        self.stall_deadline = self.settings.ack_timeout.map(|timeout| now + timeout);
        self.arm_retry(now);
    }

    /// Begins again at the oldest PSN, with all retries but those after RNR NAK, after a time in which nothing could come.
    pub fn restart(&mut self, now: Time) {
        if let Some(left) = self.rnr_left.take() {
            self.rnr_deadline = Some(now + left);
        }
        self.retries_left = self.settings.retry_cnt;
        self.probing = false;
        self.recovering = None;
        self.go_back();
        self.rearm(now);
    }

    /// No time passes until [`Requester::restart`]; at `alarm` somebody else wants to know.
    pub fn freeze(&mut self, now: Time, alarm: Option<Time>) {
        if let Some(deadline) = self.rnr_deadline.take() {
            self.rnr_left = Some(deadline.saturating_since(now));
        }
        self.stall_deadline = None;
        self.retry_deadline = alarm;
    }

    fn arm_retry(&mut self, now: Time) {
        let floor = self.config.min_rto;
        let after = match self.backoff.checked_sub(MOST_PROBES) {
            // A packet too many costs little.
            None => self.rtt.timeout(floor / 4, self.backoff),
            Some(backoff) => self.rtt.timeout(floor, backoff),
        };
        let soon = now + after;
        let at = self.stall_deadline.map_or(soon, |stall| stall.min(soon));
        self.retry_deadline = Some(at);
    }

    /// NAK "PSN sequence error" for the oldest PSN.
    pub(super) fn sequence_nak(&mut self, now: Time, counters: &mut Counters) {
        counters.packet_seq_err += 1;
        if self.recovering.is_none() || self.is_about_retry(now) {
            self.recover(now);
        }
    }

    /// Asks again for the data that are missing, or sends the oldest packet again to ask how things are; and soon once more if
    /// nothing comes of it.
    fn repair(&mut self, now: Time) {
        self.recovering = Some(now);
        self.gap_since.get_or_insert(now);
        if self.is_data_missing() {
            self.repair.begin_exact(self.ack, self.missing_data());
        } else if self.next != self.ack {
            self.repair.begin_probe(self.ack);
        }
        self.timed = None;
        self.arm_retry(now);
    }

    /// The next data are here no more, and nothing shows that they are missing: they are asked for again, alone.
    pub(super) fn ask_for_one(&mut self, now: Time) {
        self.repair.begin_exact(self.ack, 1);
        self.timed = None;
        self.arm_retry(now);
    }

    /// A later answer shows that data of the oldest READ or atomic was lost. All the later ones show it too: only the
    /// first counts, and one that comes so late that the data must have been lost again.
    pub(super) fn implied_nak(&mut self, now: Time, counters: &mut Counters) {
        if self.recovering.is_none() || self.is_about_retry(now) {
            counters.implied_nak_seq_err += 1;
            self.cut_window();
            self.repair(now);
        }
    }

    /// Has something come that is behind data that has not?
    pub(super) fn is_data_missing(&self) -> bool {
        !self.held.is_empty() || self.acknowledged_early.is_some()
    }

    /// How many packets of data are missing before the first that has come, or before the end of the oldest request.
    fn missing_data(&self) -> u32 {
        let end = self.queue.front().map_or(self.ack, Wqe::end);
        let first = self.held.first().unwrap_or(end);
        first.offset_from(self.ack).min(self.next.offset_from(self.ack))
    }

    /// Is what arrives now too late to be about what was sent before the last recovery?
    fn is_about_retry(&self, now: Time) -> bool {
        let round = match self.rtt.min() {
            Some(_) => self.rtt.smoothed(),
            None => self.config.min_rto,
        };
        self.recovering.is_none_or(|since| now - since >= round)
    }

    fn recover(&mut self, now: Time) {
        self.recovering = Some(now);
        self.cut_window();
        let since = self.gap_since;
        self.go_back();
        self.gap_since = since.or(Some(now));
    }

    /// One loss among what was under way, or many: that is one sign of congestion.
    pub(super) fn cut_window(&mut self) {
        if self.ack.distance_from(self.cut_until) >= 0 {
            self.cut_until = self.high;
            self.window.on_loss(self.rtt.is_queueing());
        }
    }

    /// The partner has no RECV: the oldest request is to be sent again, but later.
    pub(super) fn rnr_nak(&mut self, now: Time, timer: u8, counters: &mut Counters) {
        if self.rnr_deadline.is_some() {
            return;
        }
        counters.rcvd_rnr_nak += 1;
        if self.settings.rnr_retry != RNR_RETRY_INFINITE {
            if self.rnr_retries_left == 0 {
                counters.rnr_nak_retry_err += 1;
                return self.fail(WcStatus::RnrRetryExcErr);
            }
            self.rnr_retries_left -= 1;
        }
        // An answer was due and came.
        self.retries_left = self.settings.retry_cnt;
        self.window.on_receiver_not_ready();
        self.go_back();
        self.rnr_deadline = Some(now + rnr_delay(timer));
        self.retry_deadline = None;
        self.stall_deadline = None;
    }

    /// A congestion notification (annex A17.9.3): the window is cut at most once in a round trip.
    pub fn on_congestion(&mut self, now: Time) {
        let long_ago = |cut: Time| now - cut >= self.rtt.smoothed();
        if self.congestion_at.is_none_or(long_ago) {
            self.congestion_at = Some(now);
            self.window.on_congestion();
        }
    }

    /// The answer to what was sent before a timeout has come: it was only late, and so may be those to the rest. Going on
    /// from `ack` would send all of it twice to a partner that is slow already (the idea of F-RTO, RFC 5682). If some of it
    /// was lost after all, a NAK or the next timeout will say so.
    pub(super) fn go_on_from_high(&mut self) {
        self.next = self.high;
        self.reads.clear();
        self.in_flight_bytes = 0;
        self.cursor = self.queue.len();
        for (index, wqe) in self.queue.iter().enumerate() {
            let begun = match wqe.is_local() {
                true => wqe.executed,
                false => self.high.distance_from(wqe.first) > 0,
            };
            let passed = wqe.is_local() || self.high.distance_from(wqe.end()) >= 0;
            // Nothing goes on behind a request that failed here.
            let finished = begun && wqe.failure.is_none() && passed;
            if !finished {
                self.cursor = self.cursor.min(index);
            }
            if !begun {
                break;
            }
            if wqe.is_local() {
                continue;
            }
            let later = |a: Psn, b: Psn| if a.distance_from(b) > 0 { a } else { b };
            let from = later(self.ack, wqe.first);
            let to = if finished { wqe.end() } else { self.high };
            self.in_flight_bytes += wqe.bytes_between(from, to, self.settings.mtu);
            let mut at = from;
            while wqe.is_read_or_atomic() && to.distance_from(at) > 0 {
                let packets = if wqe.is_read() { wqe.rest_of_piece(at) } else { 1 };
                at = at.add(packets);
                self.reads.push_back(at.sub(1));
            }
        }
    }

    pub(super) fn go_back(&mut self) {
        self.repair.cancel();
        self.gap_since = None;
        self.missing = None;
        self.next = self.ack;
        self.cursor = 0;
        self.reads.clear();
        self.in_flight_bytes = 0;
        // What is sent twice says nothing about the round trip (Karn's rule).
        self.timed = None;
    }
}
