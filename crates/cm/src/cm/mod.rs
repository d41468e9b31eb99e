//! The communication manager of one RNIC.

mod arrivals;
mod commands;
mod moving;
mod outcome;
mod queue_pairs;
mod refused;
mod requests;
mod timers;

pub use outcome::{DropReason, Outcome, Transmit};
pub use queue_pairs::QueuePairs;

use std::collections::{HashSet, VecDeque};

use verbatim_roce::Time;

use crate::away::Away;
use crate::command::Path;
use crate::config::Config;
use crate::counters::Counters;
use crate::error::Error;
use crate::event::{Event, Notice};
use crate::num::{CommId, Gid, Owner};
use crate::state::{Connection, State};
use crate::table::Table;
use crate::talk::{Frame, Id, Kind, Talk};

/// The communication manager of one RNIC.
///
/// *Commands* of programs: [`listen`](Cm::listen), [`connect`](Cm::connect), [`accept`](Cm::accept),
/// [`establish`](Cm::establish), [`reject`](Cm::reject), [`mra`](Cm::mra), [`disconnect`](Cm::disconnect),
/// [`resolve`](Cm::resolve), [`answer`](Cm::answer), [`destroy`](Cm::destroy), [`destroy_owner`](Cm::destroy_owner).
/// *Arrivals*: [`handle_mad`](Cm::handle_mad), [`notify_established`](Cm::notify_established), [`refused`](Cm::refused),
/// [`handle_timeout`](Cm::handle_timeout). *Polls*, after each of those, until they give nothing more:
/// [`poll_transmit`](Cm::poll_transmit), [`poll_event`](Cm::poll_event); then [`next_deadline`](Cm::next_deadline).
/// *Moving*: [`take`](Cm::take), [`adopt`](Cm::adopt), [`forget`](Cm::forget); all of an owner's:
/// [`reserve`](Cm::reserve), [`hold`](Cm::hold), [`give_back`](Cm::give_back), [`let_go`](Cm::let_go).
///
/// An id is there until [`destroy`](Cm::destroy). What the peer is still owed then (a DREQ that must arrive, the same answer to the
/// same question) is done without an owner, for a limited time, and gives no more events.
#[derive(Debug)]
pub struct Cm {
    config: Config,
    counters: Counters,
    table: Table,
    away: Away,
    next_comm_id: u32,
    /// Numbers of ids that are to come from elsewhere.
    reserved: HashSet<CommId>,
    /// Whose events are next. Ids that have gone since are passed over.
    notices: VecDeque<CommId>,
    transmits: VecDeque<Transmit>,
}

impl Cm {
    /// One without ids.
    pub fn new(config: Config) -> Cm {
        Cm {
            next_comm_id: config.first_comm_id,
            config,
            counters: Counters::default(),
            table: Table::default(),
            away: Away::default(),
            reserved: HashSet::new(),
            notices: VecDeque::new(),
            transmits: VecDeque::new(),
        }
    }

    /// The next MAD to send.
    pub fn poll_transmit(&mut self) -> Option<Transmit> {
        self.transmits.pop_front()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<Notice> {
        loop {
            let id = self.notices.pop_front()?;
            let next = self.table.update(id, |entry| {
                let owner = entry.owner?;
                Some((owner, entry.events.pop_front()?))
            });
            if let Some(Some((owner, event))) = next {
                return Some(Notice { id, owner, event });
            }
        }
    }

    /// When [`Cm::handle_timeout`] is to be called.
    pub fn next_deadline(&self) -> Option<Time> {
        self.table.first_timer().map(|(time, _)| time)
    }

    /// How far an id is. `None`: there is no such id, or it has no owner any more.
    pub fn state(&self, id: CommId) -> Option<State> {
        self.owned(id).map(Id::state).ok()
    }

    /// Whose it is.
    pub fn owner(&self, id: CommId) -> Option<Owner> {
        self.table.get(id)?.owner
    }

    /// The ids of an owner, in the order of their numbers.
    pub fn ids_of(&self, owner: Owner) -> Vec<CommId> {
        self.table.owned_by(owner)
    }

    /// How many ids there are, those included that have no owner any more.
    pub fn len(&self) -> usize {
        self.table.len()
    }

    /// There are no ids.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What a queue pair needs to know of its connection; `None` for listeners and datagrams.
    pub fn connection(&self, id: CommId) -> Option<Connection> {
        self.owned_talk(id).ok()?.connection()
    }

    /// What has been counted.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What it was told at its start.
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn owned(&self, id: CommId) -> Result<&Id, Error> {
        let entry = self.table.get(id).filter(|entry| entry.owner.is_some());
        entry.ok_or(Error::NoSuchId)
    }

    fn owned_talk(&self, id: CommId) -> Result<&Talk, Error> {
        match &self.owned(id)?.kind {
            Kind::Talk(talk) => Ok(talk),
            Kind::Listener(_) => Err(Error::WrongState(State::Listening)),
        }
    }

    /// A number that nobody has.
    fn new_comm_id(&mut self) -> CommId {
        loop {
            let id = CommId(self.next_comm_id);
            self.next_comm_id = self.next_comm_id.wrapping_add(1);
            let is_free =
                self.table.get(id).is_none() && !self.away.contains(id) && !self.reserved.contains(&id);
            // Zero stands for a number that is not known.
            if id.0 != 0 && is_free {
                return id;
            }
        }
    }

    fn has_room(&self, owner: Owner) -> Result<(), Error> {
        let limits = &self.config.limits;
        let room =
            self.table.owned_count() < limits.ids && self.table.owned_count_by(owner) < limits.ids_per_owner;
        if room { Ok(()) } else { Err(Error::TooManyIds) }
    }

    /// Tells the owner, if there is one.
    fn tell(&mut self, id: CommId, event: Event) {
        let told = self.table.update(id, |entry| {
            let owned = entry.owner.is_some();
            if owned {
                entry.events.push_back(event);
            }
            owned
        });
        if told == Some(true) {
            self.notices.push_back(id);
        }
    }

    /// Sends a message along a path.
    fn send(&mut self, path: &Path, frame: &Frame) {
        self.counters.sent += 1;
        self.transmits.push_back(Transmit {
            from: path.local,
            to: path.remote,
            pkey: path.pkey,
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
            bytes: frame.0.clone(),
        });
    }

    /// Sends a message to where another has come from.
    fn answer_to(&mut self, from: Gid, to: Gid, frame: &Frame) {
        let path = Path::new(to, from, verbatim_roce::Mtu::default());
        self.send(&path, frame);
    }

    /// An id without an owner goes on until its deadline. If there are too many of those, the oldest is forgotten.
    fn leave(&mut self, id: CommId) {
        let waits = self.table.update(id, |entry| {
            entry.owner = None;
            entry.events.clear();
            if let Kind::Talk(talk) = &mut entry.kind {
                talk.pending_at = None;
            }
            entry.deadline.is_some()
        });
        if waits != Some(true) {
            self.table.remove(id);
            return;
        }
        while self.table.lingering_count() > self.config.limits.lingering
            && let Some(oldest) = self.table.longest_lingering()
        {
            self.table.remove(oldest);
            self.counters.forgotten += 1;
        }
    }
}
