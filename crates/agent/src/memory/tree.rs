//! Which files of a folder are there, changed or gone since the last look.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps};
use rustix::io::Errno;

use super::attributes;
use crate::beneath;
use crate::proto::Stamp;
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
    /// The name of a socket. Whoever has it bound binds it again where it is restored.
    Socket,
    /// A further name of this one, which is no such kind.
    Link(PathBuf),
}

/// Which file, whatever its names are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Inode {
    /// The device number of its file system.
    pub device: u64,
    /// Its number there.
    pub number: u64,
}

impl Inode {
    /// That of what was looked at.
    pub fn of(metadata: &Stat) -> Self {
        Self {
            device: metadata.st_dev,
            number: metadata.st_ino,
        }
    }
}

/// What of files is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// Each name is a file of its own, and sockets are left out.
    Content,
    /// Also which names are of one file, and sockets that are not in the folder itself: those are the host's.
    Everything,
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
    inode: Inode,
    changed: Duration,
    /// When it was looked at.
    at: Duration,
    /// When it was read and written.
    times: Times,
}

/// When a file was read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    /// When it was read.
    pub accessed: Timespec,
    /// When it was written.
    pub modified: Timespec,
}

impl Times {
    /// Those of what was looked at.
    pub fn of(metadata: &Stat) -> Self {
        Self {
            accessed: Timespec {
                tv_sec: metadata.st_atime,
                tv_nsec: metadata.st_atime_nsec as _,
            },
            modified: Timespec {
                tv_sec: metadata.st_mtime,
                tv_nsec: metadata.st_mtime_nsec as _,
            },
        }
    }

    /// As the destination is told.
    pub fn told_of(&self, path: &Path) -> Stamp {
        Stamp {
            path: path.as_os_str().as_bytes().to_vec(),
            modified_seconds: self.modified.tv_sec,
            modified_nanoseconds: self.modified.tv_nsec as u32,
            accessed_seconds: self.accessed.tv_sec,
            accessed_nanoseconds: self.accessed.tv_nsec as u32,
        }
    }

    /// As another agent tells it; `None` if they are no times.
    pub fn told(stamp: &Stamp) -> Option<Self> {
        let time = |seconds: i64, nanoseconds: u32| {
            (nanoseconds < 1_000_000_000).then_some(Timespec {
                tv_sec: seconds,
                tv_nsec: nanoseconds.into(),
            })
        };
        Some(Self {
            accessed: time(stamp.accessed_seconds, stamp.accessed_nanoseconds)?,
            modified: time(stamp.modified_seconds, stamp.modified_nanoseconds)?,
        })
    }

    /// As the kernel takes them.
    pub fn stamps(&self) -> Timestamps {
        Timestamps {
            last_access: self.accessed,
            last_modification: self.modified,
        }
    }
}

/// What was there at the last look.
#[derive(Debug, Default)]
pub struct Tree(BTreeMap<PathBuf, Seen>);

/// What has happened since.
#[derive(Debug, Default)]
pub struct Changes {
    /// New, or may have changed; folders before what is in them, and further names behind all others.
    pub touched: Vec<Entry>,
    /// No longer there, or no longer a name of what it was one of: whoever wrote to it would write to that.
    pub removed: Vec<PathBuf>,
}

impl Tree {
    /// Looks at everything below `root`.
    pub fn look(&mut self, root: &Path, detail: Detail) -> io::Result<Changes> {
        let at = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let folder = rustix::fs::openat(CWD, root, FOLDER | OFlags::CLOEXEC, Mode::empty())?;
        let mut look = Look {
            before: &self.0,
            detail,
            at,
            now: BTreeMap::new(),
        };
        look.walk(folder, Path::new(""))?;
        let mut now = look.now;
        if detail == Detail::Everything {
            join(&self.0, &mut now);
        }
        let mut changes = Changes::default();
        let mut links = Vec::new();
        for (path, seen) in &now {
            let before = self.0.get(path);
            let untouched = before.is_some_and(|before| {
                before.entry == seen.entry
                    && before.inode == seen.inode
                    && before.changed == seen.changed
                    && seen.changed + CLOCK_GRAIN < before.at
            });
            if untouched {
                continue;
            }
            if matches!(seen.entry.kind, Kind::Link(_)) {
                links.push(seen.entry.clone());
                continue;
            }
            if before.is_some_and(|before| matches!(before.entry.kind, Kind::Link(_))) {
                changes.removed.push(path.clone());
            }
            changes.touched.push(seen.entry.clone());
        }
        changes.touched.extend(links);
        let gone = self.0.keys().filter(|path| !now.contains_key(*path));
        changes.removed.extend(gone.cloned());
        self.0 = now;
        Ok(changes)
    }

