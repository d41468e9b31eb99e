//! Watches of inotify on files that CRIU does not find again.
//!
//! All watches of a container share one look: mounts are opened once, and the folders in which CRIU searches are walked once, up to a
//! deadline. Paths are those of the container, and resolved below its root (`man 2 openat2`): its links lead nowhere else. What would wait
//! for somebody (a FIFO, a device) is not opened.

use std::cell::{OnceCell, RefCell};
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Folders in which CRIU searches for an inode that it cannot open by its handle (`criu/irmap.c`), and the root itself.
const FOLDERS: [&str; 7] = [
    "etc",
    "var/spool",
    "var/log",
    "usr/share/dbus-1/system-services",
    "var/lib/polkit-1/localauthority",
    "usr/share/polkit-1/actions",
    "lib/udev",
];

/// More than a container has there.
const MOST: usize = 200_000;

/// Mounts of one file system that are tried.
const MOST_MOUNTS: usize = 16;

/// What is looked at for all watches of a container.
pub(super) struct Watches {
    root: Option<OwnedFd>,
    mounts: Vec<Mount>,
    opened: RefCell<HashMap<u64, Option<Rc<OwnedFd>>>>,
    searched: OnceCell<Searched>,
    until: Instant,
}

/// A mount of the container's first process.
struct Mount {
    device: u64,
    point: PathBuf,
}

/// What lies where CRIU searches.
struct Searched {
    inodes: HashSet<u64>,
    /// It was looked at to the end.
    is_whole: bool,
}

impl Watches {
    /// Of the container with this first process. Nothing is searched after `until`.
    pub fn of(init: i32, until: Instant) -> Self {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::openat(CWD, format!("/proc/{init}/root"), flags, Mode::empty());
        let mountinfo = std::fs::read(format!("/proc/{init}/mountinfo")).unwrap_or_default();
        let lines = mountinfo.split(|byte| *byte == b'\n');
        Self {
            root: root.ok(),
            mounts: lines.filter_map(Mount::parse).collect(),
            opened: RefCell::default(),
            searched: OnceCell::new(),
            until,
        }
    }

    /// Why an inotify with this `fdinfo` cannot move, in words that follow its name.
    pub fn problem(&self, fdinfo: &str) -> Option<String> {
        let lines = fdinfo.lines().filter(|line| line.starts_with("inotify "));
        for watch in lines.filter_map(Watch::of) {
            if let Some(why) = self.is_lost(&watch) {
                return Some(format!(
                    "watches (inotify) inode {} of device {}:{}, {why}; have the program end that watch before the move",
                    watch.inode,
                    watch.device >> 20,
                    watch.device & 0xf_ffff
                ));
            }
        }
        None
    }

