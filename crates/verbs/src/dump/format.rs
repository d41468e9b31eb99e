//! The bytes around the bodies: a head, then one record for each object. All numbers are little-endian.
//!
//! ```text
//!  head                                    record
//!   0..4    "VBCX"                          0..4    its length, this head and the padding included
//!   4..6    version                         4..6    type
//!   6..8    zero                            6..8    version
//!   8..12   how many records                8..12   handle
//!  12..16   checksum                       12..16   checksum
//!  16..24   length of all                  16..     body, then zeroes up to a multiple of 4
//! ```
//! A checksum is CRC-32 (ISO-HDLC) of the whole, dump or record, with its own four bytes taken for zero. So a record can be
//! checked without the others. It finds damage; it proves nothing about who has made the dump.

use std::ops::Range;

use super::{DumpError, ObjectType};

/// The version of dumps, and of records, that are written here. Version 1 is the first.
pub const VERSION: u16 = 1;

/// Bytes in front of the first record.
pub const HEAD_BYTES: usize = 24;
/// Bytes of a record in front of its body.
pub const RECORD_HEAD_BYTES: usize = 16;

const MAGIC: [u8; 4] = *b"VBCX";
/// Where the checksum is, in a head and in a record.
const CHECKSUM: Range<usize> = 12..16;
/// Records begin at multiples of it.
const ALIGNMENT: usize = 4;

/// One record, taken apart; its checksum is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawRecord<'a> {
    /// What it describes.
    pub object: ObjectType,
    /// Which one.
    pub handle: u32,
    /// The fields, and up to three zeroes.
    pub body: &'a [u8],
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn checksum(bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&bytes[..CHECKSUM.start]);
    hasher.update(&[0; 4]);
    hasher.update(&bytes[CHECKSUM.end..]);
    hasher.finalize()
}

fn seal(bytes: &mut [u8]) {
    let sum = checksum(bytes);
    bytes[CHECKSUM].copy_from_slice(&sum.to_le_bytes());
}

fn check_sum(bytes: &[u8]) -> Result<(), DumpError> {
    match u32_at(bytes, CHECKSUM.start) == checksum(bytes) {
        true => Ok(()),
        false => Err(DumpError::Damaged),
    }
}

fn check_version(version: u16) -> Result<(), DumpError> {
    match version {
        VERSION => Ok(()),
        other => Err(DumpError::Version(other)),
    }
}

/// A record with this body.
pub fn record(object: ObjectType, handle: u32, body: &[u8]) -> Result<Vec<u8>, DumpError> {
    let length = (RECORD_HEAD_BYTES + body.len()).next_multiple_of(ALIGNMENT);
    let length_field = u32::try_from(length).map_err(|_| DumpError::TooLong)?;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(length_field.to_le_bytes());
    bytes.extend((object as u16).to_le_bytes());
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend(handle.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend(body);
    bytes.resize(length, 0);
    seal(&mut bytes);
    Ok(bytes)
}

/// A dump of these records.
pub fn dump(records: &[Vec<u8>]) -> Result<Vec<u8>, DumpError> {
    let length = HEAD_BYTES + records.iter().map(Vec::len).sum::<usize>();
    let count = u32::try_from(records.len()).map_err(|_| DumpError::TooLong)?;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend(count.to_le_bytes());
    bytes.extend([0; 4]);
    bytes.extend((length as u64).to_le_bytes());
    records.iter().for_each(|record| bytes.extend(record));
    seal(&mut bytes);
    Ok(bytes)
}

/// Takes one record apart, which must be all of `bytes`.
pub fn parse_record(bytes: &[u8]) -> Result<RawRecord<'_>, DumpError> {
    let fits = bytes.len() >= RECORD_HEAD_BYTES && u32_at(bytes, 0) as usize == bytes.len();
    if !fits || !bytes.len().is_multiple_of(ALIGNMENT) {
        return Err(DumpError::Length);
    }
    check_version(u16_at(bytes, 6))?;
    check_sum(bytes)?;
    let object = u16_at(bytes, 4);
    Ok(RawRecord {
        object: ObjectType::from_raw(object.into()).ok_or(DumpError::Type(object))?,
        handle: u32_at(bytes, 8),
        body: &bytes[RECORD_HEAD_BYTES..],
    })
}

