//! The data of the copies on this host: made once, opened again, waited for, accepted by an operator.

use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use verbatim_mirror::decision::{Role, Sidecar};
use verbatim_mirror::opening::{Age, age};
use verbatim_mirror::trust::{self, NotMoved, accepted, failed};

use super::keeping::GLANCE;
use super::orders::{known, serving};
use super::{Daemon, Entry, State};
use crate::folder::Noted;
use crate::store::identity::Identity;
use crate::store::trust::{Belief, Marker};
use crate::store::{Expected, Lack, Making, Room, Store};

/// How data are made.
#[derive(Debug, Clone, Copy)]
pub(super) struct HowMade {
    pub(super) making: Making,
    pub(super) preallocate: bool,
    /// Nothing need tell them from others.
    pub(super) is_unnamed: bool,
}

/// Whether a copy of this role serves, or is to serve without being filled again: then its data are claimed.
pub(super) fn needs_data(role: &Role) -> bool {
    match role {
        Role::Serving | Role::Deciding { .. } | Role::Held { .. } | Role::Ready { .. } => true,
        Role::Moved { .. } | Role::Incoming { .. } | Role::Incomplete => false,
    }
}

/// Whether a copy of this role keeps its data claimed while they are open.
fn keeps_data(role: &Role) -> bool {
    needs_data(role) || matches!(role, Role::Incoming { .. })
}

impl State {
    /// Whether a flush of its disk has failed.
    pub(super) fn is_suspect(&self) -> bool {
        let is_noted = self.sidecar.as_ref().is_some_and(|sidecar| sidecar.suspect);
        is_noted || self.store.as_ref().is_some_and(|store| store.is_suspect())
    }

    /// Whether a later process finds the data that were filled. A commit of a file that was deleted meanwhile would be lost with this one.
    pub(super) fn has_file(&self, entry: &Entry) -> bool {
        let is_there = self.store.as_ref().is_none_or(|store| store.has_name());
        if !is_there {
            tracing::error!(
                "volume {}: {} was deleted while it was filled: it is not committed here, and stays where it is. `verbatim volume delete {0}`, and it can come again",
                entry.name,
                entry.folder.data(&self.settings).display()
            );
        }
        is_there
    }

    /// Closes data that the copy's role no longer needs.
    pub(super) fn let_go(&mut self) {
        let is_kept = self
            .sidecar
            .as_ref()
            .is_some_and(|sidecar| keeps_data(&sidecar.role));
        if is_kept {
            return;
        }
        // The mark is on the disk; the sidecar in memory keeps it as well.
        let is_suspect = self.store.take().is_some_and(|store| {
            self.closing_data = store.closed();
            store.let_go();
            store.is_suspect()
        });
        if let Some(sidecar) = self.sidecar.as_ref().filter(|_| is_suspect).and_then(failed) {
            self.sidecar = Some(sidecar);
        }
    }

    /// Data that were let go are closed by the last task that uses them, maybe a moment later. Before that they cannot be claimed again.
    fn until_let_go(&mut self) {
        if let Some(closing) = &self.closing_data
            && tokio::task::block_in_place(|| closing.within(GLANCE))
        {
            self.closing_data = None;
        }
    }

    /// Looks whether nothing was ever written to it, as far as is known. Called where it is lent: a look at the disk may hang, and the list of
    /// volumes
    /// must not.
    pub(super) fn look_whether_fresh(&mut self) {
        let is_used = self.noted.as_ref().is_some_and(|noted| noted.used);
        let store = self.store.as_ref();
        self.fresh = store.map(|store| !is_used && tokio::task::block_in_place(|| store.is_untouched()));
    }
}

