//! The public face: one [`Adopter`] per process, internally locked.

use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::AdoptError;
use crate::memfile;
use crate::region::{Adopted, Adoption, Options, Released, Token};
use crate::state::State;
use crate::sys::signals::Blocked;

/// A look at the descriptors of a process takes no longer.
const LOOK: Duration = Duration::from_secs(10);

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

    /// Closes the userfaultfds that are kept for the next adoption, and keeps none for [`LOOK`]: an adoption of that time closes
    /// its own when it ends. A look at the process's descriptors cannot tell them from the program's own, which no dump can write
    /// down.
    pub fn close_userfaultfds(&self) {
        let mut state = self.locked();
        state.userfaultfds.clear();
        state.none_kept_until = Some(Instant::now() + LOOK);
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
