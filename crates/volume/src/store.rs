//! The data of a volume: a file or a block device.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags};

use crate::quick::Quick;

/// Zeros that are written where the file system cannot make them.
const ZEROS: usize = 256 << 10;

/// Of what can wait, in one call. Many kernels take no processor from a thread within a call, however urgent others are, and one that writes 256 KiB takes up to
/// 0.8 ms.
const PIECE: usize = 32 << 10;

/// An open one.
#[derive(Debug)]
pub struct Store {
    file: File,
    /// A flush has failed. Linux may have dropped what was dirty and call it clean: no later flush can be believed.
    is_lost: AtomicBool,
    /// Its file system can say that a read would wait.
    reads_at_once: AtomicBool,
    quick: Quick,
}

impl Store {
    /// Opens it, and makes a file if there is none. A file gets the length; a block device must have it.
    pub fn open(path: &Path, length: u64) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)?;
        let metadata = file.metadata()?;
        if metadata.file_type().is_block_device() {
            let size = rustix::fs::seek(&file, rustix::fs::SeekFrom::End(0))?;
            if size < length {
                return Err(io::Error::other(format!(
                    "the device has {size} bytes, the volume {length}"
                )));
            }
        } else if metadata.len() != length {
            file.set_len(length)?;
            file.sync_all()?;
            if let Some(parent) = path.parent() {
                File::open(parent)?.sync_all()?;
            }
        }
        Ok(Self {
            file,
            is_lost: AtomicBool::new(false),
            reads_at_once: AtomicBool::new(true),
            quick: Quick::default(),
        })
    }

    /// Fills `data` from `offset` on.
    pub fn read(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(data, offset)
    }

    /// The same if the page cache has all of it; nothing where somebody should wait for the disk.
    pub fn read_at_once(&self, offset: u64, data: &mut [u8]) -> Option<io::Result<()>> {
        if !self.reads_at_once.load(Ordering::Relaxed) {
            return None;
        }
        let length = data.len();
        let mut parts = [io::IoSliceMut::new(data)];
        match rustix::io::preadv2(&self.file, &mut parts, offset, ReadWriteFlags::NOWAIT) {
            Ok(read) if read == length => Some(Ok(())),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => None,
            Err(_) => {
                // Whatever it was, a read that may wait says it, too.
                self.reads_at_once.store(false, Ordering::Relaxed);
                None
            }
        }
    }

    /// Writes all of it if that is not likely to take long; nothing where somebody should wait for the disk.
    pub fn write_at_once(&self, offset: u64, data: &[u8]) -> Option<io::Result<()>> {
        self.quick.try_it(|| self.write(offset, data))
    }

    /// Writes all of it.
    pub fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.file.write_all_at(data, offset)
    }

    /// As [`Store::read`], for what can wait: a thread with something urgent gets the processor between two pieces.
    pub fn read_in_pieces(&self, offset: u64, data: &mut [u8]) -> io::Result<()> {
        let mut pieces = (offset..).step_by(PIECE).zip(data.chunks_mut(PIECE));
        pieces.try_for_each(|(offset, piece)| self.read(offset, piece))
    }

    /// As [`Store::write`], in the same way.
    pub fn write_in_pieces(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut pieces = (offset..).step_by(PIECE).zip(data.chunks(PIECE));
        pieces.try_for_each(|(offset, piece)| self.write(offset, piece))
    }

    /// Zeros, allocated or not. What is read afterwards is zero in any case.
    pub fn zero(&self, offset: u64, length: u64, may_free: bool) -> io::Result<()> {
        let flags = match may_free {
            true => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            false => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        match rustix::fs::fallocate(&self.file, flags, offset, length) {
            Ok(()) => Ok(()),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                let zeros = vec![0; ZEROS.min(length as usize)];
                let mut done = 0;
                while done < length {
                    let part = (length - done).min(ZEROS as u64);
                    self.write(offset + done, &zeros[..part as usize])?;
                    done += part;
                }
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes durable what was written.
    pub fn flush(&self) -> io::Result<()> {
        if self.is_lost.load(Ordering::Acquire) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        self.file
            .sync_data()
            .inspect_err(|_| self.is_lost.store(true, Ordering::Release))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_all_of_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("data"), 1 << 20).expect("made");
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let data: Vec<u8> = (0..length).map(|at| (at / 100) as u8 | 1).collect();
            store.write_in_pieces(77, &data).expect("written");
            let mut read = vec![0; length + 1];
            store.read_in_pieces(77, &mut read[..length]).expect("read");
            assert_eq!(read[..length], data);
            store.read(77, &mut read).expect("read");
            assert_eq!(read[..length], data);
        }
        assert!(store.read_in_pieces((1 << 20) - 1, &mut [0; 2]).is_err());
    }

    #[test]
    fn zeros_are_zeros() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().join("data"), 1 << 20).expect("made");
        for may_free in [true, false] {
            store.write(0, &[7; 4096]).expect("written");
            store.zero(5, 1000, may_free).expect("zeroed");
            let mut data = [1; 1010];
            store.read(0, &mut data).expect("read");
            assert_eq!(data[..5], [7; 5]);
            assert_eq!(data[5..1005], [0; 1000]);
            assert_eq!(data[1005..], [7; 5]);
        }
        store.flush().expect("flushed");
        assert!(store.read((1 << 20) - 1, &mut [0; 2]).is_err());
    }
}
