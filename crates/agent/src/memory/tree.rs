//! Which files of a folder are there, changed or gone since the last look.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::beneath;
use crate::quotas;

/// A file system notes the time of a change in coarse steps (4 ms and more), so a file that changed shortly before it was
/// last read may have changed after it without showing it.
const CLOCK_GRAIN: Duration = Duration::from_millis(100);

/// What kind of file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A symbolic link, and to what.
    Symlink(PathBuf),
    /// A FIFO. What is in it is restored with who has it open.
    Fifo,
}

/// One file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Relative to the folder.
    pub path: PathBuf,
    /// What it is.
    pub kind: Kind,
    /// Permission bits.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The owning group.
    pub gid: u32,
    /// Length in bytes, of a regular file.
    pub length: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    entry: Entry,
    inode: u64,
    changed: Duration,
    /// When it was looked at.
    at: Duration,
}

/// What was there at the last look.
#[derive(Debug, Default)]
pub struct Tree(BTreeMap<PathBuf, Seen>);

/// What has happened since.
#[derive(Debug, Default)]
pub struct Changes {
    /// New, or may have changed; folders before what is in them.
    pub touched: Vec<Entry>,
    /// No longer there, or something else now; what was in a folder before the folder.
    pub removed: Vec<PathBuf>,
}

impl Tree {
    /// Looks at everything below `root`. Sockets are left out: each host makes its own.
    pub fn look(&mut self, root: &Path) -> io::Result<Changes> {
        let at = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let mut now = BTreeMap::new();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::openat(CWD, root, flags, Mode::empty())?;
        walk(&folder, Path::new(""), at, &mut now)?;
        let mut changes = Changes::default();
        for (path, seen) in &now {
            let untouched = self.0.get(path).is_some_and(|before| {
                before.entry == seen.entry
                    && before.inode == seen.inode
                    && before.changed == seen.changed
                    && seen.changed + CLOCK_GRAIN < before.at
            });
            if !untouched {
                changes.touched.push(seen.entry.clone());
            }
        }
        changes.removed = self
            .0
            .keys()
            .filter(|path| !now.contains_key(*path))
            .cloned()
            .collect();
        self.0 = now;
        Ok(changes)
    }
}

/// Looks through a folder by descriptors: the program that owns it can replace any of its folders by a link at any time.
fn walk(folder: &OwnedFd, within: &Path, at: Duration, out: &mut BTreeMap<PathBuf, Seen>) -> io::Result<()> {
    if within.components().count() > quotas::DEPTH {
        return Err(io::Error::other(format!(
            "there are more than {} folders within each other at {}",
            quotas::DEPTH,
            within.display()
        )));
    }
    for item in Dir::read_from(folder)? {
        let item = item?;
        let name = OsStr::from_bytes(item.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let path = within.join(name);
        let metadata = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(metadata) => metadata,
            // Gone between the two calls.
            Err(Errno::NOENT) => continue,
            Err(errno) => return Err(errno.into()),
        };
        let kind = match FileType::from_raw_mode(metadata.st_mode) {
            FileType::Directory => Kind::Directory,
            FileType::Symlink => match rustix::fs::readlinkat(folder, name, Vec::new()) {
                Ok(to) => Kind::Symlink(PathBuf::from(OsString::from_vec(to.into_bytes()))),
                // Gone, or something else by now.
                Err(Errno::NOENT | Errno::INVAL) => continue,
                Err(errno) => return Err(errno.into()),
            },
            FileType::RegularFile => Kind::File,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => continue,
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("{} is a device, which cannot be moved", path.display()),
                ));
            }
        };
        let is_directory = kind == Kind::Directory;
        let length = if kind == Kind::File {
            metadata.st_size as u64
        } else {
            0
        };
        let entry = Entry {
            path: path.clone(),
            kind,
            mode: metadata.st_mode & 0o7777,
            uid: metadata.st_uid,
            gid: metadata.st_gid,
            length,
        };
        let changed = Duration::new(metadata.st_ctime.max(0) as u64, metadata.st_ctime_nsec as u32);
        // A folder's own times change with its entries, which are looked at themselves.
        let changed = if is_directory { Duration::ZERO } else { changed };
        out.insert(
            path.clone(),
            Seen {
                entry,
                inode: metadata.st_ino,
                changed,
                at,
            },
        );
        if is_directory {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            match beneath::open_any(folder, name.as_ref(), flags, Mode::empty()) {
                Ok(inside) => walk(&inside, &path, at, out)?,
                // Gone, or something else by now.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(entries: &[Entry]) -> Vec<&str> {
        entries.iter().map(|entry| entry.path.to_str().unwrap()).collect()
    }

    #[test]
    fn new_changed_and_removed_files_are_seen_and_fresh_ones_looked_at_twice() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        std::fs::write(folder.path().join("d/a"), "a").unwrap();
        std::fs::write(folder.path().join("b"), "b").unwrap();
        std::os::unix::fs::symlink("b", folder.path().join("l")).unwrap();
        let mut tree = Tree::default();
        assert_eq!(
            names(&tree.look(folder.path()).unwrap().touched),
            ["b", "d", "d/a", "l"]
        );

        // Too fresh to be told from a file that changed in the same tick.
        assert!(names(&tree.look(folder.path()).unwrap().touched).contains(&"b"));
        for seen in tree.0.values_mut() {
            seen.at += CLOCK_GRAIN * 2;
        }
        std::fs::write(folder.path().join("d/a"), "other").unwrap();
        std::fs::remove_file(folder.path().join("b")).unwrap();
        let changes = tree.look(folder.path()).unwrap();
        assert_eq!(names(&changes.touched), ["d/a"]);
        assert_eq!(changes.removed, [PathBuf::from("b")]);
    }

    #[test]
    fn folders_are_looked_through_as_deep_as_there_is_room() {
        let folder = tempfile::tempdir().unwrap();
        let mut deep = folder.path().to_owned();
        for _ in 0..quotas::DEPTH {
            deep.push("d");
        }
        std::fs::create_dir_all(&deep).unwrap();
        std::fs::write(deep.join("f"), "").unwrap();
        let found = Tree::default().look(folder.path()).unwrap();
        assert_eq!(found.touched.len(), quotas::DEPTH + 1);
        std::fs::create_dir(deep.join("d")).unwrap();
        let error = Tree::default().look(folder.path()).unwrap_err().to_string();
        assert!(
            error.contains("more than 128 folders within each other"),
            "{error}"
        );
    }

    #[test]
    fn a_folder_of_the_host_is_not_looked_through() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("secret"), "").unwrap();
        let folder = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(outside.path(), folder.path().join("l")).unwrap();
        let found = Tree::default().look(folder.path()).unwrap();
        assert_eq!(names(&found.touched), ["l"]);
        assert_eq!(found.touched[0].kind, Kind::Symlink(outside.path().to_owned()));
    }

    #[test]
    fn a_file_that_cannot_move_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let made = rustix::fs::mknodat(
            rustix::fs::CWD,
            folder.path().join("full"),
            rustix::fs::FileType::CharacterDevice,
            rustix::fs::Mode::RWXU,
            rustix::fs::makedev(1, 7),
        );
        // Only root may.
        if made == Err(rustix::io::Errno::PERM) {
            return;
        }
        made.unwrap();
        let error = Tree::default().look(folder.path()).unwrap_err();
        assert!(error.to_string().contains("full is a device"), "{error}");
    }
}
