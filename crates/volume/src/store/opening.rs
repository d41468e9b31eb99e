//! Making the data of a copy, and opening them again.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Context, bail, ensure};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use verbatim_mirror::opening::{self, Found, Kind, Obstacle, Opening, Wrong};
use verbatim_mirror::trust::First;

use super::identity::{Identity, Match};
use super::trust::{Belief, Marker};
use super::{Store, content, sys};

/// Existing file or device that may be used when data are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Making {
    /// No file. A block device is taken with its content.
    New,
    /// A file in the volume's own folder, left by a daemon that ended before it wrote the sidecar. It is
    /// taken if nothing was written to it.
    Own,
    /// A file that becomes the volume as it is.
    Adopted,
    /// Any file: it will be overwritten completely.
    Over,
}

/// Requirements for data that are opened.
#[derive(Debug)]
pub struct Expected<'a> {
    /// Their noted identity; `None` from an older daemon.
    pub identity: Option<&'a Identity>,
    /// Their least length in bytes.
    pub length: u64,
    /// The trust in them.
    pub belief: Belief,
    /// Place of the mark for suspect data.
    pub marker: Option<Marker>,
    /// The step before anything is read.
    pub first: First,
}

/// Opened data.
#[derive(Debug)]
pub struct Opened {
    /// The data.
    pub store: Store,
    /// Their present identity.
    pub identity: Identity,
    /// A remark for the log.
    pub remark: Option<String>,
}

/// The reason why the data of a copy cannot be opened. None is a reason to make new ones.
#[derive(Debug)]
pub enum Lack {
    /// There is no file or device.
    Missing(PathBuf),
    /// Another process uses them.
    Taken(PathBuf),
    /// The file or device is not the noted one.
    Other(PathBuf, String),
    /// The data are shorter than the volume.
    Short {
        /// The path.
        path: PathBuf,
        /// The length of the data in bytes.
        size: u64,
        /// The length of the volume in bytes.
        length: u64,
    },
    /// The data have seen a later sidecar than the one here.
    Later(PathBuf),
    /// A system call has failed.
    Failed(PathBuf, io::Error),
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(path) => write!(f, "its data are missing: there is no {}", path.display()),
            Self::Taken(path) => write!(
                f,
                "{} is in use by somebody else: another daemon, a virtual machine, or a mount",
                path.display()
            ),
            Self::Other(path, how) => {
                write!(f, "{} is not what the volume had: {how}", path.display())
            }
            Self::Short { path, size, length } => write!(
                f,
                "{} has {size} bytes, and the volume {length}: part of its data is missing",
                path.display()
            ),
            Self::Later(path) => write!(
                f,
                "{} has seen a later sidecar than the one here, which comes from a backup: it may have the newest copy, so delete \
                 nothing. Start the daemon again while it is there: then `verbatim volume list` says what can be done",
                path.display()
            ),
            Self::Failed(path, error) => write!(f, "{} cannot be opened: {error}", path.display()),
        }
    }
}

impl std::error::Error for Lack {}

