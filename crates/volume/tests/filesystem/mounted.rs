//! File systems on a device: made, mounted and checked.

use std::path::PathBuf;
use std::process::Command;

use crate::support::devices::run;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Ext4,
    Xfs,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    pub fn make(self, device: &str) {
        match self {
            Self::Ext4 => run(Command::new("mkfs.ext4").args(["-q", "-F", "-b", "4096", device])),
            Self::Xfs => run(Command::new("mkfs.xfs").args(["-q", "-f", device])),
        };
    }

    /// Checks the unmounted file system for errors.
    pub fn check(self, device: &str) {
        match self {
            Self::Ext4 => run(Command::new("e2fsck").args(["-f", "-n", device])),
            Self::Xfs => run(Command::new("xfs_repair").args(["-n", device])),
        };
    }
}

/// A mounted file system, which is unmounted on drop.
pub struct Mounted {
    pub path: PathBuf,
    is_mounted: bool,
}

impl Mounted {
    /// Mounts the file system. Its journal is recovered first, if it has entries.
    pub fn new(kind: Kind, device: &str, path: PathBuf, options: &str) -> Self {
        std::fs::create_dir_all(&path).expect("a folder");
        run(Command::new("mount")
            .args(["-t", kind.name(), "-o", options, device])
            .arg(&path));
        Self {
            path,
            is_mounted: true,
        }
    }

    /// Unmounts the file system, which writes all data to the device.
    pub fn unmount(mut self) {
        self.is_mounted = false;
        run(Command::new("umount").arg(&self.path));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_mounted {
            // The device may have gone.
            let _ = Command::new("umount").arg(&self.path).output();
            let _ = Command::new("umount").arg("--lazy").arg(&self.path).output();
        }
    }
}
