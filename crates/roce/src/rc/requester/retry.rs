//! Sending again: go back N, by NAK, implied NAK or timeout (IBA §9.7.5.2.4, §9.9.2), or later, by RNR NAK.

use super::Requester;
use crate::wire::aeth::rnr_delay;
use crate::{Counters, Time, WcStatus};

/// `rnr_retry` for "without end".
const RNR_RETRY_INFINITE: u8 = 7;

impl Requester {
    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time, counters: &mut Counters) {
        if self.rnr_deadline.is_some_and(|deadline| deadline <= now) {
            self.rnr_deadline = None;
            self.rearm(now);
        }
        if self.ack_deadline.is_some_and(|deadline| deadline <= now) {
            counters.local_ack_timeout_err += 1;
            self.recovering = false;
            self.retry(counters);
            self.rearm(now);
        }
    }

    /// Sends again from the oldest PSN without an answer, or gives up.
    pub(super) fn retry(&mut self, counters: &mut Counters) {
        if self.retries_left == 0 {
            counters.retry_exceeded_err += 1;
            return self.fail(WcStatus::RetryExcErr);
        }
        self.retries_left -= 1;
        self.window.on_loss();
        self.go_back();
    }

    /// A later answer shows that the data of the oldest READ was lost. All the later ones show it too: only the first
    /// counts.
    pub(super) fn implied_nak(&mut self, counters: &mut Counters) {
        if !self.recovering {
            counters.implied_nak_seq_err += 1;
            self.recovering = true;
            self.retry(counters);
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
        self.go_back();
        self.rnr_deadline = Some(now + rnr_delay(timer));
        self.ack_deadline = None;
    }

    fn go_back(&mut self) {
        self.next = self.ack;
        self.cursor = 0;
        self.reads.clear();
    }
}