impl Store {
    /// Opens existing data: nothing is made, and their length stays as it is.
    pub fn open(path: &Path, expected: Expected<'_>) -> Result<Opened, Lack> {
        let failed = |error: io::Error| Lack::Failed(path.to_owned(), error);
        let metadata = path.metadata().map_err(|error| lack(path, error))?;
        let may_be_read = expected.belief == Belief::Suspect;
        let (file, access) = open_or_read(path, metadata.file_type().is_block_device(), may_be_read)
            .map_err(|error| lack(path, error))?;
        let metadata = file.metadata().map_err(failed)?;
        let is_device = metadata.file_type().is_block_device();
        // A suspect copy is read, and rescued, also if its device no longer takes writes.
        if is_device && expected.belief != Belief::Suspect {
            takes_writes(&file).map_err(failed)?;
        }
        let identity = Identity::beside(&file, expected.identity).map_err(failed)?;
        let mut remark = None;
        let mut differs = None;
        match expected.identity.map(|noted| noted.compare(&identity)) {
            Some(Match::Other(how)) => differs = Some(how),
            Some(Match::Restored) => {
                remark = Some(format!(
                    "{} is a copy of the file that the volume had, with its mark: it was put back by somebody, and is \
                     taken for the volume's data as it is",
                    path.display()
                ));
            }
            Some(Match::Same) => {}
            None => {
                remark = Some(format!(
                    "what {} is was not noted by an older daemon, and is noted now",
                    path.display()
                ));
            }
        }
        let size = match is_device {
            true => rustix::fs::seek(&file, SeekFrom::End(0)).map_err(|errno| failed(errno.into()))?,
            false => metadata.len(),
        };
        let noted = noted(expected.identity);
        let found = match is_device || metadata.is_file() {
            false => Found::Neither,
            true => Found::Data {
                kind: kind(is_device),
                // Equal to the noted one exactly if `compare` found no difference.
                identity: match differs {
                    None => noted.identity.clone(),
                    Some(_) => Some("another".to_owned()),
                },
                length: size,
            },
        };
        match opening::open(&noted, expected.length, &found) {
            Opening::Serve { .. } => {}
            Opening::Refuse(Wrong::Shorter) => {
                return Err(Lack::Short {
                    path: path.to_owned(),
                    size,
                    length: expected.length,
                });
            }
            Opening::Refuse(Wrong::OtherKind) | Opening::Wait(_) => {
                let how = differs.unwrap_or_else(|| "it is neither a file nor a block device".to_owned());
                return Err(Lack::Other(path.to_owned(), how));
            }
        }
        claim(&file, is_device, access).map_err(|error| lack(path, error))?;
        if !is_device {
            keep_private(&file, path);
        }
        if access == Access::Read {
            tracing::warn!(
                "{}: its file system is read-only, and so it is only read",
                path.display()
            );
        }
        let left = match expected.marker.as_ref().filter(|_| is_device).map(Marker::pages) {
            Some(pages) => pages.left(&file).unwrap_or_else(|error| {
                tracing::warn!("{}: {error:#}", path.display());
                None
            }),
            None => None,
        };
        let store = Store::new(file, access, false, expected.belief, expected.marker).map_err(failed)?;
        if let Some(offset) = identity.signed_at() {
            store.signed_at.store(offset, Ordering::Relaxed);
        }
        // Pages that are kept from now on say nothing of a flush before.
        if expected.first == First::Nothing {
            store.keep_pages();
        }
        if expected.belief == Belief::Sound {
            // Writes of an earlier process may have failed since: this flush then gets the error.
            let flushed = match expected.first {
                First::Nothing => store.flush(),
                First::FlushAndCompare => store.flush_and_compare(expected.length, path, left.as_ref()),
            };
            if let Err(error) = flushed {
                tracing::error!("{}: {error}", path.display());
            }
        }
        store.keep_pages();
        Ok(Opened {
            store,
            identity,
            remark,
        })
    }

    /// Makes the data of a volume of this length, for the owner of this process only. An error leaves nothing
    /// new behind.
    pub fn make(path: &Path, length: u64, making: Making, marker: Option<Marker>) -> anyhow::Result<Self> {
        let shown = path.display();
        let (file, is_fresh) = match path.metadata() {
            Ok(metadata) => (take(path, &metadata, length, making)?, false),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                ensure!(making != Making::Adopted, "there is no {shown}");
                (create(path)?, true)
            }
            Err(error) => return Err(error).with_context(|| format!("cannot look at {shown}")),
        };
        // Between the two another order may have taken the file: then it is that one's.
        let is_device = file.metadata()?.file_type().is_block_device();
        claim(&file, is_device, Access::Write).with_context(taken(path))?;
        let made = finish((file, is_fresh), path, length, making, marker);
        if made.is_err() && is_fresh {
            // This very call made the file.
            let _ = std::fs::remove_file(path);
        }
        made
    }

    /// A store in a new file, for tests.
    pub fn new_file(path: &Path, length: u64) -> anyhow::Result<Self> {
        Self::make(path, length, Making::Over, None)
    }

    /// The identity of the data.
    pub fn identity(&self) -> io::Result<Identity> {
        Identity::of(&self.file)
    }
}

