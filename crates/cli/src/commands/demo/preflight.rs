//! What the demo needs of this machine, looked for before anything is started.

use std::path::{Path, PathBuf};

use anyhow::Context;
use verbatim_container::{Criu, Version};

/// The check program, from the project's folder.
const VCHECK: &str = "vcheck/vcheck";

/// A machine that has everything.
#[derive(Debug)]
pub struct Machine {
    /// perftest's bandwidth test of RDMA WRITE.
    pub ib_write_bw: PathBuf,
    /// The check program.
    pub vcheck: PathBuf,
    criu: Version,
}

impl Machine {
    /// Looks for what is needed; the error names what is missing and how to get it.
    pub fn inspect() -> anyhow::Result<Self> {
        if !rustix::process::geteuid().is_root() {
            anyhow::bail!("it needs root (namespaces, mounts, cgroups); run it as root or with sudo");
        }
        let search = std::env::var_os("PATH").unwrap_or_default();
        let ib_write_bw = find(&search, "ib_write_bw")?;
        find(&search, "runc")?;
        let criu = Criu::find()?.version();
        crate::commands::lab::library()?;
        Ok(Self {
            ib_write_bw,
            vcheck: find_vcheck()?,
            criu,
        })
    }

    /// In a line.
    pub fn describe(&self) -> String {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        format!("{cores} cores, Linux {}, CRIU {}", kernel.trim(), self.criu)
    }
}

fn find(search: &std::ffi::OsStr, program: &str) -> anyhow::Result<PathBuf> {
    // A user's PATH often lacks the last two.
    let folders = std::env::split_paths(search).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders
        .map(|folder| folder.join(program))
        .find(|path| path.is_file())
        .with_context(|| format!("{program} was not found in PATH; run ./setup.sh to install it"))
}

/// Upwards from this program (target/release/ lies in the project), then from here.
fn find_vcheck() -> anyhow::Result<PathBuf> {
    let starts = [std::env::current_exe()?, std::env::current_dir()?];
    starts
        .iter()
        .flat_map(|start| start.ancestors())
        .map(|folder| folder.join(VCHECK))
        .find(|path: &PathBuf| Path::is_file(path))
        .with_context(|| {
            format!("the check program {VCHECK} is not built; run `make build` in the project's folder")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_the_remedy() {
        assert!(find("/bin:/usr/bin".as_ref(), "sh").unwrap().ends_with("sh"));
        let error = find("/nowhere".as_ref(), "no-such-program")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("no-such-program") && error.contains("./setup.sh"),
            "{error}"
        );
    }
}
