//! The program `pager.c`: built, and watched by what it says on a machine's console.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use tempfile::TempDir;

/// What it says each second.
const BEAT: &str = "pager: beat ";

/// The program, as long as this lives.
pub struct Pager {
    folder: TempDir,
}

impl Pager {
    /// Builds it. It is one file without libraries: what runs it has little memory.
    pub fn build() -> anyhow::Result<Self> {
        let folder = TempDir::new_in("/var/tmp")?;
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vm/swap/pager.c");
        let flags = "-O2 -static -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror";
        let built = Command::new("cc")
            .args(flags.split(' '))
            .arg("-o")
            .arg(folder.path().join("pager"))
            .arg(source)
            .output()
            .context("cannot start cc")?;
        ensure!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
        Ok(Self { folder })
    }

    /// Where it is, also in a machine.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join("pager")
    }
}

/// How many pages each program has compared, by the last beat of a console.
pub fn compared(console: &str) -> Option<Vec<u64>> {
    // The last line may be cut off.
    let whole = &console[..=console.rfind('\n')?];
    let beat = whole
        .lines()
        .rev()
        .find_map(|line| line.trim().strip_prefix(BEAT))?;
    beat.split_whitespace()
        .skip(2)
        .map(|count| count.parse().ok())
        .collect()
}
