//! Room of a copy on the disk: checked before it comes and while it comes, and given back if it does not.
//!
//! By default copies lie in the folder of the sidecars. So a part of that file system is kept free of them
//! ([`Reserve`]).

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use verbatim_mirror::decision::{Offer, Role, SessionId};

use super::keeping::{GLANCE, within};
use super::{Daemon, Entry, State};
use crate::reserve::{Reserve, allocated, file_system, free};

/// Default reserve: one part in `SHARE` of the file system, within these limits.
const SHARE: u64 = 100;
const LEAST: u64 = 1 << 20;
const MOST: u64 = 64 << 20;

/// Room that the copy would need at another host: its allocated bytes, or all of a device. An error if its disk does not tell.
pub(super) fn needed(entry: &Entry, state: &State, length: u64) -> anyhow::Result<u64> {
    let data = entry.folder.data(&state.settings);
    let bytes = within(GLANCE, move || {
        allocated(&data).map_or(length, |bytes| bytes.min(length))
    });
    bytes.with_context(|| format!("the disk of {} does not answer", entry.name))
}

impl Daemon {
    /// Reserve on the file system of the sidecars.
    fn reserve(&self) -> u64 {
        self.config.reserve.unwrap_or_else(|| {
            statvfs(&self.config.state_dir).map_or(LEAST, |stat| {
                (stat.f_blocks * stat.f_frsize / SHARE).clamp(LEAST, MOST)
            })
        })
    }

    /// The reserve, if these data would lie there.
    fn reserve_of(&self, data: &Path) -> Option<u64> {
        let of = |path: &Path| Some(path.metadata().ok()?.dev());
        let is_device = data.metadata().is_ok_and(|metadata| !metadata.is_file());
        let is_there = !is_device && file_system(data).and_then(of) == of(&self.config.state_dir);
        is_there.then(|| self.reserve())
    }

