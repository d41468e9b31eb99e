//! Fills a copy that is behind: in passes from the first page to the last one.

use super::{Engine, Standing};
use crate::events::{Action, Quirk};
use crate::slots::{Copy, Extent, Kind, Op, SlotId};

/// Most pages that are skipped before a retry, since they cannot be read.
const SKIPS: u32 = 64;

impl Engine {
    /// Fills a copy that is behind a little further, with a free slot. Returns whether the slot is used.
    pub fn refill(&mut self, slot: SlotId, actions: &mut Vec<Action>) -> bool {
        if !self.is_behind {
            return false;
        }
        for to in Copy::BOTH {
            if !self.is_there(to.other()) || !self.takes_writes(to) || self.stalled[to.index()] {
                continue;
            }
            let find = |from| self.pages.behind(to.other(), to, from);
            let ahead = find(self.cursor);
            if ahead.is_none() && self.skipped[to.index()] > 0 {
                // Once round: what is left could not be read, unless the rest is still under way.
                if !self.in_use().any(|slot| slot.kind == Kind::Refill(to)) {
                    (self.stalled[to.index()], self.cursor) = (true, 0);
                }
                continue;
            }
            let Some(page) = ahead.or_else(|| find(0)) else {
                continue;
            };
            let lacks = |page: &u64| {
                *page < self.config.pages
                    && !self.pages.is_zero(*page)
                    && self.pages.has(to.other(), *page)
                    && !self.pages.has(to, *page)
                    && !self.in_use().any(|used| used.extent.contains(*page))
            };
            let most = match self.one_by_one.contains(&page) {
                true => 1,
                false => self.config.slot_pages,
            };
            let count = (page..page + most).take_while(lacks).count() as u64;
            if count == 0 {
                // The page is in use; it is tried later.
                self.cursor = page + 1;
                return false;
            }
            self.cursor = page + count;
            if self.cursor >= self.one_by_one.end {
                self.one_by_one = 0..0;
            }
            self.begin(slot, Kind::Refill(to), Extent { page, count }, actions);
            return true;
        }
        // Writes in progress may still fail there.
        if self.in_use().all(|slot| slot.kind == Kind::Client(Op::Read)) {
            self.is_behind = false;
            for copy in Copy::BOTH {
                let is_leaving = self.standing[copy.index()] == Standing::Leaving;
                let is_elsewhere = self.standing[copy.other().index()] == Standing::Up
                    && self.pages.behind(copy, copy.other(), 0).is_none();
                if is_leaving && is_elsewhere {
                    actions.push(Action::Drained { copy });
                }
            }
        }
        false
    }

    /// A page cannot be read for a copy that is filled. The others are filled all the same, and this page is
    /// tried again later.
    pub(super) fn cannot_fill(&mut self, id: SlotId, to: Copy, actions: &mut Vec<Action>) {
        let extent = self.slot(id).extent;
        if self.is_there(to.other()) {
            if extent.count == 1 {
                self.skip(to);
            } else {
                let pages = extent.pages();
                self.cursor = self.cursor.min(pages.start);
                self.one_by_one = match self.one_by_one.is_empty() {
                    true => pages,
                    // Several have failed that were in flight together.
                    false => self.one_by_one.start.min(pages.start)..self.one_by_one.end.max(pages.end),
                };
            }
        }
        self.reply(id, Ok(()), actions);
        self.release(id, actions);
    }

    /// A disk that reads nothing any more is not asked for each page, again and again.
    fn skip(&mut self, to: Copy) {
        if self.config.quirk != Some(Quirk::FillsOverAndOver) {
            let skipped = &mut self.skipped[to.index()];
            *skipped += 1;
            self.stalled[to.index()] |= *skipped >= SKIPS;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Event};

    const CONFIG: Config = Config {
        pages: 300,
        slots: 4,
        slot_pages: 4,
        quirk: None,
    };

    /// An engine whose second copy has all pages, and whose first one is there and has none.
    fn behind() -> Engine {
        let mut engine = Engine::new(CONFIG);
        let mut actions = Vec::new();
        let (copy, slot) = (Copy::Second, 0);
        engine.handle(Event::Up { copy, kept: false }, &mut actions);
        for page in (0..CONFIG.pages).step_by(4) {
            let (op, extent) = (Op::Write, Extent { page, count: 4 });
            engine.handle(Event::Request { slot, op, extent }, &mut actions);
            let result = Ok(());
            engine.handle(Event::WriteDone { slot, copy, result }, &mut actions);
        }
        let copy = Copy::First;
        engine.handle(Event::Up { copy, kept: false }, &mut actions);
        engine
    }

    /// Fills with up to `most` slots at a time until nothing is left to do. Returns the number of reads.
    fn fill(engine: &mut Engine, most: SlotId, is_bad: impl Fn(u64) -> bool) -> usize {
        let mut reads = 0;
        for _ in 0..10 * CONFIG.pages {
            let mut actions = Vec::new();
            let used = (0..most)
                .filter(|slot| engine.refill(*slot, &mut actions))
                .count();
            if used == 0 && engine.is_idle() {
                return reads;
            }
            reads += used;
            while let Some(action) = actions.pop() {
                let event = match action {
                    Action::Read { slot, copy, extent } => Event::ReadDone {
                        slot,
                        copy,
                        result: if extent.pages().any(&is_bad) {
                            Err(5)
                        } else {
                            Ok(())
                        },
                    },
                    Action::Write { slot, copy, .. } => Event::WriteDone {
                        slot,
                        copy,
                        result: Ok(()),
                    },
                    _ => continue,
                };
                engine.handle(event, &mut actions);
            }
        }
        panic!("it is filled over and over");
    }

    #[test]
    fn pages_that_cannot_be_read_delay_no_other_page() {
        for most in 1..=CONFIG.slots {
            let mut engine = behind();
            let bad = [5, 7, 8, 100, 101, 102, 103, 250, 299];
            fill(&mut engine, most, |page| bad.contains(&page));
            assert_eq!(engine.counts().second_only, bad.len() as u64, "{most} at a time");
            // They are tried again later, and can be read then.
            engine.handle(Event::Retry, &mut Vec::new());
            fill(&mut engine, most, |_| false);
            assert_eq!(engine.counts().both, CONFIG.pages);
        }
    }

    #[test]
    fn a_copy_that_reads_nothing_is_asked_for_some_pages_and_again_later() {
        let mut engine = behind();
        for _ in 0..10 {
            let reads = fill(&mut engine, 1, |_| true);
            assert!((1..=2 * SKIPS as usize).contains(&reads), "{reads} reads");
            engine.handle(Event::Retry, &mut Vec::new());
        }
        fill(&mut engine, 1, |_| false);
        assert_eq!(engine.counts().both, CONFIG.pages);
    }
}