impl Daemon {
    /// Whether it may be moved, or rescued.
    pub(super) fn may_move(&self, entry: &Entry, state: &State, is_rescue: bool) -> anyhow::Result<()> {
        let sidecar = known(entry, state)?;
        let now = match state.is_suspect() {
            true => failed(sidecar),
            false => None,
        };
        match trust::may_move(now.as_ref().unwrap_or(sidecar), is_rescue) {
            Ok(()) => Ok(()),
            Err(NotMoved::Suspect) => bail!(
                "a flush of the disk of {0} has failed, and part of it may be in the page cache here only: \
                 `verbatim volume migrate {0} --to HOST --rescue` \
                 saves all that can be read, once no instance has it; `verbatim volume accept --help` has more",
                entry.name
            ),
            Err(NotMoved::Sound) => bail!(
                "no flush of the disk of {} has failed: there is nothing to rescue, and it moves without --rescue",
                entry.name
            ),
        }
    }

    pub(super) fn marker(&self, entry: &Entry) -> Marker {
        let config = &self.config;
        Marker::new(entry.folder.path(), &config.runtime_dir, &entry.name, config.hook)
    }

    /// Makes the data of a copy that has none, with this length, and notes their identity.
    pub(super) fn make_data(
        &self,
        entry: &Entry,
        state: &mut State,
        length: u64,
        how: HowMade,
    ) -> anyhow::Result<Arc<Store>> {
        state.until_let_go();
        let marker = self.marker(entry);
        // A mark may be left of an earlier volume of the same name.
        marker.clear().context("cannot write to its folder")?;
        marker.prepare().context("cannot write to its folder")?;
        let path = entry.folder.data(&state.settings);
        let own = state.settings.data.is_none();
        // The folder with the sidecar tells the data in it from others.
        let how = match own {
            true => HowMade {
                making: Making::Own,
                is_unnamed: true,
                ..how
            },
            false => how,
        };
        let store = tokio::task::block_in_place(|| Store::make(&path, length, how.making, Some(marker)))?;
        let noted = self.note_made(entry, &store, &path, length, how);
        let noted = noted.inspect_err(|_| undo(&store, &path))?;
        let store = Arc::new(store);
        (state.noted, state.store) = (Some(noted), Some(store.clone()));
        Ok(store)
    }

    /// Allocates the room of data that were just made, if that is wanted, and notes their identity.
    fn note_made(
        &self,
        entry: &Entry,
        store: &Store,
        path: &Path,
        length: u64,
        how: HowMade,
    ) -> anyhow::Result<Noted> {
        let HowMade {
            making, preallocate, ..
        } = how;
        if preallocate {
            let shown = path.display();
            let allocated = store.allocate(length);
            allocated.with_context(|| format!("{shown} cannot have all of its place on the disk"))?;
            store.flush()?;
        }
        if making != Making::Over {
            // After a failed flush the page cache has data that the disk lacks, and reads look sound.
            let shown = path.display();
            let is_sound = tokio::task::block_in_place(|| {
                store.flush()?;
                // Where nothing can tell, an operator's word is enough.
                Ok::<_, std::io::Error>(store.is_as_cached(length).unwrap_or(true))
            });
            ensure!(
                is_sound.with_context(|| format!("{shown} cannot be flushed"))?,
                "the disk of {shown} has something else than the page cache: a flush of it has failed. Copy it to another disk, or drop the page \
                 cache if the disk is right, and try again"
            );
        }
        let noted = Noted {
            identity: tokio::task::block_in_place(|| named(store, path, length, how.is_unnamed))?,
            preallocated: preallocate,
            // A device keeps its content.
            used: making == Making::Adopted || (making == Making::New && !store.is_blank(length)),
        };
        entry.folder.write_noted(&noted)?;
        if preallocate {
            store.is_preallocated();
        }
        Ok(noted)
    }

