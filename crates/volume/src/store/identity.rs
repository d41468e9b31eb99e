//! Identity of a copy's data, which tells them from other files and devices, also after a restart of the
//! machine. Numbers and names of devices do not.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;
use serde::{Deserialize, Serialize};

use super::signature::Signature;
use super::sys;

/// The extended attribute with the mark of a file; more may follow it ([`super::age`]).
pub(super) const MARK: &str = "user.verbatim.volume";

/// The name of a partition's number.
pub(super) const PARTITION: &str = "partition";

/// Identity of data, noted when they are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Identity {
    /// A regular file.
    File {
        /// A random number in an extended attribute, if its file system has such attributes.
        #[serde(default)]
        mark: Option<String>,
        /// The UUID of its file system.
        #[serde(default)]
        file_system: Option<String>,
        /// Its handle.
        #[serde(default)]
        handle: Option<String>,
    },
    /// A block device.
    Device {
        /// The kernel's identifiers of it, by their kinds.
        #[serde(default)]
        names: BTreeMap<String, String>,
        /// The block that this daemon has written behind the volume, since the device had no name.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signature: Option<Signature>,
    },
}

/// Result of a comparison of found data with noted ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Match {
    /// The same file or device.
    Same,
    /// A copy of the file with its mark: a backup that was put back.
    Restored,
    /// Another file or device, with the difference in words.
    Other(String),
}

impl Identity {
    /// The identity of an open file or device.
    pub fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        if metadata.file_type().is_block_device() {
            return Ok(Self::Device {
                names: names_of(metadata.rdev()),
                signature: None,
            });
        }
        Ok(Self::File {
            mark: mark(file),
            file_system: sys::file_system(file).map(|uuid| hexadecimal(&uuid)),
            handle: sys::handle(file).map(|(kind, bytes)| format!("{kind}:{}", hexadecimal(&bytes))),
        })
    }

    /// The same, with the signature of a device that was noted with one.
    pub fn beside(file: &File, noted: Option<&Self>) -> io::Result<Self> {
        let mut found = Self::of(file)?;
        if let (Self::Device { signature, .. }, Some(offset)) = (&mut found, noted.and_then(Self::signed_at))
        {
            *signature = Signature::read(file, offset)?;
        }
        Ok(found)
    }

    /// The first byte of its signature on the device.
    pub fn signed_at(&self) -> Option<u64> {
        match self {
            Self::Device { signature, .. } => signature.as_ref().map(|signature| signature.offset),
            Self::File { .. } => None,
        }
    }

    /// Gives a file a mark of its own. A file system without marks is not an error.
    pub fn mark(file: &File) {
        let mark = format!("{:032x}", rand::random::<u128>());
        let marked = rustix::fs::fsetxattr(file, MARK, mark.as_bytes(), XattrFlags::empty());
        if let Err(error) = marked {
            tracing::debug!("a file system keeps no marks: {error}");
        }
    }

    /// Whether this identity tells the file or device from another one.
    pub fn tells_it(&self) -> bool {
        match self {
            Self::File { mark, handle, .. } => mark.is_some() || handle.is_some(),
            Self::Device { names, signature } => !names.is_empty() || signature.is_some(),
        }
    }

    /// Compares `found` with these noted data.
    pub fn compare(&self, found: &Self) -> Match {
        match (self, found) {
            (
                Self::File {
                    mark,
                    file_system,
                    handle,
                },
                Self::File {
                    mark: mark_now,
                    file_system: file_system_now,
                    handle: handle_now,
                },
            ) => {
                let differs = |noted: &Option<String>, now: &Option<String>| matches!((noted, now), (Some(noted), Some(now)) if noted != now);
                let is_there = !differs(file_system, file_system_now) && !differs(handle, handle_now);
                if mark.is_some() && mark == mark_now {
                    return if is_there { Match::Same } else { Match::Restored };
                }
                if differs(file_system, file_system_now) {
                    return Match::Other("it lies on another file system".to_owned());
                }
                let is_told = handle.is_some() || mark.is_some();
                if differs(mark, mark_now) || (is_told && (handle.is_none() || handle != handle_now)) {
                    return Match::Other("it is another file".to_owned());
                }
                Match::Same
            }
            (
                Self::Device { names, signature },
                Self::Device {
                    names: now,
                    signature: signature_now,
                },
            ) => {
                let is_signed = signature.is_some() && signature == signature_now;
                let has_common_name = names.keys().any(|name| now.contains_key(name));
                match compare_names(names, now) {
                    // Names that differ count for more than a block, which may have been copied with all others.
                    _ if is_signed && !has_common_name => Match::Same,
                    Match::Same if names.is_empty() && signature.is_some() => Match::Other(
                        "it does not have the signature that was written behind the volume".to_owned(),
                    ),
                    compared => compared,
                }
            }
            (Self::File { .. }, Self::Device { .. }) => {
                Match::Other("it is a block device, and was a file".to_owned())
            }
            (Self::Device { .. }, Self::File { .. }) => {
                Match::Other("it is a file, and was a block device".to_owned())
            }
        }
    }
}

