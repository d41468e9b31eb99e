//! Objects by number.
//!
//! Numbers that the table gives are dense, so that looking one up is an index computation, or two where they are
//! [scattered](Table::scattered): then nobody can tell the next one from the last. A number is given again only
//! after many others have been freed, and each time with another generation: packets and keys that refer to a dead object
//! find nothing instead of the next one.
//!
//! A number can also be asked for, wherever it lies (an object comes from another RNIC, whose peers know it). One among those
//! that the table gives has its place there. Others are in a map beside it: only who misses the dense part looks there, so
//! that asked-for numbers cost the others nothing, and themselves a hash.

mod elsewhere;
mod order;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use self::elsewhere::Elsewhere;
use self::order::Order;

/// Freed numbers that wait before the oldest of them is given again, where room is left.
const QUARANTINE: usize = 1024;

/// Why there is no such number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unavailable {
    /// The table has as many objects as it can have.
    Full,
    /// Another object has it.
    Taken,
    /// No object can have it.
    Impossible,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u8,
    /// While there is no value: its place in [`Table::free`].
    freed: u64,
    value: Option<T>,
}

#[derive(Debug)]
pub struct Table<T> {
    /// The first number that is given unasked.
    start: u32,
    max: usize,
    /// Numbers that can be asked for.
    askable: Range<u32>,
    /// Which number belongs to which slot.
    order: Order,
    slots: Vec<Slot<T>>,
    /// Slots without a value, by when they were freed.
    free: BTreeMap<u64, u32>,
    /// Slots that were ever freed.
    freed: u64,
    first_generation: u8,
    /// Objects whose numbers were asked for and are not in `slots` (yet).
    elsewhere: Elsewhere<T>,
    /// Numbers without an object that are not given unasked.
    kept_back: HashSet<u32>,
}

impl<T> Table<T> {
    /// Numbers from `start` on, at most `max` objects. None can be asked for.
    pub fn new(start: u32, max: u32, first_generation: u8) -> Self {
        Self {
            start,
            max: max as usize,
            askable: 0..0,
            order: Order::in_turn(),
            slots: Vec::new(),
            free: BTreeMap::new(),
            freed: 0,
            first_generation,
            elsewhere: Elsewhere::new(),
            kept_back: HashSet::new(),
        }
    }

    /// As [`Table::new`], starting at a random one of the numbers in `starts`, with a random generation; `askable` can be
    /// asked for, and none beyond is given unasked either.
    pub fn random(max: u32, starts: Range<u32>, askable: Range<u32>) -> Self {
        let latest = askable
            .end
            .checked_sub(max)
            .expect("there are more numbers than objects");
        assert!(
            askable.start <= starts.start.min(latest),
            "what is given unasked can be asked for"
        );
        let start = rand::random_range(starts).min(latest);
        Self {
            askable,
            ..Self::new(start, max, rand::random())
        }
    }

    /// As [`Table::random`]; the numbers that are given unasked come in a random order.
    pub fn scattered(max: u32, starts: Range<u32>, askable: Range<u32>) -> Self {
        Self {
            order: Order::scattered(max),
            ..Self::random(max, starts, askable)
        }
    }

