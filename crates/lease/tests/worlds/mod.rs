//! A client with a few requests, two copies, and their faults: all orders of all that may happen.
//!
//! A world is everything that decides about what comes next. Equal worlds are explored once ([`explore`]), so
//! that all orders of requests, ends of I/O, refills, faults and recoveries are walked, and not only some.
//! Faults are counted; recoveries are free, and may also stay away.

mod audit;
mod explore;
#[path = "../world/history.rs"]
mod history;
#[path = "../world/kinds.rs"]
mod kinds;
mod moving;
mod steps;
mod store;

pub use explore::{Explored, explore};
use history::History;
pub use kinds::{BACKUPS, Backup, OUTSIDE, Outside, QUIRKS};
use steps::{End, Fault, Memory, Step};
use store::{Store, Work};
use verbatim_lease::{Action, Config, Copy, Engine, Event, Extent, Op, Quirk, SlotId};

pub const PAGES: u64 = 2;
const SLOTS: SlotId = 3;
const SLOT_PAGES: u64 = 2;

/// A version for each page of a slot; for a write, its data.
type Data = [u64; SLOT_PAGES as usize];

/// A request of the client: the operation, the first page, the number of pages.
pub type Request = (Op, u64, u64);

#[derive(Debug, Clone, Copy)]
pub struct Rules<'a> {
    pub backup: Backup,
    /// The client's requests: one of these, then one of those, and so on.
    pub script: &'a [&'a [Request]],
    pub faults: u8,
    pub moves: u8,
    pub quirk: Option<Quirk>,
    pub outside: Option<Outside>,
}

impl Rules<'_> {
    fn is_server(&self, copy: Copy) -> bool {
        copy == Copy::First || self.backup.is_server()
    }

    fn config(&self) -> Config {
        Config {
            pages: PAGES,
            slots: SLOTS,
            slot_pages: SLOT_PAGES,
            quirk: self.quirk,
        }
    }
}

impl Backup {
    /// Whether the file reports errors.
    fn may_fail(self) -> bool {
        matches!(self, Self::FullFile | Self::BadFile)
    }

    fn errno(self) -> i32 {
        if self == Self::FullFile { 28 } else { 5 }
    }
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Buffer {
    op: Op,
    extent: Extent,
    data: Data,
    /// Reads: the oldest version that may be seen, for each page.
    floor: Data,
    /// A copy was lost since the request was made.
    had_loss: bool,
    /// Copies that reported an error to this request.
    had_error: [bool; 2],
    replied: bool,
}

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct World {
    engine: Engine,
    copies: [Store; 2],
    slots: [Option<Buffer>; SLOTS as usize],
    history: History,
    /// Number of requests that the client has made.
    at: u8,
    /// Faults and moves that may still come.
    faults: u8,
    moves: u8,
    /// The file's disk takes nothing.
    is_broken: bool,
}

impl World {
    pub fn new(rules: &Rules<'_>) -> Result<Self, String> {
        let mut world = Self {
            engine: Engine::new(rules.config()),
            copies: [Store::default(), Store::default()],
            slots: [const { None }; SLOTS as usize],
            history: History::new(PAGES),
            at: 0,
            faults: rules.faults,
            moves: if rules.backup.moves() { rules.moves } else { 0 },
            is_broken: false,
        };
        world.up(Copy::First, Memory::New, rules)?;
        if rules.backup != Backup::None {
            world.up(Copy::Second, Memory::New, rules)?;
        }
        Ok(world)
    }

    pub fn go(&mut self, step: Step, rules: &Rules<'_>) -> Result<(), String> {
        self.faults -= step.faults();
        match step {
            Step::Request((op, page, count)) => {
                self.at += 1;
                self.request(op, Extent { page, count }, rules)?;
            }
            Step::Ends(copy, at, end) => self.ended(copy, at.into(), end, rules)?,
            Step::Refill => drop(self.refill(rules)?),
            Step::Retry => self.event(Event::Retry, rules)?,
            Step::Up(copy, memory) => self.up(copy, memory, rules)?,
            Step::Stays(copy) => {
                self.copies[copy.index()].leaves = false;
                self.event(Event::Stays { copy }, rules)?;
            }
            Step::Leaves(copy) => self.left(copy, rules)?,
            Step::Repaired => self.is_broken = false,
            Step::Moves(lost) => self.moved(lost, rules)?,
            Step::Lands(copy) => {
                let store = &mut self.copies[copy.index()];
                let work = store.late.remove(0);
                store.write(work.extent, &work.data.expect("a write"), work.extent.count);
            }
            Step::Saved(copy) => {
                let store = &mut self.copies[copy.index()];
                store.old = Some(store.pages);
            }
            Step::Fault(fault) => self.strikes(fault, rules)?,
        }
        self.is_under_way()
    }

