//! A folder of a file system.

use std::fs::{DirBuilder, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FallocateFlags, FlockOperation, Mode, OFlags};
use rustix::io::retry_on_intr;

use crate::storage::{Storage, StorageFile};

/// A folder that only its owner can read, and files that only their owner can read.
#[derive(Debug)]
pub struct Folder(OwnedFd);

impl Folder {
    /// Opens the folder at `path`, which is made if it is not there. It is on the disk itself when this returns.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut missing: Vec<&Path> = path.ancestors().take_while(|path| !exists(path)).collect();
        missing.reverse();
        for folder in missing {
            match DirBuilder::new().mode(0o700).create(folder) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => sync_parent(folder)?,
            }
        }
        sync_parent(path)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())?;
        rustix::fs::fchmod(&folder, Mode::RWXU)?;
        Ok(Self(folder))
    }

    fn file(&self, name: &str, flags: OFlags) -> io::Result<FolderFile> {
        let flags = flags | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(&self.0, name, flags, Mode::RUSR | Mode::WUSR);
        Ok(FolderFile(retry_on_intr(open)?.into()))
    }
}

fn exists(path: &Path) -> bool {
    path.as_os_str().is_empty() || path.exists()
}

fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = match path.parent() {
        Some(parent) if parent.as_os_str().is_empty() => PathBuf::from("."),
        Some(parent) => parent.to_owned(),
        None => return Ok(()),
    };
    File::open(parent)?.sync_all()
}

impl Storage for Folder {
    type File = FolderFile;

    fn lock(&mut self) -> io::Result<()> {
        let lock = || rustix::fs::flock(&self.0, FlockOperation::NonBlockingLockExclusive);
        Ok(retry_on_intr(lock)?)
    }

    fn names(&mut self) -> io::Result<Vec<String>> {
        let entries = rustix::fs::Dir::read_from(&self.0)?;
        let names = entries.map(|entry| Ok(entry?.file_name().to_str().ok().map(str::to_owned)));
        names.filter_map(Result::transpose).collect()
    }

    fn create(&mut self, name: &str) -> io::Result<FolderFile> {
        self.file(name, OFlags::CREATE | OFlags::EXCL)
    }

    fn open(&mut self, name: &str) -> io::Result<FolderFile> {
        self.file(name, OFlags::empty())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.0, from, &self.0, to)?)
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.0, name, AtFlags::empty())?)
    }

    fn sync(&mut self) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::fsync(&self.0))?)
    }
}

/// A file in a [`Folder`].
#[derive(Debug)]
pub struct FolderFile(File);

impl StorageFile for FolderFile {
    fn read(&mut self, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&self.0).take(limit).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn truncate(&mut self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.0.sync_all()
    }

    fn reserve(&mut self, offset: u64, bytes: u64) -> io::Result<()> {
        let reserve = || rustix::fs::fallocate(&self.0, FallocateFlags::KEEP_SIZE, offset, bytes);
        Ok(retry_on_intr(reserve)?)
    }
}
