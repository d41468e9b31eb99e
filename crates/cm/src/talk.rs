//! What is kept of one id.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use verbatim_roce::{Psn, Qpn, Time};

use crate::command::{Listen, ListenAddress, Path};
use crate::event::Event;
use crate::num::{CommId, Gid, Owner, ServiceId, Transport, field_time};
use crate::state::{Connection, State};
use crate::wire::{MAD_BYTES, Mad};

/// An id and who it belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Id {
    /// `None`: the owner has destroyed it, and something is left to do.
    pub owner: Option<Owner>,
    /// What nobody has polled yet.
    pub events: VecDeque<Event>,
    /// When something is to be done.
    pub deadline: Option<Time>,
    pub kind: Kind,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Listener(Listener),
    Talk(Box<Talk>),
}

/// Who takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listener {
    pub listen: Listen,
    /// The address that stands here for the one at which it listens: peers may ask for either.
    pub here: Option<IpAddr>,
}

impl Listener {
    /// All that it listens to.
    pub fn all(&self) -> Vec<Listen> {
        let here = self.here.map(|address| Listen {
            address: ListenAddress::One(address),
            ..self.listen
        });
        [self.listen].into_iter().chain(here).collect()
    }
}

/// A conversation with a peer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Talk {
    pub state: State,
    /// The peer began it.
    pub passive: bool,
    /// The listener that took it, until the program knows of it.
    pub pending_at: Option<CommId>,
    pub service: ServiceId,
    pub path: Path,
    pub tid: u64,
    /// The peer's id, once it is known.
    pub remote: Option<CommId>,
    /// The address by which a peer has asked for a queue pair, where that is not [`Self::path`]'s: it stays the same when the peer goes.
    pub asker: Option<Gid>,
    /// How long the answer to a message takes at most.
    pub interval: Duration,
    /// The same for the message that waits for one now: an MRA makes it longer.
    pub wait: Duration,
    /// How long the peer may go on asking, once this is over.
    pub linger: Duration,
    /// How often each message is sent again.
    pub retries: u8,
    /// How often the last one still is.
    pub left: u8,
    /// What is sent again, by the timer or as the answer to a repetition.
    pub last: Option<Frame>,
    /// `None` is about datagrams.
    pub connection: Option<Conn>,
}

/// What belongs to connections only.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conn {
    pub transport: Transport,
    /// The RNIC that the peer knows: the one where the connection began.
    pub local_guid: u64,
    pub remote_guid: u64,
    pub local_qpn: Qpn,
    pub remote_qpn: Qpn,
    pub receive_psn: Psn,
    pub send_psn: Psn,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub ack_timeout: u8,
    /// The peer asked for an alternate path, which is not supported.
    pub failover: bool,
    /// The peer has gone to another RNIC, so far as is known here: the number of its queue pair is another one's where it was.
    pub peer_moved: bool,
}

/// The bytes of a MAD.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<u8>", into = "Vec<u8>")]
pub(crate) struct Frame(pub Box<[u8; MAD_BYTES]>);

impl TryFrom<Vec<u8>> for Frame {
    type Error = &'static str;
    fn try_from(bytes: Vec<u8>) -> Result<Frame, &'static str> {
        let bytes = <Box<[u8; MAD_BYTES]>>::try_from(bytes.into_boxed_slice());
        bytes.map(Frame).map_err(|_| "a MAD has 256 bytes")
    }
}

impl From<Frame> for Vec<u8> {
    fn from(frame: Frame) -> Vec<u8> {
        frame.0.to_vec()
    }
}

impl From<&Mad> for Frame {
    fn from(mad: &Mad) -> Frame {
        Frame(Box::new(mad.emit()))
    }
}

/// By what messages and rules find an id, apart from its number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keys {
    /// The peer's RNIC and id, of connections.
    pub peer: Option<(u64, CommId)>,
    /// The peer's RNIC and queue pair, while it is connected.
    pub peer_qp: Option<(u64, Qpn)>,
    /// The peer's GID and id, of a request for a queue pair.
    pub asker: Option<(Gid, CommId)>,
    /// The listener that it waits at.
    pub pending_at: Option<CommId>,
    /// What it listens to.
    pub listens: Vec<Listen>,
}

impl Id {
    pub fn state(&self) -> State {
        match &self.kind {
            Kind::Listener(_) => State::Listening,
            Kind::Talk(talk) => talk.state,
        }
    }

