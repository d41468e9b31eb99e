//! A file system in memory that is soon full.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// File that fills it.
const FILLER: &str = ".filler";

/// It is unmounted with it.
pub struct Small(PathBuf);

impl Small {
    /// On that folder, which is made; nothing, and a word, where it cannot be.
    pub fn mount(folder: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir_all(&folder).expect("a folder");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(&folder)
            .status();
        if !mount.is_ok_and(|status| status.success()) {
            eprintln!("skipped: this test must mount a tmpfs");
            return None;
        }
        Some(Self(folder))
    }

    /// Leaves so many bytes.
    pub fn fill(&self, left: u64) {
        let mut file = File::options()
            .append(true)
            .create(true)
            .open(self.0.join(FILLER))
            .expect("a file");
        while file.write_all(&[1; 4096]).is_ok() {}
        let length = file.metadata().expect("a file").len();
        // A last incomplete block is given back, too.
        let whole = length / 4096 * 4096;
        file.set_len(whole.saturating_sub(left)).expect("shorter");
    }

    /// There is room again.
    pub fn clear(&self) {
        std::fs::remove_file(self.0.join(FILLER)).expect("it was filled");
    }

    /// Nothing can be changed there, or everything.
    pub fn be_read_only(&self, is_read_only: bool) {
        let how = if is_read_only { "remount,ro" } else { "remount,rw" };
        let status = Command::new("mount").args(["-o", how]).arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "not remounted");
    }

    /// Its free bytes.
    pub fn free(&self) -> u64 {
        free(&self.0)
    }
}

fn free(path: &Path) -> u64 {
    let stat = rustix::fs::statvfs(path).expect("a file system");
    stat.f_bavail * stat.f_frsize
}

impl Drop for Small {
    fn drop(&mut self) {
        let unmounted = Command::new("umount").arg("--lazy").arg(&self.0).status();
        assert!(unmounted.is_ok_and(|status| status.success()), "it stays mounted");
    }
}
