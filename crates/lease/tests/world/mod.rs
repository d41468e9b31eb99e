//! A client, two copies and their faults, by seed. All randomness comes from the seed.
//!
//! Servers die, hang, come back and leave. Files are full, or report errors for a while, and have pages that
//! cannot be read until they are written again. A disk goes from host to host: the move is rolled back, a
//! server is lost in the middle of the move, or no server gives the disk to its next host. The kill of an
//! owner loses its disk, unless the disk was handed over: then the next host has it.
//!
//! [`Outside`] disables rules that the engine expects of the code that does the I/O.

mod copy;
mod history;
mod kinds;

use std::fmt::Write as _;

use copy::Store;
use history::History;
pub use kinds::{BACKUPS, Backup, OUTSIDE, Outside, QUIRKS};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use verbatim_lease::{Action, Config, Copy, Engine, Event, Extent, Map, Op, Quirk, SlotId};

pub const PAGES: u64 = 12;
const SLOTS: SlotId = 6;
const SLOT_PAGES: u64 = 4;
const STEPS: u32 = 400;

/// The world of a walk.
#[derive(Debug, Clone, Copy)]
pub struct Rules {
    pub backup: Backup,
    pub quirk: Option<Quirk>,
    pub outside: Option<Outside>,
}

/// Events of a walk.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: u64,
    pub refused: u64,
    pub deaths: u64,
    pub returns: u64,
    pub refills: u64,
    pub drained: u64,
    pub moves: u64,
    pub errors: u64,
}

impl Tally {
    pub fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.refused += other.refused;
        self.deaths += other.deaths;
        self.returns += other.returns;
        self.refills += other.refills;
        self.drained += other.drained;
        self.moves += other.moves;
        self.errors += other.errors;
    }
}

struct Buffer {
    op: Op,
    extent: Extent,
    /// A version for each page; for a write, its data.
    data: Vec<u64>,
    /// Reads: the oldest version that may be seen, for each page.
    floor: Vec<u64>,
    /// A copy was lost since the request was made.
    had_loss: bool,
    replied: bool,
}

struct World {
    random: SmallRng,
    backup: Backup,
    outside: Option<Outside>,
    /// The disk behind the file fails now.
    is_failing: bool,
    /// This copy was told that it may leave, and has not yet.
    leaves_later: Option<Copy>,
    /// Earlier content of the servers.
    old: [Vec<u64>; 2],
    config: Config,
    engine: Engine,
    copies: [Store; 2],
    slots: Vec<Option<Buffer>>,
    history: History,
    versions: u64,
    tally: Tally,
    story: Option<String>,
}

/// Walks a seed. Returns the error, if there is one.
pub fn walk(seed: u64, rules: Rules) -> (Option<String>, Tally) {
    let (wrong, tally, _) = run(seed, rules, false);
    (wrong, tally)
}

/// All events of a walk, in words.
pub fn story(seed: u64, rules: Rules) -> String {
    let (wrong, _, story) = run(seed, rules, true);
    format!("{}\nseed {seed}, {rules:?}: {wrong:?}", story.unwrap_or_default())
}

fn run(seed: u64, rules: Rules, told: bool) -> (Option<String>, Tally, Option<String>) {
    let Rules {
        backup,
        quirk,
        outside,
    } = rules;
    let config = Config {
        pages: PAGES,
        slots: SLOTS,
        slot_pages: SLOT_PAGES,
        quirk,
    };
    let mut world = World {
        random: SmallRng::seed_from_u64(seed),
        backup,
        outside,
        is_failing: false,
        leaves_later: None,
        old: [vec![0; PAGES as usize], vec![0; PAGES as usize]],
        config,
        engine: Engine::new(config),
        copies: [Store::new(PAGES), Store::new(PAGES)],
        slots: (0..SLOTS).map(|_| None).collect(),
        history: History::new(PAGES),
        versions: 0,
        tally: Tally::default(),
        story: told.then(String::new),
    };
    let wrong = world.live().err();
    (wrong, world.tally, world.story)
}

impl World {
    fn tell(&mut self, what: impl FnOnce() -> String) {
        if let Some(story) = &mut self.story {
            let _ = writeln!(story, "{}", what());
        }
    }

