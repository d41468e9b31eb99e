//! The tools of one host, found and checked once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use tokio::process::Command;

use crate::criu::{Criu, Version};
use crate::error::Error;
use crate::runc::Runc;

/// The folder of CRIU's plugins, in [`HostConfig::state`].
const PLUGINS: &str = "plugins";

/// The variable that names it to CRIU (`criu/plugin.c`).
const PLUGINS_VARIABLE: &str = "CRIU_LIBS_DIR";

/// Tells the plugin that CRIU's hook for restored files has a second argument (`criu-plugin.h`, `retry_needed`). Its interface has the
/// same version with and without.
const RETRIES_VARIABLE: &str = "VERBATIM_CRIU_RETRIES";

/// Tells the plugin to leave RNICs alone.
const RNICS_VARIABLE: &str = "VERBATIM_CRIU_RNICS";

/// The first CRIU where that is so.
const RETRIES_SINCE: Version = Version {
    major: 4,
    minor: 3,
    patch: 0,
};

/// Where a [`Host`] keeps its things.
#[derive(Debug, Clone)]
pub struct HostConfig {
    /// A directory of our own, on tmpfs: runc's state (`runc/`), the proxy's link (`bin/criu`), gates. It survives a
    /// restart of the agent and not of the machine. `/run/verbatim/containers`, say.
    pub state: PathBuf,
    /// The program that calls [`criu_proxy_main`](crate::criu_proxy_main) when it is started under the name `criu`:
    /// the `verbatim` binary itself (`std::env::current_exe()`).
    pub proxy: PathBuf,
    /// The limit on descriptors (`RLIMIT_NOFILE`, the soft one) that containers get if they ask for none; as the caller's if `None`.
    pub descriptors: Option<u64>,
    /// CRIU's plugin (`crates/criu-plugin`). Where it is missing, containers that have RNICs of the kernel's are not moved, nor, without
    /// `CAP_SYS_RESOURCE`, those with processes of other users than root.
    pub plugin: PathBuf,
}

/// The tools of one host.
#[derive(Debug, Clone)]
pub struct Host {
    runc: Runc,
    criu: Criu,
    state: PathBuf,
    plugin: PathBuf,
    /// What [`Self::tracks_memory`] has found.
    tracks_memory: Arc<OnceLock<Result<(), String>>>,
}

impl Host {
    /// Finds runc and CRIU, lets CRIU probe the kernel so that no blackout has to, and lays the proxy out.
    ///
    /// The caller should be a child subreaper (`PR_SET_CHILD_SUBREAPER`), so that containers become its children.
    /// Takes about 0.3 s. The loopback device of the caller's network namespace must be up, or CRIU's probing fails.
    pub async fn open(config: HostConfig) -> Result<Self, Error> {
        let HostConfig {
            state,
            proxy,
            descriptors,
            plugin,
        } = config;
        tokio::task::spawn_blocking(move || {
            let criu = Criu::find()?;
            criu.warm()?;
            let link = put_link(&state.join("bin"), "criu", &proxy)?;
            // CRIU loads whatever is in the folder, so this is all that is in it.
            put_link(&state.join(PLUGINS), "verbatim.so", &plugin)?;
            let runc = Runc::find(state.join("runc"), link, criu.path().to_owned(), descriptors)?;
            Ok(Self {
                runc,
                criu,
                state,
                plugin,
                tracks_memory: Arc::default(),
            })
        })
        .await
        .expect("finding tools does not panic")
    }

    /// A host without runc and CRIU: whatever needs one of them fails. For tests of what needs neither.
    #[doc(hidden)]
    pub fn without_tools() -> Self {
        let nowhere = PathBuf::from("/nonexistent");
        Self {
            runc: Runc::missing(&nowhere),
            criu: Criu::missing(&nowhere),
            plugin: nowhere.clone(),
            state: nowhere,
            tracks_memory: Arc::default(),
        }
    }

    /// runc, as this host uses it.
    pub fn runc(&self) -> &Runc {
        &self.runc
    }

    /// CRIU, as this host uses it.
    pub fn criu(&self) -> &Criu {
        &self.criu
    }

    /// Whether memory can be written down ahead here ([`pre_dump`](crate::pre_dump())); if not, why. CRIU is asked once,
    /// which takes about 0.1 s.
    pub async fn tracks_memory(&self) -> Result<(), String> {
        let (known, criu) = (Arc::clone(&self.tracks_memory), self.criu.clone());
        let asked = tokio::task::spawn_blocking(move || {
            known
                .get_or_init(|| {
                    criu.tracks_memory()
                        .unwrap_or_else(|error| Err(error.to_string()))
                })
                .clone()
        });
        asked.await.expect("asking CRIU does not panic")
    }

    /// Whether containers that have RNICs of the kernel's can be moved here; if not, why.
    pub fn moves_rnics(&self) -> Result<(), Error> {
        match self.plugin.exists() {
            true => Ok(()),
            false => Err(Error::PluginMissing {
                path: self.plugin.clone(),
            }),
        }
    }

    /// Whether processes of other users than root's can be written down here; if not, why. The kernel tells root the limits of such a
    /// process only with `CAP_SYS_RESOURCE` (`man 2 prlimit`); without it our plugin reads them from `/proc`.
    pub fn moves_users(&self) -> Result<(), String> {
        use rustix::thread::{CapabilitySet, capabilities};

        let may_ask =
            capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_RESOURCE));
        match may_ask || self.plugin.exists() {
            true => Ok(()),
            false => Err(format!(
                "this host's agent has no CAP_SYS_RESOURCE, and CRIU's plugin {}, which does without it, is missing",
                self.plugin.display()
            )),
        }
    }

    /// Has the CRIU that a command starts load our plugin, which must be there if `rnics`, and then leaves RNICs alone. CRIU has only
    /// that one then.
    pub(crate) fn load_plugin(&self, command: &mut Command, rnics: bool) -> Result<(), Error> {
        if rnics {
            self.moves_rnics()?;
            command.env(RNICS_VARIABLE, "1");
        }
        if self.plugin.exists() {
            command.env(PLUGINS_VARIABLE, self.state.join(PLUGINS));
            if self.criu.version() >= RETRIES_SINCE {
                command.env(RETRIES_VARIABLE, "1");
            }
        }
        Ok(())
    }

    /// The directory of this host's containers' state.
    pub fn state(&self) -> &Path {
        &self.state
    }
}

/// Puts a link called `name` into `folder`, in the place of an earlier one.
fn put_link(folder: &Path, name: &str, to: &Path) -> Result<PathBuf, Error> {
    crate::error::make_dir(folder)?;
    let link = folder.join(name);
    let fresh = folder.join(format!("{name}.{}", std::process::id()));
    std::os::unix::fs::symlink(to, &fresh).map_err(|source| Error::file("link", &fresh, source))?;
    std::fs::rename(&fresh, &link).map_err(|source| Error::file("rename", &link, source))?;
    Ok(link)
}
