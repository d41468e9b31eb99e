//! What has passed before on the same build is not run again: cases take minutes on emulated processors, and a run may be cut off.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;

use crate::built;

/// Results of earlier runs, a file for each case that has passed.
pub struct Results {
    folder: PathBuf,
    build: String,
}

impl Results {
    /// Those in that folder of this build, of which these are the parts. This program counts as one of them.
    pub fn open(folder: &str, parts: &[&str]) -> anyhow::Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let own = std::env::current_exe()?;
        let parts = parts.iter().map(|part| built(part));
        for part in parts.chain([Ok(own)]) {
            let part = part?;
            let content = fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?;
            hasher.update(&content);
        }
        let folder = built("..")?.join(folder);
        fs::create_dir_all(&folder)?;
        Ok(Self {
            folder,
            build: hasher.finalize().to_hex().to_string(),
        })
    }

    fn path(&self, case: &str) -> PathBuf {
        self.folder.join(case.replace("::", "."))
    }

    /// Whether the case has passed on this build.
    pub fn has(&self, case: &str) -> bool {
        fs::read_to_string(self.path(case)).is_ok_and(|build| build == self.build)
    }

    /// It has passed.
    pub fn note(&self, case: &str) -> anyhow::Result<()> {
        fs::write(self.path(case), &self.build).with_context(|| format!("cannot note {case}"))
    }
}
