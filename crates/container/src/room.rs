//! Folders without room: runc, CRIU and what stands between them have many words for that, or none, when they die of it.

use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::{StatVfs, StatVfsMountFlags};
use rustix::io::Errno;

/// Less than so much is none: each of their files takes a page at least, and there are many.
const LEAST: u64 = 128 << 10;

/// Where they write beside the folders that they are given: sockets, what CRIU knows of the kernel, temporary files.
const USUAL: [&str; 2] = ["/run", "/tmp"];

/// Which of these folders, and of those in which runc and CRIU write anyway, has no room, and what to do.
pub(crate) fn lacking<'a>(folders: impl IntoIterator<Item = &'a Path>) -> Option<String> {
    let all = folders.into_iter().chain(USUAL.map(Path::new));
    let mut words = all.filter_map(lack);
    words.next()
}

/// The same, with what else is known of a failure behind it.
pub(crate) fn first<'a>(folders: impl IntoIterator<Item = &'a Path>, reason: String) -> String {
    match lacking(folders) {
        Some(lack) => format!("{lack}; {reason}"),
        None => reason,
    }
}

/// The file system of a path that could not be written, and what to do; `None` if that had another reason than lack of room.
pub fn no_room(path: &Path, error: &io::Error) -> Option<String> {
    if !matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT)) {
        return None;
    }
    let folder = existing(path)?;
    let space = rustix::fs::statvfs(&folder).ok()?;
    Some(words(&folder, &space))
}

fn lack(folder: &Path) -> Option<String> {
    let folder = existing(folder)?;
    let space = rustix::fs::statvfs(&folder).ok()?;
    // Nobody writes there, or it does not count.
    if space.f_flag.contains(StatVfsMountFlags::RDONLY) || space.f_blocks == 0 {
        return None;
    }
    (free(&space) < LEAST || has_no_inodes(&space)).then(|| words(&folder, &space))
}

fn free(space: &StatVfs) -> u64 {
    space.f_bavail * space.f_frsize
}

fn has_no_inodes(space: &StatVfs) -> bool {
    space.f_files > 0 && space.f_favail == 0
}

fn words(folder: &Path, space: &StatVfs) -> String {
    let what = match free(space) >= LEAST && has_no_inodes(space) {
        true => "no room for another file (all inodes are in use)".to_owned(),
        false => format!("no room ({} KiB are free)", free(space) >> 10),
    };
    format!(
        "the file system of {} has {what}: make room there, or enlarge it, and try again",
        folder.display()
    )
}

/// The folder, or the one in which it would be.
fn existing(folder: &Path) -> Option<PathBuf> {
    folder
        .ancestors()
        .find(|folder| folder.exists())
        .map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
    use std::io::Write;

    /// A small file system; unmounted however the test ends.
    struct Small(tempfile::TempDir);

    impl Small {
        fn new(options: &std::ffi::CStr) -> Self {
            let folder = tempfile::tempdir().unwrap();
            mount("tmpfs", folder.path(), "tmpfs", MountFlags::empty(), options).unwrap();
            Self(folder)
        }
    }

    impl Drop for Small {
        fn drop(&mut self) {
            _ = unmount(self.0.path(), UnmountFlags::DETACH);
        }
    }

    #[test]
    fn a_folder_without_room_is_named_before_the_rest() {
        let small = Small::new(c"size=1m");
        let folder = small.0.path().join("criu/web");
        let said = || lack(&folder);
        assert_eq!(said(), None);
        std::fs::create_dir_all(&folder).unwrap();
        let mut filler = std::fs::File::create(small.0.path().join("filler")).unwrap();
        let error = loop {
            if let Err(error) = filler.write_all(&[1; 4096]) {
                break error;
            }
        };
        let full = said().unwrap();
        assert_eq!(no_room(&folder, &error).as_ref(), Some(&full));
        assert_eq!(no_room(&folder, &io::ErrorKind::NotFound.into()), None);
        assert!(
            full.contains(folder.to_str().unwrap())
                && full.contains("(0 KiB are free)")
                && full.contains("enlarge"),
            "{full}"
        );
        let reason = first([folder.as_path()], "the proxy was lost".to_owned());
        assert!(
            reason.starts_with(&full) && reason.ends_with("; the proxy was lost"),
            "{reason}"
        );
        // A child that another test is starting may have the file open, and keep its room, until it runs its program.
        filler.set_len(0).unwrap();
        assert_eq!(said(), None);
    }

    #[test]
    fn a_file_system_without_room_for_a_file_is_named_and_one_that_is_read_only_is_not() {
        let small = Small::new(c"size=1m,nr_inodes=4");
        for name in 0.. {
            if std::fs::File::create(small.0.path().join(name.to_string())).is_err() {
                break;
            }
        }
        let said = lack(small.0.path()).unwrap();
        assert!(said.contains("inodes"), "{said}");
        rustix::mount::mount_remount(small.0.path(), MountFlags::RDONLY, c"").unwrap();
        assert_eq!(lack(small.0.path()), None);
    }
}
