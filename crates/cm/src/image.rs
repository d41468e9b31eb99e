//! One id as data: it goes on at another RNIC.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use verbatim_roce::Time;

use crate::command::ListenAddress;
use crate::error::AdoptError;
use crate::event::Event;
use crate::num::{CommId, Gid, Owner, field_time};
use crate::state::State;
use crate::talk::{Id, Kind, Talk};

/// The version of [`IdImage`]'s bytes, which is the first of them: another form has another number.
pub const IMAGE_VERSION: u8 = 1;

/// More events than an id can have had.
const MOST_EVENTS: usize = 16;
/// The longest time that there is: every part of an interval is a field of five bits.
const LONGEST: Duration = Duration::from_secs(1 << 16);

/// All of an id: numbers, timers (as what is left of them), what is sent again, events that nobody has polled yet.
///
/// Everything of it is checked when it is taken up ([`crate::Cm::adopt`]), so it may come from anywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdImage {
    comm_id: CommId,
    /// Until something is to be done.
    left: Option<Duration>,
    events: Vec<Event>,
    kind: Kind,
}

impl IdImage {
    pub(crate) fn of(now: Time, comm_id: CommId, id: &Id) -> IdImage {
        IdImage {
            comm_id,
            left: id.deadline.map(|deadline| deadline.saturating_since(now)),
            events: id.events.iter().cloned().collect(),
            kind: id.kind.clone(),
        }
    }

    /// Itself, in bytes.
    pub fn encode(&self) -> Vec<u8> {
        postcard::to_extend(self, vec![IMAGE_VERSION]).expect("plain data can always be encoded")
    }

    /// From its bytes.
    pub fn decode(bytes: &[u8]) -> Result<IdImage, AdoptError> {
        let Some((version, bytes)) = bytes.split_first() else {
            return Err(AdoptError::Invalid("it is empty"));
        };
        if *version != IMAGE_VERSION {
            return Err(AdoptError::Invalid("it is of another version"));
        }
        verbatim_bounded::decode(bytes).map_err(|_| AdoptError::Invalid("it is malformed"))
    }

    /// Its number, which stays.
    pub fn comm_id(&self) -> CommId {
        self.comm_id
    }

    /// How far it is.
    pub fn state(&self) -> State {
        match &self.kind {
            Kind::Listener(_) => State::Listening,
            Kind::Talk(talk) => talk.state,
        }
    }

    /// The GID from which it sends; `None` of a listener.
    pub fn local(&self) -> Option<Gid> {
        match &self.kind {
            Kind::Listener(_) => None,
            Kind::Talk(talk) => Some(talk.path.local),
        }
    }

    /// What it becomes at another place, or what is wrong with it.
    pub(crate) fn into_id(mut self, now: Time, owner: Owner, local: Option<Gid>) -> Result<Id, &'static str> {
        unless(self.comm_id.0 != 0, "its number stands for none")?;
        unless(self.events.len() <= MOST_EVENTS, "it has too many events")?;
        let timed = match &mut self.kind {
            Kind::Listener(listener) => {
                if let Some(local) = local {
                    let address = listener.listen.address;
                    let at_one = matches!(address, ListenAddress::One(_));
                    let is_other = address != ListenAddress::One(local.ip());
                    listener.here = (at_one && is_other).then(|| local.ip());
                }
                false
            }
            Kind::Talk(talk) => {
                talk.path.local = local.unwrap_or(talk.path.local);
                check(talk)?
            }
        };
        let deadline = match (timed, self.left) {
            (true, left) => Some(now + left.unwrap_or_default().min(LONGEST)),
            // What is over may have something to repeat.
            (false, Some(left)) if self.state() == State::Closed => Some(now + left.min(LONGEST)),
            (false, _) => None,
        };
        Ok(Id {
            owner: Some(owner),
            events: self.events.into(),
            deadline,
            kind: self.kind,
        })
    }
}

fn unless(condition: bool, what: &'static str) -> Result<(), &'static str> {
    if condition { Ok(()) } else { Err(what) }
}

/// Does it hold together? Gives whether its state has a timer.
fn check(talk: &Talk) -> Result<bool, &'static str> {
    use State::*;
    let (connected, passive, knows_peer, repeats, timed) = match talk.state {
        Listening => return Err("a listener talks to nobody"),
        ReqSent | MraReqReceived => (Some(true), Some(false), false, true, true),
        ReqReceived | MraReqSent => (Some(true), Some(true), true, false, false),
        RepSent | MraRepReceived => (Some(true), Some(true), true, true, true),
        RepReceived | MraRepSent => (Some(true), Some(false), true, false, false),
        Established => (Some(true), None, true, false, false),
        DreqSent => (Some(true), None, true, true, true),
        // A REJ that says "stale" may be the first that is heard of the peer.
        TimeWait => (Some(true), None, false, false, true),
        SidrReqSent => (Some(false), Some(false), false, true, true),
        SidrReqReceived => (Some(false), Some(true), true, false, false),
        Closed => (None, None, false, false, false),
    };
    unless(
        connected.is_none_or(|connected| talk.connection.is_some() == connected),
        "its state is not one of what it is about",
    )?;
    unless(
        passive.is_none_or(|passive| talk.passive == passive),
        "its state is the other side's",
    )?;
    unless(!knows_peer || talk.remote.is_some(), "it does not know its peer")?;
    unless(!repeats || talk.last.is_some(), "it has nothing to repeat")?;
    unless(
        talk.left <= 15 && talk.retries <= 15,
        "it repeats itself too often",
    )?;
    unless(
        talk.interval.max(talk.wait).max(talk.linger) <= LONGEST,
        "it waits too long",
    )?;
    unless(talk.path.packet_life_time <= 31, "its packets live too long")?;
    let ack_timeout = talk.connection.as_ref().map_or(0, |conn| conn.ack_timeout);
    unless(
        field_time(ack_timeout) <= LONGEST && ack_timeout <= 31,
        "it waits too long",
    )?;
    Ok(timed)
}