    /// The next look takes it for new.
    pub fn forget(&mut self, path: &Path) {
        self.0.remove(path);
    }

    /// The times of all that was there at the last look. A further name has those of the file.
    pub fn times(&self) -> impl Iterator<Item = (&Path, &Times)> {
        let files = self.0.iter();
        files
            .filter(|(_, seen)| !matches!(seen.entry.kind, Kind::Link(_)))
            .map(|(path, seen)| (path.as_path(), &seen.times))
    }
}

/// How folders are opened: a look changes no time.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOATIME);

/// Makes all names but one of each file further names of that one: of the one that was it at the look before, or else of the first.
fn join(before: &BTreeMap<PathBuf, Seen>, now: &mut BTreeMap<PathBuf, Seen>) {
    let mut firsts: HashMap<Inode, PathBuf> = HashMap::new();
    let mut has_more = false;
    for (path, seen) in now.iter().filter(|(_, seen)| seen.entry.kind != Kind::Directory) {
        match firsts.get_mut(&seen.inode) {
            None => {
                firsts.insert(seen.inode, path.clone());
            }
            Some(first) => {
                has_more = true;
                let is_first = |path: &Path| {
                    before.get(path).is_some_and(|before| {
                        before.inode == seen.inode && !matches!(before.entry.kind, Kind::Link(_))
                    })
                };
                if !is_first(first) && is_first(path) {
                    first.clone_from(path);
                }
            }
        }
    }
    if !has_more {
        return;
    }
    for (path, seen) in now
        .iter_mut()
        .filter(|(_, seen)| seen.entry.kind != Kind::Directory)
    {
        match firsts.get(&seen.inode) {
            Some(first) if first != path => {
                // All else is told of the first.
                seen.changed = Duration::ZERO;
                seen.entry = Entry {
                    path: path.clone(),
                    kind: Kind::Link(first.clone()),
                    mode: 0,
                    uid: 0,
                    gid: 0,
                    length: 0,
                };
            }
            _ => {}
        }
    }
}

/// What cannot be moved of what is below `root`, by its path and in words for an operator, up to `most`.
pub fn problems(root: &Path, most: usize) -> io::Result<Vec<String>> {
    let mut tree = Tree::default();
    tree.look(root, Detail::Everything).map_or_else(
        |error| match error.kind() {
            io::ErrorKind::Unsupported => Ok(vec![error.to_string()]),
            _ => Err(error),
        },
        |changes| problems_of(root, &changes, most),
    )
}

fn problems_of(root: &Path, changes: &Changes, most: usize) -> io::Result<Vec<String>> {
    let root = beneath::folder(root)?;
    let mut found = Vec::new();
    for entry in &changes.touched {
        if found.len() == most {
            break;
        }
        let Ok(file) = beneath::open_any(&root, &entry.path, OFlags::PATH, Mode::empty()) else {
            continue;
        };
        match attributes::read(file.as_fd()) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                found.push(format!("{} {error}", entry.path.display()));
            }
            _ => {}
        }
    }
    Ok(found)
}

struct Look<'a> {
    before: &'a BTreeMap<PathBuf, Seen>,
    detail: Detail,
    at: Duration,
    now: BTreeMap<PathBuf, Seen>,
}

