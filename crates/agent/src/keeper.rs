//! A small process that keeps RNIC connections for the agent of a session, in case that dies ([`verbatim_keeper`]).
//!
//! An RNIC context lives as long as somebody holds its connection. While an instance is frozen, or not yet there, that is
//! its agent; with an agent that dies the instance's connections would go. So the agent gives a copy of each to a keeper
//! as soon as it has it, and an agent that comes after it fetches them there.
//!
//! The sockets of keepers lie in `keepers/` in the runtime folder, one for each session.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::config::Config;
use crate::instances::recovery::make_private;
use crate::session::{decode, encode};

/// The agent's end.
#[derive(Debug)]
pub struct Keeper(verbatim_keeper::Keeper);

/// Something that was kept: what it is called, and the descriptors.
pub type Kept<T> = (T, Vec<OwnedFd>);

fn path(config: &Config, session: u64) -> PathBuf {
    config.runtime_dir.join("keepers").join(format!("{session:016x}"))
}

impl Keeper {
    /// Starts one for a session. Takes some ms.
    pub fn start(config: &Config, session: u64) -> anyhow::Result<Self> {
        let path = path(config, session);
        make_private(path.parent().expect("it has a folder"))?;
        Ok(Self(verbatim_keeper::Keeper::start(&config.program, &path)?))
    }

    /// That of a session which an earlier agent has begun, if there is one.
    pub fn find(config: &Config, session: u64) -> Option<Self> {
        verbatim_keeper::Keeper::find(&path(config, session)).map(Self)
    }

    /// Keeps copies of `fds` under `label`.
    pub fn keep<T: Serialize>(&self, label: &T, fds: &[BorrowedFd<'_>]) -> anyhow::Result<()> {
        self.0.keep(encode(label), fds)
    }

    /// Copies of all that is kept, in order.
    pub fn take<T: DeserializeOwned>(&self) -> anyhow::Result<Vec<Kept<T>>> {
        let kept = self.0.take()?;
        kept.into_iter()
            .map(|(label, fds)| Ok((decode(&label)?, fds)))
            .collect()
    }

    /// Lets it go, with all that it keeps.
    pub fn end(self) {
        self.0.end();
    }
}

/// Ends the keepers of sessions that are over, which an agent that died may have left.
pub fn clear(runtime_dir: &Path, is_open: impl Fn(u64) -> bool) {
    let Ok(entries) = std::fs::read_dir(runtime_dir.join("keepers")) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let session = name.to_str().and_then(|name| u64::from_str_radix(name, 16).ok());
        if session.is_some_and(&is_open) {
            continue;
        }
        let path = entry.path();
        match verbatim_keeper::Keeper::find(&path) {
            Some(keeper) => keeper.end(),
            None => {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}
