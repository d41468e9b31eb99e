//! Opening files in a folder that a program writes to.
//!
//! The agent can open anything on the host, and a program can put a link into the way at any time. So the kernel is asked
//! to resolve the path below the folder and through no link at all (`man 2 openat2`).

use std::fs::File;
use std::io;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Opens the regular file at `path` below `root`; `None` if there is nothing of the kind.
pub fn open(root: &Path, path: &Path, flags: OFlags) -> io::Result<Option<File>> {
    let folder = rustix::fs::openat(
        CWD,
        root,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // A FIFO is not waited for.
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let file = match rustix::fs::openat2(&folder, path, flags, Mode::empty(), resolve) {
        Ok(file) => File::from(file),
        // A link, nothing, a file where a folder should be, or a folder, socket or FIFO where a file should be.
        Err(Errno::LOOP | Errno::XDEV | Errno::NOENT | Errno::NOTDIR | Errno::ISDIR | Errno::NXIO) => {
            return Ok(None);
        }
        Err(errno) => return Err(errno.into()),
    };
    Ok(file.metadata()?.is_file().then_some(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

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
