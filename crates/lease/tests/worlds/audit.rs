//! A look at a world in which no slot is in use: each page is read, from both copies and from each of them alone; then
//! faults end, and the same again.

use verbatim_lease::{Copy, Event, Extent, Op};

use super::steps::{End, Memory};
use super::{Backup, PAGES, Rules, World};

/// More than enough to fill all pages, one by one, with a retry in between.
const ROUNDS: u64 = 16 * PAGES;

impl World {
    /// Finds what is wrong.
    pub(super) fn audit(&self, rules: &Rules<'_>) -> Result<(), String> {
        if !self.is_at_rest() {
            return Ok(());
        }
        self.look("then", rules)?;
        let mut end = self.clone();
        end.settle(rules).map_err(|wrong| format!("at last: {wrong}"))?;
        end.look("at last", rules)
    }

    fn look(&self, when: &str, rules: &Rules<'_>) -> Result<(), String> {
        let said = |of: &str, wrong: String| format!("{when}, {of}: {wrong}");
        let read = |mut world: Self| world.read_all(rules);
        read(self.clone()).map_err(|wrong| said("of both", wrong))?;
        for copy in Copy::BOTH {
            // A file is not lost.
            if rules.is_server(copy) && self.copies.iter().all(|store| store.is_up) {
                let mut alone = self.clone();
                let gone = alone.down(copy, 0, rules).and_then(|()| alone.read_all(rules));
                gone.map_err(|wrong| said(&format!("without {copy:?}"), wrong))?;
            }
        }
        Ok(())
    }

    fn read_all(&mut self, rules: &Rules<'_>) -> Result<(), String> {
        for page in 0..PAGES {
            self.request(Op::Read, Extent { page, count: 1 }, rules)?;
            self.finish(rules)?;
        }
        match self.is_at_rest() {
            true => Ok(()),
            false => Err("a request has no answer".to_owned()),
        }
    }

    fn finish(&mut self, rules: &Rules<'_>) -> Result<(), String> {
        for copy in Copy::BOTH {
            while !self.copies[copy.index()].work.is_empty() {
                self.ended(copy, 0, End::Usual, rules)?;
            }
        }
        match self.has_work() {
            true => self.finish(rules),
            false => Ok(()),
        }
    }

    /// Faults end, and all that is behind is filled.
    fn settle(&mut self, rules: &Rules<'_>) -> Result<(), String> {
        self.is_broken = false;
        let mut rounds = 0;
        // The first time without the retry, which comes seconds later: nothing is tried over and over.
        for retries in 0..3 {
            if retries > 0 {
                self.event(Event::Retry, rules)?;
            }
            loop {
                self.all_up(rules)?;
                self.finish(rules)?;
                if !self.refill(rules)? && self.is_at_rest() && !self.engine.is_behind() {
                    break;
                }
                rounds += 1;
                if rounds > ROUNDS {
                    return Err("it is filled over and over".to_owned());
                }
            }
        }
        self.all_up(rules)?;
        self.has_all(rules)
    }

    /// Servers are back, and those that may leave have left.
    fn all_up(&mut self, rules: &Rules<'_>) -> Result<(), String> {
        for copy in Copy::BOTH {
            if self.copies[copy.index()].may_leave {
                self.left(copy, rules)?;
            }
            let store = &self.copies[copy.index()];
            if rules.is_server(copy) && !store.is_up {
                let memory = match store.has_left {
                    true => Memory::New,
                    false => Memory::Same,
                };
                self.up(copy, memory, rules)?;
            }
        }
        Ok(())
    }

    /// Each copy has every page that the other one has and can read, and nothing is left to leave.
    fn has_all(&self, rules: &Rules<'_>) -> Result<(), String> {
        if rules.backup == Backup::None {
            return Ok(());
        }
        let counts = self.engine.counts();
        let bad = self.copies[1].bad.iter().filter(|is_bad| **is_bad).count() as u64;
        if counts.second_only > bad || counts.first_only > 0 {
            return Err(format!("pages are at one copy alone: {counts:?}, {bad} bad"));
        }
        // Of two that are about to leave, each is the other's only place to go.
        let leaving = self
            .copies
            .iter()
            .filter(|store| store.leaves && !store.may_leave);
        let leaving = leaving.count();
        match bad == 0 && leaving == 1 {
            true => Err("a copy that all pages have left may not leave".to_owned()),
            false => Ok(()),
        }
    }
}