    /// The open data of a copy; opens them if necessary.
    pub(super) fn open_data(
        &self,
        entry: &Entry,
        state: &mut State,
        sidecar: &Sidecar,
        belief: Belief,
    ) -> Result<Arc<Store>, Lack> {
        if let Some(store) = &state.store {
            return Ok(store.clone());
        }
        state.until_let_go();
        let path = entry.folder.data(&state.settings);
        let marker = self.marker(entry);
        if let Err(error) = marker.prepare() {
            tracing::warn!("volume {}: cannot write to its folder: {error}", entry.name);
        }
        let belief = match marker.is_set() && belief == Belief::Sound {
            true => Belief::Suspect,
            false => belief,
        };
        let here = match belief {
            Belief::Suspect => failed(sidecar),
            Belief::Sound | Belief::Rewritten => None,
        };
        let first = trust::first(here.as_ref().unwrap_or(sidecar), marker.was_cut_off());
        let expected = Expected {
            identity: state.noted.as_ref().map(|noted| &noted.identity),
            length: sidecar.length,
            belief,
            marker: Some(marker),
            first,
        };
        // The daemon has few threads for tasks, and a disk may take its time.
        let opened = tokio::task::block_in_place(|| {
            let opened = Store::open(&path, expected)?;
            // The data may have been missing when the sidecar was read.
            if age(state.written, opened.store.seen(sidecar.id)) == Age::Old {
                return Err(Lack::Later(path.clone()));
            }
            opened.store.sees(sidecar.id, state.written);
            Ok(opened)
        })?;
        if let Some(remark) = &opened.remark {
            tracing::warn!("volume {}: {remark}", entry.name);
        }
        if state
            .noted
            .as_ref()
            .is_none_or(|noted| noted.identity != opened.identity)
        {
            self.note(entry, state, &opened.store, opened.identity);
        }
        if opened.store.is_suspect() {
            tracing::error!(
                "volume {}: a flush of its disk has failed: it is read, and takes no writes; see `verbatim volume accept --help`",
                entry.name
            );
        }
        if state.noted.as_ref().is_some_and(|noted| noted.preallocated) {
            opened.store.is_preallocated();
        }
        let store = Arc::new(opened.store);
        state.store = Some(store.clone());
        Ok(store)
    }

    /// Notes the data's identity. If the note cannot be written, the next daemon writes it.
    fn note(&self, entry: &Entry, state: &mut State, store: &Store, identity: Identity) {
        let length = state.sidecar.as_ref().map_or(0, |sidecar| sidecar.length);
        let before = state.noted.take();
        let noted = Noted {
            identity,
            preallocated: before.as_ref().is_some_and(|noted| noted.preallocated)
                || (before.is_none() && length > 0 && store.is_allocated(length)),
            used: before.is_none_or(|noted| noted.used),
        };
        if let Err(error) = entry.folder.write_noted(&noted) {
            tracing::warn!("volume {}: {error:#}", entry.name);
        }
        state.noted = Some(noted);
    }

    /// Changes the notes on the data, durably if possible.
    pub(super) fn note_more(&self, entry: &Entry, state: &mut State, more: impl FnOnce(&mut Noted)) {
        let Some(noted) = &mut state.noted else {
            return;
        };
        let before = noted.clone();
        more(noted);
        if *noted != before
            && let Err(error) = entry.folder.write_noted(noted)
        {
            tracing::warn!("volume {}: {error:#}", entry.name);
        }
    }

    /// The copy is complete and becomes the volume: updates trust and notes.
    pub(super) fn is_filled(&self, entry: &Entry, state: &mut State) {
        let Some(store) = state.store.clone() else {
            return;
        };
        store.is_whole();
        let Some(incoming) = state.incoming.clone() else {
            return;
        };
        let keeps_room = incoming.keeps_room();
        if keeps_room {
            store.is_preallocated();
        }
        // Of a device nothing else tells later that it is not new.
        let is_used = store.is_device() && incoming.has_data();
        self.note_more(entry, state, |noted| {
            noted.preallocated |= keeps_room;
            noted.used |= is_used;
        });
    }

    /// Opens the data of a copy that needs them, unless they are open. Data that cannot be opened are never
    /// replaced.
    pub(super) fn claim_data(&self, entry: &Entry, state: &mut State) -> anyhow::Result<()> {
        match self.claim(entry, state) {
            Ok(()) => Ok(()),
            Err(lack @ Lack::Other(..)) => bail!(
                "{lack}; if it is right, `verbatim volume accept {}` says so",
                entry.name
            ),
            Err(lack) => Err(lack.into()),
        }
    }

