//! Opening files in a folder that a program writes to.
//!
//! The agent can open anything on the host, and a program can put a link into the way at any time. So the kernel is asked
//! to resolve the path below the folder and through no link at all (`man 2 openat2`).

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::Context as _;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use verbatim_seqpacket::Listener;

/// How paths below a folder are resolved.
const RESOLVE: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// The folder itself, to resolve paths below it.
pub fn folder(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(CWD, path, flags, Mode::empty())?)
}

/// Opens what is at `path` below `root`, with no link on the way and none at the end. `mode` is that of a file that is made. A FIFO is
/// not waited for, and no terminal becomes ours.
pub fn open_any(root: impl AsFd, path: &Path, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
    let mut flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    if !flags.contains(OFlags::PATH) {
        // With O_PATH nothing is opened that could wait, and openat2(2) refuses what means nothing.
        flags |= OFlags::NONBLOCK | OFlags::NOCTTY;
    }
    rustix::fs::openat2(root, path, flags, mode, RESOLVE)
}

/// Opens the regular file at `path` below `root`; `None` if there is nothing of the kind.
pub fn open(root: &Path, path: &Path, flags: OFlags) -> io::Result<Option<File>> {
    let file = match open_any(folder(root)?, path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        // A link, nothing, a file where a folder should be, or a folder, socket or FIFO where a file should be.
        Err(Errno::LOOP | Errno::XDEV | Errno::NOENT | Errno::NOTDIR | Errno::ISDIR | Errno::NXIO) => {
            return Ok(None);
        }
        Err(errno) => return Err(errno.into()),
    };
    Ok(file.metadata()?.is_file().then_some(file))
}

