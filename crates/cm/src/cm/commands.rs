//! What owners ask for.

use std::time::Duration;

use verbatim_roce::{Psn, Qpn, Time};

use super::Cm;
use crate::command::{Accept, Answer, Connect, Listen, Path, Resolve};
use crate::error::Error;
use crate::event::Event;
use crate::messages;
use crate::num::{CommId, Owner, ServiceId};
use crate::state::State;
use crate::talk::{Conn, Frame, Id, Kind, Listener, Talk, ack_timeout, interval};
use crate::wire::{Mad, RejectReason, SidrStatus};

impl Cm {
    /// Takes requests for a service from now on. Each is an id of the same owner ([`Event::ConnectRequest`],
    /// [`Event::ResolveRequest`]).
    pub fn listen(&mut self, owner: Owner, listen: &Listen) -> Result<CommId, Error> {
        self.has_room(owner)?;
        if self.table.listens(listen) {
            return Err(Error::InUse);
        }
        let id = self.new_comm_id();
        let entry = Id {
            owner: Some(owner),
            events: Default::default(),
            deadline: None,
            kind: Kind::Listener(Listener {
                listen: *listen,
                here: None,
            }),
        };
        self.table.insert(id, entry);
        Ok(id)
    }

    /// Asks for a connection (REQ).
    pub fn connect(&mut self, now: Time, owner: Owner, connect: &Connect) -> Result<CommId, Error> {
        self.has_room(owner)?;
        let (guid, ack_delay) = (self.config.guid, self.config.ack_delay);
        let id = self.new_comm_id();
        let req = messages::req(id, guid, ack_delay, connect)?;
        let path = connect.path;
        let conn = Conn {
            transport: connect.transport,
            local_guid: guid,
            remote_guid: 0,
            local_qpn: connect.qpn,
            remote_qpn: Qpn::default(),
            receive_psn: connect.starting_psn,
            send_psn: Psn::default(),
            responder_resources: connect.responder_resources,
            initiator_depth: connect.initiator_depth,
            retry_count: connect.retry_count.min(7),
            rnr_retry_count: connect.rnr_retry_count.min(7),
            ack_timeout: ack_timeout(ack_delay, path.packet_life_time),
            failover: false,
            peer_moved: false,
        };
        let asked = (
            connect.service,
            path,
            connect.remote_response_timeout,
            connect.max_cm_retries,
        );
        self.begin(now, owner, id, State::ReqSent, asked, &req, Some(conn));
        Ok(id)
    }

    /// Asks for the queue pair behind a service (SIDR_REQ).
    pub fn resolve(&mut self, now: Time, owner: Owner, resolve: &Resolve) -> Result<CommId, Error> {
        self.has_room(owner)?;
        let id = self.new_comm_id();
        let req = messages::sidr_req(id, resolve)?;
        let asked = (
            resolve.service,
            resolve.path,
            resolve.response_timeout,
            resolve.max_cm_retries,
        );
        self.begin(now, owner, id, State::SidrReqSent, asked, &req, None);
        Ok(id)
    }

    /// An id that begins by sending a message.
    #[allow(clippy::too_many_arguments, reason = "two callers, next to it")]
    fn begin(
        &mut self,
        now: Time,
        owner: Owner,
        id: CommId,
        state: State,
        (service, path, response_timeout, retries): (ServiceId, Path, u8, u8),
        message: &Mad,
        connection: Option<Conn>,
    ) {
        let interval = interval(path.packet_life_time, response_timeout);
        let mut talk = Talk {
            state,
            passive: false,
            pending_at: None,
            service,
            path,
            tid: message.tid,
            remote: None,
            asker: None,
            interval,
            wait: interval,
            linger: Duration::ZERO,
            retries: retries.min(15),
            left: 0,
            last: None,
            connection,
        };
        talk.expect_answer(state, message.into());
        let entry = Id {
            owner: Some(owner),
            events: Default::default(),
            deadline: Some(now + interval),
            kind: Kind::Talk(Box::new(talk)),
        };
        self.table.insert(id, entry);
        self.send(&path, &message.into());
    }