/// Takes a whole dump apart into its records, each of which [`parse_record`] takes.
pub fn parse(bytes: &[u8]) -> Result<Vec<&[u8]>, DumpError> {
    if bytes.len() < HEAD_BYTES {
        return Err(DumpError::Length);
    }
    if !bytes.starts_with(&MAGIC) {
        return Err(DumpError::NoDump);
    }
    check_version(u16_at(bytes, 4))?;
    let length = u64::from(u32_at(bytes, 16)) | u64::from(u32_at(bytes, 20)) << 32;
    if length != bytes.len() as u64 || u16_at(bytes, 6) != 0 {
        return Err(DumpError::Length);
    }
    check_sum(bytes)?;
    let mut records = Vec::new();
    let mut rest = &bytes[HEAD_BYTES..];
    while !rest.is_empty() {
        if rest.len() < RECORD_HEAD_BYTES {
            return Err(DumpError::Length);
        }
        let length = u32_at(rest, 0) as usize;
        let (record, behind) = rest.split_at_checked(length).ok_or(DumpError::Length)?;
        parse_record(record)?;
        records.push(record);
        rest = behind;
    }
    match records.len() == u32_at(bytes, 8) as usize {
        true => Ok(records),
        false => Err(DumpError::Count),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample() -> Vec<u8> {
        let records = [
            record(ObjectType::Pd, 1, &[]),
            record(ObjectType::Mr, 0x1200, &[1, 2, 3, 4, 5]),
            record(ObjectType::Qp, 77, &[9; 4]),
        ];
        dump(&records.map(|record| record.expect("short"))).expect("short")
    }

    #[test]
    fn what_was_written_is_read() {
        let dump = sample();
        let records: Vec<_> = parse(&dump)
            .unwrap()
            .into_iter()
            .map(|record| parse_record(record).unwrap())
            .collect();
        let found: Vec<_> = records
            .iter()
            .map(|record| (record.object, record.handle, record.body))
            .collect();
        let expected: [(_, _, &[u8]); 3] = [
            (ObjectType::Pd, 1, &[]),
            (ObjectType::Mr, 0x1200, &[1, 2, 3, 4, 5, 0, 0, 0]),
            (ObjectType::Qp, 77, &[9; 4]),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn each_flipped_byte_and_each_cut_is_found() {
        let dump = sample();
        for at in 0..dump.len() {
            for flip in [1, 0x80, 0xff] {
                let mut damaged = dump.clone();
                damaged[at] ^= flip;
                assert!(parse(&damaged).is_err(), "byte {at} ^ {flip:#x}");
            }
            assert!(parse(&dump[..at]).is_err(), "cut at {at}");
        }
        let longer = [&dump[..], &[0; 4]].concat();
        assert_eq!(parse(&longer), Err(DumpError::Length));
    }

    #[test]
    fn another_version_is_named() {
        let mut dump = sample();
        dump[4] = 2;
        assert_eq!(parse(&dump), Err(DumpError::Version(2)));
        let mut other = record(ObjectType::Pd, 1, &[]).unwrap();
        other[6] = 9;
        assert_eq!(parse_record(&other), Err(DumpError::Version(9)));
    }

    #[test]
    fn a_right_checksum_over_wrong_counts_does_not_help() {
        let mut dump = sample();
        dump[8] = 4;
        seal(&mut dump);
        assert_eq!(parse(&dump), Err(DumpError::Count));
        let mut dump = sample();
        dump[HEAD_BYTES] = 0xfc;
        seal(&mut dump);
        assert_eq!(parse(&dump), Err(DumpError::Length));
        let mut odd = record(ObjectType::Pd, 1, &[]).unwrap();
        odd[4] = 99;
        seal(&mut odd);
        assert_eq!(parse_record(&odd), Err(DumpError::Type(99)));
    }

    proptest! {
        /// Bytes of anybody: taken apart or refused, also with the checksums put right.
        #[test]
        fn anything_is_read_or_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200), sealed: bool) {
            if sealed && bytes.len() >= HEAD_BYTES {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..8].copy_from_slice(&[1, 0, 0, 0]);
                let length = bytes.len() as u64;
                bytes[16..24].copy_from_slice(&length.to_le_bytes());
                seal(&mut bytes);
            }
            let _ = parse(&bytes);
            if sealed && bytes.len() >= RECORD_HEAD_BYTES {
                let length = bytes.len() as u32;
                bytes[..4].copy_from_slice(&length.to_le_bytes());
                bytes[6..8].copy_from_slice(&[1, 0]);
                seal(&mut bytes);
            }
            let _ = parse_record(&bytes);
        }

        #[test]
        fn damage_anywhere_is_found(at in 0usize..4096, flip in 1u8..) {
            let mut dump = sample();
            let at = at % dump.len();
            dump[at] ^= flip;
            prop_assert!(parse(&dump).is_err());
        }
    }
}