/// An error if there is something at one of `names` in `root` that is not a folder: a program can have put a link there, to
/// whatever the host has, and who goes on by its path would follow it.
pub fn must_be_folders(root: &Path, names: &[&str]) -> io::Result<()> {
    let root_fd = folder(root)?;
    for name in names {
        match open_any(
            &root_fd,
            Path::new(name),
            OFlags::PATH | OFlags::DIRECTORY,
            Mode::empty(),
        ) {
            Ok(_) | Err(Errno::NOENT) => {}
            Err(errno) => {
                return Err(io::Error::new(
                    io::Error::from(errno).kind(),
                    format!(
                        "{} is not a folder any more ({errno}): a program has put something else in its place",
                        root.join(name).display()
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Attempts where a program can put something in the way again and again.
const ATTEMPTS: usize = 16;

/// Listens at `name` in `root`, for everybody. A program may have put anything there, a folder too: it is
/// removed.
pub fn listen(root: &Path, name: &str) -> anyhow::Result<Listener> {
    let mut attempt = 0;
    loop {
        attempt += 1;
        let made = remove_all(root, name)
            .map_err(anyhow::Error::from)
            .and_then(|()| Ok(Listener::bind(&root.join(name))?))
            .and_then(|listener| {
                open_socket_to_all(root, name)?;
                Ok(listener)
            });
        match made {
            Err(error) if attempt == ATTEMPTS => {
                return Err(error).with_context(|| format!("cannot listen at {}", root.join(name).display()));
            }
            Err(_) => {}
            listener => return listener,
        }
    }
}

/// Removes `name` in `root`, with its content if it is a folder. Folders of a program may lie within each other
/// as deep as its file system has room: one descriptor and no stack are needed for each depth, since a folder
/// is moved into `root` before its content is removed.
pub fn remove_all(root: &Path, name: impl AsRef<OsStr>) -> io::Result<()> {
    let name = name.as_ref();
    let root_fd = folder(root)?;
    match rustix::fs::unlinkat(&root_fd, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR) => {}
        Err(errno) => return Err(errno.into()),
    }
    // The name is free at once.
    let mut folders = Vec::new();
    match move_away(&root_fd, &root_fd, name) {
        Ok(moved) => folders.push(moved),
        Err(Errno::NOENT) => return Ok(()),
        Err(errno) => return Err(errno.into()),
    }
    while let Some(name) = folders.pop() {
        if !remove_flat(&root_fd, &name, &mut folders)? {
            return Err(io::Error::other(format!(
                "a program fills {} again and again",
                root.display()
            )));
        }
    }
    Ok(())
}

/// Removes a folder in `root`; the folders in it are moved into `root`, and their names pushed. Returns `false`
/// if a program puts something into it each time.
fn remove_flat(root: &OwnedFd, name: &CString, folders: &mut Vec<CString>) -> io::Result<bool> {
    for _ in 0..ATTEMPTS {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let folder = match open_any(
            root,
            Path::new(name.to_str().expect("ASCII")),
            flags,
            Mode::empty(),
        ) {
            Ok(folder) => folder,
            // The program has removed it, or has put something else there.
            Err(Errno::NOENT) => return Ok(true),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                _ = rustix::fs::unlinkat(root, name, AtFlags::empty());
                return Ok(true);
            }
            Err(errno) => return Err(errno.into()),
        };
        for entry in Dir::read_from(&folder)? {
            let entry = entry?;
            let inner = entry.file_name();
            if matches!(inner.to_bytes(), b"." | b"..") {
                continue;
            }
            match rustix::fs::unlinkat(&folder, inner, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                Err(Errno::ISDIR) => match move_away(root, &folder, inner) {
                    Ok(moved) => folders.push(moved),
                    Err(Errno::NOENT) => {}
                    Err(errno) => return Err(errno.into()),
                },
                Err(errno) => return Err(errno.into()),
            }
        }
        match rustix::fs::unlinkat(root, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(true),
            Err(Errno::NOTEMPTY) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(false)
}

/// Moves `name` of a folder into `root`, to a name that nobody has.
fn move_away(root: &OwnedFd, from: &OwnedFd, name: impl rustix::path::Arg) -> Result<CString, Errno> {
    let moved = CString::new(format!(".removed-{:032x}", rand::random::<u128>())).expect("no zero");
    rustix::fs::renameat(from, name, root, &moved)?;
    Ok(moved)
}

/// Lets everybody connect to the socket `name` in `root`; an error if a program has put something else in its place.
fn open_socket_to_all(root: &Path, name: &str) -> io::Result<()> {
    let socket = open_any(folder(root)?, Path::new(name), OFlags::PATH, Mode::empty())?;
    let metadata = rustix::fs::fstat(&socket)?;
    if FileType::from_raw_mode(metadata.st_mode) != FileType::Socket {
        return Err(io::Error::other(format!(
            "{} is not the socket that was made there a moment ago",
            root.join(name).display()
        )));
    }
    // By the descriptor: the path may be another's by now.
    let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_no_folder_or_socket_any_more_is_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let before = mode(outside.path());
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir(root.join("tmp")).unwrap();
        must_be_folders(root, &["tmp", "shm"]).unwrap();
        symlink(outside.path(), root.join("shm")).unwrap();
        let error = must_be_folders(root, &["tmp", "shm"]).unwrap_err().to_string();
        assert!(error.contains("shm is not a folder any more"), "{error}");

        let _listener = std::os::unix::net::UnixListener::bind(root.join("s")).unwrap();
        open_socket_to_all(root, "s").unwrap();
        assert_eq!(mode(&root.join("s")), 0o666);
        symlink(outside.path(), root.join("l")).unwrap();
        std::fs::write(root.join("f"), "").unwrap();
        for name in ["l", "f", "tmp", "missing"] {
            assert!(open_socket_to_all(root, name).is_err(), "{name}");
        }
        assert_eq!(mode(outside.path()), before);
    }

    #[test]
    fn a_socket_is_made_whatever_a_program_has_put_there() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("kept"), "").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let at = root.join("s");
        let put: [&dyn Fn(); 5] = [
            &|| {},
            &|| symlink(outside.path(), &at).unwrap(),
            &|| std::fs::write(&at, "").unwrap(),
            &|| {
                std::fs::create_dir_all(at.join("1/2/3")).unwrap();
                std::fs::write(at.join("1/file"), "").unwrap();
                symlink(outside.path(), at.join("1/2/link")).unwrap();
            },
            // A socket of an earlier agent.
            &|| drop(std::os::unix::net::UnixListener::bind(&at).unwrap()),
        ];
        for put in put {
            put();
            let _listener = listen(root, "s").unwrap();
            verbatim_seqpacket::Socket::connect(&at).unwrap();
            let names = std::fs::read_dir(root)
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            assert_eq!(names.collect::<Vec<_>>(), ["s"]);
            std::fs::remove_file(&at).unwrap();
        }
        assert!(outside.path().join("kept").exists());
    }

    #[test]
    fn folders_within_each_other_are_removed_however_deep_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let mut inner = super::folder(folder.path()).unwrap();
        for depth in 0..30_000 {
            let name = if depth == 0 { "deep" } else { "d" };
            rustix::fs::mkdirat(&inner, name, Mode::RWXU).unwrap();
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
            inner = rustix::fs::openat(&inner, name, flags, Mode::empty()).unwrap();
        }
        drop(inner);
        // With the stack of a thread of the agent's.
        let root = folder.path().to_owned();
        let remover = std::thread::Builder::new().stack_size(128 << 10);
        remover
            .spawn(move || remove_all(&root, "deep"))
            .unwrap()
            .join()
            .unwrap()
            .unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn only_files_of_the_folder_itself_are_opened() {
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("1"), "secret").unwrap();
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        std::fs::create_dir(root.join("d")).unwrap();
        std::fs::write(root.join("d/1"), "own").unwrap();
        symlink(outside.path().join("1"), root.join("link")).unwrap();
        symlink(outside.path(), root.join("way")).unwrap();
        symlink("/proc/self/fd", root.join("fds")).unwrap();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(CWD, root.join("fifo"), fifo, Mode::RWXU, 0).unwrap();
        let open = |path: &str| super::open(root, Path::new(path), OFlags::RDONLY);
        assert!(open("d/1").unwrap().is_some());
        for path in ["link", "way/1", "fds/0", "fifo", "d", "missing", "../x", "d/1/x"] {
            assert!(open(path).unwrap().is_none(), "{path}");
        }
        let absolute = outside.path().join("1");
        assert!(super::open(root, &absolute, OFlags::RDONLY).unwrap().is_none());
    }
}
