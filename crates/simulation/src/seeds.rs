//! Long walks through the world, by seed.
//!
//! Every step that can happen gets a time at which it does: now, and a latency that is hashed from the seed, the step's name and
//! how often it has happened. The earliest one happens. So a fault that is taken out of a walk moves nothing else, and a
//! failing walk can be shrunk by leaving out one fault after the other.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHasher;

use crate::check::{self, Violation};
use crate::world::{Kind, Quirks, Step, World};

/// After so many steps nothing breaks any more, and nothing is lost.
const HEALED_AFTER: usize = 120;

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
pub enum End {
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
pub struct Story {
    /// The seed.
    pub seed: u64,
    /// How it ended.
    pub end: End,
    /// What happened.
    pub steps: Vec<Step>,
}

impl fmt::Display for Story {
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
pub fn faults(seed: u64) -> Vec<Fault> {
    let count = 1 + hash((seed, "faults")) % MOST_FAULTS;
    let mut faults: Vec<_> = (0..count)
        .map(|number| Fault {
            at: (hash((seed, "at", number)) % 60) as usize,
            pick: hash((seed, "pick", number)),
        })
        .collect();
    faults.sort_unstable_by_key(|fault| fault.at);
    faults
}

/// How long a step takes from when it can happen, in microseconds; `None` if it does not happen this time.
fn latency(seed: u64, step: &Step, times: u32, is_healed: bool) -> Option<u64> {
    let chance = hash((seed, step.what, step.who as u8, times));
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

/// Walks; gives each step to `told`.
pub fn walk(seed: u64, quirks: Quirks, faults: &[Fault], mut told: impl FnMut(Step)) -> (End, u64) {
    let mut world = World::new();
    let mut due: BTreeMap<(u8, &'static str), Option<u64>> = BTreeMap::new();
    let mut times: BTreeMap<(u8, &'static str), u32> = BTreeMap::new();
    let (mut now, mut struck) = (0, 0);
    let mut faults = faults.iter().peekable();
    let mut next = Vec::new();
    let (mut count, mut healed_at) = (0, None);
    loop {
        if check::is_good_end(&world) && faults.peek().is_none() {
            let moved = world.ran_there;
            let end = End::Good {
                moved,
                faults: struck,
            };
            return (end, count as u64);
        }
        if count > HEALED_AFTER {
            healed_at.get_or_insert(now);
        }
        if healed_at.is_some_and(|at| now > at + PATIENCE) {
            return (End::Never, count as u64);
        }
        count += 1;
        let fault = faults.next_if(|fault| fault.at < count);
        world.steps(quirks, fault.is_some(), &mut next);
        let (ordinary, breaks): (Vec<_>, Vec<_>) = next.iter().partition(|(step, _)| !step.is_fault());
        let chosen = match fault {
            Some(fault) if !breaks.is_empty() => {
                struck += 1;
                Some(breaks[(fault.pick % breaks.len() as u64) as usize])
            }
            _ => {
                // What cannot happen any more gets a new time when it can again.
                due.retain(|key, _| {
                    ordinary
                        .iter()
                        .any(|(step, _)| (step.who as u8, step.what) == *key)
                });
                for (step, _) in &ordinary {
                    let key = (step.who as u8, step.what);
                    due.entry(key).or_insert_with(|| {
                        let times = times.entry(key).or_default();
                        *times += 1;
                        latency(seed, step, *times, healed_at.is_some()).map(|latency| now + latency)
                    });
                }
                let at = |step: &Step| due.get(&(step.who as u8, step.what)).copied().flatten();
                let earliest = ordinary
                    .iter()
                    .filter_map(|found| Some((at(&found.0)?, found)))
                    .min_by_key(|(at, _)| *at);
                earliest.map(|(at, found)| {
                    now = at;
                    *found
                })
            }
        };
        let Some((step, after)) = chosen else {
            // Nothing is left to happen but what chance has left out, or a fault that is still to come.
            if healed_at.is_some() && faults.peek().is_none() {
                return (End::Never, count as u64);
            }
            due.retain(|_, at| at.is_some());
            continue;
        };
        due.remove(&(step.who as u8, step.what));
        told(step);
        if let Some(violation) = check::violation(&world, &after) {
            return (End::Violation(violation), count as u64);
        }
        world = after;
    }
}

/// Walks by these seeds until one ends badly, which is then shrunk.
pub fn run(seeds: std::ops::Range<u64>, quirks: Quirks) -> (Tally, Option<Story>) {
    let mut tally = Tally::default();
    for seed in seeds {
        let faults = faults(seed);
        let (end, steps) = walk(seed, quirks, &faults, |_| {});
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
pub fn shrink(seed: u64, quirks: Quirks, mut faults: Vec<Fault>) -> Story {
    let bad = |faults: &[Fault]| !matches!(walk(seed, quirks, faults, |_| {}).0, End::Good { .. });
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
    let (end, _) = walk(seed, quirks, &faults, |step| steps.push(step));
    Story { seed, end, steps }
}
