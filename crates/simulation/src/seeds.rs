//! Long walks through the world, by seed.
//!
//! Every step that can happen gets a time at which it does: now, and a latency that is hashed from the seed, the step's name and
//! how often it has happened. The earliest one happens. So a fault that is taken out of a walk moves nothing else, and a
//! failing walk can be shrunk by leaving out one fault after the other.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use rustc_hash::FxHasher;

use crate::simulated::{Kind, Quirks, Simulated, Step, What};

/// A walk that is not over so long after that never ends: ten minutes, in microseconds.
const PATIENCE: u64 = 600_000_000;

/// How many faults a walk may have.
const MOST_FAULTS: u64 = 4;

/// A fault of a walk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// Before which step it strikes.
    pub at: usize,
    /// Which one of those that could strike then.
    pub pick: u64,
}

/// How a walk ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End<Violation> {
    /// Well.
    Good {
        /// The instance has moved.
        moved: bool,
        /// How many faults struck.
        faults: u32,
    },
    /// With something that must never happen.
    Violation(Violation),
    /// Not at all.
    Never,
}

/// A walk that ended badly, as short as it could be made.
#[derive(Debug)]
pub struct Story<W: Simulated> {
    /// The seed.
    pub seed: u64,
    /// How it ended.
    pub end: End<W::Violation>,
    /// What happened.
    pub steps: Vec<Step<W::Who>>,
}

impl<W: Simulated> fmt::Display for Story<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.end {
            End::Violation(violation) => writeln!(f, "seed {}: {violation:?}", self.seed)?,
            End::Never => writeln!(f, "seed {}: it never ends", self.seed)?,
            End::Good { .. } => writeln!(f, "seed {}: it ends well", self.seed)?,
        }
        const SHOWN: usize = 60;
        for step in self.steps.iter().take(SHOWN) {
            writeln!(f, "  {step}")?;
        }
        if self.steps.len() > SHOWN {
            writeln!(f, "  … and {} more", self.steps.len() - SHOWN)?;
        }
        Ok(())
    }
}

/// What many walks came to.
#[derive(Debug, Default, Clone, Copy)]
pub struct Tally {
    /// Walks.
    pub walks: u64,
    /// Steps of all walks.
    pub steps: u64,
    /// Faults that struck.
    pub faults: u64,
    /// Walks in which the instance moved.
    pub moved: u64,
}

fn hash(of: impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    of.hash(&mut hasher);
    // Its low bits are weak.
    let mixed = hasher.finish();
    (mixed ^ mixed >> 31).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 11
}

/// The faults of a seed.
pub fn faults<W: Simulated>(seed: u64) -> Vec<Fault> {
    let count = 1 + hash((seed, "faults")) % MOST_FAULTS;
    let mut faults: Vec<_> = (0..count)
        .map(|number| Fault {
            at: (hash((seed, "at", number)) % W::FAULTS_WITHIN) as usize,
            pick: hash((seed, "pick", number)),
        })
        .collect();
    faults.sort_unstable_by_key(|fault| fault.at);
    faults
}

/// How long a step takes from when it can happen, in microseconds; `None` if it does not happen this time.
fn latency<Who: Hash>(seed: u64, step: &Step<Who>, times: u32, is_healed: bool) -> Option<u64> {
    let chance = hash((seed, step.what, &step.who, times));
    match step.kind {
        Kind::Ordinary => Some(100 + chance % 10_000),
        // From a moment to ten seconds.
        Kind::Slow => Some(1_000 << (chance % 14)),
        Kind::Timer(timer) => Some(timer.duration().as_micros() as u64 + chance % 1_000),
        Kind::Chance if is_healed => None,
        Kind::Chance => chance.is_multiple_of(16).then_some(chance / 16 % 10_000),
        Kind::Fault => None,
    }
}

/// What may happen at a time of its own.
struct Due<Who> {
    who: Who,
    what: &'static str,
    /// `None` if chance leaves it out.
    at: Option<u64>,
    /// It can happen now.
    is_there: bool,
}

/// All that may happen. They are few: to look through them is faster than any map.
struct AllDue<Who> {
    set: Vec<Due<Who>>,
    /// How often each step could happen.
    times: Vec<(Who, &'static str, u32)>,
}

impl<Who: Copy + Eq> AllDue<Who> {
    /// The step that happens first, and when. `new` says when a step happens that could not happen before.
    fn earliest<W>(
        &mut self,
        next: &[(Step<Who>, W)],
        mut new: impl FnMut(&Step<Who>, u32) -> Option<u64>,
    ) -> Option<(u64, usize)> {
        self.set.iter_mut().for_each(|due| due.is_there = false);
        let mut earliest: Option<(u64, usize)> = None;
        for (index, (step, _)) in next.iter().enumerate() {
            if step.is_fault() {
                continue;
            }
            let (who, what) = (step.who, step.what);
            let known = self.set.iter_mut().find(|due| (due.who, due.what) == (who, what));
            let at = match known {
                Some(due) => {
                    due.is_there = true;
                    due.at
                }
                None => {
                    let at = new(step, self.again(who, what));
                    self.set.push(Due {
                        who,
                        what,
                        at,
                        is_there: true,
                    });
                    at
                }
            };
            if let Some(at) = at
                && earliest.is_none_or(|(first, _)| at < first)
            {
                earliest = Some((at, index));
            }
        }
        // What cannot happen any more gets a new time when it can again.
        self.set.retain(|due| due.is_there);
        earliest
    }

