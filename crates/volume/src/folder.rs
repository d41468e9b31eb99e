//! The disk state of volumes: a folder for each, with its data and its sidecar.
//!
//! ```text
//!  STATE/NAME/sidecar.json   identity, generation, role; which copy may serve (`verbatim_mirror::decision`)
//!  STATE/NAME/settings.json  where the data are, and whether it is attached; nothing that decides anything
//!  STATE/NAME/data.json      identity of the data, noted when they were made (`crate::store::identity`)
//!  STATE/NAME/data.sound     an empty file, `data.broken` once a flush has failed (`crate::store::trust`)
//!  STATE/NAME/place.json     where the data are to go when it moves here for the first time, if an operator has chosen a place
//!  STATE/NAME/data           the data, unless they are in a block device or a file elsewhere
//!  STATE/.gone-ID            tombstone: the highest generation that a deleted copy knew
//! ```
//!
//! A file is replaced atomically, and without further room ([`replacing`]). After a failure it may be
//! uncertain which of the two a crash leaves. Then the copy is unknown until the present file was made
//! durable ([`Folder::make_durable`]).

pub mod replacing;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use verbatim_mirror::decision::{Sidecar, Tombstone, VolumeId};

pub use replacing::NotWritten;
use replacing::{reserve, sync};

use crate::store::identity::Identity;

const SIDECAR: &str = "sidecar.json";
const SETTINGS: &str = "settings.json";
const PLACE: &str = "place.json";
const NOTED: &str = "data.json";
const DATA: &str = "data";

/// Prefix of a tombstone's name; no name of a volume begins with it.
const GONE: &str = ".gone-";

/// The longest name of a volume.
const MAX_NAME: usize = 64;

/// The largest of these files; more is not read.
const MAX_FILE: u64 = 64 << 10;

/// How a volume is used on this host.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    /// Clients may connect.
    #[serde(default)]
    pub attached: bool,
    /// Virtual machines may connect by vhost-user-blk, too.
    #[serde(default)]
    pub vhost_user: bool,
    /// Where the data are, if not in the folder.
    #[serde(default)]
    pub data: Option<PathBuf>,
    /// By an operator's word the names of devices tell nothing: another host's may have the same.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unnamed: bool,
}

/// Notes on the data of a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Noted {
    /// Their identity.
    pub identity: Identity,
    /// All of them were allocated on the disk from the start, and stay so.
    #[serde(default)]
    pub preallocated: bool,
    /// They were in use: if they look empty, data may be lost.
    #[serde(default)]
    pub used: bool,
}

/// The place for the data of a volume that is to come.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// A file or a block device.
    pub data: PathBuf,
    /// Nothing need tell it from others of its kind.
    pub is_unnamed: bool,
}

/// Its file: a path alone, as earlier releases read it, or with the word.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenPlace {
    Named(PathBuf),
    Unnamed { unnamed: PathBuf },
}

/// Content of a sidecar's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Written {
    /// Number of times that the sidecar was written; 0 from a release that does not count.
    #[serde(default)]
    pub number: u64,
    /// The sidecar that decisions are based on.
    #[serde(flatten)]
    pub sidecar: Sidecar,
}

/// Content of a tombstone's file.
#[derive(Debug, Serialize, Deserialize)]
struct Gone {
    /// The name that the volume had.
    name: String,
    #[serde(flatten)]
    tombstone: Tombstone,
}

