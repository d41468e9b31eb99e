//! Translation of numbers that were moved: dense, and read without a lock.
//!
//! MigrRDMA §3.3 hands out dense virtual keys and uses them as array indices. Here the virtual value is whatever the
//! first RNIC gave (identity first), so the array is a tree of three levels of 256: what a process uses lies close
//! together, a look-up is three loads, and the memory is what is used. RNICs keep the index of a key in its upper 24 bits and
//! a tag in the lower 8, as the verbs API expects (`ibv_inc_rkey`); queue pair numbers have 24 bits.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

const FAN: usize = 256;

type Node<T> = Box<[OnceLock<T>]>;

fn node<T>() -> Node<T> {
    (0..FAN).map(|_| OnceLock::new()).collect()
}

/// A sparse array with 24-bit indices that only grows.
#[derive(Debug)]
pub struct Radix24<T>(Node<Node<Box<[T]>>>);

impl<T: Default> Radix24<T> {
    pub fn new() -> Self {
        Self(node())
    }

    /// The element, if one near it was ever asked for with [`Self::at`].
    #[inline]
    pub fn get(&self, index: u32) -> Option<&T> {
        let [high, middle, low] = Self::split(index);
        Some(&self.0[high].get()?[middle].get()?[low])
    }

    /// The element.
    pub fn at(&self, index: u32) -> &T {
        let [high, middle, low] = Self::split(index);
        let middle_node = self.0[high].get_or_init(node);
        let leaf = middle_node[middle].get_or_init(|| (0..FAN).map(|_| T::default()).collect());
        &leaf[low]
    }

    /// The element, to be changed.
    pub fn at_mut(&mut self, index: u32) -> &mut T {
        self.at(index);
        let [high, middle, low] = Self::split(index);
        let leaf = self.0[high].get_mut().and_then(|node| node[middle].get_mut());
        &mut leaf.expect("`at` has just made it")[low]
    }

    /// All elements near one that was ever asked for.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let middles = self.0.iter().filter_map(OnceLock::get);
        middles
            .flat_map(|node| node.iter().filter_map(OnceLock::get))
            .flat_map(|leaf| leaf.iter())
    }

    #[inline]
    fn split(index: u32) -> [usize; 3] {
        [
            (index >> 16) as usize & 0xff,
            (index >> 8) as usize & 0xff,
            index as usize & 0xff,
        ]
    }
}

/// The slot of a key: what two live keys of one table may not share.
pub fn key_slot(key: u32) -> u32 {
    key >> 8
}

/// Virtual to physical keys. 0 is no key.
#[derive(Debug)]
pub struct KeyTable(Radix24<AtomicU64>);

impl KeyTable {
    pub fn new() -> Self {
        Self(Radix24::new())
    }

    /// Adds or replaces the translation of `virtual_key`.
    pub fn set(&self, virtual_key: u32, physical_key: u32) {
        let both = u64::from(virtual_key) << 32 | u64::from(physical_key);
        self.0.at(key_slot(virtual_key)).store(both, Relaxed);
    }

    /// Forgets `virtual_key`.
    pub fn remove(&self, virtual_key: u32) {
        if let Some(slot) = self.0.get(key_slot(virtual_key)) {
            slot.store(0, Relaxed);
        }
    }

    /// What the RNIC knows as `virtual_key`.
    #[inline]
    pub fn physical(&self, virtual_key: u32) -> Option<u32> {
        let both = self.0.get(key_slot(virtual_key))?.load(Relaxed);
        (both != 0 && (both >> 32) as u32 == virtual_key).then_some(both as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn a_key_with_another_tag_is_another_key() {
        let table = KeyTable::new();
        table.set(0x1234_5601, 7);
        assert_eq!(table.physical(0x1234_5601), Some(7));
        assert_eq!(table.physical(0x1234_5602), None);
        assert_eq!(table.physical(0), None);
        table.remove(0x1234_5601);
        assert_eq!(table.physical(0x1234_5601), None);
    }

    proptest! {
        #[test]
        fn the_tree_is_a_map(operations in prop::collection::vec((0u32..1 << 24, any::<u32>()), 0..200)) {
            let mut tree = Radix24::<u32>::new();
            let mut map = HashMap::new();
            for (index, value) in operations {
                prop_assert_eq!(tree.get(index).copied().unwrap_or(0), map.get(&index).copied().unwrap_or(0));
                *tree.at_mut(index) = value;
                map.insert(index, value);
            }
            for (index, value) in map {
                prop_assert_eq!(tree.get(index), Some(&value));
            }
        }
    }
}
