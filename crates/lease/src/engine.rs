//! The engine: events in, actions out.

mod refill;

use std::ops::Range;

use crate::events::{Action, Config, Event, Quirk};
use crate::pages::{Counts, Pages};
use crate::slots::{Copy, Extent, Failure, Kind, Op, Phase, Slot, SlotId, Writing};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Standing {
    Up,
    Leaving,
    Down,
}

/// The engine of one disk.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Engine {
    config: Config,
    pages: Pages,
    standing: [Standing; 2],
    slots: Vec<Option<Slot>>,
    /// Slots in use, oldest first.
    order: Vec<SlotId>,
    waiting: u32,
    /// A copy may be behind.
    is_behind: bool,
    /// This copy is filled no further before [`Event::Retry`].
    stalled: [bool; 2],
    /// Number of pages that could not be read for this copy, since it is there or since the last retry.
    skipped: [u32; 2],
    cursor: u64,
    /// These pages are filled one by one: some of them cannot be read.
    one_by_one: Range<u64>,
}

impl Engine {
    /// An engine of a disk with zeros on all pages, and no copy yet.
    pub fn new(config: Config) -> Self {
        Self::with_pages(config, Pages::new(config.pages))
    }

    pub(crate) fn with_pages(config: Config, pages: Pages) -> Self {
        assert!(config.slots > 0 && (1..=64).contains(&config.slot_pages) && config.pages > 0);
        Self {
            pages,
            standing: [Standing::Down; 2],
            slots: vec![None; config.slots.into()],
            order: Vec::with_capacity(config.slots.into()),
            waiting: 0,
            is_behind: false,
            stalled: [false; 2],
            skipped: [0; 2],
            cursor: 0,
            one_by_one: 0..0,
            config,
        }
    }

    /// Numbers of pages by the copies that have them.
    pub fn counts(&self) -> Counts {
        self.pages.counts()
    }

    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Whether no slot is in use.
    pub fn is_idle(&self) -> bool {
        self.order.is_empty()
    }

