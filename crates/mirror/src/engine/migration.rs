//! The copy, and the chunks that the destination lacks.

use std::collections::BTreeMap;
use std::time::Duration;

use super::types::{
    Action, Config, Ended, Failure, Link, Op, Pointers, Report, RequestId, Standing, Status, Ticket, Time,
};
use super::{Engine, Leg};
use crate::dirty::Dirty;
use crate::extent::Extent;
use crate::pace::Pace;

/// A flush ahead of the hold that is at most this long is the last one.
const QUICK_FLUSH: Duration = Duration::from_millis(5);

/// Least time without double writes after a silence; doubled after each further one, up to the limit.
const PENALTY: Duration = Duration::from_millis(200);
const PENALTY_LIMIT: Duration = Duration::from_secs(5);

/// Progress of a chunk's copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Changes that were in flight when the chunk's turn came have to end.
    Draining,
    /// The chunk is being read.
    Reading,
    /// The chunk is on its way to the destination's disk.
    Sending,
    /// The same, but the tenant no longer waits for it: the chunk counts as lacking, also after a success of
    /// the destination.
    Late,
}

#[derive(Debug, Clone, Copy)]
struct Copy {
    chunk: u64,
    extent: Extent,
    step: Step,
    since: Time,
}

#[derive(Debug, Clone)]
pub(super) struct Migration {
    pub link: Link,
    /// Chunks that the destination lacks, including those that are being copied.
    dirty: Dirty,
    copies: BTreeMap<Ticket, Copy>,
    /// Changes that were acknowledged without the destination, and may still arrive there.
    late: BTreeMap<RequestId, (Extent, Time)>,
    /// Position of the search for the next chunk.
    head: u64,
    passes: u32,
    copied_bytes: u64,
    interruptions: u32,
    /// No double writes before this time.
    slow_until: Time,
    penalty: Duration,
    /// A flush ahead of the hold, and the time when it began.
    pub ahead: Option<(Ticket, Time)>,
    /// Duration of the last of these flushes.
    pub ahead_took: Option<Duration>,
    pub is_flushed_ahead: bool,
    pub is_mirrored: bool,
}

impl Migration {
    fn new(config: &Config, length: u64) -> Self {
        Self {
            link: Link::Down,
            dirty: Dirty::all(length.div_ceil(config.chunk_bytes)),
            copies: BTreeMap::new(),
            late: BTreeMap::new(),
            head: 0,
            passes: 1,
            copied_bytes: 0,
            interruptions: 0,
            slow_until: Time::ZERO,
            penalty: PENALTY,
            ahead: None,
            ahead_took: None,
            is_flushed_ahead: false,
            is_mirrored: false,
        }
    }

    /// The destination has flushed its data. It is asked again as long as each flush is shorter than the one
    /// before: writes of the tenant during one flush are for the next one, and requests wait for the last.
    pub fn flushed_ahead(&mut self, now: Time) {
        let Some((_, since)) = self.ahead.take() else {
            return;
        };
        let took = now.saturating_sub(since);
        let gains_no_more = |last: Duration| took > last * 3 / 4;
        self.is_flushed_ahead = took <= QUICK_FLUSH || self.ahead_took.is_some_and(gains_no_more);
        self.ahead_took = Some(took);
    }

    /// Whether the destination has all acknowledged data, and nothing else is on its way to it.
    pub fn is_complete(&self) -> bool {
        self.link == Link::Up && self.dirty.count() == 0 && self.copies.is_empty() && self.late.is_empty()
    }

