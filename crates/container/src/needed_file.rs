//! A regular file that must be where a container is restored.

use std::path::PathBuf;

/// A regular file that must be where a container is restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededFile {
    /// In the container.
    pub path: PathBuf,
    /// Its length, if the container only reads it: another one writes to it, maybe at this moment.
    pub size: Option<u64>,
}
