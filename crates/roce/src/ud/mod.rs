//! The unreliable datagram (IBA §9.8.3): one packet, one message, anybody to anybody who has the queue key.

mod receiver;
mod sender;

use self::receiver::Receiver;
use self::sender::Sender;
use crate::shell::Shell;
use crate::wire::opcode::Kind;
use crate::{
    Counters, Host, ModifyError, Packet, QpAttributes, QpConfig, QpState, QpType, Qpn, Time, Transmit,
    TxBatch,
};

/// A datagram queue pair. Its methods are those of [`crate::RcQp`], without timers. An error of a send request brings it
/// to SQE, as with [`crate::UcQp`].
///
/// - Each request names its [`crate::Destination`]. An empty batch is restarted with the path to it; a batch of another
///   path is [`Transmit::Full`] and has to go first.
/// - A datagram goes to one queue pair, or with the multicast number to all that are attached to the group: the NIC hands
///   it to each of them.
#[derive(Debug)]
pub struct UdQp {
    shell: Shell,
    sender: Sender,
    receiver: Receiver,
}

impl UdQp {
    /// A queue pair in the RESET state.
    pub fn new(qpn: Qpn, config: QpConfig) -> UdQp {
        UdQp {
            shell: Shell::new(QpType::Ud, qpn, config),
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
        match (from, to) {
            (_, QpState::Reset) => {
                self.sender = Sender::default();
                self.receiver = Receiver::default();
            }
            (_, QpState::Err) => self.enter_error(from, host),
            (QpState::Rtr, QpState::Rts) => {
                self.sender
                    .start(self.shell.attributes.sq_psn.unwrap_or_default());
            }
            _ => {}
        }
        self.settle(host);
        Ok(())
    }

    /// A packet has arrived, and its ICRC was good. [`Packet::grh`] is what the program gets in front of the data.
    pub fn handle_packet(&mut self, _now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        if !self.shell.admits(packet) {
            return;
        }
        if packet.info.kind == Kind::Congestion {
            self.shell.counters.rp_cnp_handled += 1;
            return;
        }
        let qkey = self.shell.attributes.qkey.unwrap_or_default();
        let config = self.shell.config;
        let taken = self
            .receiver
            .handle_datagram(packet, qkey, &config, host, &mut self.shell.counters);
        if taken.is_err() {
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
        let outcome = self
            .sender
            .transmit(may_start, &mut self.shell, host, batch, budget);
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
