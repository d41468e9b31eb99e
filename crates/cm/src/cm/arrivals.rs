//! Messages that come for an id.

use verbatim_roce::{Qpn, Time};

use super::{Cm, DropReason, Outcome, QueuePairs};
use crate::event::{ConnectResponse, Event, ResolveResponse};
use crate::messages;
use crate::num::{CommId, Gid, field_time};
use crate::state::State;
use crate::talk::{Frame, Talk, ack_timeout};
use crate::wire::{Drep, Dreq, Mad, Message, Mra, Recipient, Rej, RejectReason, Rejected, Rep, Rtu, SidrRep};

/// Where a message came from, and when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrival {
    pub now: Time,
    pub from: Gid,
    pub to: Gid,
    pub tid: u64,
}

impl Cm {
    /// A datagram has come to queue pair 1, without its headers and the 40 bytes in front: from this GID, to this one of the RNIC's.
    /// Of one that another host has passed on, `from` is who sent it, and `to` the RNIC's own GID all the same.
    pub fn handle_mad(
        &mut self,
        now: Time,
        from: Gid,
        to: Gid,
        bytes: &[u8],
        queue_pairs: &dyn QueuePairs,
    ) -> Outcome {
        let outcome = match Mad::parse(bytes) {
            Ok(mad) => {
                self.counters.received += 1;
                let tid = mad.tid;
                self.arrived(Arrival { now, from, to, tid }, mad, queue_pairs)
            }
            Err(_) => Outcome::Dropped(DropReason::Malformed),
        };
        match outcome {
            Outcome::Dropped(DropReason::Malformed) => self.counters.dropped_malformed += 1,
            Outcome::Dropped(DropReason::Unexpected) => self.counters.dropped_unexpected += 1,
            Outcome::Dropped(DropReason::Backlog) => self.counters.dropped_backlog += 1,
            Outcome::Dropped(DropReason::Limits) => self.counters.dropped_limits += 1,
            Outcome::Dropped(DropReason::Rejected) => self.counters.rejected += 1,
            Outcome::Taken | Outcome::Away(_) => {}
        }
        outcome
    }

    fn arrived(&mut self, arrival: Arrival, mad: Mad, queue_pairs: &dyn QueuePairs) -> Outcome {
        let away = match mad.recipient() {
            Recipient::Id(id) if self.table.get(id).is_none() && self.away.contains(id) => Some(id),
            Recipient::Peer { remote_guid, remote } if self.table.peer(remote_guid, remote).is_none() => {
                self.away.peer(remote_guid, remote)
            }
            _ => None,
        };
        if let Some(id) = away {
            return Outcome::Away(id);
        }
        let taken = match &mad.message {
            Message::Req(req) => return self.req_arrived(arrival, req, queue_pairs),
            Message::SidrReq(req) => return self.sidr_req_arrived(arrival, req),
            Message::Mra(mra) => self.mra_arrived(arrival, mra),
            Message::Rej(rej) => self.rej_arrived(arrival, rej),
            Message::Rep(rep) => self.rep_arrived(arrival, rep, queue_pairs),
            Message::Rtu(rtu) => self.rtu_arrived(arrival, rtu),
            Message::Dreq(dreq) => self.dreq_arrived(arrival, dreq),
            Message::Drep(drep) => self.drep_arrived(arrival, drep),
            Message::SidrRep(rep) => self.sidr_rep_arrived(arrival, rep),
        };
        match taken {
            Some(()) => Outcome::Taken,
            None => Outcome::Dropped(DropReason::Unexpected),
        }
    }

    /// The id of a message that names both ends.
    fn of_both(&self, local: CommId, remote: CommId) -> Option<&Talk> {
        let talk = self.table.talk(local)?;
        (talk.remote == Some(remote) && talk.connection.is_some()).then_some(talk)
    }

    /// Answers a repetition with what answered it the first time.
    pub(super) fn repeat(&mut self, arrival: Arrival, frame: &Frame) {
        self.counters.duplicates += 1;
        self.counters.resent += 1;
        self.answer_to(arrival.from, arrival.to, frame);
    }

