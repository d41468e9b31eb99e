//! The public face: one [`Adopter`] per process, internally locked.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::AdoptError;
use crate::memfile;
use crate::state::State;
use crate::sys::signals::Blocked;

/// How the RNIC reaches a segment of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Backing {
    /// Through the memory file, from this offset on.
    File {
        /// Page aligned.
        offset: u64,
    },
    /// Through the process, by `/proc/PID/mem`.
    Process,
}

/// The answer to [`Adopter::adopt`].
#[derive(Debug)]
pub struct Adoption {
    /// Address ranges, contiguous and in order, that cover the region rounded out to pages.
    pub segments: Vec<(Range<u64>, Backing)>,
    /// To be given to [`Adopter::release`] when the region is deregistered. Dropping it keeps the pages in the file.
    pub token: Token,
}

/// A claim on ranges of the memory file. Void in the child after a fork, where nothing is adopted.
#[derive(Debug)]
#[must_use = "the pages stay in the file until the token is released"]
pub struct Token {
    pub(crate) generation: u64,
    pub(crate) pieces: Vec<Range<u64>>,
}

/// What became of a token's pages, and of pages beside them that were kept before, in bytes.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Released {
    /// Private anonymous memory again.
    pub returned_bytes: u64,
    /// Another token covers them.
    pub claimed_bytes: u64,
    /// No longer mapped by the program; the file's space is free again.
    pub gone_bytes: u64,
    /// Still in the file: they cannot be moved safely now, or many small mappings would come of it, so that they wait
    /// for their neighbours. Used again when the same pages are adopted again.
    pub kept_bytes: u64,
}

/// An adopted range, for the road map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Adopted {
    /// Where it was mapped when it was adopted.
    pub address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Where it is in the memory file.
    pub offset: u64,
}

/// How an [`Adopter`] may work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Options {
    /// Use a userfaultfd for all faults: by a descriptor that the agent sent, by `/dev/userfaultfd`, or by
    /// `userfaultfd(2)` with `CAP_SYS_PTRACE` or `vm.unprivileged_userfaultfd`. Default true.
    pub full: bool,
    /// Where there is none and the process has other threads: use one for faults from user mode, which needs no
    /// privilege. Another thread's *system call* on a page in transit then fails with `EFAULT`, once in a blue moon;
    /// without this such a region stays [`Backing::Process`]. Default false.
    pub user_mode: bool,
    /// Threads other than the caller that never touch the program's memory while pages move (the guest library's own
    /// helper, asleep). They do not count when it is decided whether the process has one thread. Default 0.
    pub own_threads: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            full: true,
            user_mode: false,
            own_threads: 0,
        }
    }
}

/// Moves registered memory into the process's memory file and back.
#[derive(Debug)]
pub struct Adopter {
    state: Mutex<State>,
}

impl Adopter {
    /// For this process, with its file in `mem_dir` (made at the first adoption). Files there of processes that are
    /// gone are removed, as is one that this process left before an `execve`. If the folder does not exist, the file has
    /// no name: the RNIC gets it by its descriptor, but no agent finds it.
    pub fn new(mem_dir: &Path) -> io::Result<Self> {
        memfile::remove_stale(mem_dir)?;
        Ok(Self {
            state: Mutex::new(State::new(mem_dir, Options::default())),
        })
    }

    /// From now on, other [`Options`].
    pub fn set_options(&self, options: Options) {
        let mut state = self.locked();
        state.options = options;
        state.userfaultfds.clear();
    }

    /// A descriptor of `/dev/userfaultfd`, for processes that may not open it (in a container): the agent opens it and
    /// sends it. It stays open until [`Adopter::close_files`].
    pub fn set_userfaultfd_device(&self, device: Option<OwnedFd>) {
        let mut state = self.locked();
        state.userfaultfd_device = device;
        state.userfaultfds.clear();
    }

    /// Makes the pages of `[address, address + length)` reachable for the RNIC. A region may overlap others.
    pub fn adopt(&self, address: usize, length: usize) -> Result<Adoption, AdoptError> {
        self.locked().adopt(address, length)
    }

    /// Drops a claim; pages that no other claim covers become private anonymous memory again.
    pub fn release(&self, token: Token) -> Released {
        self.locked().release(token)
    }

    /// What is adopted, in the order of the file.
    pub fn ranges(&self) -> Vec<Adopted> {
        self.locked().spans.iter().collect()
    }

    /// The memory file's path, once something was adopted; `None` also if it has no name.
    pub fn path(&self) -> Option<PathBuf> {
        self.locked().file.as_ref()?.path().map(Path::to_owned)
    }

    /// A descriptor of the memory file, to be sent to the RNIC and closed; `None` before the first adoption.
    pub fn open_file(&self) -> Result<Option<OwnedFd>, AdoptError> {
        self.locked()
            .file
            .as_ref()
            .map(|file| file.open_anew())
            .transpose()
    }

    /// Closes the userfaultfds that are kept for the next adoption. A look at the process's descriptors cannot tell them from
    /// the program's own, which no dump can write down.
    pub fn close_userfaultfds(&self) {
        self.locked().userfaultfds.clear();
    }

    /// Before a dump: returns when no adoption is under way, with every descriptor closed (but that of a file without a
    /// name). Whatever is called later opens the file by its path again, which is the same after a restore on another
    /// host.
    pub fn close_files(&self) {
        let mut state = self.locked();
        state.userfaultfd_device = None;
        state.userfaultfds.clear();
        state.sweep();
        if let Some(file) = &state.file {
            file.close();
        }
    }

    /// At the end of the process: removes the file. What is mapped stays usable; nothing can be adopted any more.
    pub fn cleanup(&self) {
        self.locked().close();
    }

    pub(crate) fn locked(&self) -> Locked<'_> {
        let signals = Blocked::all();
        Locked {
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
            _signals: signals,
        }
    }
}

/// The state, with signals blocked for as long as it is locked: a handler that registers memory or forks would wait
/// for its own thread.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    // Unlocked before signals come in: fields are dropped in this order.
    state: MutexGuard<'a, State>,
    _signals: Blocked,
}

impl Deref for Locked<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}
