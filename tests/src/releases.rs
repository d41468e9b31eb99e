//! Which release's programs a host has, so that those of two can meet.
//!
//! Each host that is named has a link to a folder of programs, as an installed package has its place: another release is
//! installed by pointing it elsewhere, and used by what is started from then on.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::Context;
use tempfile::TempDir;

use crate::tools::Tools;

/// The variable that names the folder with the previous release's programs.
pub const PREVIOUS_VARIABLE: &str = "VERBATIM_PREVIOUS";

/// A release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Release {
    /// The one that `tests/previous-release` names.
    Previous,
    /// The one that was built here.
    This,
}

impl Release {
    /// The other one.
    pub fn other(self) -> Self {
        match self {
            Self::Previous => Self::This,
            Self::This => Self::Previous,
        }
    }

    /// The folder of its programs.
    pub fn folder(self, tools: &Tools) -> anyhow::Result<PathBuf> {
        match self {
            Self::This => Ok(tools
                .verbatim
                .parent()
                .context("a program in no folder")?
                .to_owned()),
            Self::Previous => {
                let folder = std::env::var_os(PREVIOUS_VARIABLE).with_context(|| {
                    format!("{PREVIOUS_VARIABLE} does not name the previous release's programs: run `make compat-test`")
                })?;
                let folder = PathBuf::from(folder);
                folder
                    .canonicalize()
                    .with_context(|| format!("cannot find {}: run `make compat-test`", folder.display()))
            }
        }
    }

    /// Its command.
    pub fn verbatim(self, tools: &Tools) -> anyhow::Result<PathBuf> {
        Ok(self.folder(tools)?.join("verbatim"))
    }

    /// The content of its guest library.
    pub fn library(self, tools: &Tools) -> anyhow::Result<Vec<u8>> {
        let path = self.folder(tools)?.join("libverbatim.so");
        std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    }
}

/// The links of a lab's hosts.
pub(crate) struct Installed(TempDir);

impl Installed {
    /// Nothing is installed yet.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self(TempDir::with_prefix("verbatim-e2e-")?))
    }

    /// The link of a host.
    pub fn link(&self, host: &str) -> PathBuf {
        self.0.path().join(host)
    }

    /// Makes it lead to the programs of a folder, with an agent in a time namespace of its own.
    pub fn install_ahead(&self, host: &str, folder: &Path, seconds: u64) -> anyhow::Result<()> {
        let ahead = self.0.path().join(format!("{host}-ahead"));
        std::fs::create_dir(&ahead)?;
        for entry in std::fs::read_dir(folder)?.flatten() {
            let name = entry.file_name();
            if name != "verbatim" && entry.file_type()?.is_file() {
                symlink(entry.path(), ahead.join(name))?;
            }
        }
        let real = folder.canonicalize()?.join("verbatim");
        let (real, program) = (real.display(), ahead.join("verbatim"));
        let script = format!(
            "#!/bin/sh\ncase \" $* \" in *\" agent \"*) exec unshare -T --monotonic {seconds} --boottime {seconds} {real} \"$@\";; esac\n\
             exec {real} \"$@\"\n"
        );
        std::fs::write(&program, script)?;
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        self.install(host, &ahead)
    }

    /// Makes it lead to a folder.
    pub fn install(&self, host: &str, folder: &Path) -> anyhow::Result<()> {
        // In one step: something may be started meanwhile.
        let fresh = self.0.path().join(format!(".{host}"));
        symlink(folder, &fresh)?;
        std::fs::rename(&fresh, self.link(host)).context("cannot install a release")
    }
}