    fn strikes(&mut self, fault: Fault, rules: &Rules<'_>) -> Result<(), String> {
        match fault {
            Fault::Down(copy, end) => self.down(copy, end, rules),
            Fault::Leaving(copy) => {
                self.copies[copy.index()].leaves = true;
                self.event(Event::Leaving { copy }, rules)
            }
            Fault::Breaks => {
                self.is_broken = true;
                Ok(())
            }
            Fault::Rots(page) => {
                self.copies[1].bad[page as usize] = true;
                Ok(())
            }
            Fault::Nobody => self.lost(rules),
            Fault::LostBefore(copy) => self.adopts_lost(copy, rules),
            Fault::CacheDrops => {
                self.copies[1].forget_cached();
                Ok(())
            }
        }
    }

    /// A request without an answer has I/O in flight, or waits for one that has.
    fn is_under_way(&self) -> Result<(), String> {
        match self.has_work() || self.is_at_rest() {
            true => Ok(()),
            false => Err("a request waits for nothing".to_owned()),
        }
    }

    fn has_work(&self) -> bool {
        self.copies.iter().any(|store| !store.work.is_empty())
    }

    /// Whether no slot is in use.
    fn is_at_rest(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }

    fn free_slot(&self) -> Option<SlotId> {
        let free = self.slots.iter().position(Option::is_none);
        free.map(|slot| slot as SlotId)
    }

    fn down(&mut self, copy: Copy, end: u16, rules: &Rules<'_>) -> Result<(), String> {
        let lands_late = rules.outside == Some(Outside::LandsLate);
        self.copies[copy.index()].down(end, lands_late);
        self.had_loss();
        self.event(Event::Down { copy }, rules)
    }

    fn up(&mut self, copy: Copy, memory: Memory, rules: &Rules<'_>) -> Result<(), String> {
        let kept = memory != Memory::New;
        let store = &mut self.copies[copy.index()];
        store.up(kept);
        if let (Memory::Old, Some(old)) = (memory, store.old) {
            store.pages = old;
        }
        if !kept {
            self.history.memory_lost(copy.index());
            self.had_loss();
        }
        self.event(Event::Up { copy, kept }, rules)
    }

    fn had_loss(&mut self) {
        for slot in self.slots.iter_mut().flatten() {
            slot.had_loss = true;
        }
    }

    fn request(&mut self, op: Op, extent: Extent, rules: &Rules<'_>) -> Result<(), String> {
        let slot = self.free_slot().ok_or("no slot is free")?;
        let mut data = [u64::MAX; SLOT_PAGES as usize];
        if op != Op::Read {
            let version = self.at.into();
            self.history.issued(version, extent, op == Op::Zero);
            data.fill(version);
        }
        let mut floor = [0; SLOT_PAGES as usize];
        for (floor, page) in floor.iter_mut().zip(extent.pages()) {
            *floor = self.history.floor(page);
        }
        self.slots[usize::from(slot)] = Some(Buffer {
            op,
            extent,
            data,
            floor,
            had_loss: false,
            had_error: [false; 2],
            replied: false,
        });
        self.event(Event::Request { slot, op, extent }, rules)
    }

    /// Returns whether the engine has used a slot.
    fn refill(&mut self, rules: &Rules<'_>) -> Result<bool, String> {
        let Some(slot) = self.free_slot() else {
            return Ok(false);
        };
        let mut actions = Vec::new();
        let is_used = self.engine.refill(slot, &mut actions);
        if is_used {
            let extent = actions.iter().find_map(|action| match action {
                Action::Read { extent, .. } => Some(*extent),
                _ => None,
            });
            self.slots[usize::from(slot)] = Some(Buffer {
                op: Op::Read,
                extent: extent.ok_or("a refill reads nothing")?,
                data: [u64::MAX; SLOT_PAGES as usize],
                floor: [0; SLOT_PAGES as usize],
                had_loss: false,
                had_error: [false; 2],
                replied: true,
            });
        }
        self.act(actions, rules)?;
        Ok(is_used)
    }

