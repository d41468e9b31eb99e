//! A volume as a disk of one instance's virtual machine: by NBD, on a socket in a folder of the instance.
//!
//! QEMU connects when it starts. At the destination of a move this is long before the decision which copy
//! serves. A client is therefore accepted for every role of the copy, and its requests are not read before
//! the copy serves ([`Export::later`]). Early requests wait in the client's socket, and are discarded if the
//! session is rolled back.
//!
//! The loan is noted in the runtime folder. After a daemon was killed, the next one lends the volume on the
//! same socket again, and QEMU's NBD client reconnects. A note without the socket's folder is worthless: the
//! instance is gone as well.

use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use verbatim_mirror::decision::{AgentSession, Role};

use super::orders::{has_whole_sectors, is_nobodys, known, serving};
use super::{Daemon, Entry, State, listeners};
use crate::nbd::export::Export;
use crate::volume::Volume;

/// The loan of a volume to an instance, for the next daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Note {
    /// The instance.
    holder: String,
    /// The socket for the instance's QEMU, as this daemon sees it.
    socket: PathBuf,
    /// The instance comes here in this session of the agents, which is not decided yet.
    by: Option<AgentSession>,
    /// The instance may only read.
    #[serde(default)]
    read_only: bool,
}

/// A volume that is lent.
pub(super) struct Lent {
    note: Note,
    volume: watch::Sender<Option<Arc<Volume>>>,
    listener: JoinHandle<()>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Lent {
    fn new(name: &str, length: u64, note: Note) -> anyhow::Result<Self> {
        let listener =
            listen(&note.socket).with_context(|| format!("cannot listen on {}", note.socket.display()))?;
        let (volume, later) = watch::channel(None);
        let export = Export::later(length, note.read_only, later).for_those_who_connect_anew();
        let listener = listeners::take(listener, name, export);
        Ok(Self {
            note,
            volume,
            listener,
        })
    }

    /// The socket for QEMU.
    pub(super) fn socket(&self) -> &Path {
        &self.note.socket
    }

    /// Whether the loan waits for this session.
    pub(super) fn waits_for(&self, by: AgentSession) -> bool {
        self.note.by == Some(by)
    }

    /// Serves clients from now on, unless a session has to be decided first.
    pub(super) fn serve(&self, volume: &Arc<Volume>) {
        if self.note.by.is_none() {
            self.volume.send_replace(Some(volume.clone()));
        }
    }
}

/// Listens on a socket in an existing folder. A daemon that was killed may have left a socket there.
fn listen(socket: &Path) -> io::Result<UnixListener> {
    let (Some(folder), Some(name)) = (socket.parent(), socket.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(folder, flags, Mode::empty())?;
    // The path goes through the folder's descriptor, since the path of a socket has at most 107 bytes.
    let short = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    match std::fs::remove_file(&short) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    UnixListener::bind(&short)
}

impl Daemon {
    fn note_path(&self, name: &str) -> PathBuf {
        self.config
            .runtime_dir
            .join("volumes")
            .join(format!("{name}.lent"))
    }

    fn write_note(&self, name: &str, note: &Note) -> anyhow::Result<()> {
        let path = self.note_path(name);
        let beside = path.with_extension("lent.new");
        // The note need not outlive a power failure: the instance does not, either.
        let written =
            std::fs::write(&beside, serde_json::to_vec(note)?).and_then(|()| std::fs::rename(&beside, &path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    /// Lends the volume to the virtual machine of an instance, which may ask repeatedly. `by`: the instance
    /// comes here in this session.
    pub(super) fn lend_socket(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        state: &mut State,
        holder: String,
        (socket, read_only): (PathBuf, bool),
        by: Option<AgentSession>,
    ) -> anyhow::Result<()> {
        let name = &entry.name;
        let sidecar = known(entry, state)?;
        let length = sidecar.length;
        match (&sidecar.role, by) {
            (Role::Incoming { .. }, Some(_)) => {}
            (Role::Ready { by: promised, .. }, Some(by)) if *promised == by => {}
            (_, Some(_)) => bail!("{name} does not come here in that session"),
            (_, None) => serving(entry, state)?,
        }
        if state.settings.attached {
            bail!("{name} is attached for other clients; `verbatim volume detach {name}` first");
        }
        if state.holder.as_ref() != Some(&holder) {
            is_nobodys(entry, state)?;
        }
        ensure!(
            state.device.is_none(),
            "{name} is a block device of this machine; `verbatim volume detach {name}` first"
        );
        if state
            .volume
            .as_ref()
            .is_some_and(|volume| volume.migration().is_some())
        {
            bail!("{name} is being moved");
        }
        has_whole_sectors(entry, state)?;
        ensure!(socket.is_absolute(), "{} is no absolute path", socket.display());
        let note = Note {
            holder,
            socket,
            by,
            read_only,
        };
        state.look_whether_fresh();
        if state.lent.as_ref().is_some_and(|lent| lent.note == note) {
            return Ok(());
        }
        self.end_lent(entry, state);
        let lent = Lent::new(name, length, note)?;
        if let Err(error) = self.write_note(name, &lent.note) {
            let _ = std::fs::remove_file(lent.socket());
            return Err(error);
        }
        state.holder = Some(lent.note.holder.clone());
        state.lent = Some(lent);
        self.serve(entry, state)
    }

    /// Lends the volume again if an earlier daemon had lent it.
    pub(super) fn lend_again(&self, entry: &Entry, state: &mut State) -> anyhow::Result<()> {
        let path = self.note_path(&entry.name);
        let text = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let note: Note = serde_json::from_slice(&text)
            .with_context(|| format!("{} does not say to whom it is lent", path.display()))?;
        let is_there = note.socket.parent().is_some_and(Path::is_dir);
        match &state.sidecar {
            Some(sidecar) if is_there => {
                let lent = Lent::new(&entry.name, sidecar.length, note)?;
                state.holder = Some(lent.note.holder.clone());
                state.lent = Some(lent);
                Ok(())
            }
            _ => std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display())),
        }
    }

    /// Ends the loan. Connections end with the volume's, or at once if the volume is not served.
    pub(super) fn end_lent(&self, entry: &Entry, state: &mut State) {
        let Some(lent) = state.lent.take() else {
            return;
        };
        state.holder = None;
        for path in [lent.socket(), &self.note_path(&entry.name)] {
            if let Err(error) = std::fs::remove_file(path)
                && error.kind() != io::ErrorKind::NotFound
            {
                tracing::warn!("{} is left behind: {error}", path.display());
            }
        }
    }

    /// Applies the decision of the session in which the instance came here, if the loan waits for it.
    pub(super) fn settle_lent(
        &self,
        entry: &Entry,
        state: &mut State,
        by: AgentSession,
        is_committed: bool,
    ) -> anyhow::Result<()> {
        let may_serve = state.sidecar.as_ref().is_some_and(|sidecar| sidecar.may_serve());
        let Some(lent) = state.lent.as_mut().filter(|lent| lent.waits_for(by)) else {
            return Ok(());
        };
        if !is_committed || !may_serve {
            self.end_lent(entry, state);
            return Ok(());
        }
        let note = Note {
            by: None,
            ..lent.note.clone()
        };
        self.write_note(&entry.name, &note)?;
        lent.note = note;
        Ok(())
    }
}
