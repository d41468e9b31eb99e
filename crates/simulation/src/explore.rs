//! Every world that can be reached with a limited number of faults.
//!
//! What is found is exact: no world is taken for another, and none is left out.
//!
//! - A world of the decision is kept in 64 bits, which stand for it alone ([`Worlds`]).
//! - The search goes by the number of faults: first come all worlds that are reached without any, then those with one, and so
//!   on. A world that was met before is not looked at again: with fewer faults it had at least as many ways on.
//! - Steps back are not kept. Whether a world can end well is found by going on from it: each world keeps the step that
//!   leads to an end most likely, and whoever follows these steps mostly comes to a world that is known to end well,
//!   and so do all worlds on the way. Only from where these steps lead in a circle, all steps are tried.

mod ends;
mod numbers;
mod packed;

use std::hash::Hash;

use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;

use crate::simulated::{Kind, Quirks, Simulated, Step, What};

use ends::Ends;
pub use packed::Worlds;

/// A set of worlds, each with a number: the order in which they were met.
pub trait Known<W>: Default {
    /// How many there are.
    fn count(&self) -> usize;

    /// The world of that number.
    fn get(&self, number: u32) -> W;

    /// The numbers of worlds that come after another one. Those that were not met before get the next ones.
    fn insert<Who>(&mut self, before: Option<(u32, &W)>, worlds: &[(Step<Who>, W)], numbers: &mut Vec<u32>);
}

/// Worlds as they are.
#[derive(Debug)]
pub struct Plain<W>(IndexSet<W, FxBuildHasher>);

impl<W> Default for Plain<W> {
    fn default() -> Self {
        Self(IndexSet::default())
    }
}

impl<W: Clone + Eq + Hash> Known<W> for Plain<W> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn get(&self, number: u32) -> W {
        self.0[number as usize].clone()
    }

    fn insert<Who>(&mut self, _: Option<(u32, &W)>, worlds: &[(Step<Who>, W)], numbers: &mut Vec<u32>) {
        numbers.clear();
        numbers.extend(worlds.iter().map(|(_, world)| match self.0.get_index_of(world) {
            Some(number) => number as u32,
            None => self.0.insert_full(world.clone()).0 as u32,
        }));
    }
}

/// What was found.
#[derive(Debug)]
pub enum Found<W: Simulated> {
    /// Nothing bad, and each world can still end well without another fault.
    Safe,
    /// This must not happen; a way to it with the fewest faults.
    Violation(W::Violation, Vec<Step<W::Who>>),
    /// From here no end is good; the way to the first such world.
    NeverEnds(Vec<Step<W::Who>>, Box<W>),
}

/// A finished search.
#[derive(Debug)]
pub struct Report<W: Simulated> {
    /// How many worlds there are.
    pub worlds: usize,
    /// How many steps between them.
    pub steps: usize,
    /// What was found.
    pub found: Found<W>,
}

/// The worlds that were met, and how.
struct Search<W: Simulated> {
    quirks: Quirks<W::Quirk>,
    first: W,
    worlds: W::Known,
    /// From which world each was first reached.
    came_from: Vec<u32>,
    ends: Ends,
    steps: usize,
    /// Room for the steps of one world, and for the numbers of the worlds that they lead to.
    next: Vec<(Step<W::Who>, W)>,
    numbers: Vec<u32>,
}

/// Looks at every world with at most so many faults that is reached from `first`.
pub fn explore<W: Simulated>(first: W, quirks: Quirks<W::Quirk>, most_faults: u8) -> Report<W> {
    let mut search = Search {
        quirks,
        first,
        worlds: W::Known::default(),
        came_from: Vec::new(),
        ends: Ends::default(),
        steps: 0,
        next: Vec::new(),
        numbers: Vec::new(),
    };
    let found = search
        .all(most_faults)
        .unwrap_or_else(|| search.first_that_never_ends());
    Report {
        worlds: search.worlds.count(),
        steps: search.steps,
        found,
    }
}

impl<W: Simulated> Search<W> {
    fn all(&mut self, most_faults: u8) -> Option<Found<W>> {
        let begins = Step {
            who: (),
            what: "begins",
            kind: Kind::Ordinary,
        };
        self.worlds
            .insert(None, &[(begins, self.first.clone())], &mut self.numbers);
        self.came_from.push(0);
        self.ends.push(self.first.is_good_end());
        let (mut first, mut here) = (0, 0);
        for faults in 0..=most_faults {
            while here < self.worlds.count() {
                if let Some(found) = self.expand(here as u32, What::Goes) {
                    return Some(found);
                }
                here += 1;
            }
            if faults < most_faults {
                for here in first..here {
                    if let Some(found) = self.expand(here as u32, What::Breaks) {
                        return Some(found);
                    }
                }
            }
            first = here;
        }
        None
    }

    /// Goes on from a world by all of its steps, or all of its faults.
    fn expand(&mut self, here: u32, what: What) -> Option<Found<W>> {
        let world = self.worlds.get(here);
        let mut next = std::mem::take(&mut self.next);
        world.steps(self.quirks, what, &mut next);
        self.steps += next.len();
        for (step, after) in &next {
            if let Some(violation) = world.violation(after) {
                let mut way = self.way_to(here);
                way.push(*step);
                return Some(Found::Violation(violation, way));
            }
        }
        self.worlds.insert(Some((here, &world)), &next, &mut self.numbers);
        let mut likely: Option<(Kind, u32)> = None;
        for ((step, after), there) in next.iter().zip(&self.numbers) {
            if *there as usize == self.came_from.len() {
                self.came_from.push(here);
                self.ends.push(after.is_good_end());
            }
            if *there != here && likely.is_none_or(|(kind, _)| step.kind < kind) {
                likely = Some((step.kind, *there));
            }
        }
        self.next = next;
        if let (What::Goes, Some((_, there))) = (what, likely) {
            self.ends.leads_to(here, there);
        }
        None
    }

    /// The steps from the beginning to a world.
    fn way_to(&mut self, mut to: u32) -> Vec<Step<W::Who>> {
        let mut way = Vec::new();
        while to != 0 {
            let from = self.came_from[to as usize];
            let after = self.worlds.get(to);
            self.worlds
                .get(from)
                .steps(self.quirks, What::Both, &mut self.next);
            let step = self.next.iter().find(|(_, world)| *world == after);
            way.push(step.expect("it was reached from there").0);
            to = from;
        }
        way.reverse();
        way
    }

    fn first_that_never_ends(&mut self) -> Found<W> {
        let (worlds, quirks, next) = (&mut self.worlds, self.quirks, &mut self.next);
        let lost = self.ends.first_that_never_ends(|here, found| {
            let world = worlds.get(here);
            world.steps(quirks, What::Goes, next);
            next.sort_by_key(|(step, _)| step.kind);
            worlds.insert(Some((here, &world)), next, found);
        });
        match lost {
            Some(lost) => Found::NeverEnds(self.way_to(lost), Box::new(self.worlds.get(lost))),
            None => Found::Safe,
        }
    }
}
