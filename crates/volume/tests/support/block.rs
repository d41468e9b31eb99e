//! Volumes as block devices, and file systems on them.

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags};

use super::find;

/// The missing requirement, if there is one: root, FUSE, loop devices, and a program that makes a file
/// system.
pub fn obstacle() -> Option<&'static str> {
    let needed = ["/dev/fuse", "/dev/loop-control"];
    match rustix::process::geteuid().is_root() {
        false => Some("not root"),
        true if !needed.iter().all(|path| Path::new(path).exists()) => Some("no FUSE, or no loop devices"),
        true if find("mkfs.ext4").is_none() => Some("no mkfs.ext4"),
        true => None,
    }
}

/// A mounted file system, which is unmounted on drop.
pub struct Mounted(tempfile::TempDir);

impl Mounted {
    pub fn new(device: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        rustix::mount::mount(device, folder.path(), "ext4", MountFlags::empty(), None)
            .expect("it is mounted");
        Self(folder)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self) -> PathBuf {
        self.0.path().join("file")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        match std::thread::panicking() {
            // The daemon of the device may be gone.
            true => drop(rustix::mount::unmount(self.0.path(), UnmountFlags::DETACH)),
            false => rustix::mount::unmount(self.0.path(), UnmountFlags::empty()).expect("nobody uses it"),
        }
    }
}

/// The file behind a loop device; `None` if the device is free.
pub fn backing(device: &str) -> Option<String> {
    let name = device.strip_prefix("/dev/").expect("a device");
    std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()
}

pub fn make_file_system(device: &str) {
    let output = Command::new("mkfs.ext4").args(["-q", device]).output();
    let output = output.expect("it runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
