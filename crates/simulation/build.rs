//! The digest of the sources that a walk depends on: those of the core, and of the worlds in which it runs.

use std::path::{Path, PathBuf};

fn main() -> std::io::Result<()> {
    let mut hasher = blake3::Hasher::new();
    for folder in ["../session/src", "src"] {
        println!("cargo::rerun-if-changed={folder}");
        let mut files = Vec::new();
        list(Path::new(folder), &mut files)?;
        files.sort();
        for file in files {
            let text = std::fs::read(&file)?;
            hasher.update(file.to_string_lossy().as_bytes());
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(&text);
        }
    }
    println!(
        "cargo::rustc-env=SOURCES_DIGEST={}",
        &hasher.finalize().to_hex()[..16]
    );
    Ok(())
}

/// All sources but tests that have files of their own.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> std::io::Result<()> {
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