impl Look<'_> {
    /// Looks through a folder by descriptors: the program that owns it can replace any of its folders by a link at any time.
    fn walk(&mut self, folder: OwnedFd, within: &Path) -> io::Result<()> {
        if within.components().count() > quotas::DEPTH {
            return Err(io::Error::other(format!(
                "there are more than {} folders within each other at {}",
                quotas::DEPTH,
                within.display()
            )));
        }
        // It reads by this descriptor, and opens no other.
        for item in Dir::new(folder.try_clone()?)? {
            let item = item?;
            let name = OsStr::from_bytes(item.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let path = within.join(name);
            let Some(seen) = self.see(&folder, name, &path)? else {
                continue;
            };
            let is_directory = seen.entry.kind == Kind::Directory;
            self.now.insert(path.clone(), seen);
            if is_directory {
                match beneath::open_any(&folder, name.as_ref(), FOLDER, Mode::empty()) {
                    Ok(inside) => self.walk(inside, &path)?,
                    // Gone, or something else by now.
                    Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
        }
        Ok(())
    }

    /// What `name` is; `None` if it is gone, or is left out.
    fn see(&self, folder: &OwnedFd, name: &OsStr, path: &Path) -> io::Result<Option<Seen>> {
        let metadata = match rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(metadata) => metadata,
            // Gone between the two calls.
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        let (inode, times) = (Inode::of(&metadata), Times::of(&metadata));
        let is_in_root = path.parent() == Some(Path::new(""));
        let kind = match FileType::from_raw_mode(metadata.st_mode) {
            FileType::Directory => Kind::Directory,
            FileType::Symlink => match self.target(folder, name, path, inode, &times)? {
                Some(target) => Kind::Symlink(target),
                None => return Ok(None),
            },
            FileType::RegularFile => Kind::File,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket if self.detail == Detail::Content || is_in_root => return Ok(None),
            FileType::Socket => Kind::Socket,
            _ => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    format!("{} is a device, which cannot be moved", path.display()),
                ));
            }
        };
        let length = if kind == Kind::File {
            metadata.st_size as u64
        } else {
            0
        };
        let changed = Duration::new(metadata.st_ctime.max(0) as u64, metadata.st_ctime_nsec as u32);
        let entry = Entry {
            path: path.to_owned(),
            kind,
            mode: metadata.st_mode & 0o7777,
            uid: metadata.st_uid,
            gid: metadata.st_gid,
            length,
        };
        Ok(Some(Seen {
            entry,
            inode,
            changed,
            at: self.at,
            times,
        }))
    }

    /// Where a symbolic link leads; `None` if it is gone. It leads there as long as it is the same, and is read once: the kernel
    /// notes the time of a reading, which is put back.
    fn target(
        &self,
        folder: &OwnedFd,
        name: &OsStr,
        path: &Path,
        inode: Inode,
        times: &Times,
    ) -> io::Result<Option<PathBuf>> {
        if let Some(before) = self.before.get(path)
            && before.inode == inode
            && let Kind::Symlink(target) = &before.entry.kind
        {
            return Ok(Some(target.clone()));
        }
        let target = match rustix::fs::readlinkat(folder, name, Vec::new()) {
            Ok(target) => target,
            // Gone, or something else by now.
            Err(Errno::NOENT | Errno::INVAL) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        };
        if self.detail == Detail::Everything {
            let after = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW);
            if after.is_ok_and(|after| Inode::of(&after) == inode && Times::of(&after) != *times) {
                // One that is gone by now needs none.
                let _ = rustix::fs::utimensat(folder, name, &times.stamps(), AtFlags::SYMLINK_NOFOLLOW);
            }
        }
        Ok(Some(PathBuf::from(OsString::from_vec(target.into_bytes()))))
    }
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
            names(&tree.look(folder.path(), Detail::Everything).unwrap().touched),
            ["b", "d", "d/a", "l"]
        );

        // Too fresh to be told from a file that changed in the same tick.
        assert!(names(&tree.look(folder.path(), Detail::Everything).unwrap().touched).contains(&"b"));
        for seen in tree.0.values_mut() {
            seen.at += CLOCK_GRAIN * 2;
        }
        std::fs::write(folder.path().join("d/a"), "other").unwrap();
        std::fs::remove_file(folder.path().join("b")).unwrap();
        let changes = tree.look(folder.path(), Detail::Everything).unwrap();
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
        let found = Tree::default().look(folder.path(), Detail::Everything).unwrap();
        assert_eq!(found.touched.len(), quotas::DEPTH + 1);
        std::fs::create_dir(deep.join("d")).unwrap();
        let error = Tree::default()
            .look(folder.path(), Detail::Everything)
            .unwrap_err()
            .to_string();
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
        let found = Tree::default().look(folder.path(), Detail::Everything).unwrap();
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
        let error = Tree::default()
            .look(folder.path(), Detail::Everything)
            .unwrap_err();
        assert!(error.to_string().contains("full is a device"), "{error}");
    }

    fn links(changes: &Changes) -> Vec<(&str, &str)> {
        let links = changes.touched.iter().filter_map(|entry| match &entry.kind {
            Kind::Link(to) => Some((entry.path.to_str()?, to.to_str()?)),
            _ => None,
        });
        links.collect()
    }

    #[test]
    fn names_of_one_file_are_found_and_keep_the_one_that_has_its_content() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        std::fs::write(at("d/m"), "content").unwrap();
        let mut tree = Tree::default();
        tree.look(folder.path(), Detail::Everything).unwrap();
        std::fs::hard_link(at("d/m"), at("a")).unwrap();
        let changes = tree.look(folder.path(), Detail::Everything).unwrap();
        assert_eq!(
            links(&changes),
            [("a", "d/m")],
            "what was sent stays where it was"
        );
        assert_eq!(changes.touched.last().unwrap().path, Path::new("a"));

        // Its content is elsewhere from now on, and must not be written through a name of the old one.
        std::fs::hard_link(at("d/m"), at("z")).unwrap();
        std::fs::remove_file(at("d/m")).unwrap();
        let changes = tree.look(folder.path(), Detail::Everything).unwrap();
        assert_eq!(links(&changes), [("z", "a")]);
        assert!(
            changes
                .touched
                .iter()
                .any(|entry| entry.path == Path::new("a") && entry.kind == Kind::File)
        );
        assert_eq!(changes.removed, [PathBuf::from("a"), PathBuf::from("d/m")]);

        // A file of its own takes the place of a further name.
        std::fs::write(at("new"), "other").unwrap();
        std::fs::rename(at("new"), at("z")).unwrap();
        let changes = tree.look(folder.path(), Detail::Everything).unwrap();
        assert!(links(&changes).is_empty());
        assert_eq!(changes.removed, [PathBuf::from("z")]);

        let apart = Tree::default().look(folder.path(), Detail::Content).unwrap();
        assert!(links(&apart).is_empty());
    }

    #[test]
    fn a_look_changes_no_time() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("d")).unwrap();
        std::fs::write(at("d/f"), "f").unwrap();
        std::os::unix::fs::symlink("nowhere", at("l")).unwrap();
        // So that a reading would be noted.
        let long_ago = Timespec {
            tv_sec: 1,
            tv_nsec: 7,
        };
        let old = Timestamps {
            last_access: long_ago,
            last_modification: long_ago,
        };
        for name in ["d/f", "d", "l"] {
            rustix::fs::utimensat(CWD, at(name), &old, AtFlags::SYMLINK_NOFOLLOW).unwrap();
        }
        let mut tree = Tree::default();
        for _ in 0..2 {
            tree.look(folder.path(), Detail::Everything).unwrap();
        }
        for name in ["d/f", "d", "l"] {
            let now = rustix::fs::statat(CWD, at(name), AtFlags::SYMLINK_NOFOLLOW).unwrap();
            assert_eq!((now.st_atime, now.st_atime_nsec), (1, 7), "{name}");
        }
        let told: Vec<_> = tree
            .times()
            .map(|(path, times)| (path.to_owned(), *times))
            .collect();
        assert_eq!(told.len(), 3);
        assert!(told.iter().all(|(_, times)| times.modified == long_ago));
    }

    #[test]
    fn sockets_are_names_but_for_the_host_s() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        std::fs::create_dir(folder.path().join("d")).unwrap();
        for name in ["own", "d/s"] {
            drop(std::os::unix::net::UnixListener::bind(folder.path().join(name)).unwrap());
        }
        let found = Tree::default().look(folder.path(), Detail::Everything).unwrap();
        assert_eq!(names(&found.touched), ["d", "d/s"]);
        assert_eq!(found.touched[1].kind, Kind::Socket);
        let found = Tree::default().look(folder.path(), Detail::Content).unwrap();
        assert_eq!(names(&found.touched), ["d"]);
    }

    #[test]
    fn what_cannot_move_is_a_problem_with_its_path() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("labelled");
        std::fs::write(&path, "").unwrap();
        assert!(problems(folder.path(), 8).unwrap().is_empty());
        let set = rustix::fs::setxattr(&path, "security.odd", b"x", rustix::fs::XattrFlags::empty());
        // Only root may.
        if set != Err(Errno::PERM) {
            set.unwrap();
            let found = problems(folder.path(), 8).unwrap();
            assert!(
                found[0].starts_with("labelled has the extended attribute security.odd"),
                "{found:?}"
            );
        }
    }
}
