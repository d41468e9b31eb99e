//! Atomic replacement of small files without further room: beside each file lies a spare of full length with
//! allocated blocks.
//!
//! The spare is overwritten and synced, both exchange their names, and the folder is synced. So a full file
//! system refuses no replacement of a file with a spare. [`reserve`] makes the spare, and fails in time if
//! there is no room for it. (A file system that writes nothing in place, such as btrfs or ZFS, needs a block
//! briefly, and keeps some for that.)

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// The length of each of these files. Shorter content is padded with spaces.
pub const FULL: usize = 4096;

/// The file was not replaced, or perhaps was.
#[derive(Debug)]
pub struct NotWritten {
    /// The reason.
    pub why: anyhow::Error,
    /// True if it is uncertain which of the two a crash leaves. Otherwise the earlier one is in place, as
    /// durable as it was.
    pub is_unsure: bool,
}

impl From<NotWritten> for anyhow::Error {
    fn from(failed: NotWritten) -> Self {
        failed.why
    }
}

fn spare(path: &Path) -> PathBuf {
    path.with_extension("spare")
}

/// Syncs a folder.
pub fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Makes the spare, so that the next replacement of this file needs no room.
pub fn reserve(path: &Path) -> anyhow::Result<()> {
    let spare = spare(path);
    let make = || -> io::Result<()> {
        let mut open = OpenOptions::new();
        let open = open.write(true).create(true).truncate(false).mode(0o600);
        let file = open.open(&spare)?;
        let metadata = file.metadata()?;
        if metadata.len() == FULL as u64 && metadata.blocks() > 0 {
            return Ok(());
        }
        // Written, and not only allocated: an unwritten extent may need another block when it is written.
        file.write_all_at(&[b' '; FULL], 0)?;
        file.set_len(FULL as u64)?;
        file.sync_all()?;
        sync(folder(path))
    };
    make().with_context(|| format!("cannot set {} aside", spare.display()))
}

/// Replaces the file's content by this text.
pub fn replace(path: &Path, text: &[u8]) -> Result<(), NotWritten> {
    let unchanged = |error: anyhow::Error| NotWritten {
        why: error.context(format!("cannot write {}", path.display())),
        is_unsure: false,
    };
    let text = padded(text).map_err(unchanged)?;
    reserve(path).map_err(unchanged)?;
    let is_first = !path.exists();
    let fresh = if is_first {
        path.with_extension("new")
    } else {
        spare(path)
    };
    put(&fresh, &text).map_err(|error| unchanged(error.into()))?;
    let renamed = match is_first {
        true => fs::rename(&fresh, path),
        false => exchange(&fresh, path),
    };
    let synced = match renamed {
        Ok(()) => sync(folder(path)),
        Err(error) if is_refused(&error) => return Err(unchanged(error.into())),
        Err(error) => Err(error),
    };
    synced.map_err(|error| NotWritten {
        why: anyhow!(error).context(format!("cannot make {} durable", path.display())),
        is_unsure: true,
    })?;
    // The replaced file may be a shorter one of an earlier release. Callers that depend on the spare reserve
    // it themselves.
    let _ = reserve(path);
    Ok(())
}

/// Turns the spare into a file with this text in another folder of the same file system.
pub fn give_spare(path: &Path, to: &Path, text: &[u8]) -> anyhow::Result<()> {
    reserve(path)?;
    let text = padded(text)?;
    let give = || -> io::Result<()> {
        put(&spare(path), &text)?;
        fs::rename(spare(path), to)?;
        sync(folder(to))
    };
    give().with_context(|| format!("cannot write {}", to.display()))
}

fn folder(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new("/"))
}

fn padded(text: &[u8]) -> anyhow::Result<Vec<u8>> {
    anyhow::ensure!(
        text.len() < FULL,
        "{} bytes are too many for such a file",
        text.len()
    );
    let mut padded = text.to_vec();
    padded.resize(FULL - 1, b' ');
    padded.push(b'\n');
    Ok(padded)
}

fn put(path: &Path, text: &[u8]) -> io::Result<()> {
    let mut open = OpenOptions::new();
    let open = open.write(true).create(true).truncate(false).mode(0o600);
    let file = open.open(path)?;
    file.write_all_at(text, 0)?;
    file.set_len(text.len() as u64)?;
    file.sync_all()
}

/// Exchanges the names; where the file system cannot do that, the first takes the second's.
fn exchange(fresh: &Path, path: &Path) -> io::Result<()> {
    match renameat_with(CWD, fresh, CWD, path, RenameFlags::EXCHANGE) {
        Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => fs::rename(fresh, path),
        done => Ok(done?),
    }
}

/// Whether nothing was done.
fn is_refused(error: &io::Error) -> bool {
    let refusals = [
        libc::ENOSPC,
        libc::EDQUOT,
        libc::EROFS,
        libc::EACCES,
        libc::EPERM,
        libc::ENOENT,
    ];
    error
        .raw_os_error()
        .is_some_and(|errno| refusals.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_replaced_again_and_again_takes_no_more_room() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file.json");
        // The file of an earlier release.
        fs::write(&path, "{}").expect("written");
        for number in 0..5 {
            replace(&path, number.to_string().as_bytes()).expect("replaced");
            let text = fs::read_to_string(&path).expect("it is there");
            assert_eq!(text.trim(), number.to_string());
            assert_eq!(text.len(), FULL);
            let mut names: Vec<_> = fs::read_dir(folder.path())
                .expect("a folder")
                .map(|entry| entry.expect("an entry").file_name())
                .collect();
            names.sort();
            assert_eq!(names, ["file.json", "file.spare"]);
            let spare = fs::metadata(folder.path().join("file.spare")).expect("it is there");
            assert_eq!(spare.len(), FULL as u64);
        }
        assert!(!replace(&path, &[b' '; FULL]).expect_err("too long").is_unsure);
    }

    #[test]
    fn a_spare_becomes_another_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, to) = (folder.path().join("a.json"), folder.path().join("b"));
        replace(&path, b"1").expect("written");
        give_spare(&path, &to, b"2").expect("given");
        assert_eq!(fs::read_to_string(&to).expect("it is there").trim(), "2");
        assert_eq!(fs::read_to_string(&path).expect("it is there").trim(), "1");
        replace(&path, b"3").expect("written");
        assert_eq!(fs::read_to_string(&path).expect("it is there").trim(), "3");
    }
}
