//! Local memory and inline bytes: where the data of a request is.

use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use smallvec::SmallVec;

use crate::Lkey;

/// The most scatter/gather elements that a request has.
pub const MAX_SGE: usize = 16;
/// The most inline bytes that a request carries.
pub const MAX_INLINE: usize = 256;
/// The longest message, in bytes (IBA §9.7.7.2 allows 2^31).
pub const MAX_MESSAGE: u32 = 1 << 31;

/// So many pieces, and so many inline bytes, are in the request itself; more of them are beside it. A request is copied
/// a few times on its way through the queue pair, and nearly all have one piece.
const USUAL_SGE: usize = 2;
const USUAL_INLINE: usize = 32;

/// One piece of local memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sge {
    /// Where it starts.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u32,
    /// The key of the region that it lies in.
    pub lkey: Lkey,
}

/// Up to [`MAX_SGE`] pieces of local memory.
#[derive(Clone, Default)]
pub struct SgeList(SmallVec<[Sge; USUAL_SGE]>);

impl SgeList {
    /// The list of `items`; `None` if there are more than [`MAX_SGE`].
    pub fn new(items: &[Sge]) -> Option<SgeList> {
        (items.len() <= MAX_SGE).then(|| SgeList(SmallVec::from_slice(items)))
    }

    /// Adds a piece; says whether there was room.
    #[must_use]
    pub fn push(&mut self, sge: Sge) -> bool {
        let has_room = self.0.len() < MAX_SGE;
        if has_room {
            self.0.push(sge);
        }
        has_room
    }

    /// The pieces.
    pub fn as_slice(&self) -> &[Sge] {
        &self.0
    }

    /// Sum of the lengths, in bytes.
    pub fn len_bytes(&self) -> u64 {
        self.as_slice().iter().map(|sge| u64::from(sge.len)).sum()
    }

    /// Calls `each` with the part of every piece that falls into the `len` bytes from `offset` on, in order, with its
    /// position in those `len` bytes; stops at the first error.
    pub(crate) fn for_range<E>(
        &self,
        offset: u32,
        len: u32,
        mut each: impl FnMut(Sge, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut skip = offset;
        let mut done = 0;
        for sge in self.as_slice() {
            if done == len {
                break;
            }
            if skip >= sge.len {
                skip -= sge.len;
                continue;
            }
            let part = (sge.len - skip).min(len - done);
            let addr = sge.addr.wrapping_add(u64::from(skip));
            each(
                Sge {
                    addr,
                    len: part,
                    lkey: sge.lkey,
                },
                done as usize,
            )?;
            done += part;
            skip = 0;
        }
        Ok(())
    }
}

/// As a sequence of pieces.
impl Serialize for SgeList {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.as_slice().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for SgeList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SgeList, D::Error> {
        let pieces = Vec::<Sge>::deserialize(deserializer)?;
        SgeList::new(&pieces).ok_or_else(|| D::Error::invalid_length(pieces.len(), &"at most 16 pieces"))
    }
}

/// [`SendData`] as it is written.
#[derive(Serialize, Deserialize)]
enum PlainData {
    Sges(SgeList),
    Inline(Vec<u8>),
}

impl Serialize for SendData {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            SendData::Sges(list) => PlainData::Sges(list.clone()),
            SendData::Inline(bytes) => PlainData::Inline(bytes.to_vec()),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for SendData {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<SendData, D::Error> {
        match PlainData::deserialize(deserializer)? {
            PlainData::Sges(list) => Ok(SendData::Sges(list)),
            PlainData::Inline(bytes) => SendData::inline(&bytes)
                .ok_or_else(|| D::Error::invalid_length(bytes.len(), &"at most 256 bytes")),
        }
    }
}

impl fmt::Debug for SgeList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_slice().fmt(f)
    }
}

/// Immediate data: four bytes as the program gave them (`__be32 imm_data`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Immediate(pub [u8; 4]);

/// The local side of a send request.
#[derive(Clone)]
pub enum SendData {
    /// Memory: gathered from for SEND and WRITE, scattered to for READ.
    Sges(SgeList),
    /// Bytes that were copied when the request was posted (`IBV_SEND_INLINE`), at most [`MAX_INLINE`]. Not for READ.
    Inline(SmallVec<[u8; USUAL_INLINE]>),
}

impl SendData {
    /// Inline data; `None` if it is longer than [`MAX_INLINE`].
    pub fn inline(data: &[u8]) -> Option<SendData> {
        (data.len() <= MAX_INLINE).then(|| SendData::Inline(SmallVec::from_slice(data)))
    }

    /// The length of the message in bytes.
    pub fn len_bytes(&self) -> u64 {
        match self {
            SendData::Sges(list) => list.len_bytes(),
            SendData::Inline(bytes) => bytes.len() as u64,
        }
    }
}

impl fmt::Debug for SendData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SendData::Sges(list) => list.fmt(f),
            SendData::Inline(bytes) => write!(f, "inline, {} bytes", bytes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_crosses_pieces() {
        let sge = |addr, len| Sge {
            addr,
            len,
            lkey: Lkey(1),
        };
        let list = SgeList::new(&[sge(100, 3), sge(0, 0), sge(200, 5), sge(300, 2)]).unwrap();
        let mut seen = vec![];
        list.for_range::<()>(2, 7, |part, at| {
            seen.push((part.addr, part.len, at));
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, [(102, 1, 0), (200, 5, 1), (300, 1, 6)]);
        assert_eq!(list.len_bytes(), 10);
    }

    #[test]
    fn lists_are_bounded() {
        assert!(SgeList::new(&[Sge::default(); MAX_SGE]).is_some());
        assert!(SgeList::new(&[Sge::default(); MAX_SGE + 1]).is_none());
        assert!(SendData::inline(&[0; MAX_INLINE]).is_some());
        assert!(SendData::inline(&[0; MAX_INLINE + 1]).is_none());
    }
}
