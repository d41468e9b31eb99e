//! How data from the network get into a program's memory.
//!
//! A program may watch its memory in place of a completion queue: perftest and MPI wait for the last byte of a message; rsockets goes on when the length in
//! a credit of 16 bytes is no longer zero, and counts that credit down at once. RNICs write in the order of addresses, and each byte once. `memcpy` does
//! neither: it writes 16 bytes twice, and the end of longer data before their middle. A thread that loses its processor between the two would
//! write a credit over what rsockets has made of it since, and the stream be overwritten by its own continuation.

use std::ops::Range;
use std::sync::atomic::Ordering::Release;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64};

/// Data of at most so many bytes are written in order and once. Of longer ones the last word is: it comes when all the others are there, which are written in any order.
const SHORT: usize = 64;

/// The largest unit that is written in one piece.
const WORD: usize = size_of::<u64>();

/// Copies all of `data` there.
///
/// # Safety
/// `to` leads to `data.len()` bytes that can be written, which hold no Rust object and do not overlap `data`. Others may access them meanwhile.
#[inline]
pub unsafe fn place(data: &[u8], to: *mut u8) {
    let bulk = match data.len() {
        0..=SHORT => 0,
        length => (to as usize + length - 1) / WORD * WORD - to as usize,
    };
    // SAFETY: as this function's. What is written without an order comes before all stores below, which release it.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, bulk) };
    for unit in units(to as usize, bulk..data.len()) {
        let part = &data[unit.clone()];
        // SAFETY: as this function's; the unit is aligned to its own size.
        unsafe { store(part, to.add(unit.start)) };
    }
}

/// The parts of that range of what lies at `address`, in order: each a power of two in size, aligned to it, and as large as can be.
fn units(address: usize, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut next = range.start;
    std::iter::from_fn(move || {
        let left = range.end - next;
        let longest = 1 << left.checked_ilog2()?;
        let aligned = 1 << (address + next).trailing_zeros().min(WORD.ilog2());
        let unit = next..next + aligned.min(longest);
        next = unit.end;
        Some(unit)
    })
}

/// Stores one unit.
///
/// # Safety
/// As [`place`]; the unit has 1, 2, 4 or 8 bytes, and `to` is aligned to so many.
#[inline]
unsafe fn store(unit: &[u8], to: *mut u8) {
    macro_rules! as_one {
        ($word:ty, $atomic:ty) => {{
            let word = <$word>::from_ne_bytes(unit.try_into().expect("so many bytes"));
            // SAFETY: as this function's; whoever else accesses it does not by Rust's rules, and finds it as it was or as it will be.
            unsafe { <$atomic>::from_ptr(to.cast()) }.store(word, Release);
        }};
    }
    match unit.len() {
        1 => as_one!(u8, AtomicU8),
        2 => as_one!(u16, AtomicU16),
        4 => as_one!(u32, AtomicU32),
        _ => as_one!(u64, AtomicU64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_copied_and_nothing_beside_it() {
        let data: Vec<u8> = (1..=200).collect();
        for offset in 0..16 {
            for length in 0..data.len() {
                let mut memory = vec![0u64; 32];
                let to = memory.as_mut_ptr().cast::<u8>();
                // SAFETY: inside of the vector, which nobody else has.
                unsafe { place(&data[..length], to.add(offset)) };
                let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert_eq!(bytes[offset..offset + length], data[..length]);
                let around = bytes[..offset].iter().chain(&bytes[offset + length..]);
                assert!(around.copied().all(|byte| byte == 0), "{offset} {length}");
            }
        }
    }

    #[test]
    fn each_byte_is_written_once_and_in_order() {
        for address in 0x1000..0x1010 {
            for length in 0..100 {
                let mut next = 0;
                for unit in units(address, 0..length) {
                    assert_eq!(unit.start, next);
                    assert!((address + next).is_multiple_of(unit.len()) && unit.len() <= WORD);
                    next = unit.end;
                }
                assert_eq!(next, length);
            }
        }
        let credit: Vec<_> = units(0x1000, 0..16).collect();
        assert_eq!(credit, [0..8, 8..16]);
        assert_eq!(units(0x1002, 0..7).collect::<Vec<_>>(), [0..2, 2..6, 6..7]);
    }
}