    pub fn keys(&self) -> Keys {
        let talk = match &self.kind {
            Kind::Listener(listener) => {
                return Keys {
                    listens: listener.all(),
                    ..Keys::default()
                };
            }
            Kind::Talk(talk) => talk,
        };
        let mut keys = Keys {
            pending_at: talk.pending_at,
            ..Keys::default()
        };
        // What is over is found as long as it waits for repetitions.
        let found = talk.state != State::Closed || self.deadline.is_some();
        let Some(remote) = talk.remote.filter(|_| found) else {
            return keys;
        };
        let Some(connection) = &talk.connection else {
            let asker = talk.asker.unwrap_or(talk.path.remote);
            keys.asker = talk.passive.then_some((asker, remote));
            return keys;
        };
        keys.peer = Some((connection.remote_guid, remote));
        if !matches!(talk.state, State::TimeWait | State::Closed) && !connection.peer_moved {
            keys.peer_qp = Some((connection.remote_guid, connection.remote_qpn));
        }
        keys
    }
}

impl Talk {
    /// What a queue pair needs to know.
    pub fn connection(&self) -> Option<Connection> {
        self.connection.as_ref().map(|connection| Connection {
            state: self.state,
            service: self.service,
            transport: connection.transport,
            path: self.path,
            remote_comm_id: self.remote,
            remote_guid: connection.remote_guid,
            local_qpn: connection.local_qpn,
            remote_qpn: connection.remote_qpn,
            receive_psn: connection.receive_psn,
            send_psn: connection.send_psn,
            responder_resources: connection.responder_resources,
            initiator_depth: connection.initiator_depth,
            retry_count: connection.retry_count,
            rnr_retry_count: connection.rnr_retry_count,
            ack_timeout: connection.ack_timeout,
        })
    }

    /// How long anything of the connection may still be on the wire.
    pub fn time_wait(&self) -> Duration {
        self.connection
            .as_ref()
            .map_or(Duration::ZERO, |connection| field_time(connection.ack_timeout))
    }

    /// The peer has been told that the answer takes so long: it repeats itself more rarely.
    pub fn has_excused(&mut self, state: State, mra: Frame, service_timeout: u8) {
        self.state = state;
        self.last = Some(mra);
        self.linger = (self.linger + field_time(service_timeout) * 2).min(LONGEST_LINGER * 2);
    }

    /// The message goes out now, and the answer is waited for.
    pub fn expect_answer(&mut self, state: State, message: Frame) {
        self.state = state;
        self.last = Some(message);
        self.left = self.retries;
        self.wait = self.interval;
    }
}

/// The longest time for which a request that is over answers repetitions; with rdma_cm's timeouts it is 103 s.
pub(crate) const LONGEST_LINGER: Duration = Duration::from_secs(120);

/// How long an answer takes: both ways and the peer's own time (IBA §12.9.8.2).
pub(crate) fn interval(packet_life_time: u8, response_timeout: u8) -> Duration {
    field_time(packet_life_time) * 2 + field_time(response_timeout)
}

/// The acknowledge timeout 4.096 µs × 2^n ≥ ACK delay + both ways, as an exponent (IBA §9.7.6.1.3); rounded up by one at most,
/// since each step doubles it.
pub(crate) fn ack_timeout(ack_delay: u8, packet_life_time: u8) -> u8 {
    let ways = packet_life_time.saturating_add(1);
    let (long, short) = (ways.max(ack_delay), ways.min(ack_delay));
    let round_up = u8::from(long - short <= 1);
    long.saturating_add(round_up).min(31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledge_timeouts_are_rounded_up_where_both_parts_are_alike() {
        assert_eq!(ack_timeout(15, 18), 19);
        assert_eq!(ack_timeout(18, 18), 20);
        assert_eq!(ack_timeout(19, 18), 20);
        assert_eq!(ack_timeout(20, 18), 21);
        assert_eq!(ack_timeout(21, 18), 21);
        assert_eq!(ack_timeout(31, 31), 31);
        assert_eq!(ack_timeout(255, 255), 31);
    }

    #[test]
    fn a_frame_has_the_bytes_of_a_mad() {
        assert!(Frame::try_from(vec![0; MAD_BYTES]).is_ok());
        assert!(Frame::try_from(vec![0; MAD_BYTES - 1]).is_err());
    }
}