    fn again(&mut self, who: Who, what: &'static str) -> u32 {
        let known = self
            .times
            .iter_mut()
            .find(|known| (known.0, known.1) == (who, what));
        match known {
            Some((_, _, times)) => {
                *times += 1;
                *times
            }
            None => {
                self.times.push((who, what, 1));
                1
            }
        }
    }
}

/// Walks; gives each step to `told`.
pub fn walk<W: Simulated>(
    seed: u64,
    quirks: Quirks<W::Quirk>,
    faults: &[Fault],
    mut told: impl FnMut(Step<W::Who>),
) -> (End<W::Violation>, u64) {
    let mut world = W::of_seed(seed);
    let mut due = AllDue {
        set: Vec::new(),
        times: Vec::new(),
    };
    let (mut now, mut struck) = (0, 0);
    let mut faults = faults.iter().peekable();
    let mut next = Vec::new();
    let (mut count, mut healed_at) = (0, None);
    loop {
        if faults.peek().is_none() && world.is_good_end() {
            let end = End::Good {
                moved: world.has_moved(),
                faults: struck,
            };
            return (end, count as u64);
        }
        if count > W::HEALED_AFTER {
            healed_at.get_or_insert(now);
        }
        if healed_at.is_some_and(|at| now > at + PATIENCE) {
            return (End::Never, count as u64);
        }
        count += 1;
        let fault = faults.next_if(|fault| fault.at < count);
        let what = match fault {
            Some(_) => What::Both,
            None => What::Goes,
        };
        world.steps(quirks, what, &mut next);
        let strikes = fault.and_then(|fault| {
            let breaks = next.iter().filter(|(step, _)| step.is_fault()).count() as u64;
            let pick = fault.pick.checked_rem(breaks)? as usize;
            let breaks = next.iter().enumerate().filter(|(_, (step, _))| step.is_fault());
            breaks.map(|(index, _)| index).nth(pick)
        });
        let chosen = match strikes {
            Some(index) => {
                struck += 1;
                Some(index)
            }
            None => {
                let earliest = due.earliest(&next, |step, times| {
                    let latency = latency(seed, step, times, healed_at.is_some());
                    latency.map(|latency| now + latency)
                });
                earliest.map(|(at, index)| {
                    now = at;
                    index
                })
            }
        };
        let Some(index) = chosen else {
            // Nothing is left to happen but what chance has left out, or a fault that is still to come.
            if healed_at.is_some() && faults.peek().is_none() {
                return (End::Never, count as u64);
            }
            due.set.retain(|due| due.at.is_some());
            continue;
        };
        let (step, after) = next.swap_remove(index);
        due.set.retain(|due| (due.who, due.what) != (step.who, step.what));
        told(step);
        if let Some(violation) = world.violation(&after) {
            return (End::Violation(violation), count as u64);
        }
        world = after;
    }
}

/// Walks by these seeds until one ends badly, which is then shrunk.
pub fn run<W: Simulated>(seeds: Range<u64>, quirks: Quirks<W::Quirk>) -> (Tally, Option<Story<W>>) {
    let mut tally = Tally::default();
    for seed in seeds {
        let faults = faults::<W>(seed);
        let (end, steps) = walk::<W>(seed, quirks, &faults, |_| {});
        tally.walks += 1;
        tally.steps += steps;
        match end {
            End::Good { moved, faults } => {
                tally.faults += u64::from(faults);
                tally.moved += u64::from(moved);
            }
            _ => return (tally, Some(shrink(seed, quirks, faults))),
        }
    }
    (tally, None)
}

/// Leaves out every fault without which the walk still ends badly.
pub fn shrink<W: Simulated>(seed: u64, quirks: Quirks<W::Quirk>, mut faults: Vec<Fault>) -> Story<W> {
    let bad = |faults: &[Fault]| !matches!(walk::<W>(seed, quirks, faults, |_| {}).0, End::Good { .. });
    let mut index = 0;
    while index < faults.len() {
        let mut fewer = faults.clone();
        fewer.remove(index);
        if bad(&fewer) {
            faults = fewer;
        } else {
            index += 1;
        }
    }
    let mut steps = Vec::new();
    let (end, _) = walk::<W>(seed, quirks, &faults, |step| steps.push(step));
    Story { seed, end, steps }
}
