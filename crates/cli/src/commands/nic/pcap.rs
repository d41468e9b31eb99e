//! The capture file format that every tool reads (draft-ietf-opsawg-pcap), with times in nanoseconds.

use std::io::{self, Write};

/// Times are in nanoseconds; written in this machine's byte order, which readers learn from it.
const MAGIC: u32 = 0xa1b2_3c4d;
const VERSION: [u16; 2] = [2, 4];

/// `LINKTYPE_RAW`: packets start with an IPv4 or IPv6 header.
const LINKTYPE_RAW: u32 = 101;

/// Writes a file.
#[derive(Debug)]
pub struct Writer<W: Write>(W);

impl<W: Write> Writer<W> {
    /// Begins the file; packets have at most `snap_bytes` bytes in it.
    pub fn new(mut out: W, snap_bytes: u32) -> io::Result<Self> {
        out.write_all(&MAGIC.to_ne_bytes())?;
        for number in VERSION {
            out.write_all(&number.to_ne_bytes())?;
        }
        // Two reserved words, the length and the link type.
        for word in [0, 0, snap_bytes, LINKTYPE_RAW] {
            out.write_all(&word.to_ne_bytes())?;
        }
        Ok(Self(out))
    }

    /// Adds a packet of `length` bytes, of which `bytes` are the beginning, at a time since 1970.
    pub fn packet(&mut self, time_ns: u64, length: u32, bytes: &[u8]) -> io::Result<()> {
        const SECOND: u64 = 1_000_000_000;
        for word in [
            (time_ns / SECOND) as u32,
            (time_ns % SECOND) as u32,
            bytes.len() as u32,
            length,
        ] {
            self.0.write_all(&word.to_ne_bytes())?;
        }
        self.0.write_all(bytes)
    }

    /// Makes all of it reach the file.
    pub fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_as_the_draft_has_it() {
        let mut bytes = Vec::new();
        let mut writer = Writer::new(&mut bytes, 96).unwrap();
        writer.packet(3_000_000_007, 1500, &[0x45, 1, 2]).unwrap();
        writer.flush().unwrap();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!([word(0), word(16), word(20)], [0xa1b2_3c4d, 96, 101]);
        assert_eq!([word(24), word(28), word(32), word(36)], [3, 7, 3, 1500]);
        assert_eq!((bytes.len(), &bytes[40..]), (43, &[0x45, 1, 2][..]));
    }
}
