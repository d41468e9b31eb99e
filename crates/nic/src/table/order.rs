//! In which order numbers are given that were never given before.

use rand::seq::SliceRandom;

/// So many numbers are mixed at a time: those that a host gives lie in its part for as long as there is room.
const BLOCK: u32 = 1 << 15;

/// A number without a slot.
const NONE: u32 = u32::MAX;

/// Numbers, counted from a table's first one, and slots, counted in the order in which they are made.
#[derive(Debug)]
pub enum Order {
    /// Each slot has its own index as its number.
    InTurn,
    Scattered {
        max: u32,
        /// By slot, also of some that are not made yet.
        numbers: Vec<u32>,
        /// By number, likewise.
        slots: Vec<u32>,
    },
}

impl Order {
    pub fn in_turn() -> Self {
        Self::InTurn
    }

    /// All numbers below `max`.
    pub fn scattered(max: u32) -> Self {
        Self::Scattered {
            max,
            numbers: Vec::new(),
            slots: Vec::new(),
        }
    }

    /// The number of the slot that is made next.
    pub fn add(&mut self, slot: u32) -> u32 {
        if let Self::Scattered { max, numbers, slots } = self {
            if numbers.len() as u32 == slot {
                let mut block: Vec<u32> = (slot..slot.saturating_add(BLOCK).min(*max)).collect();
                block.shuffle(&mut rand::rng());
                slots.resize(slots.len() + block.len(), NONE);
                numbers.extend(block);
            }
            slots[numbers[slot as usize] as usize] = slot;
        }
        self.number_of(slot)
    }

    /// The number of a slot that was made.
    pub fn number_of(&self, slot: u32) -> u32 {
        match self {
            Self::InTurn => slot,
            Self::Scattered { numbers, .. } => numbers[slot as usize],
        }
    }

    /// The slot of a number; none has the index of one that has none.
    #[inline]
    pub fn slot_of(&self, number: u32) -> usize {
        match self {
            Self::InTurn => number as usize,
            Self::Scattered { slots, .. } => slots
                .get(number as usize)
                .map_or(usize::MAX, |slot| *slot as usize),
        }
    }

    /// Numbers with their slots, of which so many were made, by number.
    pub fn in_order(&self, made: usize) -> impl Iterator<Item = (u32, usize)> {
        let numbers = match self {
            Self::InTurn => made,
            Self::Scattered { slots, .. } => slots.len(),
        };
        (0..numbers as u32)
            .map(|number| (number, self.slot_of(number)))
            .filter(move |(_, slot)| *slot < made)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_next_number_does_not_follow_from_the_last() {
        let max = 3 * BLOCK / 2;
        let mut order = Order::scattered(max);
        assert_eq!(order.slot_of(0), usize::MAX);
        let given: Vec<u32> = (0..max).map(|slot| order.add(slot)).collect();
        let (first, rest) = given.split_at(BLOCK as usize);
        let first_block: BTreeSet<u32> = first.iter().copied().collect();
        assert!(first_block.iter().copied().eq(0..BLOCK), "each once");
        let rest: BTreeSet<u32> = rest.iter().copied().collect();
        assert!(rest.iter().copied().eq(BLOCK..max), "each once");
        // Of a random order about one in BLOCK follows the one before.
        let follows = first.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        assert!(follows < 20, "{follows}");
        // Nor does what one sees for a while tell what comes: most steps are seen once or twice.
        let steps: BTreeSet<u32> = first
            .windows(2)
            .map(|pair| pair[1].wrapping_sub(pair[0]))
            .collect();
        assert!(steps.len() > first.len() / 2, "{}", steps.len());
        // Another one has another order.
        let mut other = Order::scattered(max);
        let same = (0..BLOCK)
            .filter(|slot| other.add(*slot) == given[*slot as usize])
            .count();
        assert!(same < 20, "{same}");
        for slot in 0..max {
            assert_eq!(order.slot_of(order.number_of(slot)), slot as usize);
        }
        assert!(
            order
                .in_order(10)
                .map(|(_, slot)| slot)
                .collect::<BTreeSet<_>>()
                .into_iter()
                .eq(0..10)
        );
    }
}