    /// The same. An error is what the data lack.
    pub(super) fn claim(&self, entry: &Entry, state: &mut State) -> Result<(), Lack> {
        let Some(sidecar) = state.sidecar.clone().filter(|sidecar| needs_data(&sidecar.role)) else {
            state.let_go();
            // An earlier daemon may have left them.
            if !state
                .sidecar
                .as_ref()
                .is_some_and(|sidecar| keeps_data(&sidecar.role))
            {
                tokio::task::block_in_place(|| self.marker(entry).pages().end());
            }
            return Ok(());
        };
        let belief = match sidecar.suspect {
            true => Belief::Suspect,
            false => Belief::Sound,
        };
        self.open_data(entry, state, &sidecar, belief).map(drop)
    }

    /// An operator accepts the present data as the volume.
    pub(super) async fn accept(self: &Arc<Self>, entry: &Arc<Entry>) -> anyhow::Result<()> {
        let name = &entry.name;
        let (store, sidecar) = {
            let mut state = entry.state.lock().await;
            if let Some((sidecar, seen)) = state.restored.clone() {
                return self.accept_restored(entry, &mut state, &sidecar, seen);
            }
            if state.unserved.is_some() {
                return self.accept_other(entry, &mut state);
            }
            serving(entry, &state)?;
            let sidecar = known(entry, &state)?.clone();
            ensure!(
                state.is_suspect(),
                "there is nothing to accept: {name} is served, and no flush of its disk has failed"
            );
            (state.store.clone().context("it is not open")?, sidecar)
        };
        tracing::warn!("{name}: an operator accepts it; what can be read of it is written once more");
        // A suspect copy has no other writer.
        let again = store.clone();
        let keeps_room = store.keeps_room(sidecar.length);
        let path = {
            let state = entry.state.lock().await;
            entry.folder.data(&state.settings)
        };
        let at = path.clone();
        let written = tokio::task::spawn_blocking(move || {
            again.be_writable()?;
            again.is_at(&at)?;
            again.write_again(sidecar.length, keeps_room)?;
            again.is_at(&at)
        });
        match written.await? {
            Err(error) if error.kind() == ErrorKind::NotFound => bail!(
                "{name} stays suspect: {} is another file than the one that is served, which has no name any more. Nothing is lost as long as this daemon \
                 runs: `verbatim volume migrate {name} --to HOST --rescue` saves all that can be read",
                path.display()
            ),
            Err(error) if error.kind() == ErrorKind::ReadOnlyFilesystem => bail!(
                "{name} stays suspect: the file system of its data is read-only. Repair its disk and make it writable (`mount -o remount,rw`), and \
                 accept it then; or `verbatim volume migrate {name} --to HOST --rescue` saves all that can be read"
            ),
            written => written.with_context(|| format!("{name} stays suspect: its disk fails still"))?,
        }
        let mut state = entry.state.lock().await;
        let is_same = state.store.as_ref().is_some_and(|now| Arc::ptr_eq(now, &store));
        ensure!(
            is_same && state.sidecar.as_ref().is_some_and(|now| now.may_serve()),
            "{name} has moved, or was deleted, meanwhile"
        );
        if let Some(sidecar) = accepted(known(entry, &state)?) {
            self.write(entry, &mut state, sidecar)?;
        }
        self.marker(entry)
            .clear()
            .context("its mark cannot be taken away")?;
        store.is_accepted();
        Ok(())
    }

    /// An operator accepts the sidecar from a backup. Like every operator's decision, this makes a copy that
    /// serves younger than all copies that have served since the backup.
    fn accept_restored(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        sidecar: &Sidecar,
        seen: u64,
    ) -> anyhow::Result<()> {
        let accepted = match sidecar.may_serve() {
            true => Sidecar {
                generation: sidecar.known() + 2,
                ..sidecar.clone()
            },
            false => sidecar.clone(),
        };
        tracing::warn!(
            "{}: an operator accepts a sidecar that comes from a backup",
            entry.name
        );
        (state.unknown, state.restored, state.written) = (None, None, seen);
        state.sidecar = Some(sidecar.clone());
        let written = self.write(entry, state, accepted);
        // The sidecar is read again and shown to the data, whether the write succeeded or not.
        self.take_up(entry, state);
        written
    }

