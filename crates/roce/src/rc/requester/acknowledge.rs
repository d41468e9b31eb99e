//! Answers: they move `ack`, and the requests that it passes are complete (IBA §9.7.5.1.2).

use super::{MOST_IDLE_REQUESTS, Requester};
use crate::gather::{retire, scatter};
use crate::held::Release;
use crate::link::Link;
use crate::wire::aeth::{CREDITS_UNLIMITED, NakCode, Syndrome};
use crate::wire::opcode::Kind;
use crate::{Counters, Host, Operation, Packet, Psn, SendData, Time, WcStatus};

/// Data of a READ or atomic before the acknowledged PSN has not come: an implied NAK (IBA §9.7.5.1.2).
pub(super) struct DataMissing;

impl Requester {
    /// A response has arrived.
    pub fn handle_response(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        counters.rcvd_responses += 1;
        counters.rcvd_response_bytes += packet.payload.len() as u64;
        let psn = packet.bth.psn;
        if self.has_failed() || psn.offset_from(self.ack) >= self.high.offset_from(self.ack) {
            // An answer to what was answered before, or to what was never sent (a ghost).
            counters.stale_responses += 1;
            return;
        }
        let before = self.ack;
        if let Some(Syndrome::Ack { credits }) = packet.aeth.map(|aeth| aeth.syndrome) {
            counters.limited_credits += u64::from(credits != CREDITS_UNLIMITED);
        }
        let mut refused = None;
        match (packet.info.kind, packet.aeth.map(|aeth| aeth.syndrome)) {
            (Kind::ReadResponse, _) => self.handle_data(now, packet, link, host, counters),
            (Kind::Acknowledge, Some(Syndrome::Ack { .. })) => {
                if let Err(DataMissing) = self.acknowledge(psn.next(), host, counters) {
                    self.note_early_acknowledge(psn);
                    self.implied_nak(now, counters);
                }
            }
            (Kind::AtomicAcknowledge, Some(Syndrome::Ack { .. })) => {
                self.handle_data(now, packet, link, host, counters);
            }
            (Kind::Acknowledge, Some(syndrome @ (Syndrome::RnrNak { .. } | Syndrome::Nak(_)))) => {
                if self.acknowledge_before_nak(now, psn, host, counters) {
                    refused = Some(syndrome);
                } else if syndrome == Syndrome::Nak(NakCode::PsnSequenceError) {
                    self.missing = Some(psn);
                }
            }
            _ => counters.stale_responses += 1,
        }
        if self.ack != before {
            let dropped = self.take_held(link, host, counters);
            self.note_progress(now);
            if self.is_data_missing() {
                self.implied_nak(now, counters);
            } else if dropped && self.ack != self.high {
                self.ask_for_one(now);
            }
        } else if self.retry_deadline.is_none() {
            self.rearm(now);
        }
        // What the NAK acknowledges has ended all that was before it.
        match refused.filter(|_| self.ack == psn) {
            Some(Syndrome::RnrNak { timer }) => self.rnr_nak(now, timer, counters),
            Some(Syndrome::Nak(code)) => self.nak(now, code, counters),
            _ if self.missing == Some(self.ack) => self.sequence_nak(now, counters),
            _ => {}
        }
    }

