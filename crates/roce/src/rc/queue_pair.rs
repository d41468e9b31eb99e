//! The queue pair: its state, which rules over requester and responder.

use super::RcConfig;
use super::link::{Link, Outlet};
use super::requester::Requester;
use super::responder::{Responder, flush_receive};
use crate::wire::opcode::{Kind, Service};
use crate::{
    BadRequest, Completion, Counters, Event, Host, ModifyError, Packet, QpAttributes, QpState, QpType, Qpn,
    Queue, SendRequest, Time, Transition, Transmit, TxBatch, WcStatus,
};

/// A queue pair of a reliable connection.
///
/// - Commands: [`RcQp::modify`]; and whoever posted requests to the rings calls [`RcQp::poll_transmit`].
/// - Arrivals: [`RcQp::handle_packet`] with a packet whose ICRC was good; [`RcQp::handle_timeout`] at or after
///   [`RcQp::next_timeout`] (an early call is harmless).
/// - Polls: after any of these, or after a batch of them, [`RcQp::poll_transmit`] until it says [`Transmit::Idle`];
///   then [`RcQp::next_timeout`]. Acknowledgements wait for that call, so that a batch of packets gets one.
/// - Getters: the others.
///
/// Completions and events come through the [`Host`] from within these calls.
///
/// Invariants: every request that [`Host::next_send`] or [`Host::next_receive`] gave is completed exactly once, in the
/// order of the ring, unless the queue pair goes to RESET or is dropped; a request of the partner is executed exactly
/// once, except for READs, which may be executed again.
#[derive(Debug)]
pub struct RcQp {
    qpn: Qpn,
    config: RcConfig,
    state: QpState,
    attributes: QpAttributes,
    link: Link,
    requester: Requester,
    responder: Responder,
    /// A packet has come since RTR.
    established: bool,
    /// The program wants to know when the send queue is drained.
    notify_drained: bool,
    /// The last poll had answers that did not fit: they go first in the next one.
    answers_first: bool,
    counters: Counters,
}