    /// The program knows of this request: it does not count for the listener's backlog any more. Of any other id, and a second time,
    /// it does nothing.
    pub fn taken(&mut self, id: CommId) {
        self.table.update_talk(id, |talk, _| talk.pending_at = None);
    }

    /// Agrees to a connection (REP).
    pub fn accept(&mut self, now: Time, id: CommId, accept: &Accept) -> Result<(), Error> {
        let talk = self.owned_talk(id)?;
        let conn = match (talk.state, &talk.connection) {
            (State::ReqReceived | State::MraReqSent, Some(conn)) => conn,
            (state, _) => return Err(Error::WrongState(state)),
        };
        let rep: Frame = (&talk.rep(id, self.config.ack_delay, conn, accept)?).into();
        let path = talk.path;
        self.table.update_talk(id, |talk, deadline| {
            talk.expect_answer(State::RepSent, rep.clone());
            *deadline = Some(now + talk.wait);
            if let Some(conn) = &mut talk.connection {
                conn.local_qpn = accept.qpn;
                conn.receive_psn = accept.starting_psn;
                conn.responder_resources = accept.responder_resources;
                conn.initiator_depth = accept.initiator_depth;
            }
        });
        self.send(&path, &rep);
        Ok(())
    }

    /// The queue pair is ready: the connection stands (RTU). There is no event here.
    pub fn establish(&mut self, now: Time, id: CommId, private_data: &[u8]) -> Result<(), Error> {
        let _ = now;
        let talk = self.owned_talk(id)?;
        if !matches!(talk.state, State::RepReceived | State::MraRepSent) {
            return Err(Error::WrongState(talk.state));
        }
        let rtu: Frame = (&talk.rtu(id, private_data)?).into();
        let path = talk.path;
        self.table.update_talk(id, |talk, deadline| {
            talk.state = State::Established;
            talk.last = Some(rtu.clone());
            *deadline = None;
        });
        self.send(&path, &rtu);
        Ok(())
    }

    /// Does not want a connection (REJ); up to 148 bytes of private data. The id is closed, there is no event.
    pub fn reject(
        &mut self,
        now: Time,
        id: CommId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        let talk = self.owned_talk(id)?;
        match talk.state {
            State::ReqSent | State::MraReqReceived => {}
            State::ReqReceived | State::MraReqSent | State::RepSent | State::MraRepReceived => {}
            State::RepReceived | State::MraRepSent => {}
            state => return Err(Error::WrongState(state)),
        }
        let rej: Frame = (&talk.rej(id, reason, private_data)?).into();
        let path = talk.path;
        self.close(now, id, Some(rej.clone()));
        self.send(&path, &rej);
        Ok(())
    }

    /// Tells the peer that the answer to its REQ or REP will take so long (MRA), as an exponent. What is not told it is told when it
    /// repeats its message, with [`crate::Config::mra_service_timeout`].
    pub fn mra(
        &mut self,
        now: Time,
        id: CommId,
        service_timeout: u8,
        private_data: &[u8],
    ) -> Result<(), Error> {
        let _ = now;
        let talk = self.owned_talk(id)?;
        let state = match talk.state {
            State::ReqReceived => State::MraReqSent,
            State::RepReceived => State::MraRepSent,
            state => return Err(Error::WrongState(state)),
        };
        let mra: Frame = (&talk.mra(id, service_timeout, private_data)?).into();
        let path = talk.path;
        self.table.update_talk(id, |talk, _| {
            talk.has_excused(state, mra.clone(), service_timeout)
        });
        self.send(&path, &mra);
        Ok(())
    }