fn compare_names(noted: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> Match {
    let mut is_known = noted.is_empty();
    for (name, value) in noted {
        match now.get(name) {
            // A partition's number is the same on every disk: only with another name does it tell anything.
            Some(found) if found == value => is_known |= name != PARTITION,
            Some(found) => {
                return Match::Other(format!(
                    "it is another device: its {name} is {found}, and was {value}"
                ));
            }
            None => {}
        }
    }
    match is_known {
        true => Match::Same,
        false => Match::Other("nothing says that it is the same device: it has none of its names".to_owned()),
    }
}

/// The mark of an open file.
pub(super) fn mark(file: &File) -> Option<String> {
    let mut bytes = [0; 64];
    let length = rustix::fs::fgetxattr(file, MARK, &mut bytes).ok()?;
    let mark = bytes[..length].split(|byte| *byte == b' ').next()?;
    String::from_utf8(mark.to_vec()).ok()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Identifiers of a block device from sysfs.
fn names_of(number: u64) -> BTreeMap<String, String> {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let mut names = BTreeMap::new();
    let Ok(folder) = folder.canonicalize() else {
        return names;
    };
    let disk = match text(&folder.join("partition")) {
        Some(partition) => {
            names.insert(PARTITION.to_owned(), partition);
            if let Some(uuid) = text(&folder.join("uevent")).and_then(|text| partition_uuid(&text)) {
                names.insert("partition_uuid".to_owned(), uuid);
            }
            folder.parent().map(Path::to_owned)
        }
        None => Some(folder),
    };
    let Some(disk) = disk else {
        return names;
    };
    for (name, files) in [
        ("wwid", &["wwid", "device/wwid"][..]),
        ("dm_uuid", &["dm/uuid"]),
        ("md_uuid", &["md/uuid"]),
        ("serial", &["serial", "device/serial"]),
    ] {
        if let Some(value) = files.iter().find_map(|file| text(&disk.join(file))) {
            names.insert(name.to_owned(), value);
        }
    }
    if let Some(backing) =
        text(&disk.join("loop/backing_file")).and_then(|path| backing_file(Path::new(&path)))
    {
        names.insert("backing_file".to_owned(), backing);
    }
    // A partition number alone identifies nothing.
    if names.keys().all(|name| name == PARTITION) {
        names.clear();
    }
    names
}

/// The identity of a loop device's backing file.
fn backing_file(path: &Path) -> Option<String> {
    let file = File::open(path).ok()?;
    match Identity::of(&file).ok()? {
        Identity::File {
            file_system, handle, ..
        } => Some(format!("{}/{}", file_system.unwrap_or_default(), handle?)),
        Identity::Device { .. } => None,
    }
}

fn partition_uuid(uevent: &str) -> Option<String> {
    let uuid = uevent.lines().find_map(|line| line.strip_prefix("PARTUUID="))?;
    Some(uuid.to_owned())
}

/// Content of a small file of sysfs, if it is not empty.
fn text(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let text = text.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(mark: Option<&str>, file_system: Option<&str>, handle: Option<&str>) -> Identity {
        let own = |text: Option<&str>| text.map(str::to_owned);
        Identity::File {
            mark: own(mark),
            file_system: own(file_system),
            handle: own(handle),
        }
    }

    fn device(names: &[(&str, &str)]) -> Identity {
        let own = |&(name, value): &(&str, &str)| (name.to_owned(), value.to_owned());
        Identity::Device {
            names: names.iter().map(own).collect(),
            signature: None,
        }
    }

    fn signed(names: &[(&str, &str)], number: &str) -> Identity {
        let Identity::Device { names, .. } = device(names) else {
            unreachable!("it is one")
        };
        let signature = Some(Signature {
            offset: 4096,
            number: number.to_owned(),
        });
        Identity::Device { names, signature }
    }

    #[test]
    fn a_device_without_a_name_is_told_by_its_signature() {
        let noted = signed(&[], "1");
        assert!(noted.tells_it());
        assert_eq!(noted.compare(&noted), Match::Same);
        // A later kernel has a name for it.
        assert_eq!(noted.compare(&signed(&[("wwid", "1")], "1")), Match::Same);
        for other in [
            device(&[]),
            signed(&[], "2"),
            device(&[("wwid", "1")]),
            file(None, None, None),
        ] {
            assert!(matches!(noted.compare(&other), Match::Other(_)), "{other:?}");
        }
        let both = signed(&[("wwid", "1")], "1");
        for same in [device(&[("wwid", "1")]), signed(&[], "1")] {
            assert_eq!(both.compare(&same), Match::Same, "{same:?}");
        }
        assert!(
            matches!(both.compare(&signed(&[("wwid", "2")], "1")), Match::Other(_)),
            "a copy of its blocks"
        );
    }

    #[test]
    fn a_file_is_told_by_its_mark_and_else_by_its_handle() {
        let noted = file(Some("m"), Some("f"), Some("h"));
        assert_eq!(noted.compare(&noted), Match::Same);
        assert_eq!(
            noted.compare(&file(Some("m"), Some("g"), Some("i"))),
            Match::Restored
        );
        // A file without a mark is the same if its handle is.
        assert_eq!(noted.compare(&file(None, Some("f"), Some("h"))), Match::Same);
        for other in [
            file(None, Some("f"), Some("i")),
            file(Some("n"), Some("f"), Some("h")),
            file(None, Some("g"), Some("h")),
            device(&[]),
        ] {
            assert!(matches!(noted.compare(&other), Match::Other(_)), "{other:?}");
        }
        let unmarked = file(None, None, Some("h"));
        assert_eq!(unmarked.compare(&unmarked), Match::Same);
        assert!(matches!(
            unmarked.compare(&file(None, None, Some("i"))),
            Match::Other(_)
        ));
    }

    #[test]
    fn a_device_is_told_by_any_of_its_names() {
        let noted = device(&[("wwid", "1"), ("serial", "2")]);
        assert_eq!(noted.compare(&noted), Match::Same);
        assert_eq!(noted.compare(&device(&[("wwid", "1")])), Match::Same);
        let partition = device(&[("wwid", "1"), ("partition", "2")]);
        assert_eq!(partition.compare(&partition), Match::Same);
        assert!(matches!(
            partition.compare(&device(&[("partition", "2")])),
            Match::Other(_)
        ));
        for other in [
            device(&[("wwid", "1"), ("serial", "3")]),
            device(&[]),
            file(None, None, None),
        ] {
            assert!(matches!(noted.compare(&other), Match::Other(_)), "{other:?}");
        }
        assert_eq!(device(&[]).compare(&device(&[("wwid", "1")])), Match::Same);
    }

    #[test]
    fn what_is_noted_is_read_again_and_a_copy_of_a_file_is_another_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        fs::write(&path, "data").expect("written");
        let open = |path: &Path| File::options().read(true).write(true).open(path).expect("opened");
        Identity::mark(&open(&path));
        let noted = Identity::of(&open(&path)).expect("known");
        assert!(noted.tells_it(), "{noted:?}");
        let text = serde_json::to_string(&noted).expect("JSON");
        assert_eq!(serde_json::from_str::<Identity>(&text).expect("the same"), noted);
        let copy = folder.path().join("copy");
        fs::copy(&path, &copy).expect("copied");
        fs::rename(&copy, &path).expect("replaced");
        let found = Identity::of(&open(&path)).expect("known");
        assert!(
            matches!(noted.compare(&found), Match::Other(_)),
            "{noted:?} {found:?}"
        );
    }

    #[test]
    fn the_uuid_of_a_partition_is_found() {
        let uevent = "MAJOR=8\nPARTN=1\nPARTUUID=c0ffee\n";
        assert_eq!(partition_uuid(uevent).as_deref(), Some("c0ffee"));
        assert_eq!(partition_uuid("MAJOR=8\n"), None);
    }
}