    /// An error if there is no room for the source's allocated bytes.
    pub(super) fn has_space(
        &self,
        data: &Path,
        offer: &Offer,
        allocated_there: Option<u64>,
    ) -> anyhow::Result<()> {
        if data.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Ok(());
        }
        let free = free(data).with_context(|| format!("the room for {} is not known", data.display()))?;
        let had = allocated(data).unwrap_or(0);
        let more = allocated_there.unwrap_or(0).min(offer.length).saturating_sub(had);
        let reserve = self.reserve_of(data).unwrap_or(0);
        if more > 0 && free < more.saturating_add(reserve) {
            bail!(
                "there is no room for it on {}: it needs {}, and {} has {} free, of which {} are kept for other volumes; make room there, or give it \
                 another place (`verbatim volume place --help`)",
                self.config.name,
                mib(more),
                file_system(data).unwrap_or(data).display(),
                mib(free),
                mib(reserve)
            );
        }
        Ok(())
    }

    /// Notes in `state` how much the arriving copy may take. If an earlier process has begun the attempt, all
    /// allocated bytes count as the attempt's.
    pub(super) fn begin_to_fill(&self, state: &mut State, session: SessionId, data: &Path, was_begun: bool) {
        let (had, reserve) = tokio::task::block_in_place(|| {
            let had = if was_begun { None } else { allocated(data) };
            (had.unwrap_or(0), self.reserve_of(data))
        });
        let reserve = reserve.map(|bytes| Reserve::new(data, had, bytes));
        state.filling = Some((session, had, reserve.map(Arc::new)));
    }

    /// Gives up the rest of an attempt, and gives back its room, unless it is of use to the next attempt: what an older copy had before is
    /// compared. A
    /// mixture of both can never serve. `session`: only the rest of this attempt.
    pub(super) async fn give_back(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        session: Option<SessionId>,
    ) -> anyhow::Result<()> {
        let incoming = {
            let mut state = entry.state.lock().await;
            let Some(sidecar) = state.sidecar.clone().filter(|_| state.is_rest()) else {
                return Ok(());
            };
            // A source may be about to fill it.
            let is_due = |at: Instant| at.elapsed() >= self.config.keep_incomplete;
            if session.is_none() && !state.left_at.is_some_and(is_due) {
                return Ok(());
            }
            if let Role::Incoming { session: of, .. } = sidecar.role {
                if session.is_some_and(|session| session != of) {
                    return Ok(());
                }
                if let Some(incoming) = &state.incoming {
                    incoming.close();
                }
                state.whole = None;
                self.write(entry, &mut state, sidecar.given_up())?;
            }
            state.incoming.clone()
        };
        // What is being written takes room after it was given back.
        if let Some(incoming) = &incoming {
            incoming.ended().await;
        }
        let mut state = entry.state.lock().await;
        let Some(sidecar) = state.sidecar.clone() else {
            return Ok(());
        };
        // Another attempt may have begun meanwhile.
        if sidecar.role != Role::Incomplete || state.is_being_filled() {
            return Ok(());
        }
        let data = entry.folder.data(&state.settings);
        let (ran_full, had) = match state.filling.take() {
            Some((of, had, _)) if session.is_none_or(|session| session == of) => {
                (incoming.is_some_and(|incoming| incoming.ran_full()), had)
            }
            _ => (false, 0),
        };
        let is_suspect = sidecar.suspect || self.marker(entry).is_set();
        let emptied = tokio::task::block_in_place(|| {
            let is_given_back = match (allocated(&data), ran_full) {
                (now, true) => now.is_none_or(|now| now > had),
                // A device has no room to give back, and an operator's word may have been wrong.
                (None, false) => false,
                (Some(now), false) => {
                    now > 0 && sidecar.overruled.is_empty() && (sidecar.generation == 0 || is_suspect)
                }
            };
            match is_given_back {
                true => empty(&data, sidecar.length).map(|()| true),
                false => Ok(false),
            }
        });
        if emptied.with_context(|| format!("{} cannot be emptied", data.display()))? {
            let why = match ran_full {
                true => "there was no room for it here",
                false => "it did not come to its end",
            };
            tracing::warn!("{}: {why}; what had come was given back", entry.name);
        }
        Ok(())
    }

    /// The source of this attempt has gone, for good or for a while.
    pub(super) async fn is_left(self: &Arc<Self>, entry: &Arc<Entry>, session: SessionId, for_good: bool) {
        if for_good && let Err(error) = self.give_back(entry, Some(session)).await {
            tracing::warn!("{}: {error:#}", entry.name);
        }
        self.watch_rest(entry, &mut *entry.state.lock().await);
    }

    /// Gives back the room of a rest that no source has come back to for [`Config::keep_incomplete`].
    pub(super) fn watch_rest(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) {
        state.left_at = state.is_rest().then(Instant::now);
        if state.left_at.is_none() || std::mem::replace(&mut state.is_watched, true) {
            return;
        }
        let (daemon, entry) = (self.clone(), entry.clone());
        tokio::spawn(async move {
            loop {
                let left_at = {
                    let mut state = entry.state.lock().await;
                    let left_at = state.left_at.filter(|_| state.is_rest());
                    state.is_watched = left_at.is_some();
                    left_at
                };
                let Some(left_at) = left_at else {
                    return;
                };
                let end = left_at + daemon.config.keep_incomplete;
                if Instant::now() < end {
                    tokio::time::sleep_until(end.into()).await;
                    continue;
                }
                if let Err(error) = daemon.give_back(&entry, None).await {
                    tracing::warn!("{}: {error:#}", entry.name);
                }
                // A later rest has its own time.
                entry.state.lock().await.left_at.take_if(|at| *at == left_at);
            }
        });
    }
}

impl State {
    /// Whether the copy is the rest of an attempt, which no source fills now.
    pub(super) fn is_rest(&self) -> bool {
        let role = self.sidecar.as_ref().map(|sidecar| &sidecar.role);
        matches!(role, Some(Role::Incoming { .. } | Role::Incomplete)) && !self.is_being_filled()
    }
}

/// Gives the room back. The length stays.
pub(super) fn empty(data: &Path, length: u64) -> io::Result<()> {
    let file = match OpenOptions::new().write(true).open(data) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        file => file?,
    };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match fallocate(&file, flags, 0, length) {
        Ok(()) => Ok(()),
        // A device that cannot do it stays as it is.
        Err(_) if !file.metadata()?.is_file() => Ok(()),
        Err(_) => {
            let length = file.metadata()?.len();
            file.set_len(0)?;
            file.set_len(length)
        }
    }
}

/// The number of bytes in words.
fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_emptied_keeps_its_length_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let data = folder.path().join("data");
        std::fs::write(&data, vec![1; 1 << 20]).expect("written");
        assert!(allocated(&data).expect("a file") >= 1 << 20);
        empty(&data, 1 << 20).expect("emptied");
        assert_eq!(allocated(&data), Some(0));
        assert_eq!(std::fs::read(&data).expect("read"), vec![0; 1 << 20]);
    }
}
