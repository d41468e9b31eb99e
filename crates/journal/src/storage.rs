//! What a log asks of a disk.

use std::io;

/// A folder of files that belongs to one log.
pub trait Storage {
    /// A file in it that is open.
    type File: StorageFile;

    /// Keeps other processes away until this is dropped. The error is [`io::ErrorKind::WouldBlock`] if another one was faster.
    fn lock(&mut self) -> io::Result<()>;

    /// The names of all files. Names that are not UTF-8 belong to somebody else and may be left out.
    fn names(&mut self) -> io::Result<Vec<String>>;

    /// Makes an empty file, which must not exist yet.
    fn create(&mut self, name: &str) -> io::Result<Self::File>;

    /// Opens a file for reading and writing.
    fn open(&mut self, name: &str) -> io::Result<Self::File>;

    /// Gives a file another name, at once or not at all.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&mut self, name: &str) -> io::Result<()>;

    /// Returns when all names are on the disk.
    fn sync(&mut self) -> io::Result<()>;
}

/// One file. An error says nothing about what was done and what was not.
pub trait StorageFile {
    /// Its content, but no more than `limit` bytes.
    fn read(&mut self, limit: u64) -> io::Result<Vec<u8>>;

    /// Writes all of `bytes` at `offset`.
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes it `length` bytes long.
    fn truncate(&mut self, length: u64) -> io::Result<()>;

    /// Returns when its content and length are on the disk.
    fn sync(&mut self) -> io::Result<()>;

    /// Sets blocks aside for `bytes` at `offset`, so that writing there needs no free space. The length stays.
    fn reserve(&mut self, offset: u64, bytes: u64) -> io::Result<()>;
}
