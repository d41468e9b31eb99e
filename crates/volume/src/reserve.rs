//! Room that copies leave to others on a file system.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};

use rustix::fs::statvfs;

/// So much is written before the room is looked at again.
const STEP: u64 = 16 << 20;

/// What was written into a copy while the room is looked at.
#[derive(Debug)]
pub struct Reserve {
    /// The copy's own file, and what it had of the disk before.
    data: PathBuf,
    had: u64,
    bytes: u64,
    /// What may be written before the next look.
    left: AtomicI64,
}

impl Reserve {
    /// So many bytes are left free where these data lie, which had so much before.
    pub fn new(data: &Path, had: u64, bytes: u64) -> Self {
        Self {
            data: data.to_owned(),
            had,
            bytes,
            left: AtomicI64::new(0),
        }
    }

    /// Takes room for that, or says that there is none.
    pub fn take(&self, bytes: usize) -> io::Result<()> {
        let bytes = bytes as i64;
        if self.left.fetch_sub(bytes, Ordering::Relaxed) >= bytes {
            return Ok(());
        }
        let Ok(free) = free(&self.data) else {
            // What is wrong there a write says, too.
            return Ok(());
        };
        let left = free.saturating_sub(self.bytes);
        // Without room only what was the copy's before is written over.
        if left < bytes as u64 && allocated(&self.data).unwrap_or(0) > self.had {
            self.left.store(0, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let left = left.min(STEP) as i64;
        self.left.store(left - bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// What the file has of its disk; nothing if it is a device.
pub fn allocated(data: &Path) -> Option<u64> {
    let metadata = data.metadata().ok()?;
    let is_device = metadata.file_type().is_block_device();
    (!is_device).then(|| metadata.blocks() * 512)
}

/// The file system of a file that need not be there.
pub fn file_system(data: &Path) -> Option<&Path> {
    data.ancestors().find(|path| path.exists())
}

/// What may be written there.
pub fn free(data: &Path) -> io::Result<u64> {
    let path = file_system(data).ok_or(io::ErrorKind::NotFound)?;
    let stat = statvfs(path)?;
    Ok(stat.f_bavail * stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_nobodys_but_what_was_there_may_be_written_over() {
        let folder = tempfile::tempdir().expect("a folder");
        let data = folder.path().join("data");
        std::fs::write(&data, vec![1; 1 << 20]).expect("written");
        let reserve = |had, bytes| Reserve::new(&data, had, bytes);
        // More than there is.
        let full = reserve(0, u64::MAX);
        assert_eq!(full.take(1).expect_err("full").raw_os_error(), Some(libc::ENOSPC));
        assert!(full.take(4096).is_err());
        reserve(2 << 20, u64::MAX).take(4096).expect("it was its own");
        reserve(0, 0).take(4096).expect("there is room");
    }
}