impl RcQp {
    /// A queue pair in the RESET state.
    pub fn new(qpn: Qpn, config: RcConfig) -> RcQp {
        RcQp {
            qpn,
            config,
            state: QpState::Reset,
            attributes: QpAttributes::default(),
            link: Link::default(),
            requester: Requester::new(config),
            responder: Responder::default(),
            established: false,
            notify_drained: false,
            answers_first: false,
            counters: Counters::default(),
        }
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// What `ibv_query_qp` tells: the state and the attributes set so far.
    pub fn query(&self) -> QpAttributes {
        QpAttributes {
            state: Some(self.state),
            cur_state: Some(self.state),
            ..self.attributes
        }
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Are all send requests that were taken off the ring complete?
    pub fn is_drained(&self) -> bool {
        self.requester.is_drained()
    }

    /// `ibv_modify_qp`: all or nothing. Going to ERR flushes all requests (those still in the rings with the next
    /// [`RcQp::poll_transmit`]); going to RESET forgets them without completions.
    pub fn modify(&mut self, change: &QpAttributes, host: &mut impl Host) -> Result<(), ModifyError> {
        let from = self.state;
        let to = change.state.unwrap_or(from);
        if let Some(claimed) = change.cur_state.filter(|claimed| *claimed != from) {
            return Err(ModifyError::WrongCurrentState {
                claimed,
                actual: from,
            });
        }
        Transition::check(QpType::Rc, from, to, change.mask())?;
        change.check_values()?;
        self.attributes.merge(change);
        match to {
            QpState::Reset => {
                let counters = self.counters;
                *self = RcQp {
                    counters,
                    ..RcQp::new(self.qpn, self.config)
                };
            }
            QpState::Err => self.enter_error(host),
            _ => self.enter(to, change, host),
        }
        Ok(())
    }

    fn enter(&mut self, to: QpState, change: &QpAttributes, host: &mut impl Host) {
        let from = std::mem::replace(&mut self.state, to);
        self.link = Link {
            pkey: self.config.pkey,
            dest_qpn: self.attributes.dest_qpn.unwrap_or_default(),
            mtu: self.attributes.path_mtu.unwrap_or_default(),
        };
        self.responder.configure(&self.attributes);
        self.requester.configure(&self.attributes);
        match (from, to) {
            (QpState::Init, QpState::Rtr) => self.responder.start(self.attributes.rq_psn.unwrap_or_default()),
            (QpState::Rtr, QpState::Rts) => self.requester.start(self.attributes.sq_psn.unwrap_or_default()),
            (QpState::Rts, QpState::Sqd) => {
                self.notify_drained = change.en_sqd_async_notify.unwrap_or(false);
                self.settle(host);
            }
            _ => {}
        }
    }

    /// A packet has arrived, and its ICRC was good.
    pub fn handle_packet(&mut self, now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        let receiving = matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd);
        let bth = &packet.bth;
        // Two partition keys match if all but their top bits are equal (IBA §10.9.3).
        let for_us = packet.info.service == Service::Rc
            && bth.dest_qpn == self.qpn
            && (bth.pkey ^ self.config.pkey) & 0x7fff == 0;
        if !receiving || !for_us {
            self.counters.dropped_packets += 1;
            return;
        }
        if packet.info.is_request() {
            if self.state == QpState::Rtr && !self.established {
                self.established = true;
                host.event(Event::CommunicationEstablished);
            }
            self.responder
                .handle_request(packet, &self.link, host, &mut self.counters);
        } else if self.state == QpState::Rtr || packet.info.kind == Kind::Congestion {
            self.counters.dropped_packets += 1;
        } else {
            self.requester
                .handle_response(now, packet, &self.link, host, &mut self.counters);
            self.settle(host);
        }
    }

    /// When to call [`RcQp::handle_timeout`], if nothing happens before.
    pub fn next_timeout(&self) -> Option<Time> {
        self.requester.next_timeout()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time, host: &mut impl Host) {
        self.requester.handle_timeout(now, &mut self.counters);
        self.settle(host);
    }

    /// Appends packets to the batch: at most `budget` with requests or READ data, and what there is of acknowledgements.
    /// In the error state, it flushes at most `budget` requests of each ring instead. Whatever it answers, what is in the
    /// batch is to be sent: the NAK that ends the connection may be there.
    pub fn poll_transmit(
        &mut self,
        now: Time,
        host: &mut impl Host,
        batch: &mut TxBatch,
        budget: usize,
    ) -> Transmit {
        match self.state {
            QpState::Reset | QpState::Init | QpState::Sqe => Transmit::Idle,
            QpState::Err => self.flush_rings(host, budget),
            QpState::Rtr | QpState::Rts | QpState::Sqd => {
                let outcome = self.transmit(now, host, batch, budget);
                self.settle(host);
                // Requests that are still in the rings are flushed by the next call.
                if self.state == QpState::Err {
                    Transmit::More
                } else {
                    outcome
                }
            }
        }
    }

    /// Requests first, then answers: an acknowledgement is shorter than anything else, so it can end a batch but not
    /// begin one. Answers for which that left no room have the first half of the next budget.
    fn transmit(&mut self, now: Time, host: &mut impl Host, batch: &mut TxBatch, budget: usize) -> Transmit {
        let Self {
            link,
            requester,
            responder,
            counters,
            ..
        } = self;
        let mut outlet = Outlet {
            link,
            batch,
            counters,
            budget,
        };
        if self.answers_first {
            self.answers_first = false;
            let rest = budget / 2;
            outlet.budget -= rest;
            let answers = responder.respond(host, &mut outlet);
            outlet.budget += rest;
            if answers == Transmit::Full {
                return Transmit::Full;
            }
        }
        let requests = match self.state {
            QpState::Rts | QpState::Sqd => {
                requester.transmit(now, self.state == QpState::Rts, host, &mut outlet)
            }
            _ => Transmit::Idle,
        };
        let answers = responder.respond(host, &mut outlet);
        self.answers_first = answers != Transmit::Idle;
        match (requests, answers) {
            (Transmit::Full, _) | (_, Transmit::Full) => Transmit::Full,
            (Transmit::More, _) | (_, Transmit::More) => Transmit::More,
            (Transmit::Idle, Transmit::Idle) => Transmit::Idle,
        }
    }

    /// Follows up on what requester and responder came to.
    fn settle(&mut self, host: &mut impl Host) {
        if self.requester.has_failed() || self.responder.has_ended() {
            self.enter_error(host);
        } else if self.state == QpState::Sqd && self.notify_drained && self.requester.is_drained() {
            self.notify_drained = false;
            host.event(Event::SendQueueDrained);
        }
    }

    fn enter_error(&mut self, host: &mut impl Host) {
        let from = std::mem::replace(&mut self.state, QpState::Err);
        self.requester.flush(host, &mut self.counters);
        self.responder.flush(host, &mut self.counters);
        if from != QpState::Err && self.config.shared_receive_queue {
            host.event(Event::LastWqeReached);
        }
    }

    /// Completes what is posted in the error state, without executing it (IBA §10.8.2.4).
    fn flush_rings(&mut self, host: &mut impl Host, budget: usize) -> Transmit {
        let mut left = budget;
        while left > 0 {
            let Some(item) = host.next_send() else { break };
            left -= 1;
            self.counters.req_cqe_flush_error += 1;
            flush_send(&item, host);
        }
        let mut more = left == 0;
        if !self.config.shared_receive_queue {
            let mut left = budget;
            while left > 0 {
                let Some(receive) = host.next_receive() else { break };
                left -= 1;
                flush_receive(&receive, host, &mut self.counters);
            }
            more |= left == 0;
        }
        if more { Transmit::More } else { Transmit::Idle }
    }
}

fn flush_send(item: &Result<SendRequest, BadRequest>, host: &mut impl Host) {
    let (wr_id, opcode) = match item {
        Ok(request) => (request.wr_id, request.operation.wc_opcode()),
        Err(bad) => (bad.wr_id, bad.opcode),
    };
    host.retire_sends(1);
    host.complete(Completion {
        queue: Queue::Send,
        wr_id,
        status: WcStatus::WrFlushErr,
        opcode,
        byte_len: 0,
        imm: None,
        solicited: false,
    });
}
