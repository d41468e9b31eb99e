//! Reads from the disk, past the page cache: only these are valid for a comparison.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::OnceLock;

use rustix::fs::{Advice, AtFlags, StatxFlags};
use rustix::io::{Errno, ReadWriteFlags};

/// Alignment of direct reads. A disk with larger blocks refuses them; then pages are dropped instead.
const ALIGNMENT: usize = 4096;

/// The same file or device, opened once more.
#[derive(Debug, Default)]
pub struct Direct {
    /// `None` if its file system has no direct reads.
    file: OnceLock<Option<File>>,
}

impl Direct {
    /// Fills `data` from the disk. Dirty pages are written back first. An error if that is not possible.
    pub fn read(
        &self,
        file: &File,
        offset: u64,
        data: &mut [u8],
        flush: impl Fn() -> io::Result<()>,
    ) -> io::Result<()> {
        match self.read_past(file, offset, data) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            read => return read,
        }
        read_dropped(file, offset, data, flush)
    }

    /// The same, without a change to the page cache. EINVAL if the file system has no direct reads.
    pub fn read_past(&self, file: &File, offset: u64, data: &mut [u8]) -> io::Result<()> {
        match self.file.get_or_init(|| open(file)) {
            Some(direct) => read_aligned(direct, offset, data),
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }
}

fn open(file: &File) -> Option<File> {
    // Some file systems let a file be opened for direct I/O, and read it by the page cache all the same (ext4 with `data=journal`).
    let said = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
    if said.is_ok_and(|said| said.stx_mask & StatxFlags::DIOALIGN.bits() != 0 && said.stx_dio_mem_align == 0)
    {
        return None;
    }
    // Not by its name, which another file may have by now.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT).open(path).ok()
}

fn read_aligned(file: &File, offset: u64, data: &mut [u8]) -> io::Result<()> {
    let before = offset as usize % ALIGNMENT;
    let wanted = (before + data.len()).next_multiple_of(ALIGNMENT);
    let mut buffer = vec![0; wanted + ALIGNMENT];
    let start = buffer.as_ptr().align_offset(ALIGNMENT);
    let buffer = &mut buffer[start..start + wanted];
    let mut filled = 0;
    while filled < before + data.len() {
        let at = offset - before as u64 + filled as u64;
        match file.read_at(&mut buffer[filled..], at) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            // Less than a block is the end of the file.
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    data.copy_from_slice(&buffer[before..before + data.len()]);
    Ok(())
}

/// Without direct reads: drops the pages from the page cache, and checks that they are gone.
fn read_dropped(
    file: &File,
    offset: u64,
    data: &mut [u8],
    flush: impl Fn() -> io::Result<()>,
) -> io::Result<()> {
    // `flush` also handles a failure: the kernel reports it once.
    flush()?;
    let length = std::num::NonZeroU64::new(data.len() as u64);
    rustix::fs::fadvise(file, offset, length, Advice::DontNeed)?;
    for (at, piece) in (offset..).step_by(ALIGNMENT).zip(data.chunks_mut(ALIGNMENT)) {
        let mut parts = [io::IoSliceMut::new(piece)];
        match rustix::io::preadv2(file, &mut parts, at, ReadWriteFlags::NOWAIT) {
            Err(Errno::AGAIN) => {}
            _ => return Err(io::Error::other("the page cache keeps it")),
        }
    }
    file.read_exact_at(data, offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_at_any_place() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        let data: Vec<u8> = (0..20_000u32).map(|at| (at / 7) as u8).collect();
        std::fs::write(&path, &data).expect("written");
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .expect("opened");
        let direct = Direct::default();
        for (offset, length) in [
            (0, 1),
            (0, 4096),
            (4095, 2),
            (8192, 11_808),
            (19_999, 1),
            (123, 12_345),
        ] {
            let mut read = vec![0; length];
            match direct.read(&file, offset as u64, &mut read, || file.sync_data()) {
                Ok(()) => assert_eq!(read, data[offset..offset + length]),
                // A file system in memory has no disk.
                Err(error) => assert!(error.to_string().contains("the page cache"), "{error}"),
            }
        }
        let sync = || file.sync_data();
        assert!(direct.read(&file, 19_999, &mut [0; 2], sync).is_err());
    }
}