    pub fn is_copying(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Whether a chunk in flight overlaps this extent.
    pub fn locks(&self, extent: Extent) -> bool {
        let mut copies = self.copies.values();
        copies.any(|copy| copy.step != Step::Late && copy.extent.overlaps(extent))
    }

    /// A change begins. Returns whether it goes to the destination as well; if not, the destination lacks it.
    pub fn doubles(&mut self, config: &Config, extent: Extent) -> bool {
        let is_lacking = extent
            .chunks(config.chunk_bytes)
            .all(|chunk| self.dirty.has(chunk));
        let doubles = !is_lacking && self.link == Link::Up;
        if !doubles {
            self.mark(config, extent);
        }
        doubles
    }

    pub fn mark(&mut self, config: &Config, extent: Extent) {
        for chunk in extent.chunks(config.chunk_bytes) {
            self.dirty.mark(chunk);
        }
        self.is_mirrored &= self.dirty.count() == 0;
    }

    /// A late change has ended: the tenant did not wait for it.
    pub fn late_done(&mut self, id: RequestId) -> bool {
        self.late.remove(&id).is_some()
    }

    pub fn status(&self, config: &Config, length: u64, pace: &Pace) -> Status {
        let head = (self.head * config.chunk_bytes).min(length);
        let lowest = |steps: &[Step]| {
            let copies = self.copies.values().filter(|copy| steps.contains(&copy.step));
            copies.map(|copy| copy.extent.offset).min().unwrap_or(head)
        };
        let submitted = self.copies.values().filter(|copy| copy.step == Step::Sending);
        let write_tail = lowest(&[Step::Draining, Step::Reading, Step::Sending]);
        Status {
            link: self.link,
            is_mirrored: self.is_mirrored,
            passes: self.passes,
            pointers: Pointers {
                read_head: head,
                read_tail: lowest(&[Step::Draining, Step::Reading]),
                write_head: submitted
                    .map(|copy| copy.extent.end())
                    .max()
                    .unwrap_or(write_tail),
                write_tail,
            },
            lacking_bytes: (self.dirty.count() * config.chunk_bytes).min(length),
            copied_bytes: self.copied_bytes,
            interruptions: self.interruptions,
            depth: pace.depth(),
        }
    }

    /// The next lacking chunk that is not in flight, from the head on; after the last, from the beginning
    /// again.
    fn next(&mut self) -> Option<u64> {
        if self.dirty.count() <= self.copies.len() as u64 && self.is_all_in_flight() {
            return None;
        }
        let mut wrapped = false;
        loop {
            match self.dirty.next(self.head) {
                Some(chunk) if self.copies.values().any(|copy| copy.chunk == chunk) => self.head = chunk + 1,
                Some(chunk) => return Some(chunk),
                None if wrapped => return None,
                None => {
                    wrapped = true;
                    self.head = 0;
                    self.passes += 1;
                }
            }
        }
    }

    fn is_all_in_flight(&self) -> bool {
        let in_flight = self
            .copies
            .values()
            .filter(|copy| self.dirty.has(copy.chunk))
            .count();
        in_flight as u64 == self.dirty.count()
    }
}

impl Engine {
    pub(super) fn migrate(&mut self, bytes_per_second: Option<u64>) {
        if self.migration.is_none() && self.standing == Standing::Serving {
            self.pace.limit(bytes_per_second);
            self.migration = Some(Migration::new(&self.config, self.length));
        }
    }

    pub(super) fn link_up(&mut self, keeps: bool) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        // Nothing of an earlier connection arrives any more.
        debug_assert!(migration.link == Link::Down && migration.copies.is_empty());
        migration.late.clear();
        migration.link = Link::Up;
        self.pace.connected();
        if !keeps {
            migration.dirty = Dirty::all(migration.dirty.chunks());
            migration.is_mirrored = false;
            migration.ahead_took = None;
            migration.is_flushed_ahead = false;
        }
    }

