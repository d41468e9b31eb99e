//! Whose completions a completion queue has.

use crate::tables::Radix24;

/// How many numbers are found without a look into the tree: those that differ in the lowest bits.
const RECENT: usize = 64;

/// No place.
const NOBODY: u32 = u32::MAX;

/// Queue pairs by physical number.
#[derive(Debug)]
pub struct Owners<T> {
    owners: Vec<Option<T>>,
    /// Places in `owners` that are free.
    free: Vec<u32>,
    /// Number to place in `owners`, plus one.
    places: Radix24<u32>,
    /// Number and place of who was found last, by the lowest bits of the number; [`NOBODY`] if that is gone.
    recent: [(u32, u32); RECENT],
}

impl<T> Default for Owners<T> {
    fn default() -> Self {
        Self {
            owners: Vec::new(),
            free: Vec::new(),
            places: Radix24::new(),
            recent: [(0, NOBODY); RECENT],
        }
    }
}

impl<T> Owners<T> {
    /// The one of that number.
    #[inline]
    pub fn get(&mut self, number: u32) -> Option<&T> {
        let (recent, place) = self.recent[number as usize % RECENT];
        let place = if recent == number && place != NOBODY {
            place
        } else {
            self.look_up(number)?
        };
        self.owners[place as usize].as_ref()
    }

    #[cold]
    fn look_up(&mut self, number: u32) -> Option<u32> {
        let place = self.places.get(number)?.checked_sub(1)?;
        self.recent[number as usize % RECENT] = (number, place);
        Some(place)
    }

    /// Adds one, or puts it in the place of the one that had its number.
    pub fn add(&mut self, number: u32, owner: T) {
        self.remove(number);
        let place = self.free.pop().unwrap_or_else(|| {
            self.owners.push(None);
            self.owners.len() as u32 - 1
        });
        self.owners[place as usize] = Some(owner);
        *self.places.at_mut(number) = place + 1;
    }

    /// Forgets one, if there is one of that number.
    pub fn remove(&mut self, number: u32) {
        let Some(place) = self.places.get(number).and_then(|place| place.checked_sub(1)) else {
            return;
        };
        *self.places.at_mut(number) = 0;
        self.recent[number as usize % RECENT] = (0, NOBODY);
        self.owners[place as usize] = None;
        self.free.push(place);
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.owners.iter().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Few numbers, many of which share their lowest bits, so that places and what is remembered are used again.
        #[test]
        fn it_is_a_map(steps in prop::collection::vec((0u8..3, 0u32..4, 0u32..3), 0..200)) {
            let mut owners = Owners::default();
            let mut model = HashMap::new();
            for (index, (what, high, low)) in steps.into_iter().enumerate() {
                let number = high * RECENT as u32 + low;
                match what {
                    0 => {
                        owners.add(number, index);
                        model.insert(number, index);
                    }
                    1 => {
                        owners.remove(number);
                        model.remove(&number);
                    }
                    _ => {}
                }
                prop_assert_eq!(owners.get(number), model.get(&number));
                prop_assert_eq!(owners.iter().count(), model.len());
            }
        }
    }
}