    /// Ends a connection (DREQ). [`Event::Disconnected`] comes when the peer has answered, or does not. Of one that the peer
    /// has ended, or that ends, it does nothing: DREQs are answered as they come.
    pub fn disconnect(&mut self, now: Time, id: CommId, private_data: &[u8]) -> Result<(), Error> {
        let talk = self.owned_talk(id)?;
        let conn = match (talk.state, &talk.connection) {
            (State::Established, Some(conn)) => conn,
            (State::DreqSent | State::TimeWait | State::Closed, Some(_)) => return Ok(()),
            (state, _) => return Err(Error::WrongState(state)),
        };
        let dreq: Frame = (&talk.dreq(id, conn, private_data)?).into();
        let path = talk.path;
        self.table.update_talk(id, |talk, deadline| {
            talk.expect_answer(State::DreqSent, dreq.clone());
            *deadline = Some(now + talk.wait);
        });
        self.send(&path, &dreq);
        Ok(())
    }

    /// Answers the question for a queue pair (SIDR_REP). The id is closed.
    pub fn answer(&mut self, now: Time, id: CommId, answer: &Answer) -> Result<(), Error> {
        let talk = self.owned_talk(id)?;
        if talk.state != State::SidrReqReceived {
            return Err(Error::WrongState(talk.state));
        }
        let rep: Frame = (&talk.sidr_rep(answer)?).into();
        let path = talk.path;
        self.close(now, id, Some(rep.clone()));
        self.send(&path, &rep);
        Ok(())
    }

    /// Ends an id at any state: a listener stops, and rejects the requests that no program has taken; a REQ is withdrawn, a request
    /// rejected, a connection ended. Its events that nobody has polled are gone.
    pub fn destroy(&mut self, now: Time, id: CommId) -> Result<(), Error> {
        let entry = self.owned(id)?;
        match &entry.kind {
            Kind::Listener(_) => {
                for waiting in self.table.pending_at(id) {
                    self.destroy(now, waiting)?;
                }
            }
            Kind::Talk(talk) => self.say_goodbye(now, id, talk.state),
        }
        self.leave(id);
        Ok(())
    }

    /// What the peer has to be told before an id is left alone.
    fn say_goodbye(&mut self, now: Time, id: CommId, state: State) {
        let told = match state {
            State::ReqSent | State::MraReqReceived => {
                self.give_up(now, id);
                return;
            }
            State::ReqReceived
            | State::MraReqSent
            | State::RepSent
            | State::MraRepReceived
            | State::RepReceived
            | State::MraRepSent => self.reject(now, id, RejectReason::CONSUMER, &[]),
            State::Established => self.disconnect(now, id, &[]),
            State::SidrReqReceived => {
                let refused = Answer {
                    status: SidrStatus::REJECTED,
                    qpn: Qpn::default(),
                    qkey: 0,
                    private_data: Vec::new(),
                };
                self.answer(now, id, &refused)
            }
            State::SidrReqSent => {
                self.close(now, id, None);
                return;
            }
            State::Listening | State::DreqSent | State::TimeWait | State::Closed => return,
        };
        debug_assert_eq!(told, Ok(()), "the state allows it");
    }

    /// Ends all ids of an owner.
    pub fn destroy_owner(&mut self, now: Time, owner: Owner) {
        for id in self.table.owned_by(owner) {
            // A listener takes the requests that wait at it along.
            let _: Result<(), Error> = self.destroy(now, id);
        }
    }

    /// The queue pair has got traffic (`IBV_EVENT_COMM_EST`): the peer must have got the REP, though its RTU is not here yet.
    /// Gives [`Event::Established`]. An error where the id does not wait for an RTU.
    pub fn notify_established(&mut self, id: CommId) -> Result<(), Error> {
        let talk = self.owned_talk(id)?;
        if !matches!(talk.state, State::RepSent | State::MraRepReceived) {
            return Err(Error::WrongState(talk.state));
        }
        self.table.update_talk(id, |talk, deadline| {
            talk.state = State::Established;
            talk.last = None;
            *deadline = None;
        });
        let event = Event::Established {
            private_data: Vec::new(),
        };
        self.tell(id, event);
        Ok(())
    }
}
