//! The note that a flush is in progress, for the next process if this one is killed meanwhile.
//!
//! The note is in the runtime folder and never synced: it has to live as long as the page cache, which
//! outlives processes but no kernel. A flush costs two writes of one byte to memory; the file's room is
//! allocated from the beginning.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// The identity of this start of the machine.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Position of the byte, behind the identity of the start.
const AT: u64 = 40;

/// An open note.
#[derive(Debug)]
pub struct UnderWay {
    file: File,
}

fn boot() -> io::Result<String> {
    Ok(std::fs::read_to_string(BOOT)?.trim().to_owned())
}

impl UnderWay {
    /// Whether the note is set, by a process of this start of the machine.
    pub fn was_cut_off(path: &Path) -> bool {
        let (Ok(note), Ok(boot)) = (std::fs::read(path), boot()) else {
            return false;
        };
        note.starts_with(boot.as_bytes()) && note.get(AT as usize) == Some(&b'1')
    }

    /// Opens the note. It keeps its value if it is of this start of the machine.
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

    /// Sets the note when a flush begins, and clears it when the result is handled.
    pub fn set(&self, is: bool) {
        // The room is allocated. If even a write to memory fails, the old value is no worse than none.
        let _ = self.file.write_all_at(&[if is { b'1' } else { b'0' }], AT);
    }
}
