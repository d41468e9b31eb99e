//! Decoding of messages that another party wrote, within a budget of memory.
//!
//! A message's length on the wire does not bound what it takes in memory: an empty string is one byte there and 24 here, so
//! that 64 MiB of zeroes are a list of 1.6 GB. [`from_bytes`] counts what is decoded while it is decoded, and gives up as soon
//! as that is more than the budget.
//!
//! What counts is what lies on the heap: each element of a list by the size of its type, and each text by its length. A list
//! grows by doubling, so that the allocator may have given up to three times the budget for a moment ([`PEAK`]).

mod counting;

use std::cell::Cell;

use serde::de::DeserializeOwned;

/// A list that grows has its old and its new place at once, and the new one is up to twice as large as what is in it.
pub const PEAK: usize = 3;

/// The budget of a message of so many bytes whose lists are of things that take up to ten times as much in memory as on the wire. A
/// list of empty texts, which nobody sends, takes more.
pub fn memory_of(bytes: usize) -> usize {
    bytes.saturating_mul(16).saturating_add(64 << 10)
}

/// Why a message is not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are no message of the expected type.
    #[error(transparent)]
    Malformed(#[from] postcard::Error),
    /// What the bytes say would take more memory than the budget.
    #[error("what it says takes more than {most} bytes of memory")]
    TooLarge {
        /// The budget.
        most: usize,
    },
}

/// What the bytes say, within the budget of [`memory_of`] as many.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    from_bytes(bytes, memory_of(bytes.len()))
}

/// What the bytes say, if that takes at most `most` bytes on the heap. Bytes behind the message are passed over.
pub fn from_bytes<T: DeserializeOwned>(bytes: &[u8], most: usize) -> Result<T, Error> {
    within(bytes, &mut { most })
}

/// The same with a budget of which there is less afterwards.
pub fn within<T: DeserializeOwned>(bytes: &[u8], budget: &mut usize) -> Result<T, Error> {
    take_within(bytes, budget).map(|(value, _)| value)
}

/// The same, and the bytes behind the message.
pub fn take_within<'b, T: DeserializeOwned>(
    bytes: &'b [u8],
    budget: &mut usize,
) -> Result<(T, &'b [u8]), Error> {
    let most = *budget;
    let left = Cell::new(Some(most));
    let mut decoder = postcard::Deserializer::from_bytes(bytes);
    let decoded = T::deserialize(counting::Counted::new(&mut decoder, &left));
    *budget = left.get().unwrap_or(0);
    match decoded {
        Ok(value) => Ok((value, decoder.finalize()?)),
        Err(_) if left.get().is_none() => Err(Error::TooLarge { most }),
        Err(error) => Err(Error::Malformed(error)),
    }
}

#[cfg(test)]
mod tests;
