//! The log of dm-log-writes: content of a disk after a power failure at any moment. The log has a write at
//! the flush that made it durable, or by itself if it was a FUA write; so the disk after a prefix has exactly
//! the writes that had to be durable by then. The format is in the kernel's
//! Documentation/admin-guide/device-mapper/log-writes.rst and drivers/md/dm-log-writes.c.

use anyhow::{Context, ensure};

const MAGIC: u64 = 0x006a_7366_7773_6872;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;

/// The entries of a log.
pub struct Log<'a> {
    bytes: &'a [u8],
    sector: usize,
    pub entries: Vec<Entry>,
}

/// An entry of a log.
#[derive(Debug)]
pub struct Entry {
    flags: u64,
    /// Offset on the disk in bytes; likewise the length.
    offset: usize,
    length: usize,
    /// Offset of the entry's data in the log.
    at: usize,
    /// Text of a mark.
    pub mark: Option<String>,
}

impl Entry {
    /// Whether the entry writes data.
    pub fn has_data(&self) -> bool {
        self.length > 0 && self.flags & DISCARD == 0
    }

    /// Whether the entry makes a write durable: its own, or earlier ones.
    pub fn is_cut(&self) -> bool {
        self.flags & (FLUSH | FUA) != 0
    }
}

fn number(bytes: &[u8], at: usize) -> anyhow::Result<u64> {
    let bytes = bytes.get(at..at + 8).context("the log ends in the middle")?;
    Ok(u64::from_le_bytes(bytes.try_into()?))
}

impl<'a> Log<'a> {
    /// Reads a log to the end.
    pub fn read(bytes: &'a [u8]) -> anyhow::Result<Self> {
        ensure!(number(bytes, 0)? == MAGIC, "it is no log of dm-log-writes");
        ensure!(number(bytes, 8)? == 1, "another version of dm-log-writes");
        let count = number(bytes, 16)?;
        let sector = u32::from_le_bytes(bytes[24..28].try_into()?) as usize;
        let mut log = Self {
            bytes,
            sector,
            entries: Vec::new(),
        };
        let mut at = sector;
        for _ in 0..count {
            at = log.entry(at)?;
        }
        Ok(log)
    }

    /// Reads an entry; returns the offset of the next one.
    fn entry(&mut self, at: usize) -> anyhow::Result<usize> {
        let [offset, length, flags, inline] = [0, 8, 16, 24].map(|field| number(self.bytes, at + field));
        let (offset, length, flags) = (offset? as usize, length? as usize, flags?);
        let mark = match flags & MARK {
            0 => None,
            _ => {
                let text = self.bytes.get(at + 32..at + 32 + inline? as usize);
                Some(String::from_utf8_lossy(text.context("a mark is cut off")?).into_owned())
            }
        };
        let data = at + self.sector;
        self.entries.push(Entry {
            flags,
            offset: offset * self.sector,
            length: length * self.sector,
            at: data,
            mark,
        });
        Ok(match flags & DISCARD {
            0 => data + length * self.sector,
            _ => data,
        })
    }

    /// Applies an entry to a disk. The content of a discarded block is undefined; here it is zeros.
    pub fn apply(&self, entry: &Entry, disk: &mut [u8]) -> anyhow::Result<()> {
        let place = disk.get_mut(entry.offset..entry.offset + entry.length);
        let place = place.context("an entry lies outside of the disk")?;
        match entry.flags & DISCARD {
            0 => {
                let data = self.bytes.get(entry.at..entry.at + entry.length);
                place.copy_from_slice(data.context("an entry is cut off")?);
            }
            _ => place.fill(0),
        }
        Ok(())
    }
}
