//! Disks that tests make: loop devices, and some with less room than they say.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::find;

/// Runs a program that must succeed; returns its output.
pub fn run(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

/// Whether loop devices and mounts are available. Reports the reason if not.
pub fn can_have_devices() -> bool {
    let programs = ["losetup", "blockdev", "mount", "umount"];
    let is_there =
        Path::new("/dev/loop-control").exists() && programs.iter().all(|name| find(name).is_some());
    let can = is_there && rustix::process::geteuid().is_root();
    if !can {
        eprintln!("skipped: not root, no loop devices, or one of {programs:?} is missing");
    }
    can
}

/// A block device over a file, removed on drop.
pub struct Loop {
    pub device: String,
}

impl Loop {
    pub fn over(file: &Path) -> Self {
        let device = run(Command::new("losetup").args(["--find", "--show"]).arg(file));
        Self { device }
    }

    /// Drops the device's pages from the page cache, after a write-back.
    pub fn forget(&self) {
        run(Command::new("blockdev").args(["--flushbufs", &self.device]));
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run(Command::new("losetup").args(["--detach", &self.device]));
    }
}

/// A file system in memory, unmounted on drop.
pub struct Memory(pub PathBuf);

impl Memory {
    pub fn mount(path: PathBuf, size: &str) -> Self {
        std::fs::create_dir_all(&path).expect("a folder");
        let size = format!("size={size}");
        run(Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
            .arg(&path));
        Self(path)
    }

    pub fn resize(&self, size: &str) {
        let options = format!("remount,size={size}");
        run(Command::new("mount").args(["-o", &options]).arg(&self.0));
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        run(Command::new("umount").arg("--lazy").arg(&self.0));
    }
}

/// A thin block device with less room than its size: writes beyond the room fail when they are flushed.
pub struct Thin {
    pub disk: Loop,
    pub room: Memory,
}

impl Thin {
    pub fn new(folder: PathBuf, bytes: u64, room: &str) -> Self {
        let room = Memory::mount(folder, room);
        let file = room.0.join("disk");
        std::fs::File::create(&file)
            .and_then(|file| file.set_len(bytes))
            .expect("a file");
        Self {
            disk: Loop::over(&file),
            room,
        }
    }
}