    /// An operator accepts the file or device at the path of the data, whatever was there before.
    fn accept_other(self: &Arc<Self>, entry: &Arc<Entry>, state: &mut State) -> anyhow::Result<()> {
        let noted = state.noted.take();
        if let Err(error) = self.claim_data(entry, state) {
            state.noted = noted;
            return Err(error.context(format!("{} is not served", entry.name)));
        }
        tracing::warn!("{}: an operator accepts what is there now", entry.name);
        self.serve_or_try_again(entry, state);
        Ok(())
    }

    /// Takes over a failure that an earlier process has marked.
    pub(super) fn recall_failure(&self, entry: &Entry, state: &mut State) {
        if self.marker(entry).is_set()
            && let Some(sidecar) = state.sidecar.as_ref().and_then(failed)
        {
            state.sidecar = Some(sidecar);
        }
    }

    /// Before another host fills a copy: notes its failure durably in the sidecar, where it stays until all
    /// data were written again.
    pub(super) fn note_failure(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
    ) -> anyhow::Result<()> {
        let marker = self.marker(entry);
        let has_failed = marker.is_set() || state.store.as_ref().is_some_and(|store| store.is_suspect());
        let Some(sidecar) = state.sidecar.as_ref().filter(|_| has_failed) else {
            return Ok(());
        };
        // A copy that may serve is not filled, and keeps its mark.
        if needs_data(&sidecar.role) {
            return Ok(());
        }
        if let Some(sidecar) = failed(sidecar) {
            self.write(entry, state, sidecar)?;
        }
        marker.clear().context("its mark cannot be taken away")?;
        if let Some(store) = &state.store {
            store.trust().believe(Belief::Rewritten);
        }
        Ok(())
    }
}

/// The identity of data that were just made. A device without a name gets a signature.
fn named(store: &Store, path: &Path, length: u64, is_unnamed: bool) -> anyhow::Result<Identity> {
    let shown = path.display();
    let identity = store.identity()?;
    if identity.tells_it() {
        return Ok(identity);
    }
    let mut room = None;
    if store.is_device() {
        let signed = store.sign(length);
        match signed.with_context(|| format!("{shown} cannot be signed"))? {
            Ok(identity) => return Ok(identity),
            Err(lack) => room = Some(lack),
        }
    }
    ensure!(is_unnamed, "{}", nameless(path, room));
    tracing::warn!("nothing tells {shown} from another of its kind, so only its size is looked at later");
    Ok(identity)
}

/// The reason why data are refused that nothing tells from others.
pub(super) fn nameless(path: &Path, room: Option<Room>) -> String {
    let shown = path.display();
    let why = match room {
        Some(Room::Used(at)) => format!(
            "{shown} has neither a WWN nor a serial number, and its last block, where a signature would be written (4096 bytes from byte {at} on), is in \
             use. Clear that block"
        ),
        Some(_) => format!(
            "{shown} has neither a WWN nor a serial number, and no room for a signature behind the volume. Take a device that is 8192 bytes longer"
        ),
        None => format!(
            "the file system of {shown} keeps neither extended attributes nor handles of files. Take another one"
        ),
    };
    format!("{why}, or say `--unnamed`: then another of its kind is taken for it if it has the size")
}

/// Removes the file of data that could not become a volume, if they were made by this order. Files of others stay.
pub(super) fn undo(store: &Store, path: &Path) {
    store.let_go();
    if store.is_fresh() {
        let _ = std::fs::remove_file(path);
    }
}

/// Makes everything in the folder of the volumes private to the owner of this process.
pub(super) fn keep_private(folder: &Path) {
    let tighten = |path: &Path, mode: u32| {
        let now = path.symlink_metadata();
        let is_open = now.is_ok_and(|now| !now.file_type().is_symlink() && now.mode() & 0o077 != 0);
        if is_open && let Err(error) = std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)) {
            tracing::warn!("others may read {}: {error}", path.display());
        }
    };
    tighten(folder, 0o700);
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => keep_private(&path),
            false => tighten(&path, 0o600),
        }
    }
}