    fn live(&mut self) -> Result<(), String> {
        self.up(Copy::First, false)?;
        if self.backup != Backup::None {
            self.up(Copy::Second, false)?;
        }
        for _ in 0..STEPS {
            let leaves = self.leaves_later.take();
            self.step()?;
            self.leave(leaves)?;
        }
        self.settle()
    }

    /// Faults end, and all requests end; then each page is read once.
    fn settle(&mut self) -> Result<(), String> {
        self.is_failing = false;
        for copy in Copy::BOTH {
            let is_server = copy == Copy::First || self.backup.is_server();
            if is_server && !self.copies[copy.index()].is_up {
                self.up(copy, true)?;
            }
        }
        for round in 0.. {
            if round > 1000 {
                return Err("it hangs".into());
            }
            self.finish_all()?;
            let leaves = self.leaves_later.take();
            self.leave(leaves)?;
            let Some(slot) = self.free_slot() else { continue };
            if !self.refill(slot)? && self.leaves_later.is_none() && self.engine.is_idle() {
                break;
            }
        }
        self.has_all_that_can_be_read()?;
        for page in 0..PAGES {
            self.request(Op::Read, Extent { page, count: 1 })?;
            self.finish_all()?;
        }
        match self.slots.iter().any(Option::is_some) {
            true => Err("a request has no answer".into()),
            false => Ok(()),
        }
    }

    /// A server that is up is filled with every page that the file can read.
    fn has_all_that_can_be_read(&mut self) -> Result<(), String> {
        if self.backup != Backup::BadFile {
            return Ok(());
        }
        for _ in 0..4 * PAGES {
            self.event(Event::Retry)?;
            let Some(slot) = self.free_slot() else { continue };
            self.refill(slot)?;
            self.finish_all()?;
            let leaves = self.leaves_later.take();
            self.leave(leaves)?;
        }
        let pages = (0..PAGES).map(|page| Extent { page, count: 1 });
        let bad = pages.filter(|page| self.copies[1].is_bad(*page)).count() as u64;
        let left = self.engine.counts().second_only;
        match left > bad {
            true => Err(format!(
                "{left} pages are at the file alone, and {bad} cannot be read"
            )),
            false => Ok(()),
        }
    }

    fn finish_all(&mut self) -> Result<(), String> {
        for copy in Copy::BOTH {
            while self.copies[copy.index()].has_work() {
                self.complete(copy)?;
            }
        }
        Ok(())
    }

    fn free_slot(&mut self) -> Option<SlotId> {
        self.slots
            .iter()
            .position(Option::is_none)
            .map(|slot| slot as SlotId)
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.random_range(0..100) {
            0..40 => {
                let page = self.random.random_range(0..PAGES);
                let op = match self.random.random_range(0..20) {
                    0..9 => Op::Write,
                    9..19 => Op::Read,
                    _ => Op::Zero,
                };
                let most = match op {
                    Op::Read | Op::Write => SLOT_PAGES.min(PAGES - page),
                    Op::Zero => PAGES - page,
                };
                let count = self.random.random_range(1..=most);
                self.request(op, Extent { page, count })
            }
            40..90 => {
                let copy = self.any_copy();
                match self.copies[copy.index()].has_work() {
                    true => self.complete(copy),
                    false => Ok(()),
                }
            }
            90..95 => match self.free_slot() {
                Some(slot) => self.refill(slot).map(drop),
                None => Ok(()),
            },
            95 => self.event(Event::Retry),
            _ => self.trouble(),
        }
    }

    fn any_copy(&mut self) -> Copy {
        Copy::BOTH[self.random.random_range(0..2)]
    }