    /// Why CRIU will not find it again, if so.
    fn is_lost(&self, watch: &Watch) -> Option<&'static str> {
        if watch.handle.is_empty() {
            return Some("which the kernel gives no handle for");
        }
        // Of no mount of the container's first process: one of its children's, maybe.
        let mount = self.mount(watch.device)?;
        match open_by_handle(mount.as_fd(), watch.kind, &watch.handle) {
            Ok(file) => {
                let meta = rustix::fs::fstat(file.as_fd()).ok()?;
                (meta.st_nlink == 0).then_some("which is deleted, and whose watch would end silently")
            }
            Err(Errno::PERM) => None,
            Err(_) => {
                let searched = self.searched.get_or_init(|| self.search());
                match (searched.inodes.contains(&watch.inode), searched.is_whole) {
                    (true, _) => None,
                    (false, true) => {
                        Some("which CRIU cannot open again (of a lower layer of an overlay, or deleted)")
                    }
                    (false, false) => Some(
                        "which CRIU would search for with the program frozen, in folders (/etc, /var/log, /var/spool) with too many files",
                    ),
                }
            }
        }
    }

    /// A mount of that file system, opened once.
    fn mount(&self, device: u64) -> Option<Rc<OwnedFd>> {
        if let Some(known) = self.opened.borrow().get(&device) {
            return known.clone();
        }
        let of_it = self.mounts.iter().filter(|mount| mount.device == device);
        let opened = of_it
            .take(MOST_MOUNTS)
            .find_map(|mount| self.open_mount(&mount.point))
            .map(Rc::new);
        self.opened.borrow_mut().insert(device, opened.clone());
        opened
    }

    /// Opens a mount point, if it is a folder or a file: the kernel takes no `O_PATH` descriptor for a mount.
    fn open_mount(&self, point: &Path) -> Option<OwnedFd> {
        let place = self.open(point, OFlags::PATH).ok()?;
        let meta = rustix::fs::fstat(&place).ok()?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = match FileType::from_raw_mode(meta.st_mode) {
            FileType::Directory => rustix::fs::openat(&place, ".", flags | OFlags::DIRECTORY, Mode::empty()),
            FileType::RegularFile => {
                let link = format!("/proc/self/fd/{}", place.as_raw_fd());
                rustix::fs::openat(CWD, link, flags, Mode::empty())
            }
            _ => return None,
        };
        opened.ok()
    }

    /// Opens a path of the container.
    fn open(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let root = self.root.as_ref().ok_or(Errno::NOENT)?;
        let within = path.strip_prefix("/").unwrap_or(path);
        let within = match within.as_os_str().is_empty() {
            true => Path::new("."),
            false => within,
        };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        // Flags beside `O_PATH` that mean something without it are refused.
        let flags = match flags.contains(OFlags::PATH) {
            true => flags & (OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC),
            false => flags,
        };
        rustix::fs::openat2(root, within, flags, Mode::empty(), resolve)
    }

    fn search(&self) -> Searched {
        let mut found = Searched {
            inodes: HashSet::new(),
            is_whole: true,
        };
        let mut folders: Vec<_> = FOLDERS.iter().map(PathBuf::from).collect();
        if let Some(Ok(root)) = self.root.as_ref().map(rustix::fs::fstat) {
            found.inodes.insert(root.st_ino);
        }
        let mut seen = 0;
        while let Some(folder) = folders.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            let Ok(opened) = self.open(&folder, flags) else {
                continue;
            };
            found
                .inodes
                .extend(rustix::fs::fstat(&opened).ok().map(|meta| meta.st_ino));
            let Ok(entries) = opened.try_clone().map_err(|_| Errno::MFILE).and_then(Dir::new) else {
                continue;
            };
            for entry in entries.flatten() {
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name == "." || name == ".." {
                    continue;
                }
                seen += 1;
                if seen > MOST || Instant::now() >= self.until {
                    found.is_whole = false;
                    return found;
                }
                let Ok(meta) = rustix::fs::statat(&opened, name, AtFlags::SYMLINK_NOFOLLOW) else {
                    continue;
                };
                match FileType::from_raw_mode(meta.st_mode) {
                    FileType::Directory => folders.push(folder.join(name)),
                    _ => drop(found.inodes.insert(meta.st_ino)),
                }
            }
        }
        found
    }
}

impl Mount {
    /// A line of a `mountinfo`.
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ').skip(2);
        let device = std::str::from_utf8(words.next()?).ok()?;
        let (major, minor) = device.split_once(':')?;
        let point = words.nth(1)?;
        Some(Self {
            device: major.parse::<u64>().ok()? << 20 | minor.parse::<u64>().ok()?,
            point: unescape(point).into(),
        })
    }
}

