//! The missing pages, written down beside the RAM for the next process.
//!
//! The record is a file in the same tmpfs, which lives as long as the RAM does. A page's bit is cleared after
//! the page is there.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::bits::Bits;
use crate::error::{Error, Result};

/// The beginning of the file.
const MAGIC: &[u8; 8] = b"vbmissng";

/// The version of the format.
const VERSION: u32 = 1;

/// Length of the header: the magic, the version, the number of QEMU's descriptor, the number of pages, and
/// whether all missing pages are recorded.
const HEADER: usize = 8 + 4 + 4 + 8 + 8;

/// Position of the last field.
const COMPLETE: u64 = 24;

/// The file.
#[derive(Debug)]
pub struct Record {
    file: File,
    path: PathBuf,
    missing: Bits,
    descriptor: i32,
    complete: bool,
}

impl Record {
    /// Makes a record for a RAM of this many pages, none of which is missing. `descriptor`: the number of the
    /// userfaultfd in QEMU.
    pub fn create(path: &Path, pages: u64, descriptor: i32) -> Result<Self> {
        let failed = || Error::io(format!("write {}", path.display()));
        let missing = Bits::none(pages);
        let (_, bits) = missing.bytes(0..pages);
        let complete = 0u64;
        let header = [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &descriptor.to_le_bytes(),
            &pages.to_le_bytes(),
            &complete.to_le_bytes(),
        ]
        .concat();
        let mut new = path.as_os_str().to_owned();
        new.push(".new");
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600);
        let file = options.open(&new).map_err(failed())?;
        file.write_all_at(&header, 0).map_err(failed())?;
        file.write_all_at(&bits, HEADER as u64).map_err(failed())?;
        std::fs::rename(&new, path).map_err(failed())?;
        Ok(Self {
            file,
            path: path.to_owned(),
            missing,
            descriptor,
            complete: false,
        })
    }

    /// Opens the record, if there is one.
    pub fn open(path: &Path) -> Result<Option<Self>> {
        let file = match File::options().read(true).write(true).open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            file => file.map_err(Error::io(format!("open {}", path.display())))?,
        };
        let bytes = std::fs::read(path).map_err(Error::io(format!("read {}", path.display())))?;
        let (descriptor, complete, missing) = parse(&bytes).ok_or_else(|| {
            Error::PostCopy(format!(
                "{} is not what this release writes down; it is another's, or damaged",
                path.display()
            ))
        })?;
        Ok(Some(Self {
            file,
            path: path.to_owned(),
            missing,
            descriptor,
            complete,
        }))
    }

    /// The missing pages.
    pub fn missing(&self) -> &Bits {
        &self.missing
    }

    /// The number of QEMU's userfaultfd.
    pub fn descriptor(&self) -> i32 {
        self.descriptor
    }

    /// Whether all missing pages are recorded.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// Adds missing pages.
    pub fn lack(&mut self, pages: Range<u64>) -> Result<()> {
        self.missing.insert(pages.clone());
        self.write(pages)
    }

    /// Notes that all missing pages are recorded.
    pub fn complete(&mut self) -> Result<()> {
        let written = self.file.write_all_at(&1u64.to_le_bytes(), COMPLETE);
        written.map_err(Error::io(format!("write {}", self.path.display())))?;
        self.complete = true;
        Ok(())
    }

    /// Notes that these pages are there.
    pub fn given(&mut self, pages: Range<u64>) -> Result<()> {
        self.missing.remove(pages.clone());
        self.write(pages)
    }

    fn write(&self, pages: Range<u64>) -> Result<()> {
        let (at, bytes) = self.missing.bytes(pages);
        let written = self.file.write_all_at(&bytes, HEADER as u64 + at);
        written.map_err(Error::io(format!("write {}", self.path.display())))
    }

    /// Removes the record when no page is missing.
    pub fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(Error::io(format!("remove {}", self.path.display())))
    }
}

fn parse(bytes: &[u8]) -> Option<(i32, bool, Bits)> {
    let (header, bits) = bytes.split_at_checked(HEADER)?;
    let (magic, header) = header.split_at(MAGIC.len());
    let (version, header) = header.split_first_chunk()?;
    let (descriptor, header) = header.split_first_chunk()?;
    let (pages, header) = header.split_first_chunk()?;
    let complete = u64::from_le_bytes(header.try_into().ok()?);
    let pages = u64::from_le_bytes(*pages);
    if magic != MAGIC || u32::from_le_bytes(*version) != VERSION || complete > 1 {
        return None;
    }
    // Otherwise memory would be allocated for this many bits.
    if pages.div_ceil(64).checked_mul(8)? != bits.len() as u64 {
        return None;
    }
    Some((
        i32::from_le_bytes(*descriptor),
        complete == 1,
        Bits::from_bytes(pages, bits)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_found_as_it_was_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ram.missing");
        assert!(Record::open(&path).unwrap().is_none());
        let mut record = Record::create(&path, 1000, 17).unwrap();
        record.lack(3..900).unwrap();
        record.given(100..164).unwrap();
        let found = Record::open(&path).unwrap().unwrap();
        assert_eq!((found.descriptor(), found.is_complete()), (17, false));
        assert_eq!(found.missing().runs(0..1000), [3..100, 164..900]);
        record.complete().unwrap();
        let found = Record::open(&path).unwrap().unwrap();
        assert!(found.is_complete());
        found.remove().unwrap();
        assert!(Record::open(&path).unwrap().is_none());
    }

    #[test]
    fn what_it_is_not_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ram.missing");
        Record::create(&path, 100, 17).unwrap();
        let good = std::fs::read(&path).unwrap();
        assert!(parse(&good).is_some());
        for length in 0..good.len() {
            assert!(parse(&good[..length]).is_none(), "{length} bytes of it");
        }
        for at in [0, 8, 16, 24, good.len() - 1] {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            assert!(parse(&bad).is_none(), "byte {at} is another");
        }
    }
}
