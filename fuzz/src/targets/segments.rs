//! The segments of a journal, after a crash or worse.

use arbitrary::{Arbitrary, Unstructured};
use verbatim_journal::testing::{Disk, push_frame};
use verbatim_journal::{Durability, Error, Log, Replayed};

use super::noise;

/// Something in a segment.
#[derive(Debug, Arbitrary)]
enum Piece {
    Noise(Vec<u8>),
    Record {
        durable: Offset,
        follows: bool,
        payload: Vec<u8>,
    },
    /// Only at a segment's begin it is one.
    Header {
        /// Of all places so far, the one that it continues.
        continues: Option<u8>,
        is_there: bool,
        whole: Offset,
    },
    /// A byte before it is another one.
    Changed(u8),
}

/// An offset that may mean something: of now, or any one.
#[derive(Debug, Arbitrary)]
enum Offset {
    Here,
    Beyond(u8),
    Any(u16),
}

impl Offset {
    fn of(&self, bytes: &[u8]) -> u32 {
        match self {
            Self::Here => bytes.len() as u32,
            Self::Beyond(more) => bytes.len() as u32 + u32::from(*more),
            Self::Any(offset) => u32::from(*offset),
        }
    }
}

/// Begins with 0: the rest is the content of the first segment. Otherwise: a story of segments whose checksums are right.
///
/// What is replayed once is replayed again, with the same damage, and new records come behind it.
pub fn segments(input: &[u8]) {
    let disk = Disk::new();
    match input {
        [0, content @ ..] => disk.put("00000001.log", Some(content.to_vec())),
        [_, story @ ..] => {
            let Ok(story) = Vec::<(u8, Vec<Piece>)>::arbitrary_take_rest(Unstructured::new(story)) else {
                return;
            };
            tell(&disk, &story);
        }
        [] => {}
    }
    let first = match open(&disk) {
        Ok((_, replayed)) => replayed,
        Err(Error::Version { .. }) => return,
        Err(error) => panic!("{error}"),
    };
    let (mut log, mut expected) = open(&disk).expect("it was opened before");
    assert_eq!(first, expected);
    log.append(b"new", Durability::Synced)
        .expect("the disk is in order");
    expected.records.push(b"new".to_vec());
    disk.crash(|_| 0..0);
    let (mut log, replayed) = open(&disk).expect("it was opened before");
    assert_eq!(replayed, expected);
    log.rewrite(expected.records.clone().into_iter())
        .expect("the disk is in order");
    disk.crash(|_| 0..0);
    expected.damage = None;
    expected.gaps.clear();
    assert_eq!(open(&disk).expect("it was written anew").1, expected);
}

fn open(disk: &Disk) -> Result<(Log<verbatim_journal::testing::Mount>, Replayed), Error> {
    Log::open(disk.mount())
}

fn tell(disk: &Disk, story: &[(u8, Vec<Piece>)]) {
    let mut places = Vec::new();
    for (number, pieces) in story {
        let number = u32::from(number % 8);
        let (mut bytes, mut last) = (Vec::new(), 0);
        for piece in pieces {
            match piece {
                Piece::Noise(noise) => bytes.extend_from_slice(noise),
                Piece::Record {
                    durable,
                    follows,
                    payload,
                } => {
                    let previous = if *follows { last } else { !last };
                    let durable = durable.of(&bytes);
                    last = push_frame(&mut bytes, number, durable, previous, payload);
                }
                Piece::Header {
                    continues,
                    is_there,
                    whole,
                } => {
                    let place =
                        continues.and_then(|index| places.get(usize::from(index) % places.len().max(1)));
                    let (segment, offset, crc) = place.copied().unwrap_or_default();
                    let crc: u32 = if *is_there { crc } else { !crc };
                    let kind = u32::from(continues.is_some());
                    let mut payload = b"vrbt-log".to_vec();
                    for field in [1, kind, segment, offset, crc, whole.of(&bytes)] {
                        payload.extend_from_slice(&u32::to_le_bytes(field));
                    }
                    last = push_frame(&mut bytes, number, 0, 0, &payload);
                }
                Piece::Changed(back) => {
                    let index = bytes.len().checked_sub(usize::from(*back) + 1);
                    if let Some(byte) = index.and_then(|index| bytes.get_mut(index)) {
                        *byte ^= 1;
                    }
                }
            }
            places.push((number, bytes.len() as u32, last));
        }
        disk.put(&format!("{number:08x}.log"), Some(bytes));
    }
}

/// A log as it is written, and stories.
pub fn seeds() -> Vec<Vec<u8>> {
    let disk = Disk::new();
    let (mut log, _) = open(&disk).expect("an empty disk");
    for record in [&b"opened"[..], b"", b"committed", b"closed"] {
        log.append(record, Durability::Synced)
            .expect("the disk is in order");
    }
    let written = disk.files().remove("00000001.log").expect("the first segment");
    let mut seeds = vec![[&[0], &written[..]].concat()];
    seeds.extend(noise(8, 600));
    seeds
}