    /// A fault or recovery of a server.
    fn trouble(&mut self) -> Result<(), String> {
        let copy = match self.backup {
            Backup::Server | Backup::MovedServer => self.any_copy(),
            _ => Copy::First,
        };
        if self.backup.moves() && self.random.random_ratio(1, 3) {
            return self.moved();
        }
        if self.backup == Backup::BadFile && self.random.random_ratio(1, 3) {
            self.is_failing = !self.is_failing;
            let is_failing = self.is_failing;
            self.tell(|| format!("the file's disk fails: {is_failing}"));
            let page = self.random.random_range(0..PAGES);
            let count = self.random.random_range(1..=PAGES - page);
            self.copies[1].spoil(Extent { page, count }, &mut self.random);
        }
        if self.outside == Some(Outside::BelievesTheCache) && self.random.random_ratio(1, 3) {
            self.copies[1].forget_cached();
        }
        if self.random.random_ratio(1, 3) {
            self.old[copy.index()].clone_from(&self.copies[copy.index()].pages);
        }
        let is_up = self.copies[copy.index()].is_up;
        match (is_up, self.random.random_range(0..4)) {
            (true, 0) => {
                self.tell(|| format!("{copy:?} is leaving"));
                self.event(Event::Leaving { copy })
            }
            (true, 1) => self.down(copy),
            (true, 2) => {
                self.tell(|| format!("{copy:?} stays"));
                self.event(Event::Stays { copy })
            }
            (true, _) => Ok(()),
            (false, 0) => self.up(copy, true),
            (false, 1) => self.up(copy, false),
            (false, _) => {
                // Late writes from before the server was given up.
                self.copies[copy.index()].land_late(&mut self.random);
                Ok(())
            }
        }
    }

    /// The disk goes to another host, if possible: requests in flight end, and the engine there gets the
    /// state of this one.
    fn moved(&mut self) -> Result<(), String> {
        let is_server = [true, self.backup.is_server()];
        let goes = [0, 1].map(|copy| is_server[copy] && self.copies[copy].is_up);
        if !goes[0] {
            return Ok(());
        }
        self.finish_all()?;
        let Some(map) = self.engine.hand_over(goes) else {
            return Ok(());
        };
        self.tell(|| format!("it moves with {goes:?}"));
        let is_there = [self.copies[0].is_up, self.copies[1].is_up];
        for page in 0..PAGES {
            if self.history.is_held(page, is_there) && !self.history.is_held(page, goes) {
                return Err(format!("page {page} stays behind"));
            }
        }
        match self.random.random_range(0..8) {
            0 | 1 => {
                self.tell(|| "it is rolled back".to_owned());
                return Ok(());
            }
            // Rolled back for that reason: a server has other memory than that of the map.
            2 => {
                let copy = match goes[1] {
                    true => self.any_copy(),
                    false => Copy::First,
                };
                self.down(copy)?;
                self.up(copy, false)?;
                if self.outside != Some(Outside::AdoptsLost) {
                    return Ok(());
                }
            }
            3 if self.random.random_ratio(1, 4) => return self.lost(),
            _ => {}
        }
        self.tally.moves += 1;
        self.engine = Engine::taken_over(self.config, map);
        for copy in Copy::BOTH {
            let at = copy.index();
            // A server may be killed at that moment.
            let kept = goes[at] && !self.random.random_ratio(1, 16);
            if goes[at] || !is_server[at] {
                self.copies[at].down(&mut self.random);
                self.up(copy, kept)?;
            } else {
                // Its content does not count any more.
                self.history.memory_lost(at);
            }
        }
        Ok(())
    }

    /// The session is committed, and no server gives the disk to its next host.
    fn lost(&mut self) -> Result<(), String> {
        self.tell(|| "all of it is lost".to_owned());
        self.tally.moves += 1;
        self.history.all_lost();
        self.engine = match self.outside {
            Some(Outside::LostIsNew) => Engine::new(self.config),
            _ => Engine::taken_over(self.config, Map::lost(PAGES)),
        };
        for copy in Copy::BOTH {
            self.copies[copy.index()].down(&mut self.random);
            self.up(copy, false)?;
        }
        Ok(())
    }

    fn down(&mut self, copy: Copy) -> Result<(), String> {
        self.tell(|| format!("{copy:?} is down"));
        self.tally.deaths += 1;
        self.copies[copy.index()].down(&mut self.random);
        for slot in self.slots.iter_mut().flatten() {
            slot.had_loss = true;
        }
        self.event(Event::Down { copy })
    }