fn kind(is_device: bool) -> Kind {
    match is_device {
        true => Kind::Device,
        false => Kind::File,
    }
}

/// The notes in the form of the rules.
fn noted(identity: Option<&Identity>) -> opening::Noted {
    opening::Noted {
        kind: identity.map(|noted| kind(matches!(noted, Identity::Device { .. }))),
        identity: identity
            .filter(|noted| noted.tells_it())
            .map(|_| "the one".to_owned()),
    }
}

fn lack(path: &Path, error: io::Error) -> Lack {
    let path = path.to_owned();
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR | libc::ENXIO | libc::ENODEV | libc::ENOMEDIUM) => {
            Lack::Missing(path)
        }
        Some(libc::EBUSY | libc::EAGAIN) => Lack::Taken(path),
        _ => Lack::Failed(path, error),
    }
}

/// What an open file is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// It is read and written.
    Write,
    /// It is read: its file system was read-only when it was opened.
    Read,
}

/// Opens a file or a block device. `may_be_read`: a file whose file system is read-only is opened all the same.
/// A device is opened for writing in either case.
fn open_or_read(path: &Path, is_device: bool, may_be_read: bool) -> io::Result<(File, Access)> {
    match open(path, is_device) {
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem && may_be_read => {
            let mut options = OpenOptions::new();
            let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
            Ok((file, Access::Read))
        }
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Err(io::Error::new(
            error.kind(),
            "its file system is read-only; `mount -o remount,rw` makes it writable again",
        )),
        opened => Ok((opened?, Access::Write)),
    }
}

/// Opens a file, or a block device exclusively (open(2), O_EXCL): no mounted file system and no other
/// exclusive user may have it.
fn open(path: &Path, is_device: bool) -> io::Result<File> {
    let flags = if is_device { libc::O_EXCL } else { 0 };
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .custom_flags(flags | libc::O_NONBLOCK)
        .open(path)
}

/// An error for a block device that is read-only: Linux opens it for writing all the same, and refuses each write.
pub fn takes_writes(device: &File) -> io::Result<()> {
    let number = device.metadata()?.rdev();
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let says = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
    match says.is_ok_and(|text| text.trim() == "1") {
        true => Err(io::Error::new(
            io::ErrorKind::ReadOnlyFilesystem,
            "the device is read-only; `blockdev --setrw` makes it writable again",
        )),
        false => Ok(()),
    }
}

/// Claims the file as long as it is open.
fn claim(file: &File, is_device: bool, access: Access) -> io::Result<()> {
    if is_device {
        return Ok(());
    }
    let locked = match access {
        Access::Write => sys::lock(file),
        Access::Read => sys::lock_to_read(file),
    };
    match locked {
        Err(error)
            if matches!(
                error.raw_os_error(),
                Some(libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL)
            ) =>
        {
            tracing::warn!("its file system has no locks: nothing keeps others from the data");
            Ok(())
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            Err(io::Error::from_raw_os_error(libc::EAGAIN))
        }
        locked => locked,
    }
}

/// Makes the file private to its owner.
fn keep_private(file: &File, path: &Path) {
    let mode = file.metadata().map(|metadata| metadata.mode());
    if mode.is_ok_and(|mode| mode & 0o077 != 0)
        && let Err(error) = file.set_permissions(std::fs::Permissions::from_mode(0o600))
    {
        tracing::warn!("others than its owner may read {}: {error}", path.display());
    }
}

fn taken(path: &Path) -> impl Fn() -> String {
    let shown = path.display().to_string();
    move || {
        format!(
            "{shown} cannot be had: is it mounted, or swap, or in use by another daemon or a virtual machine?"
        )
    }
}

