//! Room of a copy on the disk: checked before it comes and while it comes, and given back if it does not.
//!
//! By default copies lie in the folder of the sidecars. So a part of that file system is kept free of them
//! ([`Reserve`]).

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, fallocate, statvfs};
use verbatim_mirror::decision::{Offer, Role, SessionId};

use super::{Daemon, Entry, State};
use crate::reserve::{Reserve, allocated, file_system, free};

/// Default reserve: one part in `SHARE` of the file system, within these limits.
const SHARE: u64 = 100;
const LEAST: u64 = 1 << 20;
const MOST: u64 = 64 << 20;

/// Room that the copy would need at another host: its allocated bytes, or all of a device.
pub(super) fn needed(data: &Path, length: u64) -> u64 {
    allocated(data).map_or(length, |bytes| bytes.min(length))
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
        let had = if was_begun {
            0
        } else {
            allocated(data).unwrap_or(0)
        };
        let reserve = self.reserve_of(data);
        let reserve = reserve.map(|bytes| Reserve::new(data, had, bytes));
        state.filling = Some((session, had, reserve.map(Arc::new)));
    }

    /// Gives up an attempt that has found the disk full, and gives back its room. An older copy that has
    /// grown by it is emptied as well: a mixture of both can never serve.
    pub(super) async fn give_back(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        session: SessionId,
    ) -> anyhow::Result<()> {
        let mut state = entry.state.lock().await;
        let Some(sidecar) = state.sidecar.clone() else {
            return Ok(());
        };
        if !matches!(sidecar.role, Role::Incoming { session: of, .. } if of == session)
            || state.is_being_filled()
        {
            return Ok(());
        }
        if let Some(incoming) = &state.incoming {
            incoming.close();
        }
        state.whole = None;
        let data = entry.folder.data(&state.settings);
        let had = match &state.filling {
            Some((of, had, _)) if *of == session => *had,
            _ => 0,
        };
        self.write(entry, &mut state, sidecar.given_up())?;
        state.filling = None;
        if allocated(&data).is_some_and(|bytes| bytes <= had) {
            return Ok(());
        }
        let emptied = tokio::task::block_in_place(|| empty(&data, sidecar.length));
        emptied.with_context(|| format!("{} cannot be emptied", data.display()))?;
        tracing::warn!(
            "{}: there was no room for it here; what had come was given back",
            entry.name
        );
        Ok(())
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
