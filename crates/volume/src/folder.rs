//! What is on the disk of a volume: a folder for each, with its data and its sidecar.
//!
//! ```text
//!  STATE/NAME/sidecar.json   identity, generation, role; which copy may serve (`verbatim_mirror::decision`)
//!  STATE/NAME/settings.json  where the data are, and whether it is attached; nothing that decides anything
//!  STATE/NAME/place.json     where the data are to go when it moves here for the first time, if somebody has said so
//!  STATE/NAME/data           the data, unless they are in a block device or a file elsewhere
//! ```
//!
//! A file is replaced in one piece: written beside, synced, renamed, and the folder synced. If that fails, it cannot be said which of the
//! two a crash leaves; whoever depends on it writes again until it succeeds.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use verbatim_mirror::decision::Sidecar;

const SIDECAR: &str = "sidecar.json";
const SETTINGS: &str = "settings.json";
const PLACE: &str = "place.json";
const DATA: &str = "data";

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
}

/// The folder of one volume.
#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
}

impl Folder {
    /// That of `name`, under `state`. The name is checked: it becomes part of paths.
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

    /// All that are under `state`, those that are only expected among them.
    pub fn names(state: &Path) -> anyhow::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(state).with_context(|| format!("cannot read {}", state.display()))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if [SIDECAR, PLACE]
                .iter()
                .any(|file| state.join(&name).join(file).exists())
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    /// Makes the folder.
    pub fn make(&self) -> anyhow::Result<()> {
        fs::create_dir_all(&self.path).with_context(|| format!("cannot make {}", self.path.display()))?;
        if let Some(parent) = self.path.parent() {
            sync(parent)?;
        }
        Ok(())
    }

    /// The file or block device with the data.
    pub fn data(&self, settings: &Settings) -> PathBuf {
        settings.data.clone().unwrap_or_else(|| self.path.join(DATA))
    }

    /// Nothing if there is none.
    pub fn sidecar(&self) -> anyhow::Result<Option<Sidecar>> {
        self.read(SIDECAR)
    }

    /// Replaces it. See the module for what an error means.
    pub fn write_sidecar(&self, sidecar: &Sidecar) -> anyhow::Result<()> {
        self.write(SIDECAR, sidecar)
    }

    /// The usual ones if there are none.
    pub fn settings(&self) -> anyhow::Result<Settings> {
        Ok(self.read(SETTINGS)?.unwrap_or_default())
    }

    /// Replaces them.
    pub fn write_settings(&self, settings: &Settings) -> anyhow::Result<()> {
        self.write(SETTINGS, settings)
    }

    /// The file or block device for the data of a volume that is to come.
    pub fn place(&self) -> anyhow::Result<Option<PathBuf>> {
        self.read(PLACE)
    }

    /// Replaces it.
    pub fn write_place(&self, data: &Path) -> anyhow::Result<()> {
        self.write(PLACE, &data)
    }

    /// Removes the volume, or what is expected of one: first what makes it that.
    pub fn delete(&self) -> anyhow::Result<()> {
        // What is cut off in between is the volume as it was, and not one that is expected again.
        for file in [PLACE, SIDECAR] {
            match fs::remove_file(self.path.join(file)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                removed => removed.with_context(|| format!("cannot remove {file}"))?,
            }
        }
        sync(&self.path)?;
        fs::remove_dir_all(&self.path).with_context(|| format!("cannot remove {}", self.path.display()))
    }

    fn read<T: DeserializeOwned>(&self, name: &str) -> anyhow::Result<Option<T>> {
        let path = self.path.join(name);
        let length = match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            metadata => metadata
                .with_context(|| format!("cannot read {}", path.display()))?
                .len(),
        };
        if length > MAX_FILE {
            bail!("{} is damaged: it has {length} bytes", path.display());
        }
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let value =
            serde_json::from_slice(&text).with_context(|| format!("{} is damaged", path.display()))?;
        Ok(Some(value))
    }

    fn write<T: Serialize>(&self, name: &str, value: &T) -> anyhow::Result<()> {
        let path = self.path.join(name);
        let fresh = path.with_extension("new");
        let put = || -> io::Result<()> {
            let mut file = File::create(&fresh)?;
            file.write_all(&serde_json::to_vec_pretty(value)?)?;
            file.sync_all()?;
            fs::rename(&fresh, &path)?;
            sync(&self.path)
        };
        put().with_context(|| format!("cannot write {}", path.display()))
    }
}

fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
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
            let sidecar = sidecar.with(role);
            folder.write_sidecar(&sidecar).expect("written");
            assert_eq!(folder.sidecar().expect("good"), Some(sidecar));
        }
        assert_eq!(Folder::names(state.path()).expect("one"), ["a"]);
        folder.delete().expect("deleted");
        assert!(Folder::names(state.path()).expect("none").is_empty());
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