    fn up(&mut self, copy: Copy, kept: bool) -> Result<(), String> {
        self.tell(|| format!("{copy:?} is up, kept: {kept}"));
        self.tally.returns += 1;
        let is_open = self.outside == Some(Outside::LandsLate);
        self.copies[copy.index()].up(kept, is_open);
        if kept && self.outside == Some(Outside::BelievesOldMemory) && self.random.random_ratio(1, 4) {
            self.copies[copy.index()]
                .pages
                .clone_from(&self.old[copy.index()]);
        }
        if !kept {
            self.history.memory_lost(copy.index());
            for slot in self.slots.iter_mut().flatten() {
                slot.had_loss = true;
            }
        }
        self.event(Event::Up { copy, kept })
    }

    fn request(&mut self, op: Op, extent: Extent) -> Result<(), String> {
        let Some(slot) = self.free_slot() else {
            return Ok(());
        };
        self.tally.requests += 1;
        let mut data = vec![u64::MAX; extent.count as usize];
        if op != Op::Read {
            self.versions += 1;
            self.history.issued(self.versions, extent, op == Op::Zero);
            data.fill(self.versions);
        }
        self.tell(|| format!("slot {slot}: {op:?} {extent:?} {:?}", data.first()));
        self.slots[usize::from(slot)] = Some(Buffer {
            op,
            extent,
            data,
            floor: extent.pages().map(|page| self.history.floor(page)).collect(),
            had_loss: false,
            replied: false,
        });
        self.event(Event::Request { slot, op, extent })
    }

    fn refill(&mut self, slot: SlotId) -> Result<bool, String> {
        let mut actions = Vec::new();
        let is_used = self.engine.refill(slot, &mut actions);
        if is_used {
            self.tally.refills += 1;
            let extent = actions.iter().find_map(|action| match action {
                Action::Read { extent, .. } => Some(*extent),
                _ => None,
            });
            let extent = extent.ok_or("a refill reads nothing")?;
            self.tell(|| format!("slot {slot}: refill {extent:?}"));
            self.slots[usize::from(slot)] = Some(Buffer {
                op: Op::Read,
                extent,
                data: vec![u64::MAX; extent.count as usize],
                floor: Vec::new(),
                had_loss: false,
                replied: true,
            });
        }
        self.act(actions)?;
        Ok(is_used)
    }

    fn complete(&mut self, copy: Copy) -> Result<(), String> {
        let errno = match (copy, self.backup) {
            (Copy::Second, Backup::FullFile) if self.random.random_ratio(1, 4) => Some(28),
            (Copy::Second, Backup::BadFile) if self.is_failing && self.random.random() => Some(5),
            _ => None,
        };
        let store = &mut self.copies[copy.index()];
        let work = store.take(&mut self.random);
        let (slot, extent) = (work.slot, work.extent);
        if work.is_write {
            // A write that fails may have been done in part.
            let pages = match errno {
                Some(_) => extent.count / 2,
                None => extent.count,
            };
            if copy == Copy::Second && self.outside == Some(Outside::BelievesTheCache) {
                store.cache(extent);
            }
            store.write(extent.page, &work.data[..pages as usize]);
            match errno {
                Some(5) => store.spoil(extent, &mut self.random),
                Some(_) => {}
                None => self.history.written(copy.index(), extent, &work.data),
            }
            let result = errno.map_or(Ok(()), Err);
            self.tally.errors += u64::from(result.is_err());
            self.tell(|| format!("slot {slot}: written to {copy:?}: {result:?}"));
            return self.event(Event::WriteDone { slot, copy, result });
        }
        if errno == Some(5) || store.is_bad(extent) {
            self.tally.errors += 1;
            self.tell(|| format!("slot {slot}: cannot be read from {copy:?} {extent:?}"));
            let result = Err(5);
            return self.event(Event::ReadDone { slot, copy, result });
        }
        let buffer = self.slots[usize::from(slot)].as_mut().expect("it is in use");
        for page in extent.pages() {
            buffer.data[(page - buffer.extent.page) as usize] = store.pages[page as usize];
        }
        self.tell(|| format!("slot {slot}: read from {copy:?} {extent:?}"));
        self.event(Event::ReadDone {
            slot,
            copy,
            result: Ok(()),
        })
    }

