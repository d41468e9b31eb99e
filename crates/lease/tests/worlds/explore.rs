//! All worlds that a world may become.

use std::collections::HashSet;
use std::fmt;
use std::hash::{BuildHasher, RandomState};

use super::steps::Step;
use super::{Rules, World};

/// Numbers of an exploration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Explored {
    /// Different worlds.
    pub worlds: u64,
    /// Ways from a world to the next one.
    pub steps: u64,
}

impl Explored {
    pub fn add(&mut self, other: Self) {
        self.worlds += other.worlds;
        self.steps += other.steps;
    }
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} worlds, {} steps", self.worlds, self.steps)
    }
}

/// Explores all worlds. Returns their number, or the violation with the way to it.
pub fn explore(rules: &Rules<'_>) -> Result<Explored, String> {
    let hasher = RandomState::new();
    let first = World::new(rules)?;
    let mut seen = HashSet::from([hasher.hash_one(&first)]);
    let mut left: Vec<(World, Option<u32>)> = vec![(first, None)];
    let mut ways: Vec<(Option<u32>, Step)> = Vec::new();
    let mut steps = 0;
    while let Some((world, way)) = left.pop() {
        world
            .audit(rules)
            .map_err(|wrong| format!("{wrong}\n  {}", told(&ways, way)))?;
        for step in world.steps(rules) {
            steps += 1;
            let mut next = world.clone();
            next.go(step, rules)
                .map_err(|wrong| format!("{wrong}\n  {}\n  {step:?}", told(&ways, way)))?;
            if seen.insert(hasher.hash_one(&next)) {
                ways.push((way, step));
                left.push((next, Some(ways.len() as u32 - 1)));
            }
        }
    }
    let worlds = seen.len() as u64;
    Ok(Explored { worlds, steps })
}

fn told(ways: &[(Option<u32>, Step)], mut way: Option<u32>) -> String {
    let mut steps = Vec::new();
    while let Some(at) = way {
        let (before, step) = &ways[at as usize];
        steps.push(format!("{step:?}"));
        way = *before;
    }
    steps.reverse();
    steps.join("\n  ")
}
