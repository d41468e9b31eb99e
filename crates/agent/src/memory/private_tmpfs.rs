//! Where private memory lies at its destination until its tasks have it: a tmpfs of its own.
//!
//! - It has *large folios*: memory comes in pieces of [`PIECE_BYTES`] in place of pages, which takes a sixth of the time. The tmpfs of the
//!   runtime folder has them only if whoever mounted it said so.
//! - It has no size of its own. `/run` is often a tenth of a machine's memory; what comes here is as much as the
//!   tasks will have, and whether the machine has that is looked at before ([`super::private::lack_of_memory`]).
//!
//! A hole in one of its files is a page that has not come. So large folios are taken only where a file has exactly the pages that were
//! written: before Linux 6.14 a write of one page may make 2 MiB of them. That is tried, not asked for by version.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use rustix::fs::{FallocateFlags, Mode, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

/// What is written at once: a folio of this size is had without compaction, and is not one of those that a virtual machine
/// has handed back to its host.
pub const PIECE_BYTES: u64 = 64 << 10;

/// Bytes of a page.
const PAGE: u64 = 4096;

/// What stands at the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// A new tmpfs, with large folios.
    Large,
    /// A new tmpfs, with pages.
    Plain,
    /// The tmpfs of an earlier agent.
    Before,
    /// What an earlier agent has left in the folder itself, and must be found there.
    InUse,
}

/// With large folios, and as every tmpfs is.
const WAYS: [(Found, &CStr); 2] = [
    (Found::Large, c"mode=0700,size=100%,huge=within_size"),
    (Found::Plain, c"mode=0700,size=100%"),
];

/// Mounts it at `folder`, which exists and lies in a tmpfs. It stays when the agent ends, as what is in it must.
pub fn mount(folder: &Path) -> io::Result<Found> {
    let is_empty = folder.read_dir()?.next().is_none();
    match (is_mounted(folder), is_empty) {
        (true, _) if is_exact(folder)? => return Ok(Found::Before),
        // Of an agent that died before it had looked at it.
        (true, true) => rustix::mount::unmount(folder, UnmountFlags::NOFOLLOW)?,
        (true, false) => return Err(inexact()),
        (false, false) => return Ok(Found::InUse),
        (false, true) => {}
    }
    for (found, options) in WAYS {
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        match rustix::mount::mount("tmpfs", folder, "tmpfs", flags, options) {
            Ok(()) => {}
            // A kernel without huge pages.
            Err(Errno::INVAL) => continue,
            Err(errno) => return Err(errno.into()),
        }
        let exact = is_exact(folder);
        if let Ok(true) = exact {
            return Ok(found);
        }
        rustix::mount::unmount(folder, UnmountFlags::NOFOLLOW)?;
        exact?;
    }
    Err(inexact())
}

fn inexact() -> io::Error {
    io::Error::other("a file system here does not keep to the pages that are written")
}

/// Whether there is a file system of its own at `folder`.
pub fn is_mounted(folder: &Path) -> bool {
    let device = |path: &Path| path.metadata().map(|metadata| metadata.dev()).ok();
    device(folder) != device(&folder.join(".."))
}

/// Whether a file there has the pages that were written, and no others.
fn is_exact(folder: &Path) -> io::Result<bool> {
    // Without a name: nothing is left of it, and nobody takes it for an instance's.
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR)?);
    file.set_len(64 * PIECE_BYTES)?;
    let mut expected = Vec::new();
    // Pages and pieces, at the beginning of a folio and not; far enough from each other.
    for (place, shift, bytes) in [
        (8, 0, PAGE),
        (16, 3 * PAGE, PAGE),
        (32, 0, PIECE_BYTES),
        (48, PAGE, PIECE_BYTES),
    ] {
        let begin = place * PIECE_BYTES + shift;
        file.write_all_at(&vec![1; bytes as usize], begin)?;
        expected.push(begin..begin + bytes);
    }
    if extents(&file)? != expected {
        return Ok(false);
    }
    // What is taken out of a folio is gone.
    let piece = expected[2].clone();
    let middle = piece.start + 4 * PAGE..piece.start + 6 * PAGE;
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, flags, middle.start, middle.end - middle.start)?;
    expected.splice(2..3, [piece.start..middle.start, middle.end..piece.end]);
    Ok(extents(&file)? == expected)
}

/// What is not a hole.
fn extents(file: &File) -> io::Result<Vec<Range<u64>>> {
    let (mut found, mut at) = (Vec::new(), 0);
    loop {
        let begin = match seek(file, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => return Ok(found),
            Err(errno) => return Err(errno.into()),
        };
        at = seek(file, SeekFrom::Hole(begin))?;
        found.push(begin..at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Unmounted at the end, however the test ends.
    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            std::fs::create_dir(folder.path().join("private")).unwrap();
            Self(folder)
        }

        fn private(&self) -> std::path::PathBuf {
            self.0.path().join("private")
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            _ = rustix::mount::unmount(self.private(), UnmountFlags::DETACH);
        }
    }

    #[test]
    fn it_is_mounted_once_and_keeps_what_is_in_it() {
        let folder = Folder::new();
        let found = mount(&folder.private()).unwrap();
        assert!(matches!(found, Found::Large | Found::Plain), "{found:?}");
        assert!(is_mounted(&folder.private()) && !is_mounted(folder.0.path()));
        std::fs::write(folder.private().join("5"), "page").unwrap();
        assert_eq!(mount(&folder.private()).unwrap(), Found::Before);
        assert_eq!(std::fs::read(folder.private().join("5")).unwrap(), b"page");
    }

    /// How many file systems are mounted at that folder, one over the other.
    fn mounts(folder: &Path) -> usize {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at = |line: &&str| line.split(' ').nth(4) == folder.to_str();
        table.lines().filter(at).count()
    }

    #[test]
    fn whatever_is_mounted_already_is_looked_at_before_it_is_used() {
        let folder = Folder::new();
        // Ramfs knows no holes.
        let flags = MountFlags::empty();
        rustix::mount::mount("ramfs", folder.private(), "ramfs", flags, c"mode=0700").unwrap();
        std::fs::write(folder.private().join("5"), "page").unwrap();
        assert!(mount(&folder.private()).is_err(), "what is in it is not lost");
        std::fs::remove_file(folder.private().join("5")).unwrap();
        let found = mount(&folder.private());
        assert!(matches!(found, Ok(Found::Large | Found::Plain)), "{found:?}");
        assert_eq!(mounts(&folder.private()), 1, "the other one is gone");
    }

    #[test]
    fn what_an_earlier_agent_has_left_in_the_folder_stays_in_sight() {
        let folder = Folder::new();
        std::fs::create_dir(folder.private().join("web")).unwrap();
        assert_eq!(mount(&folder.private()).unwrap(), Found::InUse);
        assert!(folder.private().join("web").exists());
    }

    #[test]
    fn holes_are_told_from_what_was_written() {
        let folder = Folder::new();
        let file = File::create_new(folder.private().join("5")).unwrap();
        assert_eq!(extents(&file).unwrap(), []);
        file.set_len(64 * PIECE_BYTES).unwrap();
        file.write_all_at(&[0; 2 * PAGE as usize], 9 * PIECE_BYTES)
            .unwrap();
        let written = 9 * PIECE_BYTES..9 * PIECE_BYTES + 2 * PAGE;
        assert_eq!(extents(&file).unwrap(), [written]);
    }
}
