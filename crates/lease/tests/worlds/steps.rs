//! What may happen next.

use verbatim_lease::Copy;

use super::{Backup, Outside, PAGES, Request, Rules, World};

/// A way in which I/O ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// As the copy can do it now.
    Usual,
    /// With an error, this once. Of a write nothing was written.
    Fails,
    /// With an error, although all was written.
    FailsLate,
    /// With an error, and the pages cannot be read until they are written again.
    Spoils,
}

/// Memory with which a server is back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Same,
    New,
    /// Older than it was, although it is called the same.
    Old,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// The client makes its next request.
    Request(Request),
    /// This request in flight at the copy ends.
    Ends(Copy, u8, End),
    /// A copy that is behind is filled a little further.
    Refill,
    /// The time has come to try again what has failed.
    Retry,
    Up(Copy, Memory),
    /// A copy that was about to leave stays.
    Stays(Copy),
    /// A copy leaves, some time after it was told that it may.
    Leaves(Copy),
    /// The file's disk works again, or has room again.
    Repaired,
    /// The disk goes to another host. Servers that have lost their memory meanwhile.
    Moves([bool; 2]),
    Fault(Fault),
    /// Writes from before the copy was given up land although it is back.
    Lands(Copy),
    /// A server's machine is saved, to be restored later.
    Saved(Copy),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// A server dies, hangs or is cut off; its writes in flight end in this way.
    Down(Copy, u16),
    Leaving(Copy),
    /// From now on the file's disk takes nothing.
    Breaks,
    /// A page of the file cannot be read until it is written again.
    Rots(u64),
    /// The disk goes to another host, and no server gives it to that host.
    Nobody,
    /// A server has lost its memory between the hand-over and the decision.
    LostBefore(Copy),
    /// The page cache drops what it could not write.
    CacheDrops,
}

impl Step {
    /// Number of faults that the step takes.
    pub fn faults(self) -> u8 {
        match self {
            Self::Fault(_) => 1,
            Self::Ends(_, _, end) => u8::from(end != End::Usual),
            Self::Moves(lost) => lost.into_iter().map(u8::from).sum(),
            _ => 0,
        }
    }
}

impl World {
    pub fn steps(&self, rules: &Rules<'_>) -> Vec<Step> {
        let mut steps = Vec::with_capacity(16);
        let has_slot = self.free_slot().is_some();
        if let (true, Some(requests)) = (has_slot, rules.script.get(usize::from(self.at))) {
            steps.extend(requests.iter().copied().map(Step::Request));
        }
        for copy in Copy::BOTH {
            for at in 0..self.copies[copy.index()].work.len() {
                self.ends(copy, at, rules, &mut steps);
            }
        }
        if has_slot && self.engine.is_behind() {
            steps.push(Step::Refill);
        }
        if rules.backup.may_fail() {
            steps.push(Step::Retry);
            match self.is_broken {
                true => steps.push(Step::Repaired),
                false => steps.push(Step::Fault(Fault::Breaks)),
            }
        }
        if rules.backup == Backup::BadFile {
            steps.extend((0..PAGES).map(|page| Step::Fault(Fault::Rots(page))));
        }
        for copy in Copy::BOTH {
            if rules.is_server(copy) {
                self.of_server(copy, rules, &mut steps);
            }
        }
        if rules.outside == Some(Outside::BelievesTheCache) && !self.copies[1].cached.is_empty() {
            steps.push(Step::Fault(Fault::CacheDrops));
        }
        self.moves(rules, &mut steps);
        steps.retain(|step| step.faults() <= self.faults);
        steps
    }

    fn ends(&self, copy: Copy, at: usize, rules: &Rules<'_>, steps: &mut Vec<Step>) {
        let end = |end| Step::Ends(copy, at as u8, end);
        steps.push(end(End::Usual));
        if copy == Copy::First || self.is_broken {
            return;
        }
        let is_write = self.copies[copy.index()].work[at].data.is_some();
        match (rules.backup, is_write) {
            (Backup::BadFile, true) => {
                steps.extend([end(End::Fails), end(End::FailsLate), end(End::Spoils)]);
            }
            (Backup::BadFile, false) => steps.push(end(End::Fails)),
            (Backup::FullFile, true) => steps.push(end(End::Fails)),
            _ => {}
        }
    }

    fn of_server(&self, copy: Copy, rules: &Rules<'_>, steps: &mut Vec<Step>) {
        let store = &self.copies[copy.index()];
        if store.may_leave {
            steps.push(Step::Leaves(copy));
        }
        if store.is_up {
            steps.extend((0..store.ends()).map(|end| Step::Fault(Fault::Down(copy, end))));
            match store.leaves {
                true => steps.push(Step::Stays(copy)),
                false => steps.push(Step::Fault(Fault::Leaving(copy))),
            }
        } else {
            steps.push(Step::Up(copy, Memory::New));
            if !store.has_left {
                steps.push(Step::Up(copy, Memory::Same));
                if store.old.is_some() {
                    steps.push(Step::Up(copy, Memory::Old));
                }
            }
        }
        if rules.outside == Some(Outside::BelievesOldMemory) && store.is_up && store.old.is_none() {
            steps.push(Step::Saved(copy));
        }
        if !store.late.is_empty() {
            steps.push(Step::Lands(copy));
        }
    }

    fn moves(&self, rules: &Rules<'_>, steps: &mut Vec<Step>) {
        let goes = self.goes(rules);
        if self.moves == 0 || !goes[0] || self.engine.hand_over(goes).is_none() {
            return;
        }
        steps.push(Step::Moves([false; 2]));
        steps.push(Step::Moves([true, false]));
        if goes[1] {
            steps.extend([Step::Moves([false, true]), Step::Moves([true; 2])]);
        }
        steps.push(Step::Fault(Fault::Nobody));
        if rules.outside == Some(Outside::AdoptsLost) {
            let goes = Copy::BOTH.into_iter().filter(|copy| goes[copy.index()]);
            steps.extend(goes.map(|copy| Step::Fault(Fault::LostBefore(copy))));
        }
    }
}