    /// How many objects there are, and numbers that are kept back.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len() + self.elsewhere.len() + self.kept_back.len()
    }

    /// A number whose object is gone is not given unasked until [`Table::give_again`].
    pub fn keep_back(&mut self, id: u32) {
        if self.get(id).is_none() {
            self.kept_back.insert(id);
        }
    }

    /// A number that was kept back can be given again.
    pub fn give_again(&mut self, id: u32) {
        self.kept_back.remove(&id);
    }

    /// Adds the object that `make` makes for its number and generation; `None` if the table is full.
    pub fn insert_with(&mut self, make: impl FnOnce(u32, u8) -> T) -> Option<u32> {
        let index = self.free_index()?;
        let id = self.start + self.order.number_of(index);
        let slot = &mut self.slots[index as usize];
        slot.value = Some(make(id, slot.generation));
        Some(id)
    }

    /// Adds the object that `make` makes under a number of the caller's choice.
    pub fn insert_at(
        &mut self,
        id: u32,
        generation: u8,
        make: impl FnOnce() -> T,
    ) -> Result<(), Unavailable> {
        self.check(Some(id))?;
        self.kept_back.remove(&id);
        let index = self.index(id);
        match self.slots.get_mut(index) {
            Some(slot) => {
                self.free.remove(&slot.freed);
                slot.generation = generation;
                slot.value = Some(make());
            }
            None => self.elsewhere.insert(id, generation, make()),
        }
        Ok(())
    }

    /// Whether one more fits.
    pub fn has_room(&self) -> bool {
        self.len() < self.max
    }

    /// Whether one more fits, with this number if one is asked for.
    pub fn check(&self, id: Option<u32>) -> Result<(), Unavailable> {
        match id {
            Some(id) if !self.askable.contains(&id) => Err(Unavailable::Impossible),
            Some(id) if self.get(id).is_some() => Err(Unavailable::Taken),
            _ if !self.has_room() => Err(Unavailable::Full),
            _ => Ok(()),
        }
    }

    /// A slot without a value, taken off the list of those.
    fn free_index(&mut self) -> Option<u32> {
        if !self.has_room() {
            return None;
        }
        while self.slots.len() < self.max && self.free.len() <= QUARANTINE + self.kept_back.len() {
            let fresh = self.slots.len() as u32;
            let (slot, is_fresh) = match self.elsewhere.take(self.start + self.order.add(fresh)) {
                // It was asked for before its turn came: it has its place here now.
                Some((generation, Some(value))) => (Slot::new(generation, Some(value)), false),
                // The same, and it is gone: not so soon.
                Some((generation, None)) => {
                    let mut slot = Slot::new(generation, None);
                    slot.freed = self.note_freed(fresh);
                    (slot, false)
                }
                None => (Slot::new(self.first_generation, None), true),
            };
            self.slots.push(slot);
            if is_fresh {
                return Some(fresh);
            }
        }
        for _ in 0..self.free.len() {
            let (_, index) = self.free.pop_first()?;
            if !self
                .kept_back
                .contains(&(self.start + self.order.number_of(index)))
            {
                return Some(index);
            }
            let freed = self.note_freed(index);
            self.slots[index as usize].freed = freed;
        }
        None
    }

    fn note_freed(&mut self, index: u32) -> u64 {
        self.freed += 1;
        self.free.insert(self.freed, index);
        self.freed
    }

    /// The slot of a number; beyond all slots if it has none.
    #[inline]
    fn index(&self, id: u32) -> usize {
        self.order.slot_of(id.wrapping_sub(self.start))
    }

    #[inline]
    pub fn get(&self, id: u32) -> Option<&T> {
        match self.slots.get(self.index(id)) {
            Some(slot) => slot.value.as_ref(),
            None => self.elsewhere.get(id),
        }
    }

    #[inline]
    pub fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        let index = self.index(id);
        match self.slots.get_mut(index) {
            Some(slot) => slot.value.as_mut(),
            None => self.elsewhere.get_mut(id),
        }
    }

    pub fn remove(&mut self, id: u32) -> Option<T> {
        let index = self.index(id);
        let Some(slot) = self.slots.get_mut(index) else {
            let would_be_given = (id.wrapping_sub(self.start) as usize) < self.max;
            return self.elsewhere.remove(id, would_be_given);
        };
        let value = slot.value.take()?;
        slot.generation = slot.generation.wrapping_add(1);
        let freed = self.note_freed(index as u32);
        self.slots[index].freed = freed;
        Some(value)
    }

    /// All of them, with their numbers, in the order of those.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        let dense = self
            .order
            .in_order(self.slots.len())
            .filter_map(|(number, slot)| {
                let value = self.slots[slot].value.as_ref()?;
                Some((self.start + number, value))
            });
        let mut before = self.elsewhere.sorted();
        let after = before.split_off(before.partition_point(|(id, _)| *id < self.start));
        before.into_iter().chain(dense).chain(after)
    }
}

