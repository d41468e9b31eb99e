//! A copy is deleted: with its data, or, by an operator's word, without them.

use std::sync::Arc;

use anyhow::{Context, bail};
use verbatim_mirror::decision::{Role, Tombstone};

use super::orders::{has_ended, is_nobodys, known};
use super::space::empty;
use super::{Daemon, Entry, State};
use crate::store::Lack;

/// The data of a copy that is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Data {
    /// They are there, or the copy needs none.
    Known,
    /// They are gone for good, by an operator's word.
    Gone,
}

impl Daemon {
    /// Deletes the copy here, or the place of a copy that is expected, or what a deleted copy has left.
    /// `is_forced`: also a copy that serves and whose data are gone for good. It changes nothing for others.
    pub(super) async fn delete(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        is_forced: bool,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        if state.unknown.is_none() && state.sidecar.is_none() {
            if state.place.is_some() {
                entry.folder.delete(None)?;
                state.is_deleted();
                return Ok(());
            }
            // Tombstones may be left of a volume that is already deleted.
            let left = entry.folder.left()?;
            if !left.is_empty() {
                return left.into_iter().try_for_each(|id| entry.folder.forget(id));
            }
        }
        let data = self.may_be_deleted(entry, state, is_forced)?;
        if state
            .volume
            .as_ref()
            .is_some_and(|volume| volume.migration().is_some())
        {
            bail!("{name} is being moved");
        }
        has_ended(entry, state)?;
        self.close(entry, state).await?;
        if let Some(incoming) = state.incoming.take() {
            incoming.close();
        }
        let sidecar = known(entry, state)?;
        // A volume that was made here and never moved needs no tombstone. Without its data nothing tells
        // whether the sidecar comes from a backup.
        let is_own = sidecar.may_serve() && sidecar.known() == 1 && data == Data::Known;
        let tombstone = (!is_own).then(|| Tombstone::of(sidecar));
        if state.settings.data.is_none() && matches!(sidecar.role, Role::Incoming { .. } | Role::Incomplete) {
            // The data are useless, and may take all the room.
            let path = entry.folder.data(&state.settings);
            tokio::task::block_in_place(|| empty(&path, sidecar.length))
                .with_context(|| format!("{} cannot be emptied", path.display()))?;
        }
        entry.folder.delete(tombstone.as_ref())?;
        self.marker(entry).discard();
        state.is_deleted();
        Ok(())
    }

    /// An error for a copy that is not deleted.
    fn may_be_deleted(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        is_forced: bool,
    ) -> anyhow::Result<Data> {
        let name = &entry.name;
        match &known(entry, state)?.role {
            Role::Serving if state.settings.attached => {
                bail!("{name} is attached; `verbatim volume detach {name}` first")
            }
            Role::Serving => {
                is_nobodys(entry, state)?;
                self.has_data(entry, state, is_forced)
            }
            Role::Deciding { .. } | Role::Held { .. } => bail!("{name} is being moved"),
            Role::Ready { from, .. } => {
                bail!(
                    "{name} comes from {from} with an instance, and it is not decided yet whether that has arrived"
                )
            }
            Role::Incoming { from, .. } if state.is_being_filled() => {
                bail!("{name} is being filled from {from}; `verbatim volume cancel {name}` there ends that")
            }
            // The rest of an attempt: it may not be served, and no host fills it.
            Role::Incoming { .. } | Role::Moved { .. } | Role::Incomplete => Ok(Data::Known),
        }
    }

    /// Whether a copy that serves has its data, or an operator says that they are gone for good. An error if
    /// they may come back.
    fn has_data(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        is_forced: bool,
    ) -> anyhow::Result<Data> {
        let name = &entry.name;
        if state.unserved.is_none() {
            return Ok(Data::Known);
        }
        let Err(lack) = self.claim(entry, state) else {
            // They have come back.
            self.serve_or_try_again(entry, state);
            return match &state.unserved {
                None => Ok(Data::Known),
                Some(why) => bail!("{name} is the copy that serves, and cannot be served now ({why})"),
            };
        };
        if !lack.may_be_for_good() {
            bail!(
                "{name} is the copy that serves, and its data cannot be had ({lack}): nothing is deleted that may come back. `--force` is for data that \
                 are missing, cut, or replaced by others"
            );
        }
        if !is_forced {
            bail!(
                "{name} is the copy that serves, and its data cannot be had ({lack}): nothing is deleted that may come back. If they are gone for good, \
                 `verbatim volume delete {name} --force` forgets the copy here; and a host to which {name} had been before may have an older copy \
                 (`verbatim volume list` there: moved), which `verbatim volume revive {name} --force` serves there"
            );
        }
        // A device that an earlier daemon has left may still have users, which wait.
        self.is_free(entry, state)?;
        let there = match &state.settings.data {
            Some(path) => format!("; what is at {} stays as it is", path.display()),
            None => String::new(),
        };
        tracing::warn!(
            "{name}: an operator says that its data are gone for good ({lack}), and the copy here is forgotten{there}"
        );
        Ok(Data::Gone)
    }
}

impl Lack {
    /// Whether an operator may say that the data are gone for good: a look shows that they are not there.
    fn may_be_for_good(&self) -> bool {
        match self {
            Self::Missing(_) | Self::Other(..) | Self::Short { .. } => true,
            // Somebody uses them, they are newer than the sidecar, or their disk lets nobody look.
            Self::Taken(_) | Self::Later(_) | Self::Failed(..) => false,
        }
    }
}

impl State {
    /// There is no copy any more. A task that tries again ends by itself.
    fn is_deleted(&mut self) {
        *self = Self {
            is_tried_again: self.is_tried_again,
            ..Self::default()
        };
    }
}
