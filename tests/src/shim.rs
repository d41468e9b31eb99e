//! Small libraries that are preloaded to make a program take another way. They are built when they are needed, since
//! cargo builds no C.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use tempfile::TempDir;

use crate::running::Running;

const LIMIT: Duration = Duration::from_secs(60);

/// Folder for the shims: not `/tmp`, of which instances have their own.
const PLACE: &str = "/var/tmp";

/// A built library; it is gone with this.
pub struct Shim {
    folder: TempDir,
    name: &'static str,
    settings: Vec<(&'static str, String)>,
}

impl Shim {
    /// Builds `tests/shims/NAME.c`.
    pub fn build(name: &'static str) -> anyhow::Result<Self> {
        let shim = Self {
            folder: tempfile::tempdir_in(PLACE)?,
            name,
            settings: Vec::new(),
        };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("shims/{name}.c"));
        let mut command = Command::new("cc");
        command.args(["-Wall", "-Werror", "-O1", "-shared", "-fPIC", "-o"]);
        command.arg(shim.path()).arg(source);
        Running::start(format!("cc {name}.c"), command)?
            .succeed(LIMIT)
            .context("cannot build a library to preload")?;
        Ok(shim)
    }

    /// Adds a variable to the environment of the programs that it is preloaded into.
    #[must_use]
    pub fn with(mut self, variable: &'static str, value: impl Into<String>) -> Self {
        self.settings.push((variable, value.into()));
        self
    }

    /// The variables set for it.
    pub fn settings(&self) -> &[(&'static str, String)] {
        &self.settings
    }

    /// A folder that is removed with it.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.folder.path().join(format!("{}.so", self.name))
    }
}
