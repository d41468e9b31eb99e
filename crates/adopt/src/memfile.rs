//! The memory file: one per process, sparse, named by its process id.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, fstat, fstatfs, ftruncate, open, unlink};
use rustix::io::Errno;
use rustix::process::{Pid, Resource, getrlimit, test_kill_process};

use crate::error::AdoptError;
use crate::maps::FileId;

/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The memory file of this process, by its path. It is opened for each use: a descriptor that stays open could be
/// closed by the program, and would be in the way of a dump.
#[derive(Debug)]
pub struct MemFile {
    path: PathBuf,
}

impl MemFile {
    /// Makes the file, empty and accessible to its owner only.
    pub fn create(mem_dir: &Path, pid: u32) -> Result<(Self, OwnedFd), AdoptError> {
        let path = mem_dir.join(pid.to_string());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => Ok((Self { path }, fd)),
            Err(error) => Err(AdoptError::File {
                path,
                source: error.into(),
            }),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens it again.
    pub fn open(&self) -> Result<OwnedFd, AdoptError> {
        open(
            &self.path,
            OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|error| self.error(error))
    }

    /// Removes its name.
    pub fn remove(&self) {
        let _ = unlink(&self.path);
    }

    /// What mappings of it look like.
    pub fn id(&self, file: BorrowedFd<'_>) -> Result<FileId, AdoptError> {
        let stat = fstat(file).map_err(|error| self.error(error))?;
        Ok(FileId {
            device: (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev)),
            inode: stat.st_ino,
        })
    }

    /// Makes sure that every page of the range can be written to later, by a store as well: a store into a hole of a
    /// full tmpfs would end the program with SIGBUS. Where the file system has a limit, all pages are allocated now
    /// (`ibv_reg_mr` allocates and pins them on hardware, too); tmpfs does not clear them before their first use, and
    /// `SEEK_DATA` passes over them. On a tmpfs without a limit (`size=0`) a hole is as good as untouched anonymous
    /// memory, and stays one.
    pub fn reserve(&self, file: BorrowedFd<'_>, range: Range<u64>) -> Result<(), AdoptError> {
        // Beyond this limit the kernel sends SIGXFSZ.
        if getrlimit(Resource::Fsize)
            .current
            .is_some_and(|limit| range.end > limit)
        {
            return Err(AdoptError::FileLimit {
                path: self.path.clone(),
                bytes: range.end,
            });
        }
        let length = range.end - range.start;
        let reserved = if is_unlimited(file) {
            fstat(file).and_then(|stat| match stat.st_size.cast_unsigned() < range.end {
                true => ftruncate(file, range.end),
                false => Ok(()),
            })
        } else {
            fallocate(file, FallocateFlags::empty(), range.start, length)
        };
        match reserved {
            Ok(()) => Ok(()),
            Err(Errno::NOSPC | Errno::DQUOT | Errno::NOMEM) => Err(AdoptError::Full {
                path: self.path.clone(),
                bytes: length,
            }),
            Err(error) => Err(self.error(error)),
        }
    }

    /// Gives the range's memory back to the system and makes it read as zeros. False if that fails.
    pub fn punch(&self, file: BorrowedFd<'_>, range: Range<u64>) -> bool {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        range.is_empty() || fallocate(file, flags, range.start, range.end - range.start).is_ok()
    }

    fn error(&self, error: Errno) -> AdoptError {
        AdoptError::File {
            path: self.path.clone(),
            source: error.into(),
        }
    }
}

/// Whether the file is on a tmpfs that never runs full: neither by its size nor by strict accounting of memory.
fn is_unlimited(file: BorrowedFd<'_>) -> bool {
    let strict =
        || std::fs::read("/proc/sys/vm/overcommit_memory").map_or(true, |mode| mode.trim_ascii() == b"2");
    fstatfs(file.as_fd()).is_ok_and(|fs| fs.f_type == TMPFS_MAGIC && fs.f_blocks == 0) && !strict()
}

/// Removes the files of processes that are gone, and that of this process (from before an `execve`, or of a
/// predecessor with its number). A folder that does not exist yet has none.
pub fn remove_stale(mem_dir: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(mem_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries.flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        let gone = Pid::from_raw(pid).is_some_and(|pid| test_kill_process(pid) == Err(Errno::SRCH));
        if gone || pid.cast_unsigned() == std::process::id() {
            // It may be another user's; then that user's processes remove it.
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_of_dead_processes_go() {
        let dir = tempfile::tempdir().unwrap();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (dead, parent) = (
            child.id().to_string(),
            std::os::unix::process::parent_id().to_string(),
        );
        let own = std::process::id().to_string();
        for name in [dead.as_str(), &parent, &own, "1", "notes"] {
            std::fs::write(dir.path().join(name), b"").unwrap();
        }
        remove_stale(dir.path()).unwrap();
        let exists = |name: &str| dir.path().join(name).exists();
        assert!(!exists(&dead) && !exists(&own));
        assert!(exists("1") && exists("notes"));
        assert!(parent == "0" || exists(&parent));
        remove_stale(&dir.path().join("missing")).unwrap();
    }
}
