//! Messages that come for a service.

use std::time::Duration;

use verbatim_roce::{Mtu, Psn, Qpn};

use super::arrivals::Arrival;
use super::{Cm, DropReason, Outcome, QueuePairs};
use crate::command::Path;
use crate::config::MAX_CM_RETRIES;
use crate::event::{ConnectRequest, Event, ResolveRequest};
use crate::messages;
use crate::num::{CommId, Owner, ServiceId, Transport};
use crate::state::State;
use crate::table::Found;
use crate::talk::{Conn, Id, Kind, LONGEST_LINGER, Talk, interval};
use crate::wire::{IP_HEADER_BYTES, IpHeader, RejectReason, Rejected, Req, SidrReq, SidrStatus, WirePath};

/// What is taken for the peer's response timeout in a question for a queue pair: SIDR_REQ says nothing of timeouts.
const SIDR_TIMEOUT: u8 = crate::config::RESPONSE_TIMEOUT;

impl Cm {
    pub(super) fn req_arrived(
        &mut self,
        arrival: Arrival,
        req: &Req,
        queue_pairs: &dyn QueuePairs,
    ) -> Outcome {
        if let Some(id) = self.table.peer(req.local_guid, req.local_comm_id) {
            return self.req_again(arrival, id);
        }
        if let Some(id) = self.away.peer(req.local_guid, req.local_comm_id) {
            return Outcome::Away(id);
        }
        let header = header_of(&req.private_data);
        let found = self.table.listener(req.service, header, false);
        if !matches!(found, Found::Listener(..))
            && let Some(listener) = self.away.listener(req.service, header)
        {
            return Outcome::Away(listener);
        }
        if let Some(holder) = self.stale(arrival, req.local_guid, req.qpn, queue_pairs) {
            self.refuse(arrival, req, RejectReason::STALE_CONNECTION);
            self.end_stale(arrival.now, holder);
            return Outcome::Dropped(DropReason::Rejected);
        }
        let reason = match (found, transport(req), Mtu::try_from(req.mtu)) {
            (Found::Listener(listener, header), Some(transport), Ok(mtu)) => {
                return self.connection_asked(arrival, req, listener, header, transport, mtu);
            }
            (Found::Nobody, ..) => RejectReason::INVALID_SERVICE_ID,
            (Found::NotForThis, ..) => RejectReason::CONSUMER,
            (_, None, _) => RejectReason::INVALID_TRANSPORT,
            (_, _, Err(_)) => RejectReason::INVALID_MTU,
        };
        self.refuse(arrival, req, reason);
        Outcome::Dropped(DropReason::Rejected)
    }

    fn refuse(&mut self, arrival: Arrival, req: &Req, reason: RejectReason) {
        let (local, remote) = (CommId(0), req.local_comm_id);
        let rej = messages::rejection(arrival.tid, local, remote, Rejected::REQ, reason);
        self.answer_to(arrival.from, arrival.to, &(&rej).into());
    }

    /// A REQ that has come before.
    fn req_again(&mut self, arrival: Arrival, id: CommId) -> Outcome {
        let Some(talk) = self.table.talk(id) else {
            return Outcome::Dropped(DropReason::Unexpected);
        };
        match talk.state {
            State::ReqReceived | State::MraReqSent => self.excuse(arrival, id),
            State::RepSent | State::Closed => {
                if talk.state == State::Closed {
                    // The peer is still there.
                    let until = arrival.now + talk.linger;
                    self.table.update(id, |entry| entry.deadline = Some(until));
                }
                let last = self.table.talk(id).and_then(|talk| talk.last.clone());
                last.inspect(|frame| self.repeat(arrival, frame));
            }
            _ => self.counters.duplicates += 1,
        }
        Outcome::Taken
    }

    fn connection_asked(
        &mut self,
        arrival: Arrival,
        req: &Req,
        listener: CommId,
        header: Option<IpHeader>,
        transport: Transport,
        mtu: Mtu,
    ) -> Outcome {
        let owner = match self.admit(listener) {
            Ok(owner) => owner,
            Err(reason) => return Outcome::Dropped(reason),
        };
        let path = path_of(arrival, req, mtu);
        let id = self.new_comm_id();
        let connection = Conn {
            transport,
            local_guid: self.config.guid,
            remote_guid: req.local_guid,
            local_qpn: Qpn::default(),
            remote_qpn: req.qpn,
            receive_psn: Psn::default(),
            send_psn: req.starting_psn,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            ack_timeout: path.packet_life_time + 1,
            failover: req.alternate.local_lid != 0,
            peer_moved: false,
        };
        let own = interval(path.packet_life_time, req.local_response_timeout);
        let peers = interval(path.packet_life_time, req.remote_response_timeout);
        let talk = Talk {
            interval: own,
            wait: own,
            linger: linger(peers, req.max_cm_retries),
            retries: req.max_cm_retries,
            connection: Some(connection),
            ..asked(
                arrival,
                State::ReqReceived,
                listener,
                req.service,
                path,
                req.local_comm_id,
            )
        };
        self.take_up(owner, id, talk);
        let private_data = behind(header, &req.private_data);
        let request = ConnectRequest {
            listener,
            service: req.service,
            ip: header,
            remote_guid: req.local_guid,
            path,
            transport,
            remote_qpn: req.qpn,
            starting_psn: req.starting_psn,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            srq: req.srq,
            private_data,
        };
        self.tell(id, Event::ConnectRequest(Box::new(request)));
        Outcome::Taken
    }

