//! The source's side: requests of the tenant, double writes, the copy, and the hold at the end.

mod hold;
mod migration;
mod types;

use std::collections::{BTreeMap, VecDeque};

use crate::extent::Extent;
use crate::pace::Pace;

use hold::Step;
use migration::Migration;

pub use types::{
    Action, Config, Ended, Event, Failure, HoldFailure, Link, Op, Pointers, Report, RequestId, Standing,
    Status, Ticket, Time,
};

/// State of a request at one of the two disks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leg {
    /// The request does not go there.
    None,
    /// The request is in flight.
    Pending,
    /// The request has ended.
    Done,
}

/// A request in flight.
#[derive(Debug, Clone, Copy)]
struct Request {
    op: Op,
    local: Leg,
    mirror: Leg,
    result: Result<(), Failure>,
    began: Time,
    /// A chunk was being copied when the request began.
    is_beside: bool,
}

impl Request {
    fn change(&self) -> Option<Extent> {
        match self.op {
            Op::Change(extent) => Some(extent),
            Op::Read | Op::Flush => None,
        }
    }

    fn is_complete(&self) -> bool {
        self.local == Leg::Done && self.mirror != Leg::Pending
    }
}

/// One volume at the host that serves it.
///
/// [`Engine::handle`] takes an event, and returns the resulting actions in order. An action may be carried
/// out at any later time, and ends with the event that its description names. Without a migration nothing
/// depends on the clock.
#[derive(Debug, Clone)]
pub struct Engine {
    config: Config,
    length: u64,
    now: Time,
    standing: Standing,
    /// Present while `standing` is a hold.
    hold: Option<(Step, Time)>,
    requests: BTreeMap<RequestId, Request>,
    waiting: VecDeque<(RequestId, Op)>,
    migration: Option<Migration>,
    pace: Pace,
    tickets: u64,
}

impl Engine {
    /// A volume of `length` bytes that is served, and is not being moved.
    pub fn new(config: Config, length: u64) -> Self {
        Self {
            config,
            length,
            now: Time::ZERO,
            standing: Standing::Serving,
            hold: None,
            requests: BTreeMap::new(),
            waiting: VecDeque::new(),
            migration: None,
            pace: Pace::default(),
            tickets: 0,
        }
    }

    /// The size in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Changes the size. Returns `false`, and changes nothing, while the volume is being moved or requests
    /// are in flight.
    pub fn resize(&mut self, length: u64) -> bool {
        let is_free = self.migration.is_none() && self.requests.is_empty() && self.waiting.is_empty();
        if is_free {
            self.length = length;
        }
        is_free
    }

    /// Whether the volume answers requests.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Number of requests that are in flight or wait.
    pub fn in_flight(&self) -> usize {
        self.requests.len() + self.waiting.len()
    }

    /// State of the migration, if there is one.
    pub fn status(&self) -> Option<Status> {
        let migration = self.migration.as_ref()?;
        Some(migration.status(&self.config, self.length, &self.pace))
    }

    /// Handles an event at `now`, which never goes back.
    pub fn handle(&mut self, now: Time, event: Event, actions: &mut Vec<Action>) {
        self.now = self.now.max(now);
        match event {
            Event::Request { id, op } => self.request(id, op, actions),
            Event::LocalDone { id, result } => self.local_done(id, result, actions),
            Event::MirrorDone { id, result } => self.mirror_done(id, result, actions),
            Event::Migrate { bytes_per_second } => self.migrate(bytes_per_second),
            Event::LinkUp { keeps } => self.link_up(keeps),
            Event::LinkDown => self.link_down(actions),
            Event::ChunkRead { ticket, result } => self.chunk_read(ticket, result, actions),
            Event::ChunkSent { ticket, result } => self.chunk_sent(ticket, result, actions),
            Event::MirrorFlushed { ticket, result } => self.mirror_flushed(ticket, result, actions),
            Event::Hold => self.begin_hold(actions),
            Event::Release => self.release(actions),
            Event::Moved => self.moved(actions),
            Event::Cancel => self.end_migration(Ended::Cancelled, actions),
            Event::Tick => {}
        }
        self.after(actions);
    }

