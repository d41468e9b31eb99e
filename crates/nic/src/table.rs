//! Objects by number.
//!
//! Numbers are dense, so that looking one up is an index computation. A number is given again only after many others
//! have been freed, and each time with another generation: packets and keys that refer to a dead object find nothing
//! instead of the next one.

use std::collections::VecDeque;

/// Freed numbers that wait before the oldest of them is given again, where room is left.
const QUARANTINE: usize = 1024;

#[derive(Debug)]
struct Slot<T> {
    generation: u8,
    value: Option<T>,
}

#[derive(Debug)]
pub struct Table<T> {
    start: u32,
    max: usize,
    slots: Vec<Slot<T>>,
    free: VecDeque<u32>,
    first_generation: u8,
}

impl<T> Table<T> {
    /// Numbers from `start` on, at most `max` objects.
    pub fn new(start: u32, max: u32, first_generation: u8) -> Self {
        Self {
            start,
            max: max as usize,
            slots: Vec::new(),
            free: VecDeque::new(),
            first_generation,
        }
    }

    /// As [`Table::new`], starting at a random 24-bit number with a random generation.
    pub fn random(max: u32) -> Self {
        Self::random_below(max, (1 << 24) - 1)
    }

    /// As [`Table::random`], with all numbers below `end`.
    pub fn random_below(max: u32, end: u32) -> Self {
        assert!(max < end / 2 && end < 1 << 24, "the numbers must fit 24 bits");
        let start = rand::random_range(0x100..end - max);
        Self::new(start, max, rand::random())
    }

    /// How many objects there are.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Adds the object that `make` makes for its number and generation; `None` if the table is full.
    pub fn insert_with(&mut self, make: impl FnOnce(u32, u8) -> T) -> Option<u32> {
        let fresh = self.slots.len();
        let index = if fresh < self.max && self.free.len() <= QUARANTINE {
            self.slots.push(Slot {
                generation: self.first_generation,
                value: None,
            });
            fresh as u32
        } else {
            self.free.pop_front()?
        };
        let id = self.start + index;
        let slot = &mut self.slots[index as usize];
        slot.value = Some(make(id, slot.generation));
        Some(id)
    }

    /// Whether one more fits.
    pub fn has_room(&self) -> bool {
        self.slots.len() < self.max || !self.free.is_empty()
    }

    #[inline]
    fn index(&self, id: u32) -> usize {
        id.wrapping_sub(self.start) as usize
    }

    #[inline]
    pub fn get(&self, id: u32) -> Option<&T> {
        self.slots.get(self.index(id))?.value.as_ref()
    }

    #[inline]
    pub fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        let index = self.index(id);
        self.slots.get_mut(index)?.value.as_mut()
    }

    pub fn remove(&mut self, id: u32) -> Option<T> {
        let index = self.index(id);
        let slot = self.slots.get_mut(index)?;
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push_back(index as u32);
        Some(value)
    }

    /// All of them, with their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let numbered = (self.start..).zip(&self.slots);
        numbered.filter_map(|(id, slot)| Some((id, slot.value.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_not_given_again_soon() {
        let mut table = Table::new(100, 1 << 20, 7);
        let first = table.insert_with(|id, generation| (id, generation)).unwrap();
        assert_eq!(table.get(first), Some(&(100, 7)));
        assert_eq!(table.remove(first), Some((100, 7)));
        assert_eq!(table.remove(first), None);
        assert_eq!((table.get(first), table.len()), (None, 0));
        let mut next = Vec::new();
        for _ in 0..QUARANTINE + 1 {
            let id = table.insert_with(|id, generation| (id, generation)).unwrap();
            table.remove(id).unwrap();
            next.push(id);
        }
        assert!(!next[..QUARANTINE].contains(&first));
        assert_eq!(
            table.insert_with(|id, generation| (id, generation)),
            Some(101),
            "the oldest but one"
        );
        assert_eq!(table.get(101), Some(&(101, 8)), "with another generation");
    }

    #[test]
    fn a_full_table_gives_the_oldest_free_number() {
        let mut table = Table::new(0, 3, 0);
        for n in 0..3 {
            assert_eq!(table.insert_with(|_, _| n), Some(n));
        }
        assert!(!table.has_room());
        assert_eq!(table.insert_with(|_, _| 9), None);
        table.remove(2);
        table.remove(0);
        assert_eq!(table.insert_with(|_, _| 9), Some(2));
        assert_eq!(table.iter().collect::<Vec<_>>(), [(1, &1), (2, &9)]);
        assert_eq!(table.get(u32::MAX), None);
    }
}
