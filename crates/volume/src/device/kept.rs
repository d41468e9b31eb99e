//! The part of a device that outlives the daemon: a keeper with the descriptors, and a note about them.
//!
//! ```text
//!  RUN/volumes/NAME.keeper   the keeper's socket: the FUSE connection, the loop device, the mount, and clones of the first, with a label
//!  RUN/volumes/NAME.device   the label again, for the case that the keeper is gone
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use serde::{Deserialize, Serialize};
use verbatim_keeper::{Keeper, OWN_PROGRAM};

use crate::store::identity::{Identity, Match};

/// A keeper that cannot be started is tried again after this time.
const AGAIN: Duration = Duration::from_secs(5);

/// Limit for a keeper to carry out an order: a keeper is idle, unless another process has it.
const ANSWER: Duration = Duration::from_secs(10);

/// Description of a device for the next daemon. New fields get defaults.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Label {
    /// The identity of the volume.
    pub volume: String,
    /// Identity of its data.
    #[serde(default)]
    pub data: Option<Identity>,
    /// The loop device.
    pub path: PathBuf,
    /// The device is read-only.
    #[serde(default)]
    pub read_only: bool,
    /// The instance that has exclusive use of it.
    #[serde(default)]
    pub holder: Option<String>,
    /// The kernel resends requests that were read and not answered.
    #[serde(default)]
    pub resends: bool,
}

impl Label {
    /// The reason why a device is not this volume's with its present data; `None` if it is.
    pub fn differs(&self, volume: &str, data: Option<&Identity>) -> Option<&'static str> {
        if self.volume != volume {
            return Some("the volume is another one of that name");
        }
        let is_other =
            matches!((&self.data, data), (Some(noted), Some(now)) if noted.compare(now) != Match::Same);
        is_other.then_some("there are other data in the place of those that it had")
    }
}

/// The two paths of a volume's device.
#[derive(Debug, Clone)]
pub struct Places {
    socket: PathBuf,
    note: PathBuf,
}

impl Places {
    /// The paths of this volume in the runtime folder.
    pub fn new(runtime_dir: &Path, name: &str) -> Self {
        let place = |ending: &str| runtime_dir.join("volumes").join(format!("{name}.{ending}"));
        Self {
            socket: place("keeper"),
            note: place("device"),
        }
    }

    /// The names of all volumes with a keeper.
    pub fn names(runtime_dir: &Path) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(runtime_dir.join("volumes")) else {
            return Vec::new();
        };
        let names = entries.flatten().filter_map(|entry| {
            let name = entry.file_name();
            Some(name.to_str()?.strip_suffix(".keeper")?.to_owned())
        });
        names.collect()
    }

    /// Whether there may be a device.
    pub fn is_any(&self) -> bool {
        self.socket.exists() || self.note.exists()
    }

    /// The device that an earlier daemon has left.
    pub fn find(&self) -> anyhow::Result<Left> {
        if !self.socket.exists() {
            return Ok(Left::Nothing);
        }
        let Some(keeper) = Keeper::look_within(&self.socket, ANSWER)? else {
            return Ok(match std::fs::read(&self.note) {
                // The device was never completed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Left::Nothing,
                text => Left::Lost(text.ok().and_then(|text| serde_json::from_slice(&text).ok())),
            });
        };
        match keeper.take()?.pop() {
            Some((label, mut fds)) => {
                let label = serde_json::from_slice(&label).context("the label of a device makes no sense")?;
                let clones = fds.split_off(fds.len().min(3));
                let [fuse, device, mount] = <[OwnedFd; 3]>::try_from(fds)
                    .map_err(|fds| anyhow::anyhow!("a keeper has {} descriptors of a device", fds.len()))?;
                let fds = Arc::new(Fds {
                    fuse: Arc::new(fuse),
                    clones: clones.into_iter().map(Arc::new).collect(),
                    device,
                    mount,
                });
                Ok(Left::Kept(Found { keeper, label, fds }))
            }
            // The daemon was killed before it had handed over any descriptor.
            None => {
                keeper.end();
                Ok(Left::Nothing)
            }
        }
    }

    /// Lets go of a device, and forgets it.
    pub fn clear(&self) {
        match Keeper::look_within(&self.socket, ANSWER) {
            Ok(Some(keeper)) => keeper.end(),
            Ok(None) => drop(std::fs::remove_file(&self.socket)),
            // The next daemon finds it.
            Err(error) => return tracing::error!("a block device may be left behind: {error:#}"),
        }
        // The device is gone by now. A note alone means nothing.
        let _ = std::fs::remove_file(&self.note);
    }
}

/// The remains of an earlier daemon's device.
pub enum Left {
    Nothing,
    /// The keeper has ended: users of the device get errors.
    Lost(Option<Label>),
    Kept(Found),
}

/// A device that waits for its daemon.
pub struct Found {
    pub keeper: Keeper,
    pub label: Label,
    pub fds: Arc<Fds>,
}

/// The descriptors of a device.
pub struct Fds {
    pub fuse: Arc<OwnedFd>,
    /// Clones of this descriptor.
    pub clones: Vec<Arc<OwnedFd>>,
    /// The loop device; it stays as long as this is open.
    pub device: OwnedFd,
    pub mount: OwnedFd,
}

impl Fds {
    fn all(&self) -> Vec<BorrowedFd<'_>> {
        let mut all = vec![self.fuse.as_fd(), self.device.as_fd(), self.mount.as_fd()];
        all.extend(self.clones.iter().map(AsFd::as_fd));
        all
    }
}

struct Inner {
    places: Places,
    label: Vec<u8>,
    fds: Arc<Fds>,
    keeper: Mutex<Option<Keeper>>,
    stop: OwnedFd,
}

