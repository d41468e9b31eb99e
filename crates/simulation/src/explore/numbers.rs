//! A very large set of 64-bit values, each with a number.
//!
//! Nearly all of the time of a search goes into memory that is not in the processor's cache. So several values are looked up at once:
//! first all of their slots are read, then all values that these slots stand for. The processor waits for all
//! of them together. A library's table takes one value after the other.

/// A slot that is free.
const FREE: u64 = u64::MAX;

/// The set.
pub struct Numbers {
    /// The values, in the order in which they came.
    pub packed: Vec<u64>,
    /// A value's number, above 32 bits of its hash. A power of two of them.
    slots: Vec<u64>,
    /// Room for the slots of the values that are looked up.
    read: Vec<(usize, u64, u64)>,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            packed: Vec::new(),
            slots: vec![FREE; 1 << 10],
            read: Vec::new(),
        }
    }
}

fn hash(value: u64) -> u64 {
    let mixed = (value ^ value >> 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed ^ mixed >> 32
}

/// What a slot says of a value with this hash. The slot's place is taken from the other end of the hash.
fn slot(number: usize, hash: u64) -> u64 {
    (number as u64) << 32 | hash >> 32
}

impl Numbers {
    /// The numbers of these values. Those that are not in the set yet get the next ones.
    pub fn insert(&mut self, values: &[u64], numbers: &mut Vec<u32>) {
        if (self.packed.len() + values.len()) * 4 > self.slots.len() * 3 {
            self.grow();
        }
        let last = self.slots.len() - 1;
        self.read.clear();
        for value in values {
            let hash = hash(*value);
            let place = hash as usize & last;
            self.read.push((place, hash, self.slots[place]));
        }
        numbers.clear();
        for (_, _, slot) in &self.read {
            let likely = self.packed.get((slot >> 32) as usize);
            numbers.push(match likely {
                Some(_) => (slot >> 32) as u32,
                None => u32::MAX,
            });
        }
        for (index, value) in values.iter().enumerate() {
            let number = numbers[index];
            if self.packed.get(number as usize) != Some(value) {
                let (place, hash, _) = self.read[index];
                numbers[index] = self.insert_one(*value, hash, place);
            }
        }
    }

    fn insert_one(&mut self, value: u64, hash: u64, mut place: usize) -> u32 {
        let last = self.slots.len() - 1;
        loop {
            let slot = self.slots[place];
            let number = (slot >> 32) as usize;
            if slot == FREE {
                break;
            }
            if slot as u32 == (hash >> 32) as u32 && self.packed[number] == value {
                return number as u32;
            }
            place = (place + 1) & last;
        }
        let number = self.packed.len();
        assert!(number < u32::MAX as usize, "more than 2^32 worlds");
        self.packed.push(value);
        self.slots[place] = slot(number, hash);
        number as u32
    }

    /// Makes all slots anew, twice as many. The old ones go first: there need not be room for both.
    fn grow(&mut self) {
        let count = self.slots.len() * 2;
        self.slots = Vec::new();
        self.slots = vec![FREE; count];
        for (number, value) in self.packed.iter().enumerate() {
            let hash = hash(*value);
            let mut place = hash as usize & (count - 1);
            while self.slots[place] != FREE {
                place = (place + 1) & (count - 1);
            }
            self.slots[place] = slot(number, hash);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indexmap::IndexSet;

    #[test]
    fn values_get_numbers_in_the_order_in_which_they_come() {
        let (mut numbers, mut known) = (Numbers::default(), IndexSet::new());
        let mut found = Vec::new();
        let mut value = 1u64;
        for round in 0..50_000u64 {
            let mut values = Vec::new();
            for index in 0..round % 9 {
                value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                // Many that come again, also at once.
                values.push(match index % 3 {
                    0 => value,
                    1 => value >> 50,
                    _ => u64::MAX - (value >> 60),
                });
            }
            numbers.insert(&values, &mut found);
            let expected: Vec<_> = values
                .iter()
                .map(|value| known.insert_full(*value).0 as u32)
                .collect();
            assert_eq!(found, expected);
        }
        assert!(numbers.packed.iter().eq(&known));
        assert!(known.len() > 60_000);
    }
}
