//! Objects whose numbers were asked for and lie outside of what the table gives.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Spreads numbers over a map's buckets. Only numbers that are in use are chosen by others, and those who choose are
/// trusted, so that a hash without a secret will do.
#[derive(Debug, Default, Clone, Copy)]
pub struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32(u32::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        // Fibonacci hashing (Knuth, TAOCP vol. 3 §6.4); the map takes its bits from both ends.
        let product = (self.0 ^ u64::from(number)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ product >> 32;
    }
}

type Map<V> = HashMap<u32, V, BuildHasherDefault<Spread>>;

#[derive(Debug)]
pub struct Elsewhere<T> {
    /// With their generations. They do not move when the map grows.
    objects: Map<(u8, Box<T>)>,
    /// Numbers that the table would give one day, of objects that are gone: the generations that come next.
    spent: Map<u8>,
}

impl<T> Elsewhere<T> {
    pub fn new() -> Self {
        Self {
            objects: Map::default(),
            spent: Map::default(),
        }
    }

    pub fn len(&self) -> usize {
        self.objects.len()
    }

    pub fn insert(&mut self, id: u32, generation: u8, value: T) {
        self.spent.remove(&id);
        self.objects.insert(id, (generation, Box::new(value)));
    }

    /// Most look-ups that come here are of numbers that nobody has, on an RNIC where none was ever asked for.
    #[inline(never)]
    pub fn get(&self, id: u32) -> Option<&T> {
        self.objects.get(&id).map(|(_, value)| &**value)
    }

    #[inline(never)]
    pub fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.objects.get_mut(&id).map(|(_, value)| &mut **value)
    }

    /// Removes an object; the table must not give its number soon, if it ever would.
    pub fn remove(&mut self, id: u32, would_be_given: bool) -> Option<T> {
        let (generation, value) = self.objects.remove(&id)?;
        if would_be_given {
            self.spent.insert(id, generation.wrapping_add(1));
        }
        Some(*value)
    }

    /// What is known of a number whose turn has come: its generation, and its object if that lives. It is forgotten here.
    pub fn take(&mut self, id: u32) -> Option<(u8, Option<T>)> {
        if let Some((generation, value)) = self.objects.remove(&id) {
            return Some((generation, Some(*value)));
        }
        self.spent.remove(&id).map(|generation| (generation, None))
    }

    pub fn sorted(&self) -> Vec<(u32, &T)> {
        let mut all: Vec<_> = self
            .objects
            .iter()
            .map(|(id, (_, value))| (*id, &**value))
            .collect();
        all.sort_unstable_by_key(|(id, _)| *id);
        all
    }
}
