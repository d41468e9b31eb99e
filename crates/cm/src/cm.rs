//! The communication manager of one RNIC.

use verbatim_roce::Time;

use crate::command::{Accept, Answer, Connect, Listen, Resolve};
use crate::config::Config;
use crate::counters::Counters;
use crate::error::{AdoptError, Error};
use crate::event::Notice;
use crate::image::IdImage;
use crate::num::{CommId, Gid, Owner};
use crate::state::{Connection, State};
use crate::wire::{MAD_BYTES, RejectReason};

/// A MAD to send from queue pair 1 to the peer's queue pair 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// From which of the RNIC's GIDs.
    pub from: Gid,
    /// To whom.
    pub to: Gid,
    /// Partition key.
    pub pkey: u16,
    /// IPv6 traffic class, IPv4 type of service.
    pub traffic_class: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// IPv6 hop limit, IPv4 time to live.
    pub hop_limit: u8,
    /// The MAD.
    pub bytes: Box<[u8; MAD_BYTES]>,
}

/// What became of a MAD.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did something, or is a repetition.
    Taken,
    /// It did nothing.
    Dropped(DropReason),
    /// It is for an id that has gone from here ([`Cm::take`]): pass it on to where it is now, or drop it. Nothing has
    /// been answered. For a request that the listener would have to take it names the listener.
    Away(CommId),
}

/// Why a MAD did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// It is no message, or one that is not supported.
    Malformed,
    /// It is for an id that does not exist or does not wait for it.
    Unexpected,
    /// The listener has as many requests waiting as it wants. The peer asks again.
    Backlog,
    /// There are as many ids as there may be. The peer asks again.
    Limits,
}

/// The communication manager of one RNIC.
///
/// *Commands* of programs: [`listen`](Cm::listen), [`connect`](Cm::connect), [`accept`](Cm::accept),
/// [`establish`](Cm::establish), [`reject`](Cm::reject), [`mra`](Cm::mra), [`disconnect`](Cm::disconnect),
/// [`resolve`](Cm::resolve), [`answer`](Cm::answer), [`destroy`](Cm::destroy), [`destroy_owner`](Cm::destroy_owner).
/// *Arrivals*: [`handle_mad`](Cm::handle_mad), [`notify_established`](Cm::notify_established),
/// [`handle_timeout`](Cm::handle_timeout). *Polls*, after each of those, until they give nothing more:
/// [`poll_transmit`](Cm::poll_transmit), [`poll_event`](Cm::poll_event); then [`next_deadline`](Cm::next_deadline).
/// *Moving*: [`take`](Cm::take), [`adopt`](Cm::adopt), [`forget`](Cm::forget), [`peer_moved`](Cm::peer_moved).
///
/// An id is there until [`destroy`](Cm::destroy). What the peer is still owed then (a DREQ that must arrive, the same answer to the
/// same question) is done without an owner, for a limited time, and gives no more events.
#[derive(Debug)]
pub struct Cm {
    config: Config,
    counters: Counters,
}

#[allow(unused_variables)]
impl Cm {
    /// One without ids.
    pub fn new(config: Config) -> Cm {
        Cm {
            config,
            counters: Counters::default(),
        }
    }

    /// Takes requests for a service from now on. Each is an id of the same owner ([`crate::Event::ConnectRequest`],
    /// [`crate::Event::ResolveRequest`]).
    pub fn listen(&mut self, owner: Owner, listen: &Listen) -> Result<CommId, Error> {
        todo!()
    }

    /// Asks for a connection (REQ).
    pub fn connect(&mut self, now: Time, owner: Owner, connect: &Connect) -> Result<CommId, Error> {
        todo!()
    }

    /// Asks for the queue pair behind a service (SIDR_REQ).
    pub fn resolve(&mut self, now: Time, owner: Owner, resolve: &Resolve) -> Result<CommId, Error> {
        todo!()
    }

    /// The program knows of this request: it does not count for the listener's backlog any more. Of any other id, and a second time,
    /// it does nothing.
    pub fn taken(&mut self, id: CommId) {
        todo!()
    }

    /// Agrees to a connection (REP).
    pub fn accept(&mut self, now: Time, id: CommId, accept: &Accept) -> Result<(), Error> {
        todo!()
    }

    /// The queue pair is ready: the connection stands (RTU). There is no event here.
    pub fn establish(&mut self, now: Time, id: CommId, private_data: &[u8]) -> Result<(), Error> {
        todo!()
    }

