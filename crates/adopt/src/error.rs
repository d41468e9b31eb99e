//! What can go wrong when memory is adopted.

use std::io;
use std::path::PathBuf;

/// Why a region could not be adopted. Nothing has changed for the program; the caller may still register the region
/// as [`crate::Backing::Process`], except after [`AdoptError::Unmapped`] and [`AdoptError::Range`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdoptError {
    /// The region is longer than the address space.
    #[error("region of {length} bytes at {address:#x} exceeds the address space")]
    Range {
        /// Start of the region.
        address: usize,
        /// Its length in bytes.
        length: usize,
    },
    /// A page of the region is not mapped, or mapped without a right to read it.
    #[error("page {address:#x} of the region is not mapped or not readable")]
    Unmapped {
        /// The first such page.
        address: usize,
    },
    /// `/proc/self/smaps` or `/proc/self/maps` could not be read.
    #[error("reading the process's own mappings from {path}")]
    Maps {
        /// The file.
        path: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The memory file could not be made, opened or changed.
    #[error("memory file {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file system of the memory file is full; give the runtime folder's tmpfs more space.
    #[error("no room for {bytes} bytes of registered memory in {path}")]
    Full {
        /// The file.
        path: PathBuf,
        /// How much was wanted.
        bytes: u64,
    },
    /// `RLIMIT_FSIZE` does not let the memory file grow that far.
    #[error("memory file {path} may not grow to {bytes} bytes; raise the limit on file sizes (ulimit -f)")]
    FileLimit {
        /// The file.
        path: PathBuf,
        /// How long it would have been.
        bytes: u64,
    },
    /// [`crate::Adopter::cleanup`] was called before.
    #[error("the memory file is already removed since the process ends")]
    Closed,
}

impl AdoptError {
    /// The errno that `ibv_reg_mr` should set.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Range { .. } => libc::EINVAL,
            Self::Unmapped { .. } => libc::EFAULT,
            Self::Full { .. } | Self::FileLimit { .. } => libc::ENOMEM,
            Self::Maps { source, .. } | Self::File { source, .. } => {
                source.raw_os_error().unwrap_or(libc::EIO)
            }
            Self::Closed => libc::ESHUTDOWN,
        }
    }

    /// Whether the region can be used through the process instead, as [`crate::Backing::Process`].
    pub fn leaves_process_access(&self) -> bool {
        !matches!(self, Self::Range { .. } | Self::Unmapped { .. })
    }
}
