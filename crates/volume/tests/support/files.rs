//! A file system whose disk can run out of room: files keep what they had, and flushes of new data fail.

use std::path::PathBuf;
use std::process::Command;

use super::devices::{Thin, can_have_devices, run};
use super::{Lab, find};

/// Enough room.
const ROOM: &str = "200m";

/// A file system on a thin disk with allocated files. Its metadata have room, and writes to the files have
/// none.
pub struct Files {
    thin: Thin,
    /// Where it is mounted.
    pub mounted: PathBuf,
}

impl Files {
    /// On the first host; `None`, with a message, if that is impossible.
    pub fn new(lab: &Lab, bytes: u64) -> Option<Self> {
        if !can_have_devices() || find("mkfs.ext4").is_none() {
            return None;
        }
        let thin = Thin::new(lab.path(0, "thin"), bytes, ROOM);
        let mounted = lab.path(0, "disk");
        std::fs::create_dir_all(&mounted).expect("a folder");
        // A journal would need room as well.
        run(Command::new("mkfs.ext4")
            .args(["-q", "-O", "^has_journal", "-E", "lazy_itable_init=0"])
            .arg(&thin.disk.device));
        run(Command::new("mount").arg(&thin.disk.device).arg(&mounted));
        Some(Self { thin, mounted })
    }

    /// The file of the volume.
    pub fn data(&self) -> PathBuf {
        self.mounted.join("db.img")
    }

    /// From now on there is no room.
    pub fn fill(&self) {
        run(Command::new("sync").arg("--file-system").arg(&self.mounted));
        let stat = rustix::fs::statvfs(&self.thin.room.0).expect("a file system");
        let used = (stat.f_blocks - stat.f_bfree) * stat.f_frsize;
        self.thin.room.resize(&(used + (64 << 10)).to_string());
    }

    /// There is room again.
    pub fn make_room(&self) {
        self.thin.room.resize(ROOM);
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        run(Command::new("umount").arg("--lazy").arg(&self.mounted));
    }
}