    /// A NAK acknowledges everything before it. Says whether the NAK itself counts.
    fn acknowledge_before_nak(
        &mut self,
        now: Time,
        psn: Psn,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> bool {
        let result = self.acknowledge(psn, host, counters);
        if result.is_err() {
            // What is before the refused request was executed, and will be acknowledged with the data.
            self.note_early_acknowledge(psn.sub(1));
            self.implied_nak(now, counters);
        }
        result.is_ok()
    }

    /// The oldest PSN has moved: retries begin anew, and there may be a round trip to learn from.
    fn note_progress(&mut self, now: Time) {
        self.restore_retries();
        let probed = std::mem::take(&mut self.probing);
        if probed && self.repair.ends_at(self.ack) && self.ack != self.high && !self.is_data_missing() {
            // The packet that asked was the missing one, and nothing behind it has arrived.
            self.cut_window();
            self.go_back();
        }
        self.repair.learn(self.ack);
        // Between the NAK and what came of it there was a round trip, or more. If the packet was late and not lost, it
        // was less, which is not to count as the shortest one.
        if let Some(since) = self.gap_since.take() {
            self.rtt
                .sample((now - since).max(self.rtt.min().unwrap_or_default()));
        }
        self.recovering = None;
        self.missing = self
            .missing
            .filter(|missing| missing.distance_from(self.ack) >= 0);
        if let Some(timed) = self.timed
            && self.ack.distance_from(timed.psn) > 0
        {
            self.timed = None;
            let rtt = now - timed.at;
            self.rtt.sample(rtt);
            let shortest = self.rtt.min().unwrap_or(rtt).as_nanos();
            let delivered = u128::from(self.delivered.wrapping_sub(timed.delivered));
            let of_path = (delivered * shortest).div_ceil(rtt.as_nanos().max(1));
            self.window.on_round(of_path as u32);
        }
        self.rearm(now);
    }

    fn nak(&mut self, now: Time, code: NakCode, counters: &mut Counters) {
        match code {
            NakCode::PsnSequenceError => self.sequence_nak(now, counters),
            NakCode::InvalidRequest | NakCode::InvalidRdRequest => {
                counters.req_remote_invalid_request += 1;
                self.fail(WcStatus::RemInvReqErr);
            }
            NakCode::RemoteAccessError => {
                counters.req_remote_access_errors += 1;
                self.fail(WcStatus::RemAccessErr);
            }
            NakCode::RemoteOperationalError => self.fail(WcStatus::RemOpErr),
        }
    }

    pub(super) fn note_early_acknowledge(&mut self, psn: Psn) {
        let later = |known: Psn| psn.distance_from(known) > 0;
        if self.acknowledged_early.is_none_or(later) {
            self.acknowledged_early = Some(psn);
        }
    }

    /// An answer with data: taken if it is the next one, kept if it is early.
    fn handle_data(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        if self.acknowledge(packet.bth.psn, host, counters).is_err() {
            let most_bytes = self.config.hold_bytes as usize;
            self.held.keep(packet, self.ack, most_bytes, host.hold_budget());
            return self.implied_nak(now, counters);
        }
        self.held.note_in_time(packet.bth.psn);
        self.take_data(packet, link, host, counters);
    }

    fn take_data(&mut self, packet: &Packet<'_>, link: &Link, host: &mut impl Host, counters: &mut Counters) {
        match packet.info.kind {
            Kind::AtomicAcknowledge => self.take_atomic_response(packet, host, counters),
            _ => self.take_read_response(packet, link, host, counters),
        }
    }

    /// What came early and is not early any more. Says whether the next data had come and were dropped.
    fn take_held(&mut self, link: &Link, host: &mut impl Host, counters: &mut Counters) -> bool {
        loop {
            let before = self.ack;
            if let Some(psn) = self.acknowledged_early
                && (psn.distance_from(before) < 0 || self.acknowledge(psn.next(), host, counters).is_ok())
            {
                self.acknowledged_early = None;
            }
            loop {
                let at = self.ack;
                match self.held.release(at) {
                    Release::Packet(released) => self.take_data(&released.packet(), link, host, counters),
                    Release::Dropped => return true,
                    Release::Nothing => break,
                }
                if self.ack == at {
                    return false;
                }
            }
            if self.ack == before {
                return false;
            }
        }
    }

    /// Data of a READ. Which packet it is follows from its PSN alone: after a retry the responder may have begun a new
    /// response in the middle, so First, Middle and Last say nothing here.
    fn take_read_response(
        &mut self,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        let psn = packet.bth.psn;
        let Some(wqe) = self.queue.front().filter(|wqe| wqe.is_read_or_atomic()) else {
            counters.stale_responses += 1;
            return;
        };
        match wqe.request.operation {
            Operation::Read { .. } => {}
            Operation::AtomicWrite { .. } if packet.payload.is_empty() => {
                return self.advance(psn.next(), host, counters);
            }
            _ => return self.fail(WcStatus::BadRespErr),
        }
        let (offset, expected) = wqe.span(psn, link.mtu);
        if packet.payload.len() != expected as usize {
            return self.fail(WcStatus::BadRespErr);
        }
        let SendData::Sges(list) = &wqe.request.data else {
            unreachable!("a READ with inline data never gets so far as to be sent")
        };
        if scatter(list, offset, packet.payload, host).is_err() {
            return self.fail(WcStatus::LocProtErr);
        }
        self.advance(psn.next(), host, counters);
    }

    /// What was there before an atomic operation.
    fn take_atomic_response(&mut self, packet: &Packet<'_>, host: &mut impl Host, counters: &mut Counters) {
        let psn = packet.bth.psn;
        let front = self
            .queue
            .front()
            .filter(|wqe| matches!(wqe.request.operation, Operation::Atomic { .. }));
        let (Some(wqe), Some(value)) = (front, packet.atomic_ack) else {
            counters.stale_responses += 1;
            return;
        };
        let SendData::Sges(list) = &wqe.request.data else {
            unreachable!("an atomic with inline data never gets so far as to be sent")
        };
        if scatter(list, 0, &value.to_ne_bytes(), host).is_err() {
            return self.fail(WcStatus::LocProtErr);
        }
        self.advance(psn.next(), host, counters);
    }

    /// Everything before `to` has arrived at the partner. READs and atomics are complete only by their data.
    pub(super) fn acknowledge(
        &mut self,
        to: Psn,
        host: &mut impl Host,
        counters: &mut Counters,
    ) -> Result<(), DataMissing> {
        while self.ack != to {
            let wqe = self
                .queue
                .front()
                .expect("what was sent and has no answer is in the queue");
            if wqe.is_read_or_atomic() {
                return Err(DataMissing);
            }
            let end = wqe.end();
            let whole = end.offset_from(self.ack) <= to.offset_from(self.ack);
            self.advance(if whole { end } else { to }, host, counters);
        }
        Ok(())
    }

    /// Moves `ack` within the oldest request, and completes that when its end is reached.
    fn advance(&mut self, to: Psn, host: &mut impl Host, counters: &mut Counters) {
        let packets = to.offset_from(self.ack);
        let resent_in_vain = self.next.offset_from(self.ack) < packets;
        if resent_in_vain {
            counters.spurious_retransmits += u64::from(self.window.undo_timeout());
        } else {
            let wqe = self.queue.front().expect("what has no answer is in the queue");
            let bytes = wqe.bytes_between(self.ack, to, self.settings.mtu);
            self.in_flight_bytes = self.in_flight_bytes.saturating_sub(bytes);
        }
        self.window.on_ack(packets, self.rtt.is_queueing());
        self.delivered = self.delivered.wrapping_add(packets);
        self.ack = to;
        while self.reads.front().is_some_and(|last| last.distance_from(to) < 0) {
            self.reads.pop_front();
        }
        self.retire_done(host);
        if resent_in_vain {
            self.go_on_from_high();
        }
    }

    /// Completes what is done, oldest first.
    pub(super) fn retire_done(&mut self, host: &mut impl Host) {
        while let Some(wqe) = self.queue.front() {
            let done = match wqe.is_local() {
                true => wqe.executed && wqe.failure.is_none(),
                false => wqe.end() == self.ack,
            };
            if !done {
                return;
            }
            let wqe = self.queue.pop_front().expect("it was just looked at");
            self.cursor = self.cursor.saturating_sub(1);
            retire(&wqe.request, wqe.opcode, WcStatus::Success, wqe.len, host);
        }
        if self.queue.capacity() > MOST_IDLE_REQUESTS {
            self.queue.shrink_to(MOST_IDLE_REQUESTS);
            self.reads.shrink_to(MOST_IDLE_REQUESTS);
        }
    }
}