    /// Also called when the engine itself gives the connection up.
    pub(super) fn link_down(&mut self, actions: &mut Vec<Action>) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        if migration.link == Link::Down {
            return;
        }
        migration.interruptions += 1;
        self.cut(actions);
    }

    /// The engine expects nothing more from the destination, which lacks everything that was in flight to it.
    fn cut(&mut self, actions: &mut Vec<Action>) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        migration.link = Link::Down;
        migration.ahead = None;
        migration.is_mirrored = false;
        // A chunk in flight is marked already.
        for (ticket, _) in std::mem::take(&mut migration.copies) {
            actions.push(Action::DropChunk { ticket });
        }
        migration.late.clear();
        let mut freed = Vec::new();
        for (&id, request) in &mut self.requests {
            if request.mirror == Leg::Pending {
                request.mirror = Leg::None;
                if let Some(extent) = request.change() {
                    migration.mark(&self.config, extent);
                }
                freed.push(id);
            }
        }
        for id in freed {
            self.finish(id, actions);
        }
    }

    /// The migration is over, and was not committed.
    pub(super) fn end_migration(&mut self, why: Ended, actions: &mut Vec<Action>) {
        if self.migration.is_none() || matches!(self.standing, Standing::Held | Standing::Moved) {
            return;
        }
        self.cut(actions);
        self.migration = None;
        self.standing = Standing::Serving;
        self.hold = None;
        actions.push(Action::Disconnect);
        actions.push(Action::Report(Report::Ended(why)));
    }

    pub(super) fn chunk_read(
        &mut self,
        ticket: Ticket,
        result: Result<(), Failure>,
        actions: &mut Vec<Action>,
    ) {
        let now = self.now;
        let copies = self.migration.as_mut().map(|migration| &mut migration.copies);
        let Some(copy) = copies.and_then(|copies| copies.get_mut(&ticket)) else {
            return;
        };
        if copy.step != Step::Reading {
            return;
        }
        match result {
            Ok(()) => {
                (copy.step, copy.since) = (Step::Sending, now);
                actions.push(Action::SendChunk { ticket });
            }
            Err(failure) => self.end_migration(Ended::SourceFailed(failure), actions),
        }
    }

    /// Whether this step waits for its [`Event::ChunkRead`](super::Event::ChunkRead).
    pub fn reads(&self, ticket: Ticket) -> bool {
        let copies = self.migration.as_ref().map(|migration| &migration.copies);
        copies
            .and_then(|copies| copies.get(&ticket))
            .is_some_and(|copy| copy.step == Step::Reading)
    }

    pub(super) fn chunk_sent(
        &mut self,
        ticket: Ticket,
        result: Result<(), Failure>,
        actions: &mut Vec<Action>,
    ) {
        let Some(migration) = &mut self.migration else {
            return;
        };
        match migration.copies.get(&ticket).map(|copy| copy.step) {
            Some(Step::Sending | Step::Late) => {}
            _ => return,
        }
        let copy = migration.copies.remove(&ticket).expect("it is there");
        self.pace.carried(self.now, self.now.saturating_sub(copy.since));
        if let Err(failure) = result {
            self.end_migration(Ended::DestinationFailed(failure), actions);
            return;
        }
        migration.copied_bytes += copy.extent.length;
        if copy.step == Step::Sending {
            migration.dirty.clear(copy.chunk);
        }
    }

    /// Begins as many chunks as the pace allows, and reads those without changes in flight.
    pub(super) fn pump(&mut self, actions: &mut Vec<Action>) {
        let now = self.now;
        loop {
            let Some(migration) = &mut self.migration else {
                return;
            };
            let tenant = self.requests.len();
            let may = migration.link == Link::Up && self.standing == Standing::Serving;
            if !may || !self.pace.allows(now, migration.copies.len(), tenant) {
                break;
            }
            let Some(chunk) = migration.next() else {
                break;
            };
            let extent = Extent::of_chunk(chunk, self.config.chunk_bytes, self.length);
            migration.head = chunk + 1;
            self.pace.begun(now, extent.length);
            self.tickets += 1;
            let copy = Copy {
                chunk,
                extent,
                step: Step::Draining,
                since: now,
            };
            migration.copies.insert(Ticket(self.tickets), copy);
        }
        let Some(migration) = &mut self.migration else {
            return;
        };
        for (&ticket, copy) in &mut migration.copies {
            let overlaps = |extent: Extent| extent.overlaps(copy.extent);
            let is_busy = self
                .requests
                .values()
                .any(|request| request.change().is_some_and(overlaps))
                || migration.late.values().any(|&(extent, _)| overlaps(extent));
            if copy.step == Step::Draining && !is_busy {
                copy.step = Step::Reading;
                let extent = copy.extent;
                actions.push(Action::ReadChunk { ticket, extent });
            }
        }
    }

    /// The tenant does not wait for a silent destination.
    pub(super) fn check_silence(&mut self, actions: &mut Vec<Action>) {
        let (now, config) = (self.now, self.config);
        let Some(migration) = &mut self.migration else {
            return;
        };
        if migration.link == Link::Down || matches!(self.standing, Standing::Held | Standing::Moved) {
            return;
        }
        let overdue = |since: Time, limit: Duration| now >= since + limit;
        let sent = |copy: &Copy| matches!(copy.step, Step::Sending | Step::Late);
        let is_dead = migration
            .late
            .values()
            .any(|&(_, since)| overdue(since, config.dead))
            || migration
                .copies
                .values()
                .any(|copy| sent(copy) && overdue(copy.since, config.dead))
            || migration
                .ahead
                .is_some_and(|(_, since)| overdue(since, 3 * config.dead));
        if is_dead {
            self.link_down(actions);
            actions.push(Action::Disconnect);
            return;
        }
        let mut is_silent = false;
        let mut freed = Vec::new();
        for (&id, request) in &mut self.requests {
            if request.mirror == Leg::Pending && overdue(request.began, config.silence) {
                request.mirror = Leg::None;
                let extent = request.change().expect("only changes are doubled");
                migration.mark(&config, extent);
                migration.late.insert(id, (extent, request.began));
                is_silent = true;
                freed.push(id);
            }
        }
        let waiting = &self.waiting;
        migration.copies.retain(|_, copy| {
            let is_wanted = waiting.iter().any(|(_, op)| match op {
                Op::Change(extent) => extent.overlaps(copy.extent),
                Op::Read | Op::Flush => false,
            });
            if !is_wanted || !overdue(copy.since, config.silence) {
                return true;
            }
            match copy.step {
                // It waits for late changes anyway.
                Step::Draining => false,
                Step::Sending => {
                    copy.step = Step::Late;
                    is_silent = true;
                    true
                }
                Step::Reading | Step::Late => true,
            }
        });
        if is_silent && migration.link == Link::Up {
            migration.link = Link::Slow;
            migration.interruptions += 1;
            migration.is_mirrored = false;
            migration.slow_until = now + migration.penalty;
            migration.penalty = (2 * migration.penalty).min(PENALTY_LIMIT);
        }
        let has_late =
            !migration.late.is_empty() || migration.copies.values().any(|copy| copy.step == Step::Late);
        if migration.link == Link::Slow && !has_late && now >= migration.slow_until {
            migration.link = Link::Up;
        }
        for id in freed {
            self.finish(id, actions);
        }
    }

    /// When the destination has all data for the first time, it is asked to flush them before any request
    /// waits for that.
    pub(super) fn report_mirrored(&mut self, actions: &mut Vec<Action>) {
        let now = self.now;
        let is_serving = self.standing == Standing::Serving;
        match &mut self.migration {
            Some(migration) if is_serving && !migration.is_mirrored && migration.is_complete() => {
                if migration.is_flushed_ahead {
                    migration.is_mirrored = true;
                    migration.penalty = PENALTY;
                    actions.push(Action::Report(Report::Mirrored));
                } else if migration.ahead.is_none() {
                    self.tickets += 1;
                    let ticket = Ticket(self.tickets);
                    migration.ahead = Some((ticket, now));
                    actions.push(Action::FlushMirror { ticket });
                }
            }
            _ => {}
        }
    }
}