/// Undoes what the kernel does to spaces and the like: `\040`.
fn unescape(escaped: &[u8]) -> OsString {
    let (mut plain, mut rest) = (Vec::new(), escaped);
    while let Some((first, after)) = rest.split_first() {
        let digits = after
            .get(..3)
            .filter(|digits| digits.iter().all(u8::is_ascii_digit));
        match digits.filter(|_| *first == b'\\') {
            Some(digits) => {
                let value = digits
                    .iter()
                    .fold(0u32, |value, digit| value * 8 + u32::from(digit - b'0'));
                plain.push(value as u8);
                rest = &after[3..];
            }
            None => {
                plain.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(plain)
}

/// A line of an inotify's `fdinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Watch {
    inode: u64,
    /// As the kernel counts it: 12 bits and 20.
    device: u64,
    kind: i32,
    handle: Vec<u8>,
}

impl Watch {
    fn of(line: &str) -> Option<Self> {
        let value = |name: &str| {
            let mut words = line.split_ascii_whitespace();
            words.find_map(|word| word.strip_prefix(name))
        };
        let number = |name: &str| value(name).and_then(|text| u64::from_str_radix(text, 16).ok());
        let handle = value("f_handle:").unwrap_or_default();
        let bytes =
            (0..handle.len() / 2).map(|at| u8::from_str_radix(handle.get(at * 2..at * 2 + 2)?, 16).ok());
        Some(Self {
            inode: number("ino:")?,
            device: number("sdev:")?,
            kind: number("fhandle-type:").unwrap_or(0) as i32,
            handle: bytes.collect::<Option<_>>()?,
        })
    }
}

/// `man 2 open_by_handle_at`.
fn open_by_handle(mount: BorrowedFd<'_>, kind: i32, bytes: &[u8]) -> rustix::io::Result<OwnedFd> {
    let mut handle = Vec::with_capacity(8 + bytes.len());
    handle.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
    handle.extend_from_slice(&kind.to_ne_bytes());
    handle.extend_from_slice(bytes);
    // Words, so that it is aligned.
    let mut words = vec![0u64; handle.len().div_ceil(8)];
    for (word, bytes) in words.iter_mut().zip(handle.chunks(8)) {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(all);
    }
    // SAFETY: it is a struct file_handle with as many bytes as it says, aligned, and the kernel writes nothing beyond it.
    let raw = unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            words.as_mut_ptr(),
            libc::O_PATH | libc::O_CLOEXEC,
        )
    };
    match raw {
        // SAFETY: it was just opened, and is nobody else's.
        raw if raw >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(raw as i32) }),
        _ => {
            let error = std::io::Error::last_os_error();
            Err(Errno::from_io_error(&error).unwrap_or(Errno::IO))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Duration;

    use super::*;

    fn own() -> Watches {
        let until = Instant::now() + Duration::from_secs(60);
        Watches::of(std::process::id() as i32, until)
    }

    /// The same with another root.
    fn below(root: &Path) -> Watches {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Watches {
            root: Some(rustix::fs::openat(CWD, root, flags, Mode::empty()).unwrap()),
            ..own()
        }
    }

    fn inode(path: &Path) -> u64 {
        std::os::unix::fs::MetadataExt::ino(&fs::symlink_metadata(path).unwrap())
    }

    #[test]
    fn a_watch_is_read_with_its_handle() {
        let line = "inotify wd:1 ino:15e sdev:2d mask:2 ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:5e010000a1b2c3d4";
        let watch = Watch::of(line).unwrap();
        assert_eq!((watch.inode, watch.device, watch.kind), (0x15e, 0x2d, 1));
        assert_eq!(watch.handle, [0x5e, 1, 0, 0, 0xa1, 0xb2, 0xc3, 0xd4]);
        let without = Watch::of("inotify wd:1 ino:15e sdev:2d mask:2 ignored_mask:0").unwrap();
        assert!(own().is_lost(&without).unwrap().contains("no handle"));
        assert_eq!(Watch::of("inotify wd:1"), None);
    }

    #[test]
    fn a_watch_on_a_file_that_is_there_is_found_again() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let inotify = rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).unwrap();
        let flags = rustix::fs::inotify::WatchFlags::MODIFY;
        rustix::fs::inotify::add_watch(&inotify, file.path(), flags).unwrap();
        let path = format!("/proc/self/fdinfo/{}", inotify.as_raw_fd());
        let fdinfo = || fs::read_to_string(&path).unwrap();
        assert_eq!(own().problem(&fdinfo()), None, "{}", fdinfo());
        let open = file.reopen().unwrap();
        drop(file);
        // The watch lasts as long as somebody has the file open.
        let found = own().problem(&fdinfo());
        if fdinfo().contains("inotify wd:") {
            assert!(found.is_some(), "{}", fdinfo());
        }
        drop(open);
    }

    #[test]
    fn a_search_is_shared_stays_below_the_root_and_ends() {
        let (root, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |path: &str| root.path().join(path);
        fs::create_dir_all(at("etc/deep")).unwrap();
        fs::create_dir_all(at("var")).unwrap();
        fs::write(at("etc/deep/own"), "").unwrap();
        fs::write(outside.path().join("foreign"), "").unwrap();
        std::os::unix::fs::symlink(outside.path(), at("var/log")).unwrap();
        std::os::unix::fs::symlink("../../../etc", at("var/spool")).unwrap();
        let watches = below(root.path());
        let first = watches.searched.get_or_init(|| watches.search());
        assert!(first.is_whole);
        assert!(first.inodes.contains(&inode(&at("etc/deep/own"))));
        assert!(first.inodes.contains(&inode(&at("."))));
        assert!(!first.inodes.contains(&inode(&outside.path().join("foreign"))));
        // Another watch walks nothing.
        fs::write(at("etc/later"), "").unwrap();
        let again = watches.searched.get_or_init(|| watches.search());
        assert!(!again.inodes.contains(&inode(&at("etc/later"))));
        let late = Watches {
            until: Instant::now(),
            ..below(root.path())
        };
        assert!(!late.search().is_whole);
    }

    #[test]
    fn a_mount_point_that_would_wait_for_somebody_is_not_opened() {
        let root = tempfile::tempdir().unwrap();
        let fifo = root.path().join("fifo");
        rustix::fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::os::unix::fs::symlink("/etc", root.path().join("etc")).unwrap();
        let watches = below(root.path());
        assert!(watches.open_mount(Path::new("/fifo")).is_none());
        assert!(watches.open_mount(Path::new("/etc")).is_none(), "it leads out");
        assert!(watches.open_mount(Path::new("/")).is_some());
    }

    #[test]
    fn mount_points_are_read_as_they_are() {
        let mount =
            Mount::parse(b"36 35 98:3 /mnt1 /mnt\\0402 rw,noatime master:1 - ext3 /dev/root rw").unwrap();
        assert_eq!(
            (mount.device, mount.point.as_path()),
            (98 << 20 | 3, Path::new("/mnt 2"))
        );
        assert!(Mount::parse(b"").is_none());
    }
}