    /// Tells the peer that the program takes its time, instead of the program, which may have said so itself.
    pub(super) fn excuse(&mut self, arrival: Arrival, id: CommId) {
        let timeout = self.config.mra_service_timeout;
        let mra = self.table.update_talk(id, |talk, _| {
            if talk.last.is_none() {
                let mra = talk
                    .mra(id, timeout, &[])
                    .expect("without private data there is room");
                let state = match talk.state {
                    State::RepReceived => State::MraRepSent,
                    _ => State::MraReqSent,
                };
                talk.has_excused(state, (&mra).into(), timeout);
            }
            talk.last.clone()
        });
        if let Some(Some(mra)) = mra {
            self.repeat(arrival, &mra);
        }
    }

    fn mra_arrived(&mut self, arrival: Arrival, mra: &Mra) -> Option<()> {
        let id = mra.remote_comm_id;
        let talk = self.table.talk(id)?;
        let next = match (talk.state, mra.message) {
            (State::ReqSent, Rejected::REQ) => State::MraReqReceived,
            (State::RepSent, Rejected::REP) if talk.remote == Some(mra.local_comm_id) => {
                State::MraRepReceived
            }
            (State::MraReqReceived | State::MraRepReceived, _) => {
                self.counters.duplicates += 1;
                return Some(());
            }
            _ => return None,
        };
        self.table.update_talk(id, |talk, deadline| {
            talk.state = next;
            talk.wait = talk.interval + field_time(mra.service_timeout);
            *deadline = Some(arrival.now + talk.wait);
        })
    }

    fn rej_arrived(&mut self, arrival: Arrival, rej: &Rej) -> Option<()> {
        let id = self.rejected_id(rej)?;
        let stale = rej.reason == RejectReason::STALE_CONNECTION;
        let event = Event::Rejected {
            reason: rej.reason,
            additional: rej.additional().to_vec(),
            private_data: rej.private_data.to_vec(),
        };
        let state = self.table.talk(id)?.state;
        match state {
            State::ReqSent | State::MraReqReceived if !stale => self.close(arrival.now, id, None),
            State::ReqReceived | State::MraReqSent | State::RepSent | State::MraRepReceived if !stale => {
                self.close(arrival.now, id, None);
            }
            State::ReqSent
            | State::MraReqReceived
            | State::ReqReceived
            | State::MraReqSent
            | State::RepSent
            | State::MraRepReceived
            | State::RepReceived
            | State::MraRepSent
            | State::Established => self.wait_for_the_wire(arrival.now, id),
            State::DreqSent => {
                self.wait_for_the_wire(arrival.now, id);
                let event = Event::Disconnected {
                    private_data: Vec::new(),
                    timed_out: false,
                };
                self.tell(id, event);
                return Some(());
            }
            _ => return None,
        }
        self.tell(id, event);
        Some(())
    }

    /// Who sends a REJ may not know the number of the id (IBA §12.6.7.1).
    fn rejected_id(&self, rej: &Rej) -> Option<CommId> {
        let id = rej.remote_comm_id;
        if rej.reason == RejectReason::TIMEOUT {
            let guid = rej.additional.first_chunk().copied().map(u64::from_be_bytes)?;
            return self.table.peer(guid, rej.local_comm_id);
        }
        let talk = self.table.talk(id)?;
        let known = match rej.message {
            Rejected::REQ => talk.remote.is_none(),
            _ => talk.remote == Some(rej.local_comm_id),
        };
        (known && talk.connection.is_some()).then_some(id)
    }

