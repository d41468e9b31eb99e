//! Segments: a header, then records.

use crate::frame::{self, Frame, u32_at};
use crate::{Error, MAX_SEGMENT};

/// The version of the format.
pub const VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"vrbt-log";
const HEADER_PAYLOAD: usize = 32;

/// The length of a segment without records.
pub const EMPTY: u64 = (frame::HEADER + HEADER_PAYLOAD) as u64;

/// A place in a segment between two frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The segment's number.
    pub segment: u32,
    /// The offset in it.
    pub offset: u64,
    /// The checksum of the frame that ends there.
    pub crc: u32,
}

/// What is before a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Nothing: the log begins with it.
    Nothing,
    /// Another segment, up to this place.
    Place(Place),
}

/// The name of a segment's file.
pub fn name(number: u32) -> String {
    format!("{number:08x}.log")
}

/// The name of a segment's file before it is whole.
pub fn new_name(number: u32) -> String {
    format!("{number:08x}.new")
}

/// The name of a damaged segment's file that the log does without.
pub fn damaged_name(number: u32) -> String {
    format!("{number:08x}.damaged")
}

/// The number in a file's name, and what follows the dot. Other names are not ours.
pub fn number(name: &str) -> Option<(u32, &str)> {
    let (number, kind) = name.split_once('.')?;
    let is_ours = number.len() == 8
        && number
            .bytes()
            .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
        && matches!(kind, "log" | "new" | "damaged");
    Some((u32::from_str_radix(number, 16).ok()?, kind)).filter(|_| is_ours)
}

/// The bytes of a new segment with records in it, and the checksum of its last frame.
///
/// There is none if it would be too long.
pub fn build<'a>(
    number: u32,
    before: Before,
    records: impl Iterator<Item = &'a [u8]> + Clone,
) -> Option<(Vec<u8>, u32)> {
    let lengths = records
        .clone()
        .map(|record| (frame::HEADER + record.len()) as u64);
    let whole = EMPTY + lengths.sum::<u64>();
    if whole > MAX_SEGMENT {
        return None;
    }
    let (kind, place) = match before {
        Before::Nothing => (0, [0; 3]),
        Before::Place(place) => (1, [place.segment, place.offset as u32, place.crc]),
    };
    let mut header = MAGIC.to_vec();
    let [segment, offset, crc] = place;
    for field in [VERSION, kind, segment, offset, crc, whole as u32] {
        header.extend_from_slice(&field.to_le_bytes());
    }
    let mut bytes = Vec::with_capacity(whole as usize);
    let mut last = frame::write(&mut bytes, number, 0, 0, 0, &header);
    for record in records {
        last = frame::write(&mut bytes, number, 0, 0, last, record);
    }
    Some((bytes, last))
}

/// A segment whose header is good.
#[derive(Debug)]
pub struct Segment {
    /// Its number.
    pub number: u32,
    /// What it continues.
    pub before: Before,
    /// Its content, with what is bad in it.
    pub bytes: Vec<u8>,
    /// Up to here it was on the disk, as it says itself. Records behind this may be in the page cache only.
    pub durable: u64,
    /// The places that are bad although they were on the disk, in order.
    pub damages: Vec<u64>,
    /// This much of it was on the disk before it got its name.
    pub whole: u64,
    header: Frame,
    frames: Vec<Frame>,
}

impl Segment {
    /// Reads a segment. There is none if the header is bad.
    pub fn parse(number: u32, bytes: Vec<u8>) -> Result<Option<Self>, Error> {
        let Some(header) = frame::read(&bytes, number, 0) else {
            return Ok(None);
        };
        let payload = header.payload(&bytes);
        if payload.len() < 12 || !payload.starts_with(MAGIC) || header.previous != 0 {
            return Ok(None);
        }
        let version = u32_at(payload, 8);
        if version != VERSION {
            return Err(Error::Version {
                segment: number,
                version,
            });
        }
        if payload.len() != HEADER_PAYLOAD {
            return Ok(None);
        }
        let place = Place {
            segment: u32_at(payload, 16),
            offset: u64::from(u32_at(payload, 20)),
            crc: u32_at(payload, 24),
        };
        let before = match u32_at(payload, 12) {
            0 => Before::Nothing,
            1 if place.segment < number => Before::Place(place),
            _ => return Ok(None),
        };
        let whole = u64::from(u32_at(payload, 28)).max(header.end as u64);
        let mut segment = Self {
            number,
            before,
            durable: whole,
            whole,
            damages: Vec::new(),
            header,
            frames: Vec::new(),
            bytes,
        };
        segment.read_records();
        Ok(Some(segment))
    }

    fn read_records(&mut self) {
        let (mut at, mut previous) = (self.header.end, self.header.crc);
        while at < self.bytes.len() {
            let next = frame::read(&self.bytes, self.number, at).filter(|frame| frame.previous == previous);
            let next = next.or_else(|| {
                let behind = self.behind_damage(at)?;
                self.damages.push(at as u64);
                Some(behind)
            });
            let Some(frame) = next else { break };
            self.durable = self.durable.max(u64::from(frame.durable));
            (at, previous) = (frame.end, frame.crc);
            self.frames.push(frame);
        }
        if (at as u64) < self.whole {
            self.damages.push(at as u64);
        }
    }

    /// The first good frame behind the bad one at `at`, if that one was on the disk: a frame further on says so, or the header.
    fn behind_damage(&self, at: usize) -> Option<Frame> {
        let mut first = None;
        let mut was_durable = (at as u64) < self.durable;
        let mut next = at + 1;
        while next + frame::HEADER <= self.bytes.len() {
            match frame::read(&self.bytes, self.number, next) {
                Some(frame) => {
                    was_durable |= frame.durable as usize > at;
                    first.get_or_insert(frame);
                    next = frame.end;
                }
                None => next += 1,
            }
            if was_durable && first.is_some() {
                return first;
            }
        }
        None
    }

    /// The place behind the last frame that ends at `offset` or before.
    pub fn place(&self, offset: u64) -> Place {
        let last = self.frames.iter().rfind(|frame| frame.end as u64 <= offset);
        let last = last.unwrap_or(&self.header);
        Place {
            segment: self.number,
            offset: last.end as u64,
            crc: last.crc,
        }
    }

    /// The place behind the last frame.
    pub fn end(&self) -> Place {
        self.place(u64::MAX)
    }

    /// The records from one offset to another.
    pub fn records(&self, from: u64, to: u64) -> impl Iterator<Item = &[u8]> + Clone {
        self.frames(from, to).map(|frame| frame.payload(&self.bytes))
    }

    /// The frames of records from one offset to another.
    pub fn frames(&self, from: u64, to: u64) -> impl Iterator<Item = &Frame> + Clone {
        let frames = self.frames.iter();
        frames.filter(move |frame| frame.start as u64 >= from && frame.end as u64 <= to)
    }
}
