//! Answers: they move `ack`, and the requests that it passes are complete (IBA §9.7.5.1.2).

use super::super::link::Link;
use super::{Requester, retire};
use crate::wire::aeth::{NakCode, Syndrome};
use crate::wire::opcode::Kind;
use crate::{Counters, Host, Key, Packet, Psn, SendData, Time, WcStatus};

/// Data of a READ before the acknowledged PSN has not come: an implied NAK (IBA §9.7.5.1.2).
struct ReadMissing;

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
        match (packet.info.kind, packet.aeth.map(|aeth| aeth.syndrome)) {
            (Kind::ReadResponse, _) => self.handle_read_response(now, packet, link, host, counters),
            (Kind::Acknowledge, Some(Syndrome::Ack { .. })) => {
                if let Err(ReadMissing) = self.acknowledge(psn.next(), host) {
                    self.implied_nak(counters);
                }
            }
            (Kind::Acknowledge, Some(Syndrome::RnrNak { timer })) => {
                if self.acknowledge_before_nak(psn, host, counters) {
                    self.rnr_nak(now, timer, counters);
                }
            }
            (Kind::Acknowledge, Some(Syndrome::Nak(code))) => {
                if self.acknowledge_before_nak(psn, host, counters) {
                    self.nak(code, counters);
                }
            }
            _ => counters.stale_responses += 1,
        }
        if self.ack != before || self.ack_deadline.is_none() {
            self.rearm(now);
        }
    }

    /// A NAK acknowledges everything before it. Says whether the NAK itself counts.
    fn acknowledge_before_nak(&mut self, psn: Psn, host: &mut impl Host, counters: &mut Counters) -> bool {
        let result = self.acknowledge(psn, host);
        if result.is_err() {
            self.implied_nak(counters);
        }
        result.is_ok()
    }

    fn nak(&mut self, code: NakCode, counters: &mut Counters) {
        match code {
            NakCode::PsnSequenceError => {
                counters.packet_seq_err += 1;
                if !self.recovering {
                    self.recovering = true;
                    self.retry(counters);
                }
            }
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

    /// Data of a READ. Which packet it is follows from its PSN alone: after a retry the responder may have begun a new
    /// response in the middle, so First, Middle and Last say nothing here.
    fn handle_read_response(
        &mut self,
        now: Time,
        packet: &Packet<'_>,
        link: &Link,
        host: &mut impl Host,
        counters: &mut Counters,
    ) {
        let psn = packet.bth.psn;
        if self.acknowledge(psn, host).is_err() {
            return self.implied_nak(counters);
        }
        let Some(wqe) = self.queue.front().filter(|wqe| wqe.is_read()) else {
            counters.stale_responses += 1;
            return;
        };
        let (offset, expected) = wqe.span(psn, link.mtu);
        if packet.payload.len() != expected as usize {
            return self.fail(WcStatus::BadRespErr);
        }
        let SendData::Sges(list) = &wqe.request.data else {
            unreachable!("a READ with inline data never gets so far as to be sent")
        };
        let scattered = list.for_range(offset, expected, |part, at| {
            host.write(
                Key::Local(part.lkey),
                part.addr,
                &packet.payload[at..at + part.len as usize],
            )
        });
        if scattered.is_err() {
            return self.fail(WcStatus::LocProtErr);
        }
        self.advance(psn.next(), host);
        self.rearm(now);
    }

    /// Everything before `to` has arrived at the partner. READs are complete only by their data.
    fn acknowledge(&mut self, to: Psn, host: &mut impl Host) -> Result<(), ReadMissing> {
        while self.ack != to {
            let wqe = self
                .queue
                .front()
                .expect("what was sent and has no answer is in the queue");
            if wqe.is_read() {
                return Err(ReadMissing);
            }
            let end = wqe.end();
            let whole = end.offset_from(self.ack) <= to.offset_from(self.ack);
            self.advance(if whole { end } else { to }, host);
        }
        Ok(())
    }

    /// Moves `ack` within the oldest request, and completes that when its end is reached.
    fn advance(&mut self, to: Psn, host: &mut impl Host) {
        let packets = to.offset_from(self.ack);
        if self.next.offset_from(self.ack) < packets {
            // Resending had gone back to before this, in vain: the packets had arrived.
            self.next = to;
            self.cursor = 0;
        }
        self.ack = to;
        self.window.on_ack(packets);
        self.restore_retries();
        while self.reads.front().is_some_and(|last| last.distance_from(to) < 0) {
            self.reads.pop_front();
        }
        if self.queue.front().is_some_and(|wqe| wqe.end() == to) {
            let wqe = self.queue.pop_front().expect("it was just looked at");
            self.cursor = self.cursor.saturating_sub(1);
            retire(&wqe, WcStatus::Success, host);
        }
    }
}
