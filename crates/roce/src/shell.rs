//! What queue pairs of all types have in common: the state, the attributes, who is let in, and the flushing of rings.

use crate::link::Link;
use crate::receive::flush_receive;
use crate::wire::opcode::Service;
use crate::{
    BadRequest, Completion, Counters, Event, Host, Location, ModifyError, Packet, QpAttributes, QpConfig,
    QpState, QpType, Qpn, Queue, SendRequest, Transition, Transmit, WcStatus,
};

/// The destination of multicast datagrams (IBA §10.5.2).
const MULTICAST_QPN: u32 = 0x00ff_ffff;

/// What a queue pair does: the states that the program sees, and those that it does not. In this order: what each packet asks
/// for, whether all may be sent and whether responses are waited for, is one comparison with a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Reset,
    Init,
    /// There is something to be told to a partner that was stopped or has gone on, or to be heard from it.
    Waiting,
    Rtr,
    Rts,
    Sqd,
    Sqe,
    Err,
    /// The connection is stopped, and may go on elsewhere.
    Stopped,
}

impl Phase {
    /// What a queue pair does of which nothing else is known than the state.
    pub fn of(state: QpState) -> Phase {
        match state {
            QpState::Reset => Phase::Reset,
            QpState::Init => Phase::Init,
            QpState::Rtr => Phase::Rtr,
            QpState::Rts => Phase::Rts,
            QpState::Sqd => Phase::Sqd,
            QpState::Sqe => Phase::Sqe,
            QpState::Err => Phase::Err,
        }
    }
}

/// The common part of a queue pair.
#[derive(Debug)]
pub(crate) struct Shell {
    pub qpn: Qpn,
    pub qp_type: QpType,
    pub config: QpConfig,
    /// What the program sees.
    pub state: QpState,
    /// What the queue pair does: the state, but for a connection that is stopped or waits for its partner.
    pub phase: Phase,
    pub attributes: QpAttributes,
    pub link: Link,
    /// Where the partner has gone on, if it has.
    pub peer: Option<Location>,
    pub counters: Counters,
    /// The program wants to know when the send queue is drained.
    pub notify_drained: bool,
    /// A packet has come since RTR.
    pub established: bool,
}

impl Shell {
    pub fn new(qp_type: QpType, qpn: Qpn, config: QpConfig) -> Shell {
        Shell {
            qpn,
            qp_type,
            config,
            state: QpState::Reset,
            phase: Phase::Reset,
            attributes: QpAttributes::default(),
            link: Link::default(),
            peer: None,
            counters: Counters::default(),
            notify_drained: false,
            established: false,
        }
    }

    pub fn query(&self) -> QpAttributes {
        QpAttributes {
            state: Some(self.state),
            cur_state: Some(self.state),
            ..self.attributes
        }
    }

    /// Checks a change, and makes it as far as it concerns the shell; gives the states before and after.
    pub fn modify(
        &mut self,
        change: &QpAttributes,
        drained: bool,
    ) -> Result<(QpState, QpState), ModifyError> {
        let from = self.state;
        let to = change.state.unwrap_or(from);
        if let Some(claimed) = change.cur_state.filter(|claimed| *claimed != from) {
            return Err(ModifyError::WrongCurrentState {
                claimed,
                actual: from,
            });
        }
        Transition::check(self.qp_type, from, to, change.mask())?;
        change.check_values()?;
        if from == QpState::Sqd && !drained && !matches!(to, QpState::Reset | QpState::Err) {
            return Err(ModifyError::Draining { to });
        }
        self.attributes.merge(change);
        self.state = to;
        self.phase = Phase::of(to);
        match to {
            QpState::Reset => {
                *self = Shell {
                    counters: self.counters,
                    ..Shell::new(self.qp_type, self.qpn, self.config)
                };
            }
            QpState::Err => {}
            _ => {
                self.refresh_link();
                if (from, to) == (QpState::Rts, QpState::Sqd) {
                    self.notify_drained = change.en_sqd_async_notify.unwrap_or(false);
                }
            }
        }
        Ok((from, to))
    }

    /// Is the packet one for this queue pair, now (IBA §9.6.1)? What is not is counted.
    pub fn admits(&mut self, packet: &Packet<'_>) -> bool {
        let counters = &mut self.counters;
        let bth = &packet.bth;
        let for_all = self.qp_type == QpType::Ud && bth.dest_qpn.get() == MULTICAST_QPN;
        let closed = matches!(
            self.phase,
            Phase::Reset | Phase::Init | Phase::Err | Phase::Stopped
        );
        let reason = if closed {
            &mut counters.dropped_by_state
        } else if !service_fits(packet.info.service, self.qp_type) {
            &mut counters.dropped_wrong_service
        } else if bth.dest_qpn != self.qpn && !for_all {
            &mut counters.dropped_wrong_qpn
        } else if !pkeys_match(bth.pkey, self.config.pkey) {
            &mut counters.bad_pkey
        } else {
            return true;
        };
        *reason += 1;
        counters.dropped_packets += 1;
        false
    }

