//! Worlds that were met. There are many of them, but few states of one host: each is kept once.

use indexmap::IndexSet;
use rustc_hash::FxBuildHasher;

use super::{HOSTS, Host, MOVES, Move, World};
use crate::explore::Known;
use crate::simulated::Step;

/// A world, with the numbers of its hosts' states.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Numbered {
    hosts: [u32; HOSTS],
    moves: [Move; MOVES],
    begun: u8,
    partner: bool,
    lost: bool,
    forced: bool,
    is_small: bool,
}

/// A set of worlds, each with a number: the order in which they were met.
#[derive(Debug, Default)]
pub struct Worlds {
    hosts: IndexSet<Host, FxBuildHasher>,
    worlds: IndexSet<Numbered, FxBuildHasher>,
}

impl Worlds {
    fn number(&mut self, world: &World) -> Numbered {
        let World {
            hosts,
            moves,
            begun,
            partner,
            lost,
            forced,
            is_small,
        } = world;
        let number = |host: &Host| match self.hosts.get_index_of(host) {
            Some(number) => number as u32,
            None => self.hosts.insert_full(host.clone()).0 as u32,
        };
        Numbered {
            hosts: hosts.each_ref().map(number),
            moves: *moves,
            begun: *begun,
            partner: *partner,
            lost: *lost,
            forced: *forced,
            is_small: *is_small,
        }
    }
}

impl Known<World> for Worlds {
    fn count(&self) -> usize {
        self.worlds.len()
    }

    fn get(&self, number: u32) -> World {
        let Numbered {
            hosts,
            moves,
            begun,
            partner,
            lost,
            forced,
            is_small,
        } = self.worlds[number as usize].clone();
        World {
            hosts: hosts.map(|number| self.hosts[number as usize].clone()),
            moves,
            begun,
            partner,
            lost,
            forced,
            is_small,
        }
    }

    fn insert<Who>(
        &mut self,
        _: Option<(u32, &World)>,
        worlds: &[(Step<Who>, World)],
        numbers: &mut Vec<u32>,
    ) {
        numbers.clear();
        for (_, world) in worlds {
            let numbered = self.number(world);
            numbers.push(self.worlds.insert_full(numbered).0 as u32);
        }
    }
}
