//! The signature of a block device without a name of its own: a block behind the volume with a random number,
//! by which the device is known after a restart of the machine, whatever its path and number are then.
//!
//! The block is the last whole one of the device, so that the volume can grow up to it. It is only written
//! over zeros, or over an earlier signature: the rest of a larger device is somebody's.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use serde::{Deserialize, Serialize};

/// Bytes of the block, and its alignment.
pub const BLOCK: u64 = 4096;

/// The beginning of the block; the number follows, in hexadecimal.
const MAGIC: &[u8] = b"verbatim volume signature 1 ";

/// Letters of the number.
const LETTERS: usize = 32;

/// A signature, and its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Signature {
    /// Its first byte on the device.
    pub offset: u64,
    /// The number.
    pub number: String,
}

/// Whether a device has room for a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Room {
    /// It has, at this byte.
    At(u64),
    /// The volume takes all of the device.
    None,
    /// The block has other content.
    Used(u64),
}

impl Room {
    /// The room behind a volume of this length. The device is only read.
    pub fn of(device: &File, length: u64) -> io::Result<Self> {
        let size = rustix::fs::seek(device, SeekFrom::End(0))?;
        let offset = (size / BLOCK * BLOCK).saturating_sub(BLOCK);
        if size < BLOCK || offset < length {
            return Ok(Self::None);
        }
        let mut block = [0; BLOCK as usize];
        device.read_exact_at(&mut block, offset)?;
        let is_free = block.starts_with(MAGIC) || block.iter().all(|byte| *byte == 0);
        Ok(if is_free {
            Self::At(offset)
        } else {
            Self::Used(offset)
        })
    }
}

impl Signature {
    /// Writes a new one there, durably.
    pub fn write(device: &File, offset: u64) -> io::Result<Self> {
        let number = format!("{:032x}", rand::random::<u128>());
        let mut block = vec![0; BLOCK as usize];
        block[..MAGIC.len()].copy_from_slice(MAGIC);
        block[MAGIC.len()..][..LETTERS].copy_from_slice(number.as_bytes());
        device.write_all_at(&block, offset)?;
        device.sync_data()?;
        Ok(Self { offset, number })
    }

    /// The one at this byte, if there is one.
    pub fn read(device: &File, offset: u64) -> io::Result<Option<Self>> {
        let mut block = [0; BLOCK as usize];
        match device.read_exact_at(&mut block, offset) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            read => read?,
        }
        let number = block.strip_prefix(MAGIC).map(|rest| &rest[..LETTERS]);
        let number = number.and_then(|number| std::str::from_utf8(number).ok());
        Ok(number.map(|number| Self {
            offset,
            number: number.to_owned(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file in the place of a device.
    fn device(bytes: u64) -> File {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(bytes).expect("longer");
        file
    }

    #[test]
    fn a_signature_is_read_again_and_another_one_differs() {
        let device = device(5 * BLOCK + 512);
        assert_eq!(Room::of(&device, 4 * BLOCK).expect("read"), Room::At(4 * BLOCK));
        assert_eq!(Signature::read(&device, 4 * BLOCK).expect("read"), None);
        let first = Signature::write(&device, 4 * BLOCK).expect("written");
        assert_eq!(
            Signature::read(&device, 4 * BLOCK).expect("read").as_ref(),
            Some(&first)
        );
        assert_eq!(
            Room::of(&device, 1).expect("read"),
            Room::At(4 * BLOCK),
            "an earlier one is replaced"
        );
        let second = Signature::write(&device, 4 * BLOCK).expect("written");
        assert_ne!(first, second);
        assert_eq!(Signature::read(&device, 1 << 40).expect("it is short"), None);
    }

    #[test]
    fn a_signature_is_written_over_nothing_and_not_into_the_volume() {
        let device = device(5 * BLOCK);
        for length in [4 * BLOCK + 1, 5 * BLOCK, 6 * BLOCK] {
            assert_eq!(Room::of(&device, length).expect("read"), Room::None, "{length}");
        }
        device.write_all_at(&[7], 5 * BLOCK - 1).expect("written");
        assert_eq!(Room::of(&device, 1).expect("read"), Room::Used(4 * BLOCK));
        assert_eq!(
            Room::of(&tempfile::tempfile().expect("a file"), 0).expect("read"),
            Room::None
        );
    }
}