    fn ended(&mut self, copy: Copy, at: usize, end: End, rules: &Rules<'_>) -> Result<(), String> {
        let is_broken = self.is_broken && copy == Copy::Second;
        let store = &mut self.copies[copy.index()];
        let Work { slot, extent, data } = store.work.remove(at);
        let errno = rules.backup.errno();
        let buffer = self.slots[usize::from(slot)].as_mut().expect("it is in use");
        if let Some(data) = data {
            if copy == Copy::Second && rules.outside == Some(Outside::BelievesTheCache) {
                store.cache(extent);
            }
            let fails = is_broken || end != End::Usual;
            match end {
                End::Usual if is_broken => {}
                End::Usual | End::FailsLate => store.write(extent, &data, extent.count),
                End::Fails => {}
                End::Spoils => extent.pages().for_each(|page| store.bad[page as usize] = true),
            }
            if fails {
                buffer.had_error[copy.index()] = true;
            } else {
                self.history.written(copy.index(), extent, &data);
            }
            let result = if fails { Err(errno) } else { Ok(()) };
            return self.event(Event::WriteDone { slot, copy, result }, rules);
        }
        let is_broken = is_broken && rules.backup == Backup::BadFile;
        if is_broken || end != End::Usual || store.is_bad(extent) {
            buffer.had_error[copy.index()] = true;
            let result = Err(errno);
            return self.event(Event::ReadDone { slot, copy, result }, rules);
        }
        for page in extent.pages() {
            buffer.data[(page - buffer.extent.page) as usize] = store.pages[page as usize];
        }
        let result = Ok(());
        self.event(Event::ReadDone { slot, copy, result }, rules)
    }

    fn event(&mut self, event: Event, rules: &Rules<'_>) -> Result<(), String> {
        let mut actions = Vec::new();
        self.engine.handle(event, &mut actions);
        self.act(actions, rules)
    }

    fn act(&mut self, actions: Vec<Action>, rules: &Rules<'_>) -> Result<(), String> {
        for action in actions {
            match action {
                Action::Read { slot, copy, extent } => self.begin(slot, copy, extent, None)?,
                Action::Write { slot, copy, extent } => {
                    let buffer = self.slots[usize::from(slot)].as_ref();
                    let data = buffer.ok_or("a write of a free slot")?.data;
                    self.begin(slot, copy, extent, Some(data))?;
                }
                Action::Clear { slot, extent } => {
                    let buffer = self.slots[usize::from(slot)].as_mut().ok_or("a free slot")?;
                    for page in extent.pages() {
                        buffer.data[(page - buffer.extent.page) as usize] = 0;
                    }
                }
                Action::Reply { slot, result } => self.reply(slot, result.is_ok(), rules)?,
                Action::Release { slot } => {
                    let buffer = self.slots[usize::from(slot)].take();
                    if !buffer.ok_or("a free slot is released")?.replied {
                        return Err("it is released without an answer".to_owned());
                    }
                }
                Action::Drained { copy } => self.drained(copy, rules)?,
            }
        }
        Ok(())
    }

    fn begin(&mut self, slot: SlotId, copy: Copy, extent: Extent, data: Option<Data>) -> Result<(), String> {
        let store = &mut self.copies[copy.index()];
        if !store.is_up {
            return Err(format!("slot {slot}: a copy that is down is used"));
        }
        store.work.push(Work { slot, extent, data });
        Ok(())
    }

    /// A server may leave.
    fn drained(&mut self, copy: Copy, rules: &Rules<'_>) -> Result<(), String> {
        let store = &mut self.copies[copy.index()];
        if !store.leaves {
            return Err(format!("{copy:?} may leave, and nobody has asked for that"));
        }
        if rules.outside == Some(Outside::LeavesLater) {
            store.may_leave = true;
            return Ok(());
        }
        self.left(copy, rules)
    }

    /// A server has left: its memory is gone, but no acknowledged write is lost.
    fn left(&mut self, copy: Copy, rules: &Rules<'_>) -> Result<(), String> {
        let is_there = [0, 1].map(|at| self.copies[at].is_up);
        self.history.leaves(copy.index(), is_there)?;
        let store = &mut self.copies[copy.index()];
        store.down(0, false);
        store.has_left = true;
        self.event(Event::Down { copy }, rules)
    }

    fn reply(&mut self, slot: SlotId, is_done: bool, rules: &Rules<'_>) -> Result<(), String> {
        let buffer = self.slots[usize::from(slot)].as_mut();
        let buffer = buffer.ok_or("an answer to nobody")?;
        if std::mem::replace(&mut buffer.replied, true) {
            return Err("two answers".to_owned());
        }
        let (op, extent) = (buffer.op, buffer.extent);
        match (op, is_done) {
            (Op::Read, true) => {
                for ((page, floor), seen) in extent.pages().zip(&buffer.floor).zip(&buffer.data) {
                    self.history.seen(page, *floor, *seen)?;
                }
            }
            (_, true) => self.history.done(buffer.data[0], extent),
            (_, false) => {
                // A server that is about to leave counts, too, if the other copy cannot take the write.
                let counts = [0, 1].map(|at| self.copies[at].is_up && !buffer.had_error[at]);
                let is_possible = match op {
                    Op::Read => extent.pages().all(|page| self.history.is_held(page, counts)),
                    Op::Write => counts.contains(&true),
                    Op::Zero => true,
                };
                // A file that never fails has every page, or gets it.
                if rules.backup == Backup::File || is_possible && !buffer.had_loss {
                    return Err(format!("slot {slot}: {op:?} {extent:?} fails"));
                }
            }
        }
        Ok(())
    }
}
