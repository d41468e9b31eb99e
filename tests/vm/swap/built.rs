//! Programs in C that run in the machines, built here.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use tempfile::TempDir;

/// Some of them, as long as this lives.
pub struct Built {
    folder: TempDir,
}

impl Built {
    /// Builds these. Each is one file, and linked statically: what runs it has little memory.
    pub fn of(names: &[&str]) -> anyhow::Result<Self> {
        let folder = TempDir::new_in("/var/tmp")?;
        for name in names {
            let source = format!("{}/../../tests/vm/swap/{name}.c", env!("CARGO_MANIFEST_DIR"));
            let flags = "-O2 -static -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror";
            let built = Command::new("cc")
                .args(flags.split(' '))
                .arg("-o")
                .arg(folder.path().join(name))
                .args([&source, "-lm"])
                .output()
                .context("cannot start cc")?;
            ensure!(
                built.status.success(),
                "{}",
                String::from_utf8_lossy(&built.stderr)
            );
        }
        Ok(Self { folder })
    }

    /// Where it is, also in a machine.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}