    /// Whether a copy may lack pages of the other, so that [`Self::refill`] has work to do.
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Handles an event. `actions` needs room for some actions per slot, so that nothing is allocated.
    pub fn handle(&mut self, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Request { slot, op, extent } => self.begin(slot, Kind::Client(op), extent, actions),
            Event::ReadDone { slot, copy, result } => self.read_done(slot, copy, result, actions),
            Event::WriteDone { slot, copy, result } => {
                self.write_done(slot, copy, result.map_err(Failure::Errno), actions);
            }
            Event::Up { copy, kept } => {
                debug_assert_eq!(self.standing[copy.index()], Standing::Down);
                if !kept && self.config.quirk != Some(Quirk::TrustsNewMemory) {
                    self.pages.forget(copy);
                }
                self.standing[copy.index()] = Standing::Up;
                self.stalled[copy.index()] = false;
                self.skipped[copy.index()] = 0;
                self.cursor = 0;
                self.is_behind = true;
            }
            Event::Down { copy } => self.down(copy, actions),
            Event::Leaving { copy } => {
                if self.standing[copy.index()] == Standing::Up {
                    self.standing[copy.index()] = Standing::Leaving;
                    self.is_behind = true;
                }
            }
            Event::Stays { copy } => {
                if self.standing[copy.index()] == Standing::Leaving {
                    self.standing[copy.index()] = Standing::Up;
                    self.is_behind = true;
                }
            }
            Event::Retry => {
                self.is_behind |= self.stalled.contains(&true);
                self.stalled = [false; 2];
                self.skipped = [0; 2];
            }
        }
        self.advance(actions);
    }

    fn in_use(&self) -> impl Iterator<Item = &Slot> {
        self.order.iter().map(|slot| self.slot(*slot))
    }

    fn slot(&self, slot: SlotId) -> &Slot {
        self.slots[usize::from(slot)].as_ref().expect("it is in use")
    }

    fn slot_mut(&mut self, slot: SlotId) -> &mut Slot {
        self.slots[usize::from(slot)].as_mut().expect("it is in use")
    }

    fn is_there(&self, copy: Copy) -> bool {
        self.standing[copy.index()] != Standing::Down
    }

    /// Whether this copy takes writes: one that leaves does so only without another copy.
    fn takes_writes(&self, copy: Copy) -> bool {
        match self.standing[copy.index()] {
            Standing::Up => true,
            Standing::Leaving => self.standing[copy.other().index()] != Standing::Up,
            Standing::Down => false,
        }
    }

    fn begin(&mut self, id: SlotId, kind: Kind, extent: Extent, actions: &mut Vec<Action>) {
        assert!(self.slots[usize::from(id)].is_none(), "slot {id} is in use");
        // Zeros have no bytes in the slot's buffer.
        assert!(extent.count > 0);
        assert!(kind == Kind::Client(Op::Zero) || extent.count <= self.config.slot_pages);
        assert!(extent.page + extent.count <= self.pages.count());
        self.slots[usize::from(id)] = Some(Slot::new(kind, extent));
        self.order.push(id);
        self.waiting += 1;
        self.start(id, actions);
    }

    /// Starts the request if its turn has come.
    fn start(&mut self, id: SlotId, actions: &mut Vec<Action>) {
        let slot = *self.slot(id);
        let mut earlier = self.order.iter().take_while(|other| **other != id);
        let is_turn = !earlier.any(|earlier| self.slot(*earlier).comes_before(&slot));
        if !is_turn && self.config.quirk != Some(Quirk::NoTurns) {
            return;
        }
        match slot.kind {
            Kind::Client(Op::Read) | Kind::Refill(_) => self.plan_read(id, actions),
            Kind::Client(Op::Write) => self.start_write(id, actions),
            Kind::Client(Op::Zero) => {
                self.change(id, true);
                self.reply(id, Ok(()), actions);
                self.release(id, actions);
            }
        }
    }

    fn running(&mut self, id: SlotId) {
        self.slot_mut(id).phase = Phase::Running;
        self.waiting -= 1;
    }

    fn reply(&mut self, id: SlotId, result: Result<(), Failure>, actions: &mut Vec<Action>) {
        if self.slot(id).phase == Phase::Waiting {
            self.waiting -= 1;
        }
        let slot = self.slot_mut(id);
        slot.phase = Phase::Replied;
        if matches!(slot.kind, Kind::Client(_)) {
            actions.push(Action::Reply { slot: id, result });
        }
    }

    fn release(&mut self, id: SlotId, actions: &mut Vec<Action>) {
        debug_assert_eq!(self.slot(id).phase, Phase::Replied);
        self.slots[usize::from(id)] = None;
        self.order.retain(|other| *other != id);
        actions.push(Action::Release { slot: id });
    }

    fn plan_read(&mut self, id: SlotId, actions: &mut Vec<Action>) {
        let slot = *self.slot(id);
        let before = actions.len();
        let mut reads = [0; 2];
        let mut must_wait = false;
        let mut run: Option<(Option<Copy>, Extent)> = None;
        let push = |actions: &mut Vec<Action>, run: Option<(Option<Copy>, Extent)>| match run {
            Some((Some(copy), extent)) => actions.push(Action::Read {
                slot: id,
                copy,
                extent,
            }),
            Some((None, extent)) => actions.push(Action::Clear { slot: id, extent }),
            None => {}
        };
        for page in slot.extent.pages() {
            let has = |copy: &Copy| {
                self.is_there(*copy) && self.pages.has(*copy, page) && !slot.avoids[copy.index()]
            };
            let from = match self.pages.is_zero(page) {
                true => None,
                false => match Copy::BOTH.into_iter().find(has) {
                    Some(copy) => Some(copy),
                    None => {
                        let comes = |other: &Slot| {
                            other.extent.contains(page)
                                && Copy::BOTH.iter().any(|copy| other.is_writing(*copy))
                        };
                        if self.in_use().any(comes) && self.config.quirk != Some(Quirk::NoPatience) {
                            must_wait = true;
                            break;
                        }
                        actions.truncate(before);
                        let failure = match slot.avoids.contains(&true) {
                            true => Failure::Errno(5),
                            false => Failure::Lost,
                        };
                        self.reply(id, Err(failure), actions);
                        self.release(id, actions);
                        return;
                    }
                },
            };
            run = match run {
                Some((of, extent)) if of == from => Some((
                    of,
                    Extent {
                        count: extent.count + 1,
                        ..extent
                    },
                )),
                other => {
                    push(actions, other);
                    reads[from.map_or(0, Copy::index)] += u32::from(from.is_some());
                    Some((from, Extent { page, count: 1 }))
                }
            };
        }
        if must_wait {
            actions.truncate(before);
            if slot.phase != Phase::Waiting {
                self.slot_mut(id).phase = Phase::Waiting;
                self.waiting += 1;
            }
            return;
        }
        push(actions, run);
        if slot.phase == Phase::Waiting {
            self.running(id);
        }
        let slot = self.slot_mut(id);
        slot.reads = reads;
        slot.has_failed = false;
        if reads == [0; 2] {
            self.have_read(id, actions);
        }
    }

    fn read_done(&mut self, id: SlotId, copy: Copy, result: Result<(), i32>, actions: &mut Vec<Action>) {
        let slot = self.slot_mut(id);
        slot.reads[copy.index()] -= 1;
        if result.is_err() {
            slot.has_failed = true;
            slot.avoids[copy.index()] = true;
        }
        if slot.reads == [0; 2] {
            self.have_read(id, actions);
        }
    }

    /// The last read of this slot has ended.
    fn have_read(&mut self, id: SlotId, actions: &mut Vec<Action>) {
        let slot = *self.slot(id);
        if slot.has_failed {
            return match slot.kind {
                Kind::Refill(to) => self.cannot_fill(id, to, actions),
                Kind::Client(_) => self.plan_read(id, actions),
            };
        }
        match slot.kind {
            Kind::Refill(to) if self.takes_writes(to) => {
                self.slot_mut(id).writes[to.index()] = Writing::Queued;
                self.start_writes(to, actions);
            }
            Kind::Client(_) | Kind::Refill(_) => {
                self.reply(id, Ok(()), actions);
                self.release(id, actions);
            }
        }
    }

    fn start_write(&mut self, id: SlotId, actions: &mut Vec<Action>) {
        let takes = Copy::BOTH.map(|copy| self.takes_writes(copy));
        if takes == [false; 2] {
            // Nothing has changed.
            self.reply(id, Err(Failure::Lost), actions);
            return self.release(id, actions);
        }
        self.change(id, false);
        self.running(id);
        for copy in Copy::BOTH {
            if takes[copy.index()] {
                self.slot_mut(id).writes[copy.index()] = Writing::Queued;
                self.start_writes(copy, actions);
            } else {
                self.is_behind = true;
            }
        }
    }

    /// Starts writes to this copy whose turn has come.
    fn start_writes(&mut self, copy: Copy, actions: &mut Vec<Action>) {
        if !self.is_there(copy) {
            return;
        }
        for at in 0..self.order.len() {
            let id = self.order[at];
            let slot = *self.slot(id);
            if slot.writes[copy.index()] != Writing::Queued {
                continue;
            }
            let waits = |other: &SlotId| {
                let other = self.slot(*other);
                other.is_writing(copy) && other.extent.overlaps(slot.extent)
            };
            let is_turn = !self.order[..at].iter().any(waits);
            if is_turn || self.config.quirk == Some(Quirk::NoOrder) {
                self.slot_mut(id).writes[copy.index()] = Writing::Running;
                actions.push(Action::Write {
                    slot: id,
                    copy,
                    extent: slot.extent,
                });
            }
        }
    }

    fn write_done(&mut self, id: SlotId, copy: Copy, result: Result<(), Failure>, actions: &mut Vec<Action>) {
        let slot = *self.slot(id);
        let is_done = result.is_ok();
        self.slot_mut(id).writes[copy.index()] = match result {
            Ok(()) => Writing::Done,
            Err(failure) => Writing::Failed(failure),
        };
        if is_done {
            self.count(id, copy);
            if slot.phase == Phase::Running {
                self.reply(id, Ok(()), actions);
            }
        } else {
            self.is_behind = true;
            self.stalled[copy.index()] |= self.is_there(copy);
        }
        self.write_where_it_leaves(id, copy, actions);
        let slot = *self.slot(id);
        if !Copy::BOTH.iter().any(|copy| slot.is_writing(*copy)) {
            if slot.phase != Phase::Replied {
                let failure = slot.writes.iter().find_map(|writing| match writing {
                    Writing::Failed(Failure::Errno(errno)) => Some(Failure::Errno(*errno)),
                    _ => None,
                });
                self.reply(id, Err(failure.unwrap_or(Failure::Lost)), actions);
            }
            self.release(id, actions);
        }
        self.start_writes(copy, actions);
    }

    /// A client's write was spared to a copy that is about to leave or was away. If the other copy could not
    /// take the write, this one gets it after all.
    fn write_where_it_leaves(&mut self, id: SlotId, failed: Copy, actions: &mut Vec<Action>) {
        let slot = *self.slot(id);
        let other = failed.other();
        let is_spared = slot.writes[other.index()] == Writing::Not && self.is_there(other);
        let has_failed = matches!(slot.writes[failed.index()], Writing::Failed(_));
        let is_refused = self.config.quirk == Some(Quirk::RefusesWhileLeaving);
        let is_client = slot.kind == Kind::Client(Op::Write) && slot.phase == Phase::Running;
        if is_client && has_failed && is_spared && !is_refused {
            self.slot_mut(id).writes[other.index()] = Writing::Queued;
            self.start_writes(other, actions);
        }
    }

    /// The copy has the slot's pages, and counts for them, except for pages that a later request has changed.
    fn count(&mut self, id: SlotId, copy: Copy) {
        let slot = *self.slot(id);
        for (at, page) in slot.extent.pages().enumerate() {
            let is_late = slot.superseded & (1 << at) != 0;
            if !is_late || self.config.quirk == Some(Quirk::LateCounts) {
                self.pages.set(copy, page);
            }
        }
    }

    /// From now on no copy counts for these pages, even if earlier writes still end there.
    fn change(&mut self, id: SlotId, to_zero: bool) {
        let extent = self.slot(id).extent;
        self.pages.change(extent, to_zero);
        for earlier in self.order.iter().take_while(|other| **other != id) {
            let earlier = self.slots[usize::from(*earlier)].as_mut().expect("it is in use");
            // Zeros cause no write that could end late, and may be longer than a slot.
            if earlier.kind == Kind::Client(Op::Zero) || !earlier.extent.overlaps(extent) {
                continue;
            }
            for (at, page) in earlier.extent.pages().enumerate() {
                earlier.superseded |= u64::from(extent.contains(page)) << at;
            }
        }
    }

    fn down(&mut self, copy: Copy, actions: &mut Vec<Action>) {
        self.standing[copy.index()] = Standing::Down;
        let mut at = 0;
        while at < self.order.len() {
            let id = self.order[at];
            let slot = self.slot_mut(id);
            let was_reading = std::mem::take(&mut slot.reads[copy.index()]) > 0;
            slot.has_failed |= was_reading;
            if was_reading && slot.reads == [0; 2] {
                self.have_read(id, actions);
            } else if slot.is_writing(copy) {
                let was_running = slot.writes[copy.index()] == Writing::Running;
                if was_running && self.config.quirk == Some(Quirk::TrustsUnanswered) {
                    self.count(id, copy);
                }
                self.write_done(id, copy, Err(Failure::Lost), actions);
            }
            // Unless the slot was released just now.
            at += usize::from(self.order.get(at) == Some(&id));
        }
    }

    /// Starts all requests that can start now.
    fn advance(&mut self, actions: &mut Vec<Action>) {
        let mut at = 0;
        while self.waiting > 0 && at < self.order.len() {
            let id = self.order[at];
            if self.slot(id).phase == Phase::Waiting {
                self.start(id, actions);
            }
            at += usize::from(self.order.get(at) == Some(&id));
        }
    }
}
