//! Worlds, each in 64 bits.
//!
//! There are many worlds, but only few states of one host. So each state of a host gets a number, in the order in which they are
//! met, and a world is the numbers of its three hosts beside the messages under way. Two worlds have the same number
//! only if they are equal.

use std::hash::Hash;

use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;

use super::Known;
use super::numbers::Numbers;
use crate::simulated::Step;
use crate::world::{DestinationHost, Mail, PartnerHost, SourceHost, World};

/// Bits for the number of a source, of a destination, of a partner. The rest is for what is under way.
const BITS: [u32; 3] = [19, 18, 16];

/// The states of one host.
struct Hosts<T> {
    known: IndexSet<T, FxBuildHasher>,
    bits: u32,
}

impl<T: Hash + Eq + Copy> Hosts<T> {
    fn new(bits: u32) -> Self {
        Self {
            known: IndexSet::default(),
            bits,
        }
    }

    /// Its number; `near` is a state that is often the same, and its number.
    fn number(&mut self, host: &T, near: Option<(&T, u64)>) -> u64 {
        if let Some((same, number)) = near
            && same == host
        {
            return number;
        }
        let (number, _) = self.known.insert_full(*host);
        assert!(
            number < 1 << self.bits,
            "a host has more states than {} bits can number",
            self.bits
        );
        number as u64
    }
}

/// A set of worlds, each with a number: the order in which they were met.
pub struct Worlds {
    sources: Hosts<SourceHost>,
    destinations: Hosts<DestinationHost>,
    partners: Hosts<PartnerHost>,
    numbers: Numbers,
    /// Room for the worlds that are looked up.
    packed: Vec<u64>,
}

impl Default for Worlds {
    fn default() -> Self {
        let [source, destination, partner] = BITS;
        Self {
            sources: Hosts::new(source),
            destinations: Hosts::new(destination),
            partners: Hosts::new(partner),
            numbers: Numbers::default(),
            packed: Vec::new(),
        }
    }
}

impl Worlds {
    /// The numbers of a packed world's parts.
    fn parts(packed: u64) -> [u64; 4] {
        let [source, destination, partner] = BITS;
        let part = |from: u32, bits: u32| packed >> from & ((1 << bits) - 1);
        [
            part(0, source),
            part(source, destination),
            part(source + destination, partner),
            packed >> (source + destination + partner),
        ]
    }

    /// Packs a world. `near`: the world of that number has most in common with it.
    fn pack(&mut self, world: &World, near: Option<(u32, &World)>) -> u64 {
        let near = near.map(|(number, near)| (near, Self::parts(self.numbers.packed[number as usize])));
        let source = near.map(|(near, parts)| (&near.source, parts[0]));
        let destination = near.map(|(near, parts)| (&near.destination, parts[1]));
        let partner = near.map(|(near, parts)| (&near.partner, parts[2]));
        let [for_source, for_destination, for_partner] = BITS;
        let mail = u64::from(world.mail.bits());
        assert!(mail < 1 << Mail::BITS && for_source + for_destination + for_partner + Mail::BITS + 2 <= 64);
        let rest = mail << 2 | u64::from(world.ran_there) << 1 | u64::from(world.forced);
        rest << (for_source + for_destination + for_partner)
            | self.partners.number(&world.partner, partner) << (for_source + for_destination)
            | self.destinations.number(&world.destination, destination) << for_source
            | self.sources.number(&world.source, source)
    }
}

impl Known<World> for Worlds {
    fn count(&self) -> usize {
        self.numbers.packed.len()
    }

    fn get(&self, number: u32) -> World {
        let [source, destination, partner, rest] = Self::parts(self.numbers.packed[number as usize]);
        World {
            source: self.sources.known[source as usize],
            destination: self.destinations.known[destination as usize],
            partner: self.partners.known[partner as usize],
            mail: Mail::from_bits((rest >> 2) as u16),
            ran_there: rest & 2 != 0,
            forced: rest & 1 != 0,
        }
    }

    fn insert<Who>(
        &mut self,
        before: Option<(u32, &World)>,
        worlds: &[(Step<Who>, World)],
        numbers: &mut Vec<u32>,
    ) {
        let mut packed = std::mem::take(&mut self.packed);
        packed.clear();
        packed.extend(worlds.iter().map(|(_, world)| self.pack(world, before)));
        self.numbers.insert(&packed, numbers);
        self.packed = packed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulated::{Simulated, What};
    use crate::world::{Quirk, Quirks};

    #[test]
    fn a_packed_world_is_the_world_and_no_other() {
        let mut known: IndexSet<World> = IndexSet::new();
        let mut worlds = Worlds::default();
        known.insert(World::new());
        let mut numbers = Vec::new();
        let first = crate::simulated::Step {
            who: (),
            what: "begins",
            kind: crate::simulated::Kind::Ordinary,
        };
        worlds.insert(None, &[(first, World::new())], &mut numbers);
        let (mut here, mut next) = (0, Vec::new());
        while known.len() < 100_000 {
            let world = known[here];
            world.steps(Quirks::only(Quirk::Glue), What::Both, &mut next);
            worlds.insert(None, &next, &mut numbers);
            let far = numbers.clone();
            worlds.insert(Some((here as u32, &world)), &next, &mut numbers);
            assert_eq!(numbers, far);
            let known_by: Vec<_> = next
                .iter()
                .map(|(_, after)| known.insert_full(*after).0 as u32)
                .collect();
            assert_eq!(numbers, known_by);
            here += 1;
        }
        for (number, world) in known.iter().enumerate() {
            assert_eq!(worlds.get(number as u32), *world);
        }
    }
}
