//! The place for the data of a volume that has not come yet.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use anyhow::{Context, bail, ensure};
use rustix::fs::SeekFrom;

use super::data::nameless;
use super::keeping::{GLANCE, within};
use super::{Daemon, Entry, State};
use crate::control::Row;
use crate::folder::{Place, Settings};
use crate::store::identity::Identity;
use crate::store::{Room, is_no_place_of_devices, takes_writes};

impl Daemon {
    /// Notes the place.
    pub(super) fn place(&self, entry: &Entry, state: &mut State, place: Place) -> anyhow::Result<()> {
        let name = &entry.name;
        state.is_known(entry)?;
        if state.sidecar.is_some() || entry.folder.sidecar()?.is_some() {
            if place.is_unnamed && state.settings.data.as_ref() == Some(&place.data) {
                // The same place, and a word about its name.
                let settings = Settings {
                    unnamed: true,
                    ..state.settings.clone()
                };
                entry.folder.write_settings(&settings)?;
                state.settings = settings;
                return Ok(());
            }
            bail!(
                "there is a copy of {name} here, at {}: what moves here goes there; `verbatim volume delete {name}` removes it first",
                entry.folder.data(&state.settings).display()
            );
        }
        tokio::task::block_in_place(|| has_room(&place.data, 0, place.is_unnamed))?;
        entry.folder.make()?;
        entry.folder.write_place(&place)?;
        state.place = Some(place);
        Ok(())
    }

    /// The row of a volume that has a place and is not here yet.
    pub(super) fn placed(&self, entry: &Entry, state: &State) -> Option<Row> {
        let place = state.place.clone()?;
        Some(Row {
            name: entry.name.clone(),
            role: "placed".to_owned(),
            data: Some(place.data),
            ..Row::default()
        })
    }

    /// An error if another volume has its data there, or is to have them there. The state folder tells the places, so that
    /// this does not wait for another volume, whose disk may hang.
    pub(super) async fn is_no_others(&self, name: &str, data: &Path) -> anyhow::Result<()> {
        let real = |path: std::path::PathBuf| within(GLANCE, move || path.canonicalize().unwrap_or(path));
        let shown = data.display();
        let data = real(data.to_owned());
        let data = data.with_context(|| format!("{shown} cannot be looked at: its disk does not answer"))?;
        let entries: Vec<_> = self.entries.lock().await.values().cloned().collect();
        for entry in entries.iter().filter(|entry| entry.name != name) {
            let folder = &entry.folder;
            let theirs = folder
                .settings()
                .and_then(|settings| Ok((settings.data, folder.place()?)));
            let (theirs, expected) =
                theirs.with_context(|| format!("it cannot be said where {} has its data", entry.name))?;
            for path in theirs.into_iter().chain(expected.map(|place| place.data)) {
                // The disk of theirs may hang: then its path is compared as it is.
                let path = real(path.clone()).unwrap_or(path);
                ensure!(
                    path != data,
                    "{} is the place of the volume {}",
                    data.display(),
                    entry.name
                );
            }
        }
        Ok(())
    }
}

/// Whether a volume of this length can be written there, over the present content, and whether the place can be told from others. A file need not
/// exist.
pub(super) fn has_room(data: &Path, length: u64, is_unnamed: bool) -> anyhow::Result<()> {
    let shown = data.display();
    ensure!(
        data.is_absolute(),
        "{shown} is no absolute path: the daemon has a folder of its own"
    );
    let Ok(metadata) = data.metadata() else {
        let folder = data.parent().filter(|folder| folder.is_dir());
        let folder = folder.with_context(|| format!("there is no folder for {shown}"))?;
        return is_no_place_of_devices(folder, data);
    };
    if metadata.is_file() {
        return Ok(());
    }
    ensure!(
        metadata.file_type().is_block_device(),
        "{shown} is neither a file nor a block device"
    );
    // A mounted file system has the device exclusively, as have other users that must not be overwritten
    // (open(2), O_EXCL).
    let mut open = OpenOptions::new();
    let device = open.read(true).write(true).custom_flags(libc::O_EXCL).open(data);
    let device =
        device.with_context(|| format!("{shown} cannot be had: is it mounted, or swap, or in use?"))?;
    takes_writes(&device).with_context(|| format!("{shown} takes no copy"))?;
    let size = rustix::fs::seek(&device, SeekFrom::End(0))?;
    ensure!(
        size >= length,
        "{shown} has {size} bytes, and the volume {length}: `verbatim volume place` gives it another place"
    );
    if !is_unnamed && !Identity::of(&device)?.tells_it() {
        let room = Room::of(&device, length).with_context(|| format!("{shown} cannot be read"))?;
        ensure!(matches!(room, Room::At(_)), "{}", nameless(data, Some(room)));
    }
    Ok(())
}
