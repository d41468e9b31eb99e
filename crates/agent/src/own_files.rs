//! File systems that an instance has for itself: filling one takes no room from other instances.
//!
//! ```text
//!  instances/NAME/       a tmpfs as large as the instance's files may be: its /tmp and /dev/shm, its output, registered memory
//!  instances/NAME/mem/   another tmpfs, for a virtual machine that the agent starts: exactly as large as its RAM
//! ```
//!
//! They last as long as the instance is on this host, also when the agent ends. Where the agent has no right
//! to mount, the files lie in the runtime folder's file system, as do the files of instances that an earlier
//! release has started.

use std::ffi::CString;
use std::io;
use std::path::Path;

use rustix::fs::{AtFlags, CWD};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::beneath;

/// Least size: room for the guest library and some output.
pub const LEAST: u64 = 64 << 20;

/// Default size, as the kernel's for a tmpfs: half of the machine's memory.
pub fn usual(total: u64) -> u64 {
    (total / 2).max(LEAST)
}

/// Files of a tmpfs that each have at least this many bytes of it: empty ones take kernel memory, too.
const BYTES_PER_FILE: u64 = 16 << 10;
/// Files that even a small tmpfs may have.
const LEAST_FILES: u64 = 16 << 10;

/// Mounts a new one of that size at a folder, which exists. Returns `false` if the kernel does not allow the
/// mount.
pub fn mount(folder: &Path, bytes: u64, may_execute: bool) -> io::Result<bool> {
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if !may_execute {
        flags |= MountFlags::NOEXEC;
    }
    let files = (bytes / BYTES_PER_FILE).max(LEAST_FILES);
    let options = format!("mode=0755,size={bytes},nr_inodes={files}");
    let options = CString::new(options).expect("there is no zero in it");
    match rustix::mount::mount("tmpfs", folder, "tmpfs", flags, options.as_c_str()) {
        Ok(()) => Ok(true),
        Err(Errno::PERM | Errno::ACCESS) => {
            tracing::warn!(
                folder = %folder.display(),
                "no tmpfs can be mounted there: its files share the room of all others"
            );
            Ok(false)
        }
        Err(errno) => Err(errno.into()),
    }
}

/// Removes an instance's folder with its content, if it exists. The memory is free at once, even if a process
/// of the host still has the mount.
pub fn clear(folder: &Path, memory: &str, ram: &str) -> io::Result<()> {
    // Only the file: post-copy sessions may have links of their own beside it ([`crate::behind`]).
    remove_ram(folder, ram)?;
    unmount(&folder.join(memory))?;
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    // By the folder itself, and iteratively: the content is a program's.
    for entry in entries {
        beneath::remove_all(folder, entry?.file_name())?;
    }
    unmount(folder)?;
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Removes the file with a guest's RAM, `mem/ram` in its folder, which is no longer needed.
pub fn remove_ram(folder: &Path, ram: &str) -> io::Result<()> {
    let path = Path::new(ram);
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Ok(());
    };
    let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
    let opened = rustix::fs::openat(
        CWD,
        folder,
        flags | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )
    .and_then(|root| beneath::open_any(root, parent, flags, rustix::fs::Mode::empty()));
    let removed = opened.and_then(|parent| rustix::fs::unlinkat(parent, name, AtFlags::empty()));
    match removed {
        // There is no such file, or something else in its place, which is removed with the folder.
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ISDIR | Errno::XDEV) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Unmounts every file system at a path, without following links.
pub fn unmount(path: &Path) -> io::Result<()> {
    loop {
        match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Not (or no longer) a mount point, or missing, or something that a program has put there.
            Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            // Without the right to unmount, nothing of ours was mounted.
            Err(Errno::PERM) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Whether a file system has no room left.
pub fn is_full(folder: &Path) -> bool {
    rustix::fs::statvfs(folder).is_ok_and(|space| space.f_blocks > 0 && space.f_bavail == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    const MIB: u64 = 1 << 20;

    /// Two instances' folders, removed however the test ends.
    struct Folders(tempfile::TempDir);

    impl Drop for Folders {
        fn drop(&mut self) {
            for name in ["a", "b"] {
                _ = clear(&self.0.path().join(name), "mem", "mem/ram");
            }
        }
    }

    fn fill(path: &Path) -> u64 {
        let mut file = std::fs::File::create(path).unwrap();
        let mut written = 0;
        loop {
            match file.write(&[1; 1 << 16]) {
                Ok(bytes) => written += bytes as u64,
                Err(error) => {
                    assert_eq!(error.kind(), io::ErrorKind::StorageFull, "{error}");
                    return written;
                }
            }
        }
    }

    #[test]
    fn who_fills_its_own_is_in_nobodys_way_and_leaves_nothing() {
        let folders = Folders(tempfile::tempdir_in("/dev/shm").unwrap());
        let [a, b] = ["a", "b"].map(|name| folders.0.path().join(name));
        for folder in [&a, &b] {
            std::fs::create_dir(folder).unwrap();
            assert!(mount(folder, 4 * MIB, true).unwrap());
            std::fs::create_dir(folder.join("mem")).unwrap();
            assert!(mount(&folder.join("mem"), 2 * MIB, false).unwrap());
        }
        assert_eq!(rustix::fs::statvfs(&a).unwrap().f_files, LEAST_FILES);
        std::fs::create_dir(a.join("tmp")).unwrap();
        assert_eq!(fill(&a.join("tmp/x")), 4 * MIB);
        assert!(is_full(&a) && !is_full(&b) && !is_full(folders.0.path()));
        // The RAM is apart, also from its own instance's files.
        assert_eq!(fill(&a.join("mem/ram")), 2 * MIB);
        std::fs::write(b.join("x"), [1; 4096]).unwrap();
        clear(&a, "mem", "mem/ram").unwrap();
        assert!(!a.exists());
        clear(&a, "mem", "mem/ram").unwrap();
        clear(&b, "mem", "mem/ram").unwrap();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        assert!(!mounts.contains(folders.0.path().to_str().unwrap()));
    }

    #[test]
    fn a_link_that_a_program_has_put_in_the_way_is_removed_and_not_followed() {
        let folders = Folders(tempfile::tempdir_in("/dev/shm").unwrap());
        let (a, b) = (folders.0.path().join("a"), folders.0.path().join("b"));
        std::fs::create_dir(&b).unwrap();
        mount(&b, MIB, true).unwrap();
        std::fs::write(b.join("ram"), "another's").unwrap();
        std::fs::create_dir(&a).unwrap();
        mount(&a, MIB, true).unwrap();
        std::os::unix::fs::symlink(&b, a.join("mem")).unwrap();
        clear(&a, "mem", "mem/ram").unwrap();
        assert_eq!(std::fs::read(b.join("ram")).unwrap(), b"another's");
        assert!(!a.exists());
    }
}
