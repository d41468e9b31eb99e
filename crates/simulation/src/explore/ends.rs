//! Which worlds can end well.

/// What is known of each world, by its number.
#[derive(Default)]
pub struct Ends {
    ends_well: Vec<bool>,
    /// The world that comes next most likely; its own number if it was not looked at yet, or nothing comes next.
    next: Vec<u32>,
}

impl Ends {
    /// Another world; `is_end`: it is a good end itself.
    pub fn push(&mut self, is_end: bool) {
        self.next.push(self.next.len() as u32);
        self.ends_well.push(is_end);
    }

    /// `there` comes after `here`, most likely.
    pub fn leads_to(&mut self, here: u32, there: u32) {
        self.next[here as usize] = there;
    }

    /// The first world from which no good end is reached. `steps` lists what comes after a world.
    pub fn first_that_never_ends(&mut self, mut steps: impl FnMut(u32, &mut Vec<u32>)) -> Option<u32> {
        let mut way = Vec::new();
        for world in 0..self.next.len() as u32 {
            way.clear();
            if !self.follow(world, &mut way) && !self.search(world, &mut steps) {
                return Some(world);
            }
        }
        None
    }

    /// Goes on by the steps that come most likely.
    fn follow(&mut self, mut world: u32, way: &mut Vec<u32>) -> bool {
        // A circle is one that is longer than any way to an end.
        const LONGEST: usize = 1_000;
        while !self.ends_well[world as usize] {
            let next = self.next[world as usize];
            if next == world || way.len() == LONGEST {
                return false;
            }
            way.push(world);
            world = next;
        }
        for world in way {
            self.ends_well[*world as usize] = true;
        }
        true
    }

    /// Goes on by all steps until a world is met that ends well: so does each on the way to it.
    fn search(&mut self, from: u32, steps: &mut impl FnMut(u32, &mut Vec<u32>)) -> bool {
        let mut met = std::collections::HashSet::from([from]);
        // Each world of the way, and what of its steps was not tried yet.
        let mut way = vec![(from, None::<Vec<u32>>)];
        while let Some((world, left)) = way.last_mut() {
            if self.ends_well[*world as usize] {
                for (world, _) in &way {
                    self.ends_well[*world as usize] = true;
                }
                return true;
            }
            let left = left.get_or_insert_with(|| {
                let mut found = Vec::new();
                steps(*world, &mut found);
                found.reverse();
                found
            });
            match left.pop() {
                Some(next) if met.insert(next) => way.push((next, None)),
                Some(_) => {}
                None => _ = way.pop(),
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By walking backwards from all good ends, again and again.
    fn slowly(after: &[Vec<u32>], good: &[bool]) -> Option<u32> {
        let mut well = good.to_vec();
        for _ in 0..after.len() {
            for (world, after) in after.iter().enumerate() {
                well[world] |= after.iter().any(|next| well[*next as usize]);
            }
        }
        (0..after.len() as u32).find(|world| !well[*world as usize])
    }

    #[test]
    fn the_first_world_without_a_good_end_is_found() {
        let mut number = 1u64;
        let mut draw = |below: u64| {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (number >> 33) % below
        };
        let (mut lost, mut safe) = (0, 0);
        for _ in 0..3_000 {
            let count = 2 + draw(9);
            let after: Vec<Vec<u32>> = (0..count)
                .map(|_| (0..draw(4)).map(|_| draw(count) as u32).collect())
                .collect();
            let good: Vec<bool> = (0..count).map(|_| draw(3) == 0).collect();
            let mut ends = Ends::default();
            good.iter().for_each(|good| ends.push(*good));
            for (world, after) in after.iter().enumerate() {
                if let Some(next) = after.first() {
                    ends.leads_to(world as u32, *next);
                }
            }
            let found = ends.first_that_never_ends(|world, found| found.clone_from(&after[world as usize]));
            assert_eq!(found, slowly(&after, &good), "{after:?} {good:?}");
            match found {
                Some(_) => lost += 1,
                None => safe += 1,
            }
        }
        assert!(lost > 100 && safe > 100, "{lost} {safe}");
    }
}
