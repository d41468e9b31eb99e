//! The tools of one host, found and checked once.

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use crate::criu::Criu;
use crate::error::Error;
use crate::runc::Runc;

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
}

/// The tools of one host.
#[derive(Debug, Clone)]
pub struct Host {
    runc: Runc,
    criu: Criu,
    state: PathBuf,
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
        } = config;
        tokio::task::spawn_blocking(move || {
            let criu = Criu::find()?;
            criu.warm()?;
            let bin = state.join("bin");
            crate::error::make_dir(&bin)?;
            let link = bin.join("criu");
            let fresh = bin.join(format!("criu.{}", std::process::id()));
            std::os::unix::fs::symlink(&proxy, &fresh)
                .map_err(|source| Error::file("link", &fresh, source))?;
            std::fs::rename(&fresh, &link).map_err(|source| Error::file("rename", &link, source))?;
            let runc = Runc::find(state.join("runc"), link, criu.path().to_owned(), descriptors)?;
            Ok(Self {
                runc,
                criu,
                state,
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

    /// The directory of this host's containers' state.
    pub fn state(&self) -> &Path {
        &self.state
    }
}
