//! The unreliable connection (IBA §9.8.2): SEND and WRITE without answers.
//!
//! A request is complete when its last packet is on its way. What arrives is taken in as long as the PSNs follow each
//! other; a gap costs the message in which it lies, silently, and the next First or Only packet begins anew.

mod receiver;
mod sender;

use self::receiver::Receiver;
use self::sender::Sender;
use crate::link::Outlet;
use crate::shell::Shell;
use crate::wire::opcode::Kind;
use crate::{
    Counters, Host, ModifyError, Packet, QpAttributes, QpConfig, QpState, QpType, Qpn, Time, Transmit,
    TxBatch,
};

/// A queue pair of an unreliable connection. Its methods are those of [`crate::RcQp`], without timers. An error of a send
/// request brings it to SQE (IBA §10.3.1.6): it goes on receiving, and flushes what is posted to send until
/// [`UcQp::modify`] brings it back to RTS.
#[derive(Debug)]
pub struct UcQp {
    shell: Shell,
    sender: Sender,
    receiver: Receiver,
}

impl UcQp {
    /// A queue pair in the RESET state.
    pub fn new(qpn: Qpn, config: QpConfig) -> UcQp {
        UcQp {
            shell: Shell::new(QpType::Uc, qpn, config),
            sender: Sender::default(),
            receiver: Receiver::default(),
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

    /// What `ibv_query_qp` tells.
    pub fn query(&self) -> QpAttributes {
        self.shell.query()
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        &self.shell.counters
    }

    /// Are all send requests that were taken off the ring complete?
    pub fn is_drained(&self) -> bool {
        self.sender.is_drained()
    }

    /// `ibv_modify_qp`: all or nothing.
    pub fn modify(&mut self, change: &QpAttributes, host: &mut impl Host) -> Result<(), ModifyError> {
        let (from, to) = self.shell.modify(change, self.is_drained())?;
        let attributes = &self.shell.attributes;
        match (from, to) {
            (_, QpState::Reset) => {
                self.sender = Sender::default();
                self.receiver = Receiver::default();
            }
            (_, QpState::Err) => self.enter_error(from, host),
            (QpState::Init, QpState::Rtr) => {
                self.receiver.start(attributes.rq_psn.unwrap_or_default());
            }
            (QpState::Rtr, QpState::Rts) => self.sender.start(attributes.sq_psn.unwrap_or_default()),
            _ => {}
        }
        self.settle(host);
        Ok(())
    }

    /// A packet has arrived, and its ICRC was good.
    pub fn handle_packet(&mut self, _now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        if !self.shell.admits(packet) {
            return;
        }
        if packet.info.kind == Kind::Congestion {
            self.shell.counters.rp_cnp_handled += 1;
            return;
        }
        self.shell.note_request(host);
        let Shell {
            link,
            counters,
            config,
            attributes,
            ..
        } = &mut self.shell;
        let access = attributes.access_flags.unwrap_or_default();
        let shared = config.shared_receive_queue;
        if self
            .receiver
            .handle_request(packet, link.mtu, access, shared, host, counters)
            .is_err()
        {
            let from = self.shell.state;
            self.enter_error(from, host);
        }
    }

    /// Appends packets to the batch, at most `budget`; in ERR and SQE, flushes at most `budget` requests of each ring.
    pub fn poll_transmit(&mut self, host: &mut impl Host, batch: &mut TxBatch, budget: usize) -> Transmit {
        let may_start = match self.shell.state {
            QpState::Reset | QpState::Init | QpState::Rtr => return Transmit::Idle,
            QpState::Err => return self.shell.flush_rings(host, budget),
            QpState::Sqe => return self.shell.flush_sends(host, budget),
            QpState::Rts => true,
            QpState::Sqd => false,
        };
        let Shell { link, counters, .. } = &mut self.shell;
        let mut outlet = Outlet {
            link,
            batch,
            counters,
            budget,
        };
        let outcome = self.sender.transmit(may_start, host, &mut outlet);
        self.settle(host);
        match self.shell.state {
            QpState::Sqe => Transmit::More,
            _ => outcome,
        }
    }

    /// Follows up on what the sender came to.
    fn settle(&mut self, host: &mut impl Host) {
        if self.sender.take_failure() && matches!(self.shell.state, QpState::Rts | QpState::Sqd) {
            self.shell.state = QpState::Sqe;
        }
        self.shell.note_drained(self.sender.is_drained(), host);
    }

    fn enter_error(&mut self, from: QpState, host: &mut impl Host) {
        self.sender.flush(host, &mut self.shell.counters);
        self.receiver.flush(host, &mut self.shell.counters);
        self.shell.enter_error(from, host);
    }
}
