//! All worlds, or one way through them by seed.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::{Rules, Step, World};

/// Explores all worlds. Returns their number, or the violation with the way to it.
pub fn explore(rules: &Rules, most: usize) -> Result<usize, String> {
    let hasher = RandomState::new();
    let first = World::new(rules);
    // Equal worlds are explored once.
    let mut seen = HashSet::from([hasher.hash_one(&first)]);
    let mut left: Vec<(World, Option<usize>)> = vec![(first, None)];
    let mut ways: Vec<(Option<usize>, Step)> = Vec::new();
    while let Some((world, way)) = left.pop() {
        let found = match &world.wrong {
            Some(wrong) => Err(wrong.clone()),
            None => world.way_out(rules),
        };
        if let Err(wrong) = found {
            return Err(format!("{wrong}\n  {}", told(&ways, way)));
        }
        if world.is_lost || world.has_lied {
            continue;
        }
        if seen.len() >= most {
            return Ok(seen.len());
        }
        for step in world.steps(rules) {
            let mut next = world.clone();
            next.go(step, rules);
            if next != world && seen.insert(hasher.hash_one(&next)) {
                ways.push((way, step));
                left.push((next, Some(ways.len() - 1)));
            }
        }
    }
    Ok(seen.len())
}

fn told(ways: &[(Option<usize>, Step)], mut way: Option<usize>) -> String {
    let mut steps = Vec::new();
    while let Some(at) = way {
        let (before, step) = &ways[at];
        steps.push(format!("{step:?}"));
        way = *before;
    }
    steps.reverse();
    steps.join("\n  ")
}

/// Walks one way. Returns its number of steps, or the violation with the way to it.
pub fn stroll(seed: u64, rules: &Rules, longest: usize) -> Result<usize, String> {
    let mut random = SmallRng::seed_from_u64(seed);
    let mut world = World::new(rules);
    let mut way = Vec::new();
    let rarity = [2, 6, 20][seed as usize % 3];
    for _ in 0..longest {
        let all = world.steps(rules);
        let (faults, steps): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|step| matches!(step, Step::Fault(_) | Step::Word(_)));
        let is_fault = !faults.is_empty() && (steps.is_empty() || random.random_ratio(1, rarity));
        let from = if is_fault { &faults } else { &steps };
        if from.is_empty() {
            break;
        }
        let step = from[random.random_range(0..from.len())];
        way.push(step);
        world.go(step, rules);
        let is_over = world.is_lost || world.has_lied;
        let found = match &world.wrong {
            Some(wrong) => Err(wrong.clone()),
            // The search for the way out takes longer than the way.
            None if is_over || random.random_ratio(1, 8) => world.way_out(rules),
            None => Ok(()),
        };
        if let Err(wrong) = found {
            return Err(format!("seed {seed}: {wrong}\n  {way:?}"));
        }
        if is_over {
            break;
        }
    }
    world
        .way_out(rules)
        .map_err(|wrong| format!("seed {seed}: {wrong}\n  {way:?}"))?;
    Ok(way.len())
}
