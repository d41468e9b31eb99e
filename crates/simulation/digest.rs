//! The digest of sources, for what holds as long as they are the same: seeds that were walked. Build scripts include this file.

use std::io;
use std::path::{Path, PathBuf};

/// The digest of the code in these folders, without comments, and without tests that have files of their own. The build script runs again when one changes.
pub fn of(folders: &[&str]) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    for folder in folders {
        println!("cargo::rerun-if-changed={folder}");
        let mut files = Vec::new();
        list(Path::new(folder), &mut files)?;
        files.sort();
        for file in files {
            let text = std::fs::read_to_string(&file)?;
            // A comment changes nothing that a walk has found.
            let code = text.lines().map(str::trim).filter(|line| !line.starts_with("//"));
            let code = code.collect::<Vec<_>>().join("\n");
            hasher.update(file.to_string_lossy().as_bytes());
            hasher.update(&(code.len() as u64).to_le_bytes());
            hasher.update(code.as_bytes());
        }
    }
    Ok(hasher.finalize().to_hex()[..16].to_owned())
}

fn list(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            list(&path, files)?;
        } else if path.extension().is_some_and(|end| end == "rs") && !path.ends_with("tests.rs") {
            files.push(path);
        }
    }
    Ok(())
}