    /// Is it one for this queue pair, whatever the state?
    pub fn is_addressed(&self, packet: &Packet<'_>) -> bool {
        service_fits(packet.info.service, self.qp_type)
            && packet.bth.dest_qpn == self.qpn
            && pkeys_match(packet.bth.pkey, self.config.pkey)
    }

    /// What packets carry, by the attributes and where the partner has gone.
    pub fn refresh_link(&mut self) {
        let dest_qpn = match self.peer {
            Some(peer) => peer.qpn,
            None => self.attributes.dest_qpn.unwrap_or_default(),
        };
        let mtu = match self.qp_type {
            QpType::Ud => self.config.port_mtu,
            QpType::Rc | QpType::Uc => self.attributes.path_mtu.unwrap_or_default(),
        };
        self.link = Link {
            pkey: self.config.pkey,
            dest_qpn,
            mtu,
        };
    }

    /// The partner goes on there. What the program knows of it stays.
    pub fn set_peer(&mut self, peer: Location) {
        self.peer = Some(peer);
        self.link.dest_qpn = peer.qpn;
    }

    /// A request has come: the first one in RTR is an event (IBA §11.6.3.1).
    pub fn note_request(&mut self, host: &mut impl Host) {
        if self.state == QpState::Rtr && !self.established {
            self.established = true;
            host.event(Event::CommunicationEstablished);
        }
    }

    /// Reports the end of draining, once.
    pub fn note_drained(&mut self, drained: bool, host: &mut impl Host) {
        if self.state == QpState::Sqd && self.notify_drained && drained {
            self.notify_drained = false;
            host.event(Event::SendQueueDrained);
        }
    }

    /// Goes to ERR; requester and responder have been flushed.
    pub fn enter_error(&mut self, from: QpState, host: &mut impl Host) {
        self.state = QpState::Err;
        self.phase = Phase::Err;
        if from != QpState::Err && self.config.shared_receive_queue {
            host.event(Event::LastWqeReached);
        }
    }

    /// Completes what is posted in ERR, without executing it (IBA §10.8.2.4): at most `budget` of each ring.
    pub fn flush_rings(&mut self, host: &mut impl Host, budget: usize) -> Transmit {
        let mut more = self.flush_sends(host, budget) == Transmit::More;
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

    /// The same for the send ring alone, which is what SQE asks for.
    pub fn flush_sends(&mut self, host: &mut impl Host, budget: usize) -> Transmit {
        for _ in 0..budget {
            let Some(item) = host.next_send() else {
                return Transmit::Idle;
            };
            self.counters.req_cqe_flush_error += 1;
            flush_send(&item, host);
        }
        Transmit::More
    }
}

fn service_fits(service: Service, qp_type: QpType) -> bool {
    match service {
        Service::Rc => qp_type == QpType::Rc,
        Service::Uc => qp_type == QpType::Uc,
        Service::Ud => qp_type == QpType::Ud,
        // It is about a flow, of whatever kind (annex A17.9.3).
        Service::Cnp => true,
    }
}

/// Two partition keys match if all but the top bit are equal, and not zero; one of the two has to be a full member, which
/// is what the top bit says (IBA §10.9.1).
fn pkeys_match(one: u16, other: u16) -> bool {
    const FULL: u16 = 0x8000;
    (one ^ other) & !FULL == 0 && one & !FULL != 0 && (one | other) & FULL != 0
}

fn flush_send(item: &Result<SendRequest, BadRequest>, host: &mut impl Host) {
    let (wr_id, opcode) = match item {
        Ok(request) => (request.wr_id, request.operation.wc_opcode()),
        Err(bad) => (bad.wr_id, bad.opcode),
    };
    host.retire_sends(1);
    host.complete(Completion::new(
        Queue::Send,
        wr_id,
        WcStatus::WrFlushErr,
        opcode,
        0,
    ));
}

#[cfg(test)]
mod tests {
    use super::pkeys_match;

    #[test]
    fn limited_members_do_not_see_each_other() {
        assert!(pkeys_match(0xffff, 0xffff));
        assert!(pkeys_match(0x7fff, 0xffff) && pkeys_match(0xffff, 0x7fff));
        assert!(!pkeys_match(0x7fff, 0x7fff));
        assert!(!pkeys_match(0x8001, 0xffff));
        assert!(!pkeys_match(0x8000, 0x8000), "zero is no partition");
    }
}