/// The folder of one volume.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// The folder of volume `name`, under `state`. The name is checked: it becomes part of paths.
    pub fn new(state: &Path, name: &str) -> anyhow::Result<Self> {
        let is_good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || name.starts_with('.') || !name.chars().all(is_good) {
            bail!(
                "{name:?} is no name of a volume: letters, digits, '-', '_' and '.' only, {MAX_NAME} at most"
            );
        }
        Ok(Self {
            path: state.join(name),
        })
    }

    /// All volumes under `state`, expected ones included.
    pub fn names(state: &Path) -> anyhow::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(state).with_context(|| format!("cannot read {}", state.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let Ok(folder) = Self::new(state, &name) else {
                continue;
            };
            // A folder that cannot be examined may be a volume.
            let is_there = |file: &&str| match folder.path.join(file).try_exists() {
                Err(error) => error.kind() != io::ErrorKind::NotADirectory,
                Ok(is_there) => is_there,
            };
            if [SIDECAR, PLACE].iter().any(is_there) {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// The path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Notes on the data; `None` from older daemons.
    pub fn noted(&self) -> anyhow::Result<Option<Noted>> {
        self.read(NOTED)
    }

    /// Replaces the notes.
    pub fn write_noted(&self, noted: &Noted) -> anyhow::Result<()> {
        self.write(NOTED, noted).map_err(|failed| failed.why)
    }

    /// Makes the folder.
    pub fn make(&self) -> anyhow::Result<()> {
        let mut make = fs::DirBuilder::new();
        let made = make.recursive(true).mode(0o700).create(&self.path);
        made.with_context(|| format!("cannot make {}", self.path.display()))?;
        sync(self.state())?;
        Ok(())
    }

    fn state(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// The file or block device with the data.
    pub fn data(&self, settings: &Settings) -> PathBuf {
        settings.data.clone().unwrap_or_else(|| self.path.join(DATA))
    }

    /// The sidecar; `None` if there is none.
    pub fn sidecar(&self) -> anyhow::Result<Option<Written>> {
        self.read(SIDECAR)
    }

    /// Replaces the sidecar.
    pub fn write_sidecar(&self, written: &Written) -> Result<(), NotWritten> {
        self.write(SIDECAR, written)
    }

    /// Reserves room for the next sidecar.
    pub fn reserve_sidecar(&self) -> anyhow::Result<()> {
        reserve(&self.path.join(SIDECAR))
    }

    /// Makes the present sidecar durable. It needs no room, and changes nothing.
    pub fn make_durable(&self) -> anyhow::Result<()> {
        let path = self.path.join(SIDECAR);
        let make = || -> io::Result<()> {
            File::open(&path)?.sync_all()?;
            sync(&self.path)
        };
        make().with_context(|| format!("cannot make {} durable", path.display()))
    }

    /// The settings; the default if there are none.
    pub fn settings(&self) -> anyhow::Result<Settings> {
        Ok(self.read(SETTINGS)?.unwrap_or_default())
    }

    /// Replaces the settings.
    pub fn write_settings(&self, settings: &Settings) -> anyhow::Result<()> {
        Ok(self.write(SETTINGS, settings)?)
    }

    /// The place for the data of a volume that is to come.
    pub fn place(&self) -> anyhow::Result<Option<Place>> {
        let written: Option<WrittenPlace> = self.read(PLACE)?;
        Ok(written.map(|written| match written {
            WrittenPlace::Named(data) => Place {
                data,
                is_unnamed: false,
            },
            WrittenPlace::Unnamed { unnamed } => Place {
                data: unnamed,
                is_unnamed: true,
            },
        }))
    }

    /// Replaces the place.
    pub fn write_place(&self, place: &Place) -> anyhow::Result<()> {
        let data = place.data.clone();
        let written = match place.is_unnamed {
            false => WrittenPlace::Named(data),
            true => WrittenPlace::Unnamed { unnamed: data },
        };
        Ok(self.write(PLACE, &written)?)
    }

    /// The tombstone of a deleted copy of that volume.
    pub fn tombstone(&self, id: VolumeId) -> anyhow::Result<Option<Tombstone>> {
        Ok(read::<Gone>(&self.gone(id))?.map(|gone| gone.tombstone))
    }

    /// Removes the tombstone: a sidecar knows as much or more, or an operator wants it forgotten.
    pub fn forget(&self, id: VolumeId) -> anyhow::Result<()> {
        let path = self.gone(id);
        // On a read-only file system removing a missing file would fail.
        let is_there = path.try_exists();
        if !is_there.with_context(|| format!("cannot look at {}", path.display()))? {
            return Ok(());
        }
        fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        Ok(sync(self.state())?)
    }

    /// Tombstones of volumes that had this name.
    pub fn left(&self) -> anyhow::Result<Vec<VolumeId>> {
        let name = self.path.file_name().and_then(|name| name.to_str());
        let entries =
            fs::read_dir(self.state()).with_context(|| format!("cannot read {}", self.state().display()))?;
        let mut left = Vec::new();
        for entry in entries {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(GONE)
                && let Some(gone) = read::<Gone>(&entry.path())?
                && Some(gone.name.as_str()) == name
            {
                left.push(gone.tombstone.id);
            }
        }
        Ok(left)
    }

    fn gone(&self, id: VolumeId) -> PathBuf {
        self.state().join(format!("{GONE}{}", String::from(id)))
    }

    /// Removes the volume, or the note of its place: first the file that makes it one. The tombstone is
    /// durable before.
    pub fn delete(&self, tombstone: Option<&Tombstone>) -> anyhow::Result<()> {
        if let Some(tombstone) = tombstone {
            let name = self.path.file_name().unwrap_or_default();
            let gone = Gone {
                name: name.to_string_lossy().into_owned(),
                tombstone: tombstone.clone(),
            };
            let text = serde_json::to_vec(&gone)?;
            // The tombstone takes the room of the sidecar's spare, since a volume is also deleted to make
            // room.
            replacing::give_spare(&self.path.join(SIDECAR), &self.gone(tombstone.id), &text)?;
        }
        // After a crash in between there is the volume as it was, and not an expected one.
        for file in [PLACE, SIDECAR] {
            match fs::remove_file(self.path.join(file)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.with_context(|| format!("cannot remove {file}"))?,
            }
        }
        sync(&self.path)?;
        fs::remove_dir_all(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))
    }

    /// Removes the remains of a volume that was not completed.
    pub fn discard(&self) {
        let is_one = |file| self.path.join(file).try_exists().unwrap_or(true);
        let has_data = self
            .path
            .join(DATA)
            .metadata()
            .is_ok_and(|data| data.blocks() > 0);
        if !is_one(SIDECAR) && !is_one(PLACE) && !has_data {
            // An error is harmless.
            let _ = fs::remove_dir_all(&self.path);
        }
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> anyhow::Result<Option<T>> {
        read(&self.path.join(name))
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> Result<(), NotWritten> {
        let text = serde_json::to_vec_pretty(value).map_err(|error| NotWritten {
            why: error.into(),
            is_unsure: false,
        })?;
        replacing::replace(&self.path.join(name), &text)
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<Option<T>> {
    let length = match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        metadata => metadata
            .with_context(|| format!("cannot read {}", path.display()))?
            .len(),
    };
    if length > MAX_FILE {
        bail!("{} is damaged: it has {length} bytes", path.display());
    }
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let value = serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))?;
    Ok(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use verbatim_mirror::decision::{Role, SessionId, VolumeId};

    #[test]
    fn names_do_not_lead_elsewhere() {
        let state = Path::new("/state");
        for bad in ["", ".", "..", "a/b", "../a", ".a", "a b", "a\0", &"a".repeat(65)] {
            assert!(Folder::new(state, bad).is_err(), "{bad:?}");
        }
        assert!(Folder::new(state, "web-1.data").is_ok());
    }

    #[test]
    fn what_was_written_is_read() {
        let state = tempfile::tempdir().expect("a folder");
        let folder = Folder::new(state.path(), "a").expect("a name");
        folder.make().expect("made");
        assert_eq!(folder.sidecar().expect("none"), None);
        let sidecar = Sidecar::new(VolumeId(u128::MAX - 5), 1 << 40);
        for role in [
            Role::Serving,
            Role::Deciding {
                session: SessionId(1 << 100),
                to: "b".into(),
            },
            Role::Incoming {
                session: SessionId(7),
                base: 3,
                from: "c".into(),
            },
            Role::Incomplete,
        ] {
            let written = Written {
                number: 1 << 40,
                sidecar: sidecar.with(role),
            };
            folder.write_sidecar(&written).expect("written");
            assert_eq!(folder.sidecar().expect("good"), Some(written));
        }
        // The format of an earlier release.
        let text = serde_json::to_vec(&sidecar).expect("it can be written");
        fs::write(state.path().join("a").join(SIDECAR), text).expect("written");
        let written = Written { number: 0, sidecar };
        assert_eq!(folder.sidecar().expect("good"), Some(written));
        assert_eq!(Folder::names(state.path()).expect("one"), ["a"]);
        folder.delete(None).expect("deleted");
        assert!(Folder::names(state.path()).expect("none").is_empty());
    }

    #[test]
    fn what_is_deleted_leaves_what_it_has_said_until_that_is_deleted_too() {
        let state = tempfile::tempdir().expect("a folder");
        let folder = Folder::new(state.path(), "a").expect("a name");
        folder.make().expect("made");
        let sidecar = Sidecar {
            generation: 7,
            ..Sidecar::new(VolumeId(5), 4096)
        };
        let written = Written {
            number: 3,
            sidecar: sidecar.clone(),
        };
        folder.write_sidecar(&written).expect("written");
        let tombstone = Tombstone::of(&sidecar);
        folder.delete(Some(&tombstone)).expect("deleted");
        assert!(Folder::names(state.path()).expect("none").is_empty());
        assert_eq!(folder.tombstone(sidecar.id).expect("good"), Some(tombstone));
        assert_eq!(folder.tombstone(VolumeId(6)).expect("none"), None);
        let other = Folder::new(state.path(), "b").expect("a name");
        assert!(other.left().expect("none").is_empty(), "of another name");
        assert_eq!(folder.left().expect("one"), [sidecar.id]);
        folder.forget(sidecar.id).expect("forgotten");
        folder.forget(sidecar.id).expect("there is none");
        assert_eq!(folder.tombstone(sidecar.id).expect("none"), None);
    }

    #[test]
    fn a_damaged_sidecar_is_an_error_and_no_new_volume() {
        let state = tempfile::tempdir().expect("a folder");
        let folder = Folder::new(state.path(), "a").expect("a name");
        folder.make().expect("made");
        for bad in ["", "{", "{\"role\":\"serving\"}", "null"] {
            fs::write(state.path().join("a").join(SIDECAR), bad).expect("written");
            if bad != "null" {
                assert!(folder.sidecar().is_err(), "{bad:?}");
            }
        }
    }
}
