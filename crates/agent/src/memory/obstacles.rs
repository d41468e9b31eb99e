//! What of an instance's files cannot be moved, found before anything is sent.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{leases, tree};

/// Files that are named at a time.
const MOST: usize = 8;

/// All of it, in words for an operator: below the instance's runtime folder, and what its first process and all that descend from it
/// have leased.
pub fn of(folder: &Path, init: i32) -> Vec<String> {
    let files = tree::problems(folder, MOST).map(|files| {
        let own = files.into_iter().map(|problem| format!("its file {problem}"));
        own.collect::<Vec<_>>()
    });
    let leased = leases::problems(init, device(folder));
    let mut found = Vec::new();
    for problems in [files, leased] {
        match problems {
            Ok(problems) => found.extend(problems),
            Err(error) => found.push(format!("its files cannot be looked at: {error}")),
        }
    }
    found
}

/// The device number of the file system that the runtime folder lies in.
pub fn device(folder: &Path) -> Option<u64> {
    Some(std::fs::metadata(folder).ok()?.dev())
}
