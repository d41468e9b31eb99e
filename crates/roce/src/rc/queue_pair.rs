//! The queue pair: its state, which rules over requester and responder.

use super::dialogue::Dialogue;
use super::migration::{Migration, Standing};
use super::position::Position;
use super::requester::Requester;
use super::responder::Responder;
use crate::link::Outlet;
use crate::shell::{Phase, Shell};
use crate::wire::opcode::Kind;
use crate::{
    Counters, Host, ModifyError, Packet, QpAttributes, QpConfig, QpState, QpType, Qpn, Time, Transmit,
    TxBatch,
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
/// once, atomics included, except for READs, which may be executed again.
#[derive(Debug)]
pub struct RcQp {
    pub(super) shell: Shell,
    pub(super) requester: Requester,
    pub(super) responder: Responder,
    pub(super) migration: Migration,
    /// The last poll had answers that did not fit: they go first in the next one.
    answers_first: bool,
    dialogue: Dialogue,
    /// An acknowledgement waits for the program's answer until then.
    ack_deadline: Option<Time>,
}

impl RcQp {
    /// A queue pair in the RESET state.
    pub fn new(qpn: Qpn, config: QpConfig) -> RcQp {
        RcQp {
            shell: Shell::new(QpType::Rc, qpn, config),
            requester: Requester::new(config),
            responder: Responder::default(),
            migration: Migration::default(),
            answers_first: false,
            dialogue: Dialogue::default(),
            ack_deadline: None,
        }
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        self.shell.qpn
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        self.shell.state
    }

    /// What `ibv_query_qp` tells: the state and the attributes set so far.
    pub fn query(&self) -> QpAttributes {
        self.shell.query()
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.shell.counters
    }

    /// Are all send requests that were taken off the ring complete?
    pub fn is_drained(&self) -> bool {
        self.requester.is_drained()
    }

    /// Bytes under way: sent and not acknowledged, or asked for by READ and not arrived.
    pub fn in_flight_bytes(&self) -> u64 {
        self.requester.in_flight_bytes()
    }

    /// Where it stands now: exact only while it is stopped.
    pub fn position(&self) -> Position {
        Position::of(&self.requester, &self.responder)
    }

    /// Where it stands. For a NIC that from now on neither gives it packets or time nor asks it for packets, until
    /// [`RcQp::restart`]. A connection that is at its end is taken to ERR: the NAK that says so is lost, as on any link.
    pub fn stop(&mut self, host: &mut impl Host) -> Position {
        self.ack_deadline = None;
        let position = self.position();
        if self.responder.is_ending() {
            self.enter_error(self.shell.state, host);
        }
        position
    }

    /// Goes on after [`RcQp::stop`], as if all that was under way then had been lost. While a partner is waited for, that is
    /// what happens when it has come.
    pub fn restart(&mut self, now: Time) {
        if self.standing() == Standing::Running {
            self.requester.restart(now);
        }
    }

    /// Changes the most bytes that may be under way, from now on; what is under way stays. For a NIC that shares what a
    /// destination can buffer among the queue pairs that are active. Cheap.
    pub fn set_window(&mut self, bytes: u32) {
        self.requester.set_window(bytes);
    }

    /// `ibv_modify_qp`: all or nothing. Going to ERR flushes all requests (those still in the rings with the next
    /// [`RcQp::poll_transmit`]); going to RESET forgets them without completions.
    pub fn modify(&mut self, change: &QpAttributes, host: &mut impl Host) -> Result<(), ModifyError> {
        let (from, to) = self.shell.modify(change, self.requester.is_drained())?;
        let attributes = &self.shell.attributes;
        match to {
            QpState::Reset => {
                self.requester = Requester::new(self.shell.config);
                self.responder = Responder::default();
                self.answers_first = false;
                self.dialogue = Dialogue::default();
                self.ack_deadline = None;
                self.migration.forget();
                return Ok(());
            }
            QpState::Err => {
                self.enter_error(from, host);
                return Ok(());
            }
            _ => {
                self.responder.configure(attributes);
                self.requester.configure(attributes);
            }
        }
        match (from, to) {
            (QpState::Init, QpState::Rtr) => self.responder.start(attributes.rq_psn.unwrap_or_default()),
            (QpState::Rtr, QpState::Rts) => self.requester.start(attributes.sq_psn.unwrap_or_default()),
            _ => {}
        }
        self.refresh_phase();
        self.settle(host);
        Ok(())
    }

    /// A packet has arrived, and its ICRC was good.
    pub fn handle_packet(&mut self, now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        if !self.shell.admits(packet) {
            return self.turn_away(packet);
        }
        if packet.info.is_request() {
            self.shell.note_request(host);
            let Shell { link, counters, .. } = &mut self.shell;
            self.responder.handle_request(packet, link, host, counters);
            if packet.bth.ack_request {
                self.dialogue.hear(now);
            }
            return;
        }
        if matches!(packet.info.kind, Kind::Congestion | Kind::Migration) {
            return self.handle_notice(now, packet, host);
        }
        let passive = matches!(self.shell.phase, Phase::Waiting | Phase::Rtr) && !self.takes_responses();
        let Shell { link, counters, .. } = &mut self.shell;
        if passive {
            counters.dropped_by_state += 1;
            counters.dropped_packets += 1;
        } else {
            self.requester.handle_response(now, packet, link, host, counters);
            self.settle(host);
        }
    }

    /// A packet that is about the connection, and not part of a message.
    #[cold]
    fn handle_notice(&mut self, now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        if packet.info.kind == Kind::Migration {
            return self.handle_migration(now, packet, host);
        }
        self.shell.counters.rp_cnp_handled += 1;
        self.requester.on_congestion(now);
    }

    /// When to call [`RcQp::handle_timeout`], if nothing happens before.
    pub fn next_timeout(&self) -> Option<Time> {
        self.requester.next_timeout()
    }

    /// An acknowledgement waits for the program to answer the message ([`QpConfig::ack_delay`]): at that time, if nothing
    /// happens before, call [`RcQp::poll_transmit`].
    pub fn ack_deadline(&self) -> Option<Time> {
        self.ack_deadline
    }

    /// The next [`RcQp::poll_transmit`] sends an acknowledgement that waits. For a NIC that is about to take the queue pair
    /// away: what was executed should be acknowledged.
    pub fn send_acknowledgement(&mut self) {
        if self.ack_deadline.take().is_some() {
            self.dialogue.give_up();
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time, host: &mut impl Host) {
        match self.shell.phase {
            Phase::Waiting if self.standing() != Standing::Running => self.waited(now, host),
            Phase::Stopped => self.halted(now),
            _ => self.requester.handle_timeout(now, &mut self.shell.counters),
        }
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
        let outcome = match self.shell.phase {
            Phase::Rtr | Phase::Rts | Phase::Sqd => self.transmit(now, host, batch, budget),
            Phase::Stopped | Phase::Waiting => self.transmit_waiting(now, host, batch, budget),
            Phase::Reset | Phase::Init | Phase::Sqe => return Transmit::Idle,
            Phase::Err => return self.shell.flush_rings(host, budget),
        };
        self.settle(host);
        // Requests that are still in the rings are flushed by the next call.
        if self.shell.state == QpState::Err {
            Transmit::More
        } else {
            outcome
        }
    }

    /// Requests first, then answers: an acknowledgement is shorter than anything else, so it can end a batch but not
    /// begin one. Answers for which that left no room have the first half of the next budget.
    pub(super) fn transmit(
        &mut self,
        now: Time,
        host: &mut impl Host,
        batch: &mut TxBatch,
        budget: usize,
    ) -> Transmit {
        let Self {
            shell,
            requester,
            responder,
            dialogue,
            ack_deadline,
            ..
        } = self;
        let patience = shell.config.ack_delay;
        let Shell {
            state,
            link,
            counters,
            ..
        } = shell;
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
        let sent_before = outlet.counters.sent_requests;
        let requests = match *state {
            QpState::Rts | QpState::Sqd => requester.transmit(now, *state == QpState::Rts, host, &mut outlet),
            _ => Transmit::Idle,
        };
        if outlet.counters.sent_requests != sent_before {
            dialogue.say(now, patience);
        }
        *ack_deadline = dialogue
            .until(patience)
            .filter(|deadline| now < *deadline && responder.owes_only_acknowledgement());
        let answers = match ack_deadline {
            Some(_) => Transmit::Idle,
            None => responder.respond(host, &mut outlet),
        };
        self.answers_first = answers != Transmit::Idle;
        match (requests, answers) {
            (Transmit::Full, _) | (_, Transmit::Full) => Transmit::Full,
            (Transmit::More, _) | (_, Transmit::More) => Transmit::More,
            (Transmit::Idle, Transmit::Idle) => Transmit::Idle,
        }
    }

    /// Follows up on what requester and responder came to.
    pub(super) fn settle(&mut self, host: &mut impl Host) {
        if self.requester.has_failed() || self.responder.has_ended() {
            self.enter_error(self.shell.state, host);
        } else {
            self.shell.note_drained(self.requester.is_drained(), host);
        }
    }

    pub(super) fn enter_error(&mut self, from: QpState, host: &mut impl Host) {
        self.ack_deadline = None;
        self.requester.flush(host, &mut self.shell.counters);
        self.responder.flush(host, &mut self.shell.counters);
        self.migration.run();
        self.shell.enter_error(from, host);
    }
}