/// Opens a file or device that exists already, if it may become the data.
fn take(path: &Path, metadata: &std::fs::Metadata, length: u64, making: Making) -> anyhow::Result<File> {
    let shown = path.display();
    let is_device = metadata.file_type().is_block_device();
    ensure!(
        is_device || metadata.is_file(),
        "{shown} is neither a file nor a block device"
    );
    let file = open(path, is_device).with_context(taken(path))?;
    if is_device {
        takes_writes(&file).with_context(|| format!("{shown} takes no volume"))?;
    }
    claim(&file, is_device, Access::Write).with_context(taken(path))?;
    let size = match is_device {
        true => rustix::fs::seek(&file, SeekFrom::End(0))?,
        false => file.metadata()?.len(),
    };
    let looks = content::of(&file).map(|what| format!(", and looks like {what}"));
    let looks = looks.unwrap_or_default();
    let found = Found::Data {
        kind: kind(is_device),
        identity: None,
        length: size,
    };
    match (making, opening::make(length, &found, making == Making::Adopted)) {
        (Making::Adopted, Ok(opening::Making::Lengthen)) => bail!(
            "{shown} has {size} bytes{looks}, and the volume is to have {length}: give the file's size, or less. Nothing was changed"
        ),
        // Longer data stay as they are.
        (_, Ok(_)) | (Making::Adopted, Err(Obstacle::Longer)) => Ok(file),
        (_, Err(Obstacle::TooSmall)) => bail!(
            "{shown} has {size} bytes, and the volume {length}: `verbatim volume place` gives it another place"
        ),
        (Making::Over, Err(_)) => Ok(file),
        (Making::Own, Err(_)) if is_empty(&file) => Ok(file),
        (Making::Own, Err(_)) => bail!(
            "there are the remains of a volume at {shown}: {size} bytes{looks}. Nothing was changed. Put its sidecar.json back, or remove that file"
        ),
        (Making::New | Making::Adopted, Err(_)) => bail!(
            "{shown} is there already: it has {size} bytes{looks}. Nothing was changed. `--adopt` takes it for the volume's data as it is; else \
             give another path, or remove it"
        ),
    }
}

/// Whether nothing was written to the file.
fn is_empty(file: &File) -> bool {
    let data = rustix::fs::seek(file, SeekFrom::Data(0));
    matches!(data, Err(Errno::NXIO))
}

fn create(path: &Path) -> anyhow::Result<File> {
    let shown = path.display();
    let folder = path.parent().context("a folder is no file")?;
    let folder_metadata = folder.metadata();
    let folder_metadata = folder_metadata.with_context(|| format!("there is no folder for {shown}"))?;
    ensure!(folder_metadata.is_dir(), "there is no folder for {shown}");
    is_no_place_of_devices(folder, path)?;
    let mut options = OpenOptions::new();
    let created = options
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path);
    created.with_context(|| format!("cannot make {shown}"))
}

/// An error for a folder of device nodes: a file would be in memory there, and in the way of a node.
pub fn is_no_place_of_devices(folder: &Path, path: &Path) -> anyhow::Result<()> {
    let number = |path: &Path| path.metadata().map(|metadata| metadata.dev()).ok();
    let is_in_dev = folder
        .canonicalize()
        .is_ok_and(|folder| folder.starts_with("/dev"));
    ensure!(
        !is_in_dev || number(folder) != number(Path::new("/dev")),
        "there is no device {} (yet?), and no file is made among devices",
        path.display()
    );
    Ok(())
}

