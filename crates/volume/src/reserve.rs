//! Room that copies leave to others on a file system.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI64, Ordering};

use rustix::fs::statvfs;

/// Bytes written between two looks at the free room.
const STEP: u64 = 16 << 20;

/// Accounts for writes into a copy, so that they leave room on its file system.
#[derive(Debug)]
pub struct Reserve {
    /// The copy's own file, and the bytes that it had allocated before.
    data: PathBuf,
    had: u64,
    bytes: u64,
    /// Bytes that may be written before the next look.
    left: AtomicI64,
}

impl Reserve {
    /// Keeps `bytes` free where these data lie, which had `had` bytes allocated before.
    pub fn new(data: &Path, had: u64, bytes: u64) -> Self {
        Self {
            data: data.to_owned(),
            had,
            bytes,
            left: AtomicI64::new(0),
        }
    }

    /// Takes room for that many bytes; an error if there is none.
    pub fn take(&self, bytes: u64) -> io::Result<()> {
        let bytes = bytes.min(i64::MAX as u64) as i64;
        if self.left.fetch_sub(bytes, Ordering::Relaxed) >= bytes {
            return Ok(());
        }
        let Ok(free) = free(&self.data) else {
            // The write itself reports such an error.
            return Ok(());
        };
        let left = free.saturating_sub(self.bytes);
        // Without room a write may only overwrite blocks that the copy had before.
        if left < bytes as u64 && allocated(&self.data).unwrap_or(0) > self.had {
            self.left.store(0, Ordering::Relaxed);
            return Err(io::Error::from_raw_os_error(libc::ENOSPC));
        }
        let left = left.min(STEP) as i64;
        self.left.store(left - bytes, Ordering::Relaxed);
        Ok(())
    }
}

/// Allocated bytes of the file; `None` if it is a device.
pub fn allocated(data: &Path) -> Option<u64> {
    let metadata = data.metadata().ok()?;
    let is_device = metadata.file_type().is_block_device();
    (!is_device).then(|| metadata.blocks() * 512)
}

/// The nearest existing folder of a file that need not exist.
pub fn file_system(data: &Path) -> Option<&Path> {
    data.ancestors().find(|path| path.exists())
}

/// Free bytes on the file system of this path.
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
        // The reserve exceeds the free bytes.
        let full = reserve(0, u64::MAX);
        assert_eq!(full.take(1).expect_err("full").raw_os_error(), Some(libc::ENOSPC));
        assert!(full.take(4096).is_err());
        reserve(2 << 20, u64::MAX).take(4096).expect("it was its own");
        reserve(0, 0).take(4096).expect("there is room");
    }
}