    pub(super) fn sidr_req_arrived(&mut self, arrival: Arrival, req: &SidrReq) -> Outcome {
        let header = header_of(&req.private_data);
        let asker = header.map_or(arrival.from, |header| header.source.into());
        if let Some(id) = self.table.asker(asker, req.request_id) {
            let last = self.table.talk(id).and_then(|talk| talk.last.clone());
            match last {
                Some(rep) => self.repeat(arrival, &rep),
                None => self.counters.duplicates += 1,
            }
            return Outcome::Taken;
        }
        if let Some(id) = self.away.asker(asker, req.request_id) {
            return Outcome::Away(id);
        }
        let found = self.table.listener(req.service, header, true);
        let Found::Listener(listener, header) = found else {
            if let Some(listener) = self.away.listener(req.service, header) {
                return Outcome::Away(listener);
            }
            let status = match found {
                Found::NotForThis => SidrStatus::REJECTED,
                _ => SidrStatus::UNSUPPORTED_SERVICE,
            };
            let rep = messages::no_queue_pair(arrival.tid, req.request_id, req.service, status);
            self.answer_to(arrival.from, arrival.to, &(&rep).into());
            return Outcome::Dropped(DropReason::Rejected);
        };
        let owner = match self.admit(listener) {
            Ok(owner) => owner,
            Err(reason) => return Outcome::Dropped(reason),
        };
        let mut path = Path::new(arrival.to, arrival.from, Mtu::default());
        path.pkey = req.pkey;
        let id = self.new_comm_id();
        let wait = interval(path.packet_life_time, SIDR_TIMEOUT);
        let talk = Talk {
            interval: wait,
            wait,
            linger: linger(wait, MAX_CM_RETRIES),
            asker: Some(asker),
            ..asked(
                arrival,
                State::SidrReqReceived,
                listener,
                req.service,
                path,
                req.request_id,
            )
        };
        self.take_up(owner, id, talk);
        let request = ResolveRequest {
            listener,
            service: req.service,
            ip: header,
            local: arrival.to,
            remote: arrival.from,
            pkey: req.pkey,
            private_data: behind(header, &req.private_data),
        };
        self.tell(id, Event::ResolveRequest(Box::new(request)));
        Outcome::Taken
    }

    /// May a listener have one more request?
    fn admit(&self, id: CommId) -> Result<Owner, DropReason> {
        let entry = self.table.get(id).ok_or(DropReason::Unexpected)?;
        let (Some(owner), Kind::Listener(listener)) = (entry.owner, &entry.kind) else {
            return Err(DropReason::Unexpected);
        };
        if self.table.pending_count_at(id) >= listener.listen.backlog as usize {
            return Err(DropReason::Backlog);
        }
        if self.table.pending_count() >= self.config.limits.pending || self.has_room(owner).is_err() {
            return Err(DropReason::Limits);
        }
        Ok(owner)
    }

    fn take_up(&mut self, owner: Owner, id: CommId, talk: Talk) {
        let entry = Id {
            owner: Some(owner),
            events: Default::default(),
            deadline: None,
            kind: Kind::Talk(Box::new(talk)),
        };
        self.table.insert(id, entry);
    }
}

/// A conversation that the peer has begun.
fn asked(
    arrival: Arrival,
    state: State,
    listener: CommId,
    service: ServiceId,
    path: Path,
    remote: CommId,
) -> Talk {
    Talk {
        state,
        passive: true,
        pending_at: Some(listener),
        service,
        path,
        tid: arrival.tid,
        remote: Some(remote),
        asker: None,
        interval: Default::default(),
        wait: Default::default(),
        linger: Default::default(),
        retries: 0,
        left: 0,
        last: None,
        connection: None,
    }
}

/// How long a peer repeats a request at most.
fn linger(interval: Duration, retries: u8) -> Duration {
    (interval * (u32::from(retries) + 1)).min(LONGEST_LINGER)
}

fn transport(req: &Req) -> Option<Transport> {
    match req.transport {
        0 => Some(Transport::Rc),
        1 => Some(Transport::Uc),
        _ => None,
    }
}

/// The way back: to where the request has come from, otherwise as it says.
fn path_of(arrival: Arrival, req: &Req, mtu: Mtu) -> Path {
    let WirePath {
        flow_label,
        rate,
        traffic_class,
        hop_limit,
        sl,
        ack_timeout,
        ..
    } = req.primary;
    Path {
        local: arrival.to,
        remote: arrival.from,
        pkey: req.pkey,
        mtu,
        rate,
        traffic_class,
        flow_label,
        hop_limit,
        sl,
        packet_life_time: ack_timeout.saturating_sub(1),
    }
}

fn header_of(private_data: &[u8]) -> Option<IpHeader> {
    IpHeader::parse(private_data.first_chunk::<IP_HEADER_BYTES>()?).ok()
}

/// The program's part of the private data.
fn behind(header: Option<IpHeader>, private_data: &[u8]) -> Vec<u8> {
    let skip = if header.is_some() { IP_HEADER_BYTES } else { 0 };
    private_data[skip..].to_vec()
}