fn finish(
    (file, is_fresh): (File, bool),
    path: &Path,
    length: u64,
    making: Making,
    marker: Option<Marker>,
) -> anyhow::Result<Store> {
    let shown = path.display();
    let may_cut = is_fresh || making == Making::Own;
    if !file.metadata()?.file_type().is_block_device() {
        keep_private(&file, path);
        Identity::mark(&file);
        let size = file.metadata()?.len();
        if size < length || (may_cut && size != length) {
            file.set_len(length)
                .with_context(|| format!("{shown} cannot have {length} bytes"))?;
        }
        let synced = file.sync_all().and_then(|()| match path.parent() {
            Some(parent) => File::open(parent)?.sync_all(),
            None => Ok(()),
        });
        synced.with_context(|| format!("cannot make {shown} durable"))?;
    }
    let store = Store::new(file, Access::Write, is_fresh, Belief::Sound, marker)?;
    store.keep_new_pages();
    Ok(store)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: u64 = 1 << 20;

    fn expected(identity: Option<&Identity>, length: u64) -> Expected<'_> {
        Expected {
            identity,
            length,
            belief: Belief::Sound,
            marker: None,
            first: First::Nothing,
        }
    }

    #[test]
    fn what_was_made_is_opened_and_nothing_else() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        let missing = Store::open(&path, expected(None, LENGTH));
        assert!(matches!(missing, Err(Lack::Missing(_))), "{missing:?}");
        assert!(!path.exists(), "opening makes nothing");
        let store = Store::make(&path, LENGTH, Making::New, None).expect("made");
        assert_eq!(path.metadata().expect("there").mode() & 0o7777, 0o600);
        let noted = store.identity().expect("known");
        let twice = Store::open(&path, expected(Some(&noted), LENGTH));
        assert!(matches!(twice, Err(Lack::Taken(_))), "{twice:?}");
        drop(store);
        let longer = Store::open(&path, expected(Some(&noted), LENGTH + 1));
        assert!(matches!(longer, Err(Lack::Short { .. })), "{longer:?}");
        let opened = Store::open(&path, expected(Some(&noted), LENGTH - 1)).expect("opened");
        assert_eq!(
            (opened.store.size().expect("known"), opened.remark),
            (LENGTH, None)
        );
        drop(opened.store);
        let saved = folder.path().join("saved");
        std::fs::rename(&path, &saved).expect("renamed");
        std::fs::write(&path, vec![0; LENGTH as usize]).expect("written");
        let other = Store::open(&path, expected(Some(&noted), LENGTH));
        assert!(matches!(other, Err(Lack::Other(..))), "{other:?}");
        std::fs::rename(&saved, &path).expect("renamed");
        Store::open(&path, expected(Some(&noted), LENGTH)).expect("it has come again");
    }

    #[test]
    fn a_file_that_is_there_is_only_taken_when_somebody_says_so_and_never_cut() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        std::fs::write(&path, vec![7; 8192]).expect("written");
        for making in [Making::New, Making::Own] {
            Store::make(&path, 4096, making, None).expect_err("it is somebody's");
        }
        Store::make(&path, 8193, Making::Adopted, None).expect_err("it is too short");
        for making in [Making::Adopted, Making::Over] {
            Store::make(&path, 4096, making, None).expect("taken");
            assert!(
                std::fs::read(&path).expect("there") == vec![7; 8192],
                "{making:?}"
            );
        }
        Store::make(&path, 12_288, Making::Over, None).expect("taken");
        assert_eq!(path.metadata().expect("there").len(), 12_288);
        // The remains of a process that ended while it made the file.
        let own = folder.path().join("own");
        File::create(&own).expect("made").set_len(100).expect("longer");
        let store = Store::make(&own, 4096, Making::Own, None).expect("taken");
        assert_eq!(store.size().expect("known"), 4096);
    }

    #[test]
    fn no_file_is_made_among_devices() {
        let path = Path::new("/dev/verbatim-test-of-a-device-that-is-late");
        for making in [Making::New, Making::Over] {
            let error = Store::make(path, LENGTH, making, None).expect_err("it is refused");
            assert!(
                error.to_string().contains("no file is made among devices"),
                "{error:#}"
            );
            assert!(!path.exists());
        }
    }
}
