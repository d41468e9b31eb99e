//! The memory file: one per process, sparse. Named by its process id where there is a folder for such files, so that an
//! agent finds it and a restored process opens it again; without a name (memfd_create(2)) where there is none.

use std::cell::RefCell;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fstat, fstatfs, ftruncate, memfd_create, open,
    unlink,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, Resource, getrlimit, test_kill_process};

use crate::error::AdoptError;
use crate::maps::FileId;
use crate::pages::CHUNK_BYTES;
use crate::sys::kept::KeptFd;

/// `f_type` of tmpfs (statfs(2)).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// The memory file of this process.
#[derive(Debug)]
pub struct MemFile {
    /// For a file without a name: what messages call it.
    path: PathBuf,
    place: Place,
}

/// The pages of a range, as [`MemFile::reserve`] leaves them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserved {
    /// All that it needs.
    Pages,
    /// [`MemFile::fill`] is still to come.
    Length,
}

#[derive(Debug)]
enum Place {
    /// The descriptor of its last opening, if it was not closed since: mappings beside each other become one only if
    /// they are made of one open file.
    Path(RefCell<Option<KeptFd>>),
    /// There is no other way to it than a descriptor that stays open.
    Nameless(KeptFd),
}

/// The name that `/proc/PID/maps` shows of a file without one.
const NAMELESS: &str = "verbatim-memory";

impl MemFile {
    /// Makes the file, empty and accessible to its owner only; without a name if `mem_dir` does not exist.
    pub fn create(mem_dir: &Path, pid: u32) -> Result<(Self, OwnedFd), AdoptError> {
        let path = mem_dir.join(pid.to_string());
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match open(&path, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => Ok((
                Self {
                    path,
                    place: Place::Path(RefCell::new(KeptFd::new(&fd).ok())),
                },
                fd,
            )),
            Err(Errno::NOENT) => Self::create_nameless(),
            Err(error) => Err(AdoptError::File {
                path,
                source: error.into(),
            }),
        }
    }

    fn create_nameless() -> Result<(Self, OwnedFd), AdoptError> {
        let path = Path::new("memfd:").join(NAMELESS);
        let made = memfd_create(NAMELESS, MemfdFlags::CLOEXEC)
            .map_err(io::Error::from)
            .and_then(|fd| Ok((KeptFd::new(&fd)?, fd)));
        match made {
            Ok((kept, fd)) => Ok((
                Self {
                    path,
                    place: Place::Nameless(kept),
                },
                fd,
            )),
            Err(source) => Err(AdoptError::File { path, source }),
        }
    }

    /// Where it is; `None` if it has no name.
    pub fn path(&self) -> Option<&Path> {
        matches!(self.place, Place::Path(_)).then_some(&self.path)
    }

    /// A descriptor for a look at the file, of which nothing is mapped: it is not kept. To keep one may take the kernel 10 ms in a process
    /// that was restored with a small table of descriptors: it waits for a grace period when the table of several threads grows.
    pub fn open_for_a_look(&self) -> Result<OwnedFd, AdoptError> {
        match &self.place {
            Place::Path(kept) => match kept.borrow().as_ref().map(KeptFd::duplicate) {
                Some(Ok(duplicate)) => Ok(duplicate),
                _ => self.open_anew(),
            },
            Place::Nameless(_) => self.open_anew(),
        }
    }

    /// A descriptor for this process's own use.
    pub fn open(&self) -> Result<OwnedFd, AdoptError> {
        let Place::Path(kept) = &self.place else {
            return self.open_anew();
        };
        let mut kept = kept.borrow_mut();
        if let Some(Ok(duplicate)) = kept.as_ref().map(KeptFd::duplicate) {
            return Ok(duplicate);
        }
        let opened = self.open_anew()?;
        *kept = KeptFd::new(&opened).ok();
        Ok(opened)
    }

    /// A descriptor to give away; of an open file of its own where the file has a name.
    pub fn open_anew(&self) -> Result<OwnedFd, AdoptError> {
        let opened = match &self.place {
            Place::Path(_) => open(
                &self.path,
                OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC,
                Mode::empty(),
            )
            .map_err(io::Error::from),
            Place::Nameless(kept) => kept.duplicate(),
        };
        opened.map_err(|source| AdoptError::File {
            path: self.path.clone(),
            source,
        })
    }

    /// Closes the descriptor that is kept, if there is another way to the file.
    pub fn close(&self) {
        if let Place::Path(kept) = &self.place {
            kept.take();
        }
    }

