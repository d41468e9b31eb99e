//! A folder for the targets that read files: one for each thread, in memory.

use std::path::{Path, PathBuf};

thread_local! {
    static FOLDER: tempfile::TempDir = tempfile::Builder::new()
        .prefix("verbatim-fuzz-")
        .tempdir_in(std::env::var_os("VERBATIM_FUZZ_FOLDER").unwrap_or_else(|| "/dev/shm".into()))
        .expect("a folder in memory");
}

/// The place of a file in the folder.
pub fn path(name: &str) -> PathBuf {
    FOLDER.with(|folder| folder.path().join(name))
}

/// Calls `use_it` with a new, empty folder that is gone afterwards.
pub fn with_new(use_it: impl FnOnce(&Path)) {
    let folder = FOLDER.with(|folder| tempfile::tempdir_in(folder.path()).expect("a folder in it"));
    use_it(folder.path());
}
