//! Translation of numbers that were moved: dense, and read without a lock.
//!
//! MigrRDMA §3.3 hands out dense virtual keys and uses them as array indices. Here the virtual value is whatever the
//! first RNIC gave (identity first), so the array is a tree of three levels of 256: what a process uses lies close
//! together, a look-up is three loads, and the memory is what is used. RNICs keep the index of a key in its upper 24 bits and
//! a tag in the lower 8, as the verbs API expects (`ibv_inc_rkey`); queue pair numbers have 24 bits.
//!
//! A queue uses the same key again and again, so it remembers the last one ([`RecentKey`]); a table counts its changes so
//! that a queue knows what to forget.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

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

    /// All elements near those that were ever asked for with [`Self::at`].
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let middles = self.0.iter().filter_map(OnceLock::get);
        let leaves = middles.flat_map(|middle| middle.iter().filter_map(OnceLock::get));
        leaves.flat_map(|leaf| leaf.iter())
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

/// What tells physical keys from virtual ones.
pub trait Keys {
    /// What the RNIC knows as `virtual_key`.
    fn physical(&self, virtual_key: u32) -> Option<u32>;
}

/// Where an entry has the upper half of a key: that the tag does not count, as with memory windows. No key of the slot is
/// like this.
fn any_tag(slot: u32) -> u32 {
    !(slot << 8)
}

/// Virtual to physical keys. 0 is no key.
#[derive(Debug)]
pub struct KeyTable {
    keys: Radix24<AtomicU64>,
    /// Goes up after each change.
    changes: AtomicU32,
}

impl KeyTable {
    pub fn new() -> Self {
        Self {
            keys: Radix24::new(),
            changes: AtomicU32::new(0),
        }
    }

    /// Adds or replaces the translation of `virtual_key`.
    pub fn set(&self, virtual_key: u32, physical_key: u32) {
        let both = u64::from(virtual_key) << 32 | u64::from(physical_key);
        self.keys.at(key_slot(virtual_key)).store(both, Relaxed);
        self.changes.fetch_add(1, Release);
    }

    /// The same for all keys with the index of `virtual_key`: the physical ones have the other index and the same tag.
    pub fn set_any_tag(&self, virtual_key: u32, physical_key: u32) {
        let slot = key_slot(virtual_key);
        let both = u64::from(any_tag(slot)) << 32 | u64::from(physical_key & !0xff);
        self.keys.at(slot).store(both, Relaxed);
        self.changes.fetch_add(1, Release);
    }

    /// Forgets `virtual_key`.
    pub fn remove(&self, virtual_key: u32) {
        if let Some(slot) = self.keys.get(key_slot(virtual_key)) {
            slot.store(0, Relaxed);
            self.changes.fetch_add(1, Release);
        }
    }

    /// The way back: physical to virtual keys.
    pub fn reversed(&self) -> HashMap<u32, u32> {
        let both = self.keys.iter().map(|slot| slot.load(Relaxed));
        both.filter(|both| *both != 0)
            .map(|both| (both as u32, (both >> 32) as u32))
            .collect()
    }

    /// What the RNIC knows as `virtual_key`.
    #[inline]
    pub fn physical(&self, virtual_key: u32) -> Option<u32> {
        let both = self.keys.get(key_slot(virtual_key))?.load(Relaxed);
        match (both >> 32) as u32 {
            _ if both == 0 => None,
            key if key == virtual_key => Some(both as u32),
            key if key == any_tag(key_slot(virtual_key)) => Some(both as u32 | virtual_key & 0xff),
            _ => None,
        }
    }
}

impl Keys for KeyTable {
    #[inline]
    fn physical(&self, virtual_key: u32) -> Option<u32> {
        self.physical(virtual_key)
    }
}

/// A table, and the last translation that one queue took from it.
#[derive(Debug, Clone)]
pub struct RecentKey {
    table: Arc<KeyTable>,
    /// Virtual and physical; 0 for none.
    last: Cell<(u32, u32)>,
    /// [`KeyTable::changes`] before it was looked up.
    changes: Cell<u32>,
}

impl RecentKey {
    pub fn new(table: Arc<KeyTable>) -> Self {
        Self {
            table,
            last: Cell::new((0, 0)),
            changes: Cell::new(0),
        }
    }

    /// As [`KeyTable::reversed`].
    pub fn reversed(&self) -> HashMap<u32, u32> {
        self.table.reversed()
    }

    #[cold]
    fn look_up(&self, virtual_key: u32, changes: u32) -> Option<u32> {
        let physical = self.table.physical(virtual_key)?;
        self.last.set((virtual_key, physical));
        self.changes.set(changes);
        Some(physical)
    }
}

impl Keys for RecentKey {
    #[inline]
    fn physical(&self, virtual_key: u32) -> Option<u32> {
        // Before the look-up: what changes meanwhile is seen next time.
        let changes = self.table.changes.load(Acquire);
        let (last, physical) = self.last.get();
        if last == virtual_key && self.changes.get() == changes && physical != 0 {
            return Some(physical);
        }
        self.look_up(virtual_key, changes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    #[test]
    fn a_window_is_found_whatever_its_tag() {
        let table = KeyTable::new();
        for slot in [0, 0x12_3456, 0xff_ffff] {
            table.set_any_tag(slot << 8 | 5, 0xabcd_ef07);
            for tag in [0, 5, 0xff] {
                assert_eq!(table.physical(slot << 8 | tag), Some(0xabcd_ef00 | tag));
            }
            table.remove(slot << 8);
            assert_eq!(table.physical(slot << 8 | 5), None);
        }
    }

    #[test]
    fn what_a_queue_remembers_is_what_the_table_says() {
        let table = Arc::new(KeyTable::new());
        let recent = RecentKey::new(table.clone());
        assert_eq!(recent.physical(0), None);
        assert_eq!(
            recent.physical(0x100),
            None,
            "what is not there is not remembered"
        );
        table.set(0x100, 7);
        assert_eq!(
            (recent.physical(0x100), recent.physical(0x100)),
            (Some(7), Some(7))
        );
        table.set(0x100, 8);
        assert_eq!(recent.physical(0x100), Some(8));
        table.set(0x200, 9);
        assert_eq!(
            (recent.physical(0x200), recent.physical(0x100)),
            (Some(9), Some(8))
        );
        table.remove(0x100);
        assert_eq!(recent.physical(0x100), None, "deregistered");
        assert_eq!(recent.physical(0x200), Some(9));
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
