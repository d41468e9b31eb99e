//! On real file systems.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::Durability::{Later, Synced};
use crate::{AppendError, Error, Folder, Log, Replayed};

fn open(path: &Path) -> Result<(Log<Folder>, Replayed), Error> {
    Log::open(Folder::open(path).unwrap())
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn records_stay_and_only_the_owner_can_read_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("var/journal");
    let (mut log, replayed) = open(&path).unwrap();
    assert_eq!(replayed.records, Vec::<Vec<u8>>::new());
    log.reserve(1000).unwrap();
    log.append(b"a", Later).unwrap();
    log.append(b"b", Synced).unwrap();
    assert!(matches!(open(&path), Err(Error::InUse)));
    drop(log);
    assert_eq!(mode(&path), 0o700);
    assert_eq!(mode(&folder.path().join("var")), 0o700);
    let file = path.join("00000001.log");
    assert_eq!(mode(&file), 0o600);

    // A torn record, and files of somebody else.
    let mut bytes = fs::read(&file).unwrap();
    let whole = bytes.len();
    bytes.extend_from_slice(b"torn");
    fs::write(&file, bytes).unwrap();
    fs::write(path.join("README"), "").unwrap();
    fs::write(path.join("0000000F.log"), "").unwrap();
    let (mut log, replayed) = open(&path).unwrap();
    assert_eq!(replayed.records, [b"a", b"b"]);
    assert_eq!(replayed.damage, None);
    assert_eq!(fs::metadata(&file).unwrap().len() as usize, whole);
    log.append(b"c", Synced).unwrap();
    log.rewrite([b"c".to_vec()].into_iter()).unwrap();
    assert!(!file.exists());
    drop(log);
    assert_eq!(open(&path).unwrap().1.records, [b"c"]);
    assert!(path.join("README").exists() && path.join("0000000F.log").exists());
}

#[test]
fn a_folder_that_others_can_read_is_closed_and_a_link_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("journal");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    open(&path).unwrap();
    assert_eq!(mode(&path), 0o700);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    assert!(Folder::open(&link).is_err());
}

/// A file system of 64 KiB in memory.
struct Small(tempfile::TempDir);

impl Small {
    /// There is none without privileges.
    fn mount() -> Option<Self> {
        use rustix::mount::{MountFlags, mount};
        let folder = tempfile::tempdir().unwrap();
        let options = c"size=64k";
        match mount("journal", folder.path(), "tmpfs", MountFlags::empty(), options) {
            Err(rustix::io::Errno::PERM) => None,
            mounted => {
                mounted.unwrap();
                Some(Self(folder))
            }
        }
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let unmounted = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
        unmounted.expect("it is mounted");
    }
}

#[test]
fn a_full_disk_loses_nothing_and_what_was_reserved_can_be_used() {
    let Some(disk) = Small::mount() else {
        eprintln!("skipped: this process may not mount a file system");
        return;
    };
    let path = disk.0.path().join("journal");
    let record = |number: u8| vec![number; 3000];
    let (mut log, _) = open(&path).unwrap();
    log.append(&record(0), Synced).unwrap();
    let reserved = 3 * (3000 + crate::RECORD_OVERHEAD);
    log.reserve(reserved).unwrap();
    // Somebody else takes the rest.
    let other = disk.0.path().join("other");
    fs::write(&other, vec![1; 65536]).unwrap_err();
    for number in 1..=3 {
        log.append(&record(number), Synced).unwrap();
    }
    // There may be place in the last page.
    let mut kept = 4;
    let error = loop {
        match log.append(&record(kept), Synced) {
            Ok(()) => kept += 1,
            Err(error) => break error,
        }
        assert!(kept < 6);
    };
    assert!(
        matches!(error, AppendError::NotWritten(error) if error.raw_os_error() == Some(28)),
        "ENOSPC"
    );
    assert!(log.reserve(reserved).is_err());
    let expected: Vec<_> = (0..kept).map(record).collect();
    drop(log);
    // It can be opened on a full disk.
    let (mut log, replayed) = open(&path).unwrap();
    assert_eq!(replayed.records, expected);
    assert!(log.append(&record(9), Synced).is_err());
    fs::remove_file(&other).unwrap();
    log.append(&record(9), Synced).unwrap();
    drop(log);
    let records = open(&path).unwrap().1.records;
    assert_eq!(records[..kept as usize], expected);
    assert_eq!(records[kept as usize..], [record(9)]);
}
