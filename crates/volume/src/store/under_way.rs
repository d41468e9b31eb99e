//! The note that a flush is under way, for the process that comes after one that was killed meanwhile.
//!
//! It lies in the runtime folder, and is never made durable: it is to live as long as the page cache does, which outlives processes and no kernel. A flush
//! costs two writes of one byte to memory; its file has its room from the beginning.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Names this start of the machine.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Where the byte is, behind the name of the start.
const AT: u64 = 40;

/// An open one.
#[derive(Debug)]
pub struct UnderWay {
    file: File,
}

fn boot() -> io::Result<String> {
    Ok(std::fs::read_to_string(BOOT)?.trim().to_owned())
}

impl UnderWay {
    /// Whether it is there, and of this start of the machine.
    pub fn was_cut_off(path: &Path) -> bool {
        let (Ok(note), Ok(boot)) = (std::fs::read(path), boot()) else {
            return false;
        };
        note.starts_with(boot.as_bytes()) && note.get(AT as usize) == Some(&b'1')
    }

    /// Makes one that says what there says already, if that is of this start.
    pub fn open(path: &Path) -> io::Result<Self> {
        let is_cut_off = Self::was_cut_off(path);
        let mut open = OpenOptions::new();
        let open = open.write(true).create(true).truncate(false).mode(0o600);
        let file = open.open(path)?;
        let mut note = boot()?.into_bytes();
        note.resize(AT as usize, b' ');
        note.extend([if is_cut_off { b'1' } else { b'0' }, b'\n']);
        file.write_all_at(&note, 0)?;
        Ok(Self { file })
    }

    /// One is, or is dealt with.
    pub fn set(&self, is: bool) {
        // It has its room. Where even memory fails, what it says is not worse than nothing.
        let _ = self.file.write_all_at(&[if is { b'1' } else { b'0' }], AT);
    }
}