    fn rep_arrived(&mut self, arrival: Arrival, rep: &Rep, queue_pairs: &dyn QueuePairs) -> Option<()> {
        let id = rep.remote_comm_id;
        let state = self
            .table
            .talk(id)
            .filter(|talk| talk.connection.is_some() && !talk.passive);
        match state.map(|talk| (talk.state, talk.remote)) {
            Some((State::ReqSent | State::MraReqReceived, _)) => {
                return self.first_rep(arrival, rep, queue_pairs);
            }
            Some((State::RepReceived | State::MraRepSent, Some(remote))) if remote == rep.local_comm_id => {
                self.excuse(arrival, id);
                return Some(());
            }
            Some((State::Established, Some(remote))) if remote == rep.local_comm_id => {
                let rtu = self.table.talk(id)?.last.clone()?;
                self.repeat(arrival, &rtu);
                return Some(());
            }
            // A repetition: what comes next tells the peer that it had arrived.
            Some((State::DreqSent | State::TimeWait, Some(remote))) if remote == rep.local_comm_id => {
                return None;
            }
            _ => {}
        }
        let (local, reason) = (rep.remote_comm_id, RejectReason::INVALID_COMM_ID);
        let rej = messages::rejection(arrival.tid, local, rep.local_comm_id, Rejected::REP, reason);
        self.answer_to(arrival.from, arrival.to, &(&rej).into());
        None
    }

    fn first_rep(&mut self, arrival: Arrival, rep: &Rep, queue_pairs: &dyn QueuePairs) -> Option<()> {
        let id = rep.remote_comm_id;
        if self.table.peer(rep.local_guid, rep.local_comm_id).is_some() {
            return None;
        }
        if let Some(holder) = self.stale(arrival, rep.local_guid, rep.qpn, queue_pairs) {
            let reason = RejectReason::STALE_CONNECTION;
            let rej = messages::rejection(arrival.tid, id, rep.local_comm_id, Rejected::REP, reason);
            self.answer_to(arrival.from, arrival.to, &(&rej).into());
            self.end_stale(arrival.now, holder);
            return None;
        }
        self.table.update_talk(id, |talk, deadline| {
            talk.state = State::RepReceived;
            talk.remote = Some(rep.local_comm_id);
            talk.last = None;
            *deadline = None;
            let life_time = talk.path.packet_life_time;
            // Who listened may have gone elsewhere. What is sent there from now on is known there only.
            let peer_moved = std::mem::replace(&mut talk.path.remote, arrival.from) != arrival.from;
            if let Some(conn) = &mut talk.connection {
                conn.peer_moved |= peer_moved;
                conn.remote_guid = rep.local_guid;
                conn.remote_qpn = rep.qpn;
                conn.send_psn = rep.starting_psn;
                conn.responder_resources = rep.initiator_depth;
                conn.initiator_depth = rep.responder_resources;
                conn.rnr_retry_count = rep.rnr_retry_count;
                conn.ack_timeout = ack_timeout(rep.target_ack_delay, life_time);
            }
        });
        let response = ConnectResponse {
            remote_guid: rep.local_guid,
            remote_qpn: rep.qpn,
            starting_psn: rep.starting_psn,
            responder_resources: rep.initiator_depth,
            initiator_depth: rep.responder_resources,
            target_ack_delay: rep.target_ack_delay,
            failover_accepted: rep.failover_accepted,
            flow_control: rep.flow_control,
            rnr_retry_count: rep.rnr_retry_count,
            srq: rep.srq,
            private_data: rep.private_data.to_vec(),
        };
        self.tell(id, Event::ConnectResponse(Box::new(response)));
        Some(())
    }

    fn rtu_arrived(&mut self, arrival: Arrival, rtu: &Rtu) -> Option<()> {
        let id = rtu.remote_comm_id;
        let talk = self.of_both(id, rtu.local_comm_id).filter(|talk| talk.passive)?;
        match talk.state {
            State::RepSent | State::MraRepReceived => {}
            State::Established => {
                self.counters.duplicates += 1;
                return Some(());
            }
            // It was rejected after all, and the peer does not know yet.
            State::Closed => {
                let rej = talk.last.clone()?;
                self.repeat(arrival, &rej);
                return Some(());
            }
            _ => return None,
        }
        self.table.update_talk(id, |talk, deadline| {
            talk.state = State::Established;
            talk.last = None;
            *deadline = None;
        });
        let event = Event::Established {
            private_data: rtu.private_data.to_vec(),
        };
        self.tell(id, event);
        Some(())
    }

