//! What a test needs on this machine, found once.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use tempfile::TempDir;
use verbatim_container::Criu;

/// Programs that the tests run, one of each package.
const PROGRAMS: &[&str] = &[
    "runc",
    "ip",
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ib_write_bw",
    "rping",
    "tshark",
    "dumpcap",
];

/// Where an instance has folders of its own, in place of the host's.
const HIDDEN: &[&str] = &["/tmp", "/run", "/dev"];

/// What was built, and where it is.
#[derive(Debug, Clone)]
pub struct Tools {
    /// The command.
    pub verbatim: PathBuf,
    /// The same with agents that fail where a test orders it.
    with_faults: PathBuf,
    /// The guest library.
    pub library: PathBuf,
    /// The check program, where instances see it too.
    pub vcheck: PathBuf,
    /// The folder of its copy, if it is one.
    _copy: Option<Arc<TempDir>>,
}

impl Tools {
    /// Finds what `make build` made, in the target folder that the running program is from.
    pub fn find() -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own path")?;
        // A test is in target/PROFILE/deps, any other program in target/PROFILE.
        let folders = program.ancestors().skip(1).take(2);
        let built = |name: &str| {
            let mut places = folders.clone().map(|folder| folder.join(name));
            places.find(|path| path.exists()).with_context(|| {
                format!(
                    "{name} is not beside {}: run `make build` (cargo builds only what it runs)",
                    program.display()
                )
            })
        };
        let vcheck = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vcheck/vcheck");
        let vcheck = vcheck.canonicalize().with_context(|| {
            format!(
                "the check program {} is missing: run `make build`",
                vcheck.display()
            )
        })?;
        let (vcheck, copy) = seen_inside(vcheck)?;
        Ok(Self {
            verbatim: built("verbatim")?,
            with_faults: built("verbatim-with-faults")?,
            library: built("libverbatim.so")?,
            vcheck,
            _copy: copy,
        })
    }

    /// The same tools, but for a command whose agents take orders to fail ([`crate::TestLab::order_faults`]).
    pub fn that_fail_on_order(&self) -> Self {
        Self {
            verbatim: self.with_faults.clone(),
            ..self.clone()
        }
    }

    /// Whether the command's agents take orders to fail.
    pub(crate) fn fail_on_order(&self) -> bool {
        self.verbatim == self.with_faults
    }

    /// Why the tests cannot run on this machine, if they cannot: something to install, or rights.
    pub fn obstacle() -> Option<String> {
        if !rustix::process::geteuid().is_root() {
            return Some("a lab needs root: run `sudo make test`".to_owned());
        }
        let missing: Vec<_> = PROGRAMS
            .iter()
            .copied()
            .filter(|program| find_program(program).is_err())
            .collect();
        if !missing.is_empty() {
            return Some(format!("not installed: {}; run `make setup`", missing.join(", ")));
        }
        Criu::find()
            .err()
            .map(|error| format!("{error}; run `make setup`"))
    }
}

/// The program, or a copy of it where a shell in an instance finds it as well.
fn seen_inside(program: PathBuf) -> anyhow::Result<(PathBuf, Option<Arc<TempDir>>)> {
    if !HIDDEN.iter().any(|folder| program.starts_with(folder)) {
        return Ok((program, None));
    }
    let name = program.file_name().context("a program without a name")?;
    let folder = TempDir::with_prefix_in("verbatim-e2e-", "/var/tmp").context("no folder in /var/tmp")?;
    let copy = folder.path().join(name);
    std::fs::copy(&program, &copy).with_context(|| format!("cannot copy {}", program.display()))?;
    // Whoever a program runs as, it can be started.
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o755))?;
    Ok((copy, Some(Arc::new(folder))))
}

/// Where a program is: on `PATH`, or in a system folder that a plain user's `PATH` lacks.
pub(crate) fn find_program(name: &str) -> anyhow::Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders =
        std::env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from));
    match folders
        .map(|folder| folder.join(name))
        .find(|program| program.is_file())
    {
        Some(program) => Ok(program),
        None => bail!("{name} is not installed; run `make setup`"),
    }
}
