//! Every world that can be reached with a limited number of faults.

use std::collections::VecDeque;

use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;

use crate::check::{self, Violation};
use crate::world::{Quirks, Step, World};

/// What was found.
#[derive(Debug)]
pub enum Found {
    /// Nothing bad, and each world can still end well without another fault.
    Safe,
    /// This must not happen; the shortest way to it.
    Violation(Violation, Vec<Step>),
    /// From here no end is good; the shortest way to the first such world.
    NeverEnds(Vec<Step>, Box<World>),
}

/// A finished search.
#[derive(Debug)]
pub struct Report {
    /// How many worlds there are.
    pub worlds: usize,
    /// How many steps between them.
    pub steps: usize,
    /// What was found.
    pub found: Found,
}

/// Looks at every world with at most so many faults: first at all that are reached without any, then with one, and so on.
/// A world that was met before is not looked at again: with fewer faults it had at least as many ways on.
pub fn explore(quirks: Quirks, most_faults: u8) -> Report {
    // Worlds keep their numbers: the order in which they were met.
    let mut worlds: IndexSet<World, FxBuildHasher> = IndexSet::default();
    worlds.insert(World::new());
    let mut came_by: Vec<(u32, Option<Step>)> = vec![(0, None)];
    let mut backwards: Vec<(u32, u32)> = Vec::new();
    let mut queue = VecDeque::from([0u32]);
    let (mut next, mut steps) = (Vec::new(), 0);
    for faults in 0..=most_faults {
        let mut behind_a_fault: Vec<(u32, Step, World)> = Vec::new();
        while let Some(here) = queue.pop_front() {
            let world = worlds[here as usize];
            world.steps(quirks, faults < most_faults, &mut next);
            steps += next.len();
            for (step, after) in next.drain(..) {
                if let Some(violation) = check::violation(&world, &after) {
                    let mut way = way_to(&came_by, here);
                    way.push(step);
                    return Report {
                        worlds: worlds.len(),
                        steps,
                        found: Found::Violation(violation, way),
                    };
                }
                if step.is_fault() {
                    behind_a_fault.push((here, step, after));
                    continue;
                }
                let (there, is_new) = worlds.insert_full(after);
                if is_new {
                    came_by.push((here, Some(step)));
                    queue.push_back(there as u32);
                }
                backwards.push((there as u32, here));
            }
        }
        for (here, step, after) in behind_a_fault {
            let (there, is_new) = worlds.insert_full(after);
            if is_new {
                came_by.push((here, Some(step)));
                queue.push_back(there as u32);
            }
        }
    }
    let found = match first_without_good_end(&worlds, backwards) {
        Some(lost) => Found::NeverEnds(way_to(&came_by, lost), Box::new(worlds[lost as usize])),
        None => Found::Safe,
    };
    Report {
        worlds: worlds.len(),
        steps,
        found,
    }
}

fn way_to(came_by: &[(u32, Option<Step>)], mut to: u32) -> Vec<Step> {
    let mut way = Vec::new();
    while let (from, Some(step)) = came_by[to as usize] {
        way.push(step);
        to = from;
    }
    way.reverse();
    way
}

/// The first world from which no good end is reached, by walking backwards from all good ends.
fn first_without_good_end(
    worlds: &IndexSet<World, FxBuildHasher>,
    mut backwards: Vec<(u32, u32)>,
) -> Option<u32> {
    backwards.sort_unstable();
    let mut ends_well: Vec<bool> = worlds.iter().map(check::is_good_end).collect();
    let mut queue: Vec<u32> = (0..worlds.len() as u32)
        .filter(|world| ends_well[*world as usize])
        .collect();
    while let Some(world) = queue.pop() {
        let first = backwards.partition_point(|(to, _)| *to < world);
        for (_, from) in backwards[first..].iter().take_while(|(to, _)| *to == world) {
            if !std::mem::replace(&mut ends_well[*from as usize], true) {
                queue.push(*from);
            }
        }
    }
    (0..worlds.len() as u32).find(|world| !ends_well[*world as usize])
}