    fn dreq_arrived(&mut self, arrival: Arrival, dreq: &Dreq) -> Option<()> {
        let id = dreq.remote_comm_id;
        let drep: Frame = (&messages::drep(arrival.tid, dreq)).into();
        let found = self.of_both(id, dreq.local_comm_id);
        let Some((state, conn)) = found.and_then(|talk| Some((talk.state, talk.connection.as_ref()?))) else {
            // Nothing is connected with the peer: that is what it wants.
            self.answer_to(arrival.from, arrival.to, &drep);
            return None;
        };
        if conn.local_qpn != dreq.remote_qpn {
            return None;
        }
        match state {
            State::RepSent | State::MraRepReceived | State::Established | State::DreqSent => {
                self.wait_for_the_wire(arrival.now, id);
                self.answer_to(arrival.from, arrival.to, &drep);
                let event = Event::Disconnected {
                    private_data: dreq.private_data.to_vec(),
                    timed_out: false,
                };
                self.tell(id, event);
                Some(())
            }
            State::TimeWait | State::Closed => {
                self.repeat(arrival, &drep);
                Some(())
            }
            _ => None,
        }
    }

    fn drep_arrived(&mut self, arrival: Arrival, drep: &Drep) -> Option<()> {
        let id = drep.remote_comm_id;
        let talk = self.of_both(id, drep.local_comm_id)?;
        if talk.state != State::DreqSent {
            return None;
        }
        self.wait_for_the_wire(arrival.now, id);
        let event = Event::Disconnected {
            private_data: drep.private_data.to_vec(),
            timed_out: false,
        };
        self.tell(id, event);
        Some(())
    }

    fn sidr_rep_arrived(&mut self, arrival: Arrival, rep: &SidrRep) -> Option<()> {
        let id = rep.request_id;
        if self.table.talk(id)?.state != State::SidrReqSent {
            return None;
        }
        self.close(arrival.now, id, None);
        let response = ResolveResponse {
            status: rep.status,
            qpn: rep.qpn,
            qkey: rep.qkey,
            additional: rep.additional().to_vec(),
            private_data: rep.private_data.to_vec(),
        };
        self.tell(id, Event::ResolveResponse(Box::new(response)));
        Some(())
    }

    /// The connection with the queue pair that a message is about. Only who sends from where the connection's peer is, is believed, and
    /// only as long as the queue pair of this end has that peer: one that has another by now goes on elsewhere, and the
    /// number is the newcomer's.
    pub(super) fn stale(
        &mut self,
        arrival: Arrival,
        guid: u64,
        qpn: Qpn,
        queue_pairs: &dyn QueuePairs,
    ) -> Option<CommId> {
        let holder = self.table.peer_qp(guid, qpn)?;
        let talk = self.table.talk(holder)?;
        let conn = talk.connection.as_ref()?;
        if talk.path.remote != arrival.from {
            return None;
        }
        let has_begun = matches!(talk.state, State::Established | State::DreqSent);
        if !has_begun || queue_pairs.are_connected(conn.local_qpn, arrival.from, qpn) {
            return Some(holder);
        }
        self.table.update_talk(holder, |talk, _| {
            if let Some(conn) = &mut talk.connection {
                conn.peer_moved = true;
            }
        });
        None
    }

    /// The peer has another connection on the queue pair of this one, so it has forgotten this one.
    pub(super) fn end_stale(&mut self, now: Time, id: CommId) {
        let talk = self.table.talk(id);
        let Some((talk, conn)) = talk.and_then(|talk| Some((talk, talk.connection.as_ref()?))) else {
            return;
        };
        if talk.state != State::Established {
            return;
        }
        let dreq: Frame = (&talk
            .dreq(id, conn, &[])
            .expect("without private data there is room"))
            .into();
        let path = talk.path;
        self.table.update_talk(id, |talk, deadline| {
            talk.expect_answer(State::DreqSent, dreq.clone());
            *deadline = Some(now + talk.wait);
        });
        self.send(&path, &dreq);
    }
}