    /// Consequences of any change: waiting requests that can go on, chunks that can be copied, a hold that is
    /// complete.
    fn after(&mut self, actions: &mut Vec<Action>) {
        self.check_silence(actions);
        self.admit(actions);
        self.pump(actions);
        self.advance_hold(actions);
        self.report_mirrored(actions);
    }

    fn request(&mut self, id: RequestId, op: Op, actions: &mut Vec<Action>) {
        match self.standing {
            Standing::Moved => actions.push(Action::Reply {
                id,
                result: Err(Failure::Moved),
            }),
            Standing::Holding | Standing::Held => self.waiting.push_back((id, op)),
            Standing::Serving => match op {
                Op::Change(extent) if self.must_wait(extent, self.waiting.len()) => {
                    self.waiting.push_back((id, op));
                }
                op => self.begin(id, op, actions),
            },
        }
    }

    /// Whether a change has to wait that came after the first `earlier` of the waiting ones.
    fn must_wait(&self, extent: Extent, earlier: usize) -> bool {
        let overlaps = |other: Option<Extent>| other.is_some_and(|other| other.overlaps(extent));
        self.requests.values().any(|request| overlaps(request.change()))
            || self.waiting.iter().take(earlier).any(|(_, op)| match op {
                Op::Change(other) => other.overlaps(extent),
                Op::Read | Op::Flush => false,
            })
            || self
                .migration
                .as_ref()
                .is_some_and(|migration| migration.locks(extent))
    }

    fn begin(&mut self, id: RequestId, op: Op, actions: &mut Vec<Action>) {
        let mut mirror = Leg::None;
        let mut is_beside = false;
        if let Some(migration) = &mut self.migration {
            is_beside = migration.is_copying();
            if let Op::Change(extent) = op
                && migration.doubles(&self.config, extent)
            {
                mirror = Leg::Pending;
            }
        }
        let request = Request {
            op,
            local: Leg::Pending,
            mirror,
            result: Ok(()),
            began: self.now,
            is_beside,
        };
        let replaced = self.requests.insert(id, request);
        debug_assert!(replaced.is_none(), "an id names one request");
        actions.push(Action::Local { id });
        if mirror == Leg::Pending {
            actions.push(Action::Mirror { id });
        }
    }

    fn local_done(&mut self, id: RequestId, result: Result<(), Failure>, actions: &mut Vec<Action>) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        request.local = Leg::Done;
        request.result = result;
        if request.op != Op::Flush {
            let took = self.now.saturating_sub(request.began);
            self.pace.sample(self.now, took, request.is_beside);
        }
        // The content after a failed change is unknown, here and at the destination.
        if let (Err(_), Some(extent), Some(migration)) = (result, request.change(), &mut self.migration) {
            migration.mark(&self.config, extent);
        }
        self.finish(id, actions);
    }

    fn mirror_done(&mut self, id: RequestId, result: Result<(), Failure>, actions: &mut Vec<Action>) {
        let is_late = match &mut self.migration {
            Some(migration) => migration.late_done(id),
            None => return,
        };
        if !is_late {
            match self.requests.get_mut(&id) {
                Some(request) if request.mirror == Leg::Pending => request.mirror = Leg::Done,
                _ => return,
            }
        }
        match result {
            Ok(()) => self.finish(id, actions),
            Err(failure) => {
                // The content at the destination is unknown; the end of the migration answers the request.
                self.end_migration(Ended::DestinationFailed(failure), actions);
                self.finish(id, actions);
            }
        }
    }

    fn finish(&mut self, id: RequestId, actions: &mut Vec<Action>) {
        if let Some(request) = self.requests.get(&id)
            && request.is_complete()
        {
            let result = request.result;
            self.requests.remove(&id);
            actions.push(Action::Reply { id, result });
        }
    }

    /// Lets waiting requests go on, in their order, unless an earlier one is in the way.
    fn admit(&mut self, actions: &mut Vec<Action>) {
        if self.standing != Standing::Serving {
            return;
        }
        let mut index = 0;
        while let Some(&(id, op)) = self.waiting.get(index) {
            let must_wait = match op {
                Op::Change(extent) => self.must_wait(extent, index),
                Op::Read | Op::Flush => false,
            };
            match must_wait {
                true => index += 1,
                false => {
                    self.waiting.remove(index);
                    self.begin(id, op, actions);
                }
            }
        }
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }
}
