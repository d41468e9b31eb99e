//! Frames: their bytes, and what of given bytes is one.

use crate::MAX_RECORD;

/// The bytes of a frame before its payload.
pub const HEADER: usize = 20;

/// A frame that is good at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// Its offset in the segment.
    pub start: usize,
    /// Where the next one begins.
    pub end: usize,
    /// Up to where the segment was on the disk when it was written.
    pub durable: u32,
    /// The checksum of the frame before it.
    pub previous: u32,
    /// Its checksum.
    pub crc: u32,
}

impl Frame {
    /// Its payload in the bytes of its segment.
    pub fn payload<'bytes>(&self, bytes: &'bytes [u8]) -> &'bytes [u8] {
        &bytes[self.start + HEADER..self.end]
    }
}

/// Appends a frame to `bytes`, the content of segment `number` from offset `base` on. Returns its checksum.
///
/// Offsets and lengths are below `MAX_SEGMENT`, as the callers see to.
pub fn write(
    bytes: &mut Vec<u8>,
    number: u32,
    base: u64,
    durable: u64,
    previous: u32,
    payload: &[u8],
) -> u32 {
    let offset = base as u32 + bytes.len() as u32;
    let fields = [payload.len() as u32, durable as u32, previous].map(u32::to_le_bytes);
    let check = check(number, offset, fields.as_flattened());
    let crc = crc32c::crc32c_append(check, payload);
    bytes.extend_from_slice(fields.as_flattened());
    bytes.extend_from_slice(&check.to_le_bytes());
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(payload);
    crc
}

/// Reads the frame at `start` of segment `number`, if a whole and good one is there.
pub fn read(bytes: &[u8], number: u32, start: usize) -> Option<Frame> {
    let header = bytes.get(start..)?.first_chunk::<HEADER>()?;
    let field = |index: usize| u32_at(header, 4 * index);
    if field(3) != check(number, u32::try_from(start).ok()?, &header[..12]) {
        return None;
    }
    let length = field(0) as usize;
    if length > MAX_RECORD {
        return None;
    }
    let payload = bytes[start + HEADER..].get(..length)?;
    let frame = Frame {
        start,
        end: start + HEADER + length,
        durable: field(1),
        previous: field(2),
        crc: field(4),
    };
    (frame.crc == crc32c::crc32c_append(field(3), payload)).then_some(frame)
}

/// The number at an offset of some bytes that are known to be long enough.
pub fn u32_at(bytes: &[u8], offset: usize) -> u32 {
    let bytes = bytes[offset..offset + 4].try_into().expect("four bytes");
    u32::from_le_bytes(bytes)
}

fn check(number: u32, offset: u32, fields: &[u8]) -> u32 {
    let place = [number, offset].map(u32::to_le_bytes);
    crc32c::crc32c_append(crc32c::crc32c(place.as_flattened()), fields)
}
