//! A file system in memory that is soon full.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the file that fills the file system.
const FILLER: &str = ".filler";

/// The file system, which is unmounted on drop.
pub struct Small(PathBuf);

impl Small {
    /// Mounts a file system on this folder, which is made; `None`, with a message, if that is impossible.
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

    /// Fills the file system up to this many bytes.
    pub fn fill(&self, left: u64) {
        let mut file = File::options()
            .append(true)
            .create(true)
            .open(self.0.join(FILLER))
            .expect("a file");
        while file.write_all(&[1; 4096]).is_ok() {}
        let length = file.metadata().expect("a file").len();
        // A last incomplete block is given back as well.
        let whole = length / 4096 * 4096;
        file.set_len(whole.saturating_sub(left)).expect("shorter");
    }

    /// Makes room again.
    pub fn clear(&self) {
        std::fs::remove_file(self.0.join(FILLER)).expect("it was filled");
    }

    /// Makes the file system read-only, or writable again.
    pub fn be_read_only(&self, is_read_only: bool) {
        let how = if is_read_only { "remount,ro" } else { "remount,rw" };
        let status = Command::new("mount").args(["-o", how]).arg(&self.0).status();
        assert!(status.is_ok_and(|status| status.success()), "not remounted");
    }

    /// The free bytes.
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