    fn event(&mut self, event: Event) -> Result<(), String> {
        let mut actions = Vec::new();
        self.engine.handle(event, &mut actions);
        self.act(actions)
    }

    fn act(&mut self, actions: Vec<Action>) -> Result<(), String> {
        for action in actions {
            match action {
                Action::Read { slot, copy, extent } => {
                    self.copies[copy.index()].begin(slot, extent, None)?;
                }
                Action::Write { slot, copy, extent } => {
                    let data = self.slots[usize::from(slot)]
                        .as_ref()
                        .expect("in use")
                        .data
                        .clone();
                    self.copies[copy.index()].begin(slot, extent, Some(data))?;
                }
                Action::Clear { slot, extent } => {
                    let buffer = self.slots[usize::from(slot)].as_mut().expect("in use");
                    for page in extent.pages() {
                        buffer.data[(page - buffer.extent.page) as usize] = 0;
                    }
                }
                Action::Reply { slot, result } => self.reply(slot, result.is_ok())?,
                Action::Release { slot } => {
                    let buffer = self.slots[usize::from(slot)].take().expect("it was in use");
                    if !buffer.replied {
                        return Err("it is released without an answer".into());
                    }
                }
                Action::Drained { copy } => {
                    self.tally.drained += 1;
                    self.drained(copy)?;
                }
            }
        }
        Ok(())
    }

    /// This server leaves now, unless it is down meanwhile.
    fn leave(&mut self, copy: Option<Copy>) -> Result<(), String> {
        match copy.filter(|copy| self.copies[copy.index()].is_up) {
            Some(copy) => self.left(copy),
            None => Ok(()),
        }
    }

    /// A server may leave.
    fn drained(&mut self, copy: Copy) -> Result<(), String> {
        if self.outside == Some(Outside::LeavesLater) {
            self.leaves_later = Some(copy);
            return Ok(());
        }
        self.left(copy)
    }

    /// A server has left: its memory is gone, but no acknowledged write is lost.
    fn left(&mut self, copy: Copy) -> Result<(), String> {
        self.tell(|| format!("{copy:?} has left"));
        let is_there = [0, 1].map(|at| self.copies[at].is_up);
        self.history.leaves(copy.index(), is_there)?;
        self.copies[copy.index()].down(&mut self.random);
        self.event(Event::Down { copy })?;
        self.copies[copy.index()].up(false, false);
        self.event(Event::Up { copy, kept: false })
    }

    fn reply(&mut self, slot: SlotId, is_done: bool) -> Result<(), String> {
        let buffer = self.slots[usize::from(slot)]
            .as_mut()
            .ok_or("an answer to nobody")?;
        if std::mem::replace(&mut buffer.replied, true) {
            return Err("two answers".into());
        }
        let buffer = self.slots[usize::from(slot)].as_ref().expect("in use");
        if buffer.op == Op::Read && is_done {
            for ((page, floor), seen) in buffer.extent.pages().zip(&buffer.floor).zip(&buffer.data) {
                self.history.seen(page, *floor, *seen)?;
            }
        }
        if buffer.op != Op::Read && is_done {
            self.history.done(buffer.data[0], buffer.extent);
        }
        if !is_done {
            self.tally.refused += 1;
            let is_there = [self.copies[0].is_up, self.copies[1].is_up];
            let fails = matches!(self.backup, Backup::FullFile | Backup::BadFile);
            let is_read = [is_there[0], is_there[1] && self.backup != Backup::BadFile];
            let is_written = [is_there[0], is_there[1] && !fails];
            let is_possible = match buffer.op {
                Op::Read => buffer
                    .extent
                    .pages()
                    .all(|page| self.history.is_held(page, is_read)),
                // A server that is about to leave counts, too, if the other copy cannot take the write.
                Op::Write => is_written.contains(&true),
                Op::Zero => true,
            };
            // A file that never fails has every page, or gets it.
            if self.backup == Backup::File || is_possible && !buffer.had_loss {
                return Err(format!("slot {slot}: {:?} {:?} fails", buffer.op, buffer.extent));
            }
        }
        self.tell(|| format!("slot {slot}: answered, {is_done}"));
        Ok(())
    }
}