/// A device that is kept. A keeper that was ended is replaced by another one.
pub struct Keeping {
    inner: Arc<Inner>,
    watch: Option<JoinHandle<()>>,
}

impl Keeping {
    /// Starts a keeper, unless one is given.
    pub fn new(
        places: &Places,
        label: &Label,
        fds: Arc<Fds>,
        keeper: Option<Keeper>,
    ) -> anyhow::Result<Self> {
        let label = serde_json::to_vec(label)?;
        // The socket shows other processes that there is a keeper.
        let (keeper, is_new) = match keeper {
            Some(keeper) => (keeper, false),
            None => (begin(places, &label, &fds)?, true),
        };
        let beside = places.note.with_extension("device.new");
        let noted = std::fs::write(&beside, &label)
            .and_then(|()| std::fs::rename(&beside, &places.note))
            .with_context(|| format!("cannot write {}", places.note.display()));
        if let Err(error) = noted {
            // Nothing is left of a device that was not made.
            if is_new {
                keeper.end();
            }
            return Err(error);
        }
        let inner = Arc::new(Inner {
            places: places.clone(),
            label,
            fds,
            keeper: Mutex::new(Some(keeper)),
            stop: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let of = inner.clone();
        let watch = std::thread::Builder::new()
            .name("keeper".into())
            .spawn(move || of.watch())?;
        Ok(Self {
            inner,
            watch: Some(watch),
        })
    }

    /// Stops watching the keeper, which stays.
    fn leave(&mut self) {
        if let Some(watch) = self.watch.take() {
            rustix::io::write(&self.inner.stop, &1u64.to_ne_bytes()).expect("nobody else counts there");
            watch.join().expect("it does not panic");
        }
    }

    /// Ends the keeper, and forgets the device.
    pub fn end(mut self) {
        self.leave();
        if let Some(keeper) = self.inner.keeper.lock().expect("no panic under this lock").take() {
            keeper.end();
        }
        self.inner.places.clear();
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.leave();
    }
}

fn begin(places: &Places, label: &[u8], fds: &Fds) -> anyhow::Result<Keeper> {
    ensure!(
        Path::new(OWN_PROGRAM).exists(),
        "{OWN_PROGRAM} is not there: is /proc mounted?"
    );
    let keeper = Keeper::start(Path::new(OWN_PROGRAM), &places.socket)?;
    match keeper.keep(label.to_owned(), &fds.all()) {
        Ok(()) => Ok(keeper),
        Err(error) => {
            keeper.end();
            Err(error)
        }
    }
}

impl Inner {
    /// Starts another keeper when one has ended, until it is stopped.
    fn watch(&self) {
        loop {
            let watched = {
                let keeper = self.keeper.lock().expect("no panic under this lock");
                keeper.as_ref().and_then(|keeper| keeper.watched().ok())
            };
            let stop = PollFd::new(&self.stop, PollFlags::IN);
            // Nothing writes to this socket, so its end is the only event.
            let ended = match &watched {
                Some(watched) => {
                    let mut both = [stop, PollFd::new(watched, PollFlags::empty())];
                    let polled = poll(&mut both, None);
                    let is_stopped = both[0].revents().contains(PollFlags::IN);
                    (polled.is_ok() || is_stopped).then_some(is_stopped)
                }
                None => {
                    let pause = Timespec::try_from(AGAIN).expect("it is short");
                    let mut one = [stop];
                    let polled = poll(&mut one, Some(&pause));
                    polled.ok().map(|_| one[0].revents().contains(PollFlags::IN))
                }
            };
            match ended {
                Some(true) => return,
                // A signal has interrupted the wait.
                None => continue,
                Some(false) => {}
            }
            let shown = self.places.socket.display();
            let mut keeper = self.keeper.lock().expect("no panic under this lock");
            *keeper = match begin(&self.places, &self.label, &self.fds) {
                Ok(new) => {
                    tracing::warn!("the keeper of a block device ({shown}) was ended; there is another one");
                    Some(new)
                }
                Err(error) => {
                    tracing::error!(
                        "the keeper of a block device ({shown}) was ended, and there is no other one: the device would go with this daemon ({error:#})"
                    );
                    None
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label() -> Label {
        serde_json::from_str(r#"{"volume":"00ff","path":"/dev/loop9"}"#).expect("all else has defaults")
    }

    #[test]
    fn a_device_is_its_volumes_alone() {
        let file = |mark: &str| Identity::File {
            mark: Some(mark.to_owned()),
            file_system: None,
            handle: Some(format!("1:{mark}")),
        };
        let noted = Label {
            data: Some(file("a")),
            ..label()
        };
        assert_eq!(noted.differs("00ff", Some(&file("a"))), None);
        assert_eq!(noted.differs("00ff", None), None);
        assert!(noted.differs("0100", Some(&file("a"))).is_some());
        let why = noted.differs("00ff", Some(&file("b"))).expect("other data");
        assert!(why.contains("other data"), "{why}");
    }

    #[test]
    fn a_keeper_that_is_gone_is_told_from_one_that_never_was() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("volumes")).expect("a folder");
        let places = Places::new(folder.path(), "db");
        assert!(matches!(places.find().expect("found"), Left::Nothing));
        drop(std::os::unix::net::UnixListener::bind(&places.socket).expect("a socket"));
        assert!(matches!(places.find().expect("found"), Left::Nothing));
        std::fs::write(&places.note, serde_json::to_vec(&label()).expect("text")).expect("written");
        let Left::Lost(Some(lost)) = places.find().expect("found") else {
            panic!("there was one")
        };
        assert_eq!(lost, label());
        assert_eq!(Places::names(folder.path()), ["db"]);
        places.clear();
        assert!(Places::names(folder.path()).is_empty() && !places.note.exists());
    }
}