    /// Does not want a connection (REJ); up to 148 bytes of private data. The id is closed, there is no event.
    pub fn reject(
        &mut self,
        now: Time,
        id: CommId,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Error> {
        todo!()
    }

    /// Tells the peer that the answer to its REQ or REP will take so long (MRA), as an exponent. What is not told it is told when it
    /// repeats its message, with [`Config::mra_service_timeout`].
    pub fn mra(
        &mut self,
        now: Time,
        id: CommId,
        service_timeout: u8,
        private_data: &[u8],
    ) -> Result<(), Error> {
        todo!()
    }

    /// Ends a connection (DREQ). [`crate::Event::Disconnected`] comes when the peer has answered, or does not. Of one that the peer
    /// has ended, or that ends, it does nothing: DREQs are answered as they come.
    pub fn disconnect(&mut self, now: Time, id: CommId, private_data: &[u8]) -> Result<(), Error> {
        todo!()
    }

    /// Answers the question for a queue pair (SIDR_REP). The id is closed.
    pub fn answer(&mut self, now: Time, id: CommId, answer: &Answer) -> Result<(), Error> {
        todo!()
    }

    /// Ends an id at any state: a listener stops, and rejects the requests that no program has taken; a REQ is withdrawn, a request
    /// rejected, a connection ended. Its events that nobody has polled are gone.
    pub fn destroy(&mut self, now: Time, id: CommId) -> Result<(), Error> {
        todo!()
    }

    /// Ends all ids of an owner.
    pub fn destroy_owner(&mut self, now: Time, owner: Owner) {
        todo!()
    }

    /// The queue pair has got traffic (`IBV_EVENT_COMM_EST`): the peer must have got the REP, though its RTU is not here yet.
    /// Gives [`crate::Event::Established`]. An error where the id does not wait for an RTU.
    pub fn notify_established(&mut self, id: CommId) -> Result<(), Error> {
        todo!()
    }

    /// A datagram has come to queue pair 1, without its headers and the 40 bytes in front: from this GID, to this one of the RNIC's.
    pub fn handle_mad(&mut self, now: Time, from: Gid, to: Gid, bytes: &[u8]) -> Outcome {
        todo!()
    }

    /// It is late enough for [`Cm::next_deadline`]. Calling it earlier does nothing.
    pub fn handle_timeout(&mut self, now: Time) {
        todo!()
    }

    /// The next MAD to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        todo!()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Notice> {
        todo!()
    }

    /// When [`Cm::handle_timeout`] is to be called.
    pub fn next_deadline(&self) -> Option<Time> {
        todo!()
    }

    /// How far an id is. `None`: there is no such id, or it has no owner any more.
    pub fn state(&self, id: CommId) -> Option<State> {
        todo!()
    }

    /// Whose it is.
    pub fn owner(&self, id: CommId) -> Option<Owner> {
        todo!()
    }

    /// The ids of an owner, in the order of their numbers.
    pub fn ids_of(&self, owner: Owner) -> Vec<CommId> {
        todo!()
    }

    /// What a queue pair needs to know of its connection; `None` for listeners and datagrams.
    pub fn connection(&self, id: CommId) -> Option<Connection> {
        todo!()
    }

    /// What has been counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The RNIC whose manager this is.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes an id away: from now on it does nothing here, and what comes for it is [`Outcome::Away`], until
    /// [`forget`](Cm::forget) or its return by [`adopt`](Cm::adopt).
    pub fn take(&mut self, now: Time, id: CommId) -> Result<IdImage, Error> {
        todo!()
    }

    /// An id as it would be taken; it stays.
    pub fn image(&self, now: Time, id: CommId) -> Result<IdImage, Error> {
        todo!()
    }

    /// Takes up an id, for this owner: it goes on where it was, timers included. `local` is the GID that it is to have here (for those
    /// that have one), if that is another.
    pub fn adopt(
        &mut self,
        now: Time,
        owner: Owner,
        image: IdImage,
        local: Option<Gid>,
    ) -> Result<CommId, AdoptError> {
        todo!()
    }

    /// The id that went away is not passed on to any more.
    pub fn forget(&mut self, id: CommId) {
        todo!()
    }

    /// The peer of this id is at another GID now: what is sent goes there.
    pub fn peer_moved(&mut self, id: CommId, to: Gid) -> Result<(), Error> {
        todo!()
    }
}
