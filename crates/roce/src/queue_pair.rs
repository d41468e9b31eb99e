//! A queue pair of any type.

use crate::{
    Counters, Host, ModifyError, Packet, Position, QpAttributes, QpConfig, QpState, QpType, Qpn, RcQp, Time,
    Transmit, TxBatch, UcQp, UdQp,
};

/// A queue pair. What each method does is told at [`RcQp`]; where the other types differ, at [`UcQp`] and [`UdQp`].
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "nearly all are reliable connections, which are the largest"
)]
pub enum Qp {
    /// Reliable connection.
    Rc(RcQp),
    /// Unreliable connection.
    Uc(UcQp),
    /// Unreliable datagram.
    Ud(UdQp),
}

macro_rules! each {
    ($self:ident, $qp:ident => $call:expr) => {
        match $self {
            Qp::Rc($qp) => $call,
            Qp::Uc($qp) => $call,
            Qp::Ud($qp) => $call,
        }
    };
}

impl Qp {
    /// A queue pair in the RESET state.
    pub fn new(qp_type: QpType, qpn: Qpn, config: QpConfig) -> Qp {
        match qp_type {
            QpType::Rc => Qp::Rc(RcQp::new(qpn, config)),
            QpType::Uc => Qp::Uc(UcQp::new(qpn, config)),
            QpType::Ud => Qp::Ud(UdQp::new(qpn, config)),
        }
    }

    /// Its type.
    pub fn qp_type(&self) -> QpType {
        match self {
            Qp::Rc(_) => QpType::Rc,
            Qp::Uc(_) => QpType::Uc,
            Qp::Ud(_) => QpType::Ud,
        }
    }

    /// Its number.
    pub fn qpn(&self) -> Qpn {
        each!(self, qp => qp.qpn())
    }

    /// Its state.
    pub fn state(&self) -> QpState {
        each!(self, qp => qp.state())
    }

    /// What `ibv_query_qp` tells.
    pub fn query(&self) -> QpAttributes {
        each!(self, qp => qp.query())
    }

    /// What it has counted.
    pub fn counters(&self) -> &Counters {
        each!(self, qp => qp.counters())
    }

    /// Are all send requests that were taken off the ring complete? In SQD, no is `sq_draining`.
    pub fn is_drained(&self) -> bool {
        each!(self, qp => qp.is_drained())
    }

    /// `ibv_modify_qp`.
    pub fn modify(&mut self, change: &QpAttributes, host: &mut impl Host) -> Result<(), ModifyError> {
        each!(self, qp => qp.modify(change, host))
    }

    /// A packet has arrived, and its ICRC was good.
    #[inline]
    pub fn handle_packet(&mut self, now: Time, packet: &Packet<'_>, host: &mut impl Host) {
        each!(self, qp => qp.handle_packet(now, packet, host));
    }

    /// When to call [`Qp::handle_timeout`], if nothing happens before.
    #[inline]
    pub fn next_timeout(&self) -> Option<Time> {
        match self {
            Qp::Rc(qp) => qp.next_timeout(),
            Qp::Uc(_) | Qp::Ud(_) => None,
        }
    }

    /// Until when an acknowledgement waits for the program's answer.
    #[inline]
    pub fn ack_deadline(&self) -> Option<Time> {
        match self {
            Qp::Rc(qp) => qp.ack_deadline(),
            Qp::Uc(_) | Qp::Ud(_) => None,
        }
    }

    /// The next [`Qp::poll_transmit`] sends an acknowledgement that waits.
    pub fn send_acknowledgement(&mut self) {
        if let Qp::Rc(qp) = self {
            qp.send_acknowledgement();
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time, host: &mut impl Host) {
        if let Qp::Rc(qp) = self {
            qp.handle_timeout(now, host);
        }
    }

    /// Where it stands, for whoever stops it there ([`RcQp::stop`]); `None` for a type that has no acknowledgements.
    pub fn stop(&mut self, host: &mut impl Host) -> Option<Position> {
        match self {
            Qp::Rc(qp) => Some(qp.stop(host)),
            Qp::Uc(_) | Qp::Ud(_) => None,
        }
    }

    /// Goes on after [`Qp::stop`].
    pub fn restart(&mut self, now: Time) {
        if let Qp::Rc(qp) = self {
            qp.restart(now);
        }
    }

    /// What only a reliable connection has: pause and resume, and an image.
    pub fn as_rc(&self) -> Option<&RcQp> {
        match self {
            Qp::Rc(qp) => Some(qp),
            Qp::Uc(_) | Qp::Ud(_) => None,
        }
    }

    /// The same, to be changed.
    pub fn as_rc_mut(&mut self) -> Option<&mut RcQp> {
        match self {
            Qp::Rc(qp) => Some(qp),
            Qp::Uc(_) | Qp::Ud(_) => None,
        }
    }

    /// Appends packets to the batch.
    #[inline]
    pub fn poll_transmit(
        &mut self,
        now: Time,
        host: &mut impl Host,
        batch: &mut TxBatch,
        budget: usize,
    ) -> Transmit {
        match self {
            Qp::Rc(qp) => qp.poll_transmit(now, host, batch, budget),
            Qp::Uc(qp) => qp.poll_transmit(host, batch, budget),
            Qp::Ud(qp) => qp.poll_transmit(host, batch, budget),
        }
    }

    /// Changes the most bytes that may be under way to the partner. Nothing for a type that waits for no answers.
    pub fn set_window(&mut self, bytes: u32) {
        if let Qp::Rc(qp) = self {
            qp.set_window(bytes);
        }
    }

    /// Bytes under way: sent and not acknowledged, or asked for by READ and not arrived.
    pub fn in_flight_bytes(&self) -> u64 {
        match self {
            Qp::Rc(qp) => qp.in_flight_bytes(),
            Qp::Uc(_) | Qp::Ud(_) => 0,
        }
    }
}
