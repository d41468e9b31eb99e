//! What has passed before on the same build is not run again: cases take minutes on emulated processors, and a run may be cut off.

use std::fs;
use std::path::PathBuf;

use anyhow::Context;

use crate::built;

/// Everything of ours that a case runs.
const PARTS: &[&str] = &[
    "verbatim",
    "verbatim-with-faults",
    "libverbatim.so",
    "libverbatim_criu_plugin.so",
    "../vm-probes/traffic",
    "../../vcheck/vcheck",
];

/// Results of earlier runs, a file for each case that has passed.
pub struct Results {
    folder: PathBuf,
    build: String,
}

impl Results {
    /// Those of this build. This program counts as a part of it.
    pub fn open() -> anyhow::Result<Self> {
        let mut hasher = blake3::Hasher::new();
        let own = std::env::current_exe()?;
        let parts = PARTS.iter().map(|part| built(part));
        for part in parts.chain([Ok(own)]) {
            let part = part?;
            let content = fs::read(&part).with_context(|| format!("cannot read {}", part.display()))?;
            hasher.update(&content);
        }
        let folder = built("..")?.join("rnic-results");
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
