//! Atomic writes of files: records that a later agent reads.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Writes a file, readable by root alone. If that fails, for example since the file system is full, the old
/// content stays, and no other file is left.
pub fn write(path: &Path, content: &[u8]) -> anyhow::Result<()> {
    let beside = beside(path);
    let written = write_beside(&beside, content).and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        // It is of no use, and takes room.
        let _ = std::fs::remove_file(&beside);
    }
    explained(path, written).with_context(|| format!("cannot write {}", path.display()))
}

/// What became of a write to `path`. If there was no room for it the error names the file system, and what to do.
pub fn explained<T>(path: &Path, written: io::Result<T>) -> anyhow::Result<T> {
    written.map_err(|error| match verbatim_container::no_room(path, &error) {
        Some(lack) => anyhow::Error::new(error).context(lack),
        None => error.into(),
    })
}

/// The same for a value, as JSON.
pub fn write_json(path: &Path, value: &impl Serialize) -> anyhow::Result<()> {
    write(path, &serde_json::to_vec(value)?)
}

/// Reads such a record; `None` if there is none. `says`: what it is there to say, such as "which QEMU it is".
pub fn read_json<T: DeserializeOwned>(path: &Path, says: &str) -> anyhow::Result<Option<T>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text
            .and_then(|text| Ok(serde_json::from_slice(&text)?))
            .map(Some)
            .with_context(|| format!("{} does not say {says}", path.display())),
    }
}

/// Removes such a record, if it is there.
pub fn remove(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn write_beside(beside: &Path, content: &[u8]) -> io::Result<()> {
    // Left by an agent that died, or a link put there by a program.
    let _ = std::fs::remove_file(beside);
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(beside)?;
    file.write_all(content)?;
    file.sync_all()
}

/// Path of the temporary file: hidden, in the same folder.
fn beside(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".new");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    /// A file system of one MiB; unmounted however the test ends.
    struct Small(tempfile::TempDir);

    impl Small {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            mount("tmpfs", folder.path(), "tmpfs", MountFlags::empty(), c"size=1m").unwrap();
            Self(folder)
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            _ = unmount(self.0.path(), UnmountFlags::DETACH);
        }
    }

    #[test]
    fn a_record_is_read_or_missing_and_one_that_is_damaged_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let record = folder.path().join("ran");
        let read = || read_json::<bool>(&record, "whether it ran").map_err(|error| format!("{error:#}"));
        assert_eq!(read(), Ok(None));
        remove(&record).unwrap();
        write_json(&record, &true).unwrap();
        assert_eq!(read(), Ok(Some(true)));
        std::fs::write(&record, "tr").unwrap();
        let error = read().unwrap_err();
        assert!(error.contains("ran does not say whether it ran"), "{error}");
        remove(&record).unwrap();
        assert_eq!(read(), Ok(None));
        let beneath = record.join("x");
        std::fs::write(&record, "").unwrap();
        assert!(
            remove(&beneath)
                .unwrap_err()
                .to_string()
                .contains("cannot remove")
        );
    }

    #[test]
    fn what_was_there_before_outlives_a_full_file_system() {
        let small = Small::new();
        let folder = small.0.path();
        let record = folder.join("ran");
        write_json(&record, &true).unwrap();
        let mut filler = std::fs::File::create(folder.join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
        let error = write(&record, &[b'x'; 8192]).unwrap_err();
        let said = format!("{error:#}");
        let named = format!("the file system of {} has no room", record.display());
        assert!(said.contains(&named) && said.contains("No space left"), "{said}");
        assert_eq!(std::fs::read(&record).unwrap(), b"true");
        let fresh = write(&folder.join("other"), b"y").unwrap_err();
        assert!(format!("{fresh:#}").contains("cannot write"), "{fresh:#}");
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        names.sort();
        assert_eq!(
            names,
            ["filler", "ran"],
            "nothing is left of what could not be written"
        );
        // Its room is free only after it is closed.
        drop(filler);
        std::fs::remove_file(folder.join("filler")).unwrap();
        write(&record, b"false").unwrap();
        assert_eq!(std::fs::read(&record).unwrap(), b"false");
    }
}