    /// Removes its name, if it has one.
    pub fn remove(&self) {
        self.close();
        if let Some(path) = self.path() {
            let _ = unlink(path);
        }
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
    /// (`ibv_reg_mr` allocates and pins them on hardware, too). On a tmpfs without a limit (`size=0`) the file only gets its
    /// length: pages come with [`MemFile::fill`], a part at a time, so that they are not there twice while a region moves in.
    pub fn reserve(&self, file: BorrowedFd<'_>, range: Range<u64>) -> Result<Reserved, AdoptError> {
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
        let lengthened = fstat(file).and_then(|stat| match stat.st_size.cast_unsigned() < range.end {
            true => ftruncate(file, range.end),
            false => Ok(()),
        });
        lengthened.map_err(|error| self.error(error))?;
        if is_unlimited(file) {
            return Ok(Reserved::Length);
        }
        let length = range.end - range.start;
        range
            .clone()
            .step_by(CHUNK_BYTES)
            .try_for_each(|start| allocate(file, start..range.end.min(start + CHUNK_BYTES as u64)))
            .map_err(|error| self.lacking(error, length))?;
        Ok(Reserved::Pages)
    }

    /// Allocates the pages of a range that has its length only. This process does it, in its cgroup: a page of a hole would otherwise be
    /// allocated by the RNIC, for a partner's write. tmpfs does not clear such pages before their first use, and `SEEK_DATA` passes
    /// over them; a second call would clear them all.
    pub fn fill(&self, file: BorrowedFd<'_>, range: Range<u64>) -> Result<(), AdoptError> {
        let length = range.end - range.start;
        allocate(file, range).map_err(|error| self.lacking(error, length))
    }

    /// Gives the range's memory back to the system and makes it read as zeros. False if that fails.
    pub fn punch(&self, file: BorrowedFd<'_>, range: Range<u64>) -> bool {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        range.is_empty() || fallocate(file, flags, range.start, range.end - range.start).is_ok()
    }

    /// The error of a call that wanted so many bytes of memory.
    fn lacking(&self, error: Errno, bytes: u64) -> AdoptError {
        match error {
            Errno::NOSPC | Errno::DQUOT | Errno::NOMEM => AdoptError::Full {
                path: self.path.clone(),
                bytes,
            },
            error => self.error(error),
        }
    }

    fn error(&self, error: Errno) -> AdoptError {
        AdoptError::File {
            path: self.path.clone(),
            source: error.into(),
        }
    }
}

/// Allocates the pages of a short range within the file's length. Short, since most kernels let a freezer or a stop interrupt the call,
/// and take back all pages that it has allocated.
fn allocate(file: BorrowedFd<'_>, range: Range<u64>) -> Result<(), Errno> {
    retry_on_intr(|| {
        fallocate(
            file,
            FallocateFlags::KEEP_SIZE,
            range.start,
            range.end - range.start,
        )
    })
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
    fn without_a_folder_it_has_no_name_and_is_never_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let (file, first) = MemFile::create(&dir.path().join("missing"), std::process::id()).unwrap();
        assert_eq!(file.path(), None);
        let id = file.id(first.as_fd()).unwrap();
        let again = file.open().unwrap();
        assert!(id == file.id(again.as_fd()).unwrap());
        file.reserve(again.as_fd(), 0..8192).unwrap();
        assert!(file.punch(again.as_fd(), 0..4096));
        let Place::Nameless(kept) = &file.place else {
            panic!("it has no name")
        };
        // The program closes the descriptor and gets the number for a file of its own.
        let number = kept.number();
        let other = std::fs::File::open("/dev/null").unwrap();
        kept.replace_for_test(&other);
        assert!(file.open().is_err());
        drop(file);
        assert!(crate::sys::kept::is_open(number), "it is not ours to close");
        crate::sys::kept::close_for_test(number);
    }

    #[test]
    fn a_look_keeps_no_descriptor() {
        let dir = tempfile::tempdir().unwrap();
        let (file, first) = MemFile::create(dir.path(), std::process::id()).unwrap();
        file.close();
        let look = file.open_for_a_look().unwrap();
        assert!(file.id(look.as_fd()).unwrap() == file.id(first.as_fd()).unwrap());
        let Place::Path(kept) = &file.place else {
            panic!("it has a name")
        };
        assert!(kept.borrow().is_none());
        // Whoever maps it has one kept.
        drop(file.open().unwrap());
        assert!(kept.borrow().is_some());
    }

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