impl<T> Slot<T> {
    fn new(generation: u8, value: Option<T>) -> Self {
        Self {
            generation,
            freed: 0,
            value,
        }
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
    fn a_number_that_is_kept_back_is_not_given_and_takes_room() {
        let mut table = Table {
            askable: 2..1 << 24,
            ..Table::new(100, 3, 0)
        };
        for n in 0..3 {
            assert_eq!(table.insert_with(|_, _| n), Some(100 + n));
        }
        table.keep_back(101);
        assert!(!table.has_room(), "one with an object is as before");
        assert_eq!(table.remove(101), Some(1));
        assert!(table.has_room());
        table.keep_back(101);
        assert!(!table.has_room());
        assert_eq!(table.insert_with(|_, _| 9), None);
        assert_eq!(table.remove(102), Some(2));
        assert_eq!(table.insert_with(|_, _| 9), Some(102), "not the oldest");
        table.remove(102);
        // Whoever asks for it gets it.
        assert_eq!(table.insert_at(101, 0, || 8), Ok(()));
        assert_eq!(table.remove(101), Some(8));
        table.keep_back(101);
        table.give_again(101);
        assert_eq!(table.insert_with(|_, _| 7), Some(102));
        assert_eq!(table.insert_with(|_, _| 7), Some(101));
        assert!(!table.has_room());
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

    #[test]
    fn a_number_can_be_asked_for_and_is_not_given_soon_after() {
        let mut table = Table {
            askable: 2..1 << 24,
            ..Table::new(100, 4, 7)
        };
        assert_eq!(table.insert_with(|_, generation| generation), Some(100));
        // Far away, next in turn, and taken, impossible.
        assert_eq!(table.insert_at(0xff_ffff, 9, || 9), Ok(()));
        assert_eq!(table.insert_at(101, 8, || 8), Ok(()));
        for (id, why) in [
            (100, Unavailable::Taken),
            (101, Unavailable::Taken),
            (0xff_ffff, Unavailable::Taken),
            (1, Unavailable::Impossible),
            (1 << 24, Unavailable::Impossible),
        ] {
            assert_eq!(
                (table.check(Some(id)), table.insert_at(id, 0, || 0)),
                (Err(why), Err(why))
            );
        }
        assert_eq!(
            table.insert_with(|_, generation| generation),
            Some(102),
            "101 is passed over"
        );
        let all = [(100, &7), (101, &8), (102, &7), (0xff_ffff, &9)];
        assert_eq!(table.iter().collect::<Vec<_>>(), all);
        assert_eq!(table.insert_at(5, 0, || 0), Err(Unavailable::Full));
        assert_eq!(table.insert_with(|_, _| 0), None);

        // What was asked for can be asked for again at once, here and there.
        for id in [0xff_ffff, 101] {
            assert!(table.remove(id).is_some() && table.remove(id).is_none());
            assert_eq!(table.insert_at(id, 3, || 3), Ok(()));
            assert_eq!(table.get_mut(id), Some(&mut 3));
        }
        table.remove(100);
        table.remove(101);
        assert_eq!(
            table.insert_with(|_, generation| generation),
            Some(103),
            "never given"
        );
        assert_eq!(
            table.insert_with(|_, generation| generation),
            Some(100),
            "the oldest"
        );
        table.remove(102);
        assert_eq!(table.insert_with(|_, generation| generation), Some(101));
        assert_eq!(
            table.get(101),
            Some(&4),
            "after the generation that was asked for"
        );
        assert_eq!(table.len(), 4);
    }

    #[test]
    fn a_number_that_was_asked_for_before_its_turn_waits_as_others_do() {
        let mut table = Table {
            askable: 2..1 << 24,
            ..Table::new(100, 1 << 20, 0)
        };
        table.insert_at(101, 5, || 5).unwrap();
        table.remove(101);
        let given: Vec<_> = (0..QUARANTINE)
            .map(|_| table.insert_with(|_, _| 0).unwrap())
            .collect();
        assert!(!given.contains(&101));
        for id in given {
            table.remove(id);
        }
        assert_eq!(
            table.insert_with(|_, generation| generation),
            Some(101),
            "freed before all others"
        );
        assert_eq!(table.get(101), Some(&6));
    }

    /// Against a map: whatever is asked for, given and freed, each number has one object.
    #[test]
    fn the_table_is_a_map() {
        for order in [Order::in_turn(), Order::scattered(60)] {
            is_a_map(order);
        }
    }

    fn is_a_map(order: Order) {
        let mut table = Table {
            askable: 2..200,
            order,
            ..Table::new(50, 60, 0)
        };
        let mut map = BTreeMap::new();
        for value in 0..200_000u32 {
            match rand::random_range(0..3) {
                0 => {
                    let id = rand::random_range(0..202);
                    let expected = match id {
                        2..200 if map.contains_key(&id) => Err(Unavailable::Taken),
                        2..200 if map.len() == 60 => Err(Unavailable::Full),
                        2..200 => Ok(()),
                        _ => Err(Unavailable::Impossible),
                    };
                    assert_eq!(table.insert_at(id, 0, || value), expected);
                    if expected.is_ok() {
                        map.insert(id, value);
                    }
                }
                1 => match table.insert_with(|_, _| value) {
                    Some(id) => {
                        assert!((50..110).contains(&id), "{id}");
                        assert_eq!(map.insert(id, value), None);
                    }
                    None => assert_eq!(map.len(), 60),
                },
                _ => {
                    let id = rand::random_range(0..202);
                    assert_eq!(table.get(id), map.get(&id));
                    assert_eq!(table.get_mut(id), map.get_mut(&id));
                    assert_eq!(table.remove(id), map.remove(&id));
                }
            }
            assert_eq!(table.len(), map.len());
        }
        let all = map.iter().map(|(id, value)| (*id, value));
        assert_eq!(table.iter().collect::<Vec<_>>(), all.collect::<Vec<_>>());
    }
}
