//! A volume as a block device, with a file system that is mounted.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountFlags, UnmountFlags};
use support::{Lab, find, until};

/// What is needed: root, FUSE, loop devices, and a program that makes a file system.
fn obstacle() -> Option<&'static str> {
    let needed = ["/dev/fuse", "/dev/loop-control"];
    match rustix::process::geteuid().is_root() {
        false => Some("not root"),
        true if !needed.iter().all(|path| Path::new(path).exists()) => Some("no FUSE, or no loop devices"),
        true if find("mkfs.ext4").is_none() => Some("no mkfs.ext4"),
        true => None,
    }
}

/// A mounted file system, that is unmounted with it.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn new(device: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        rustix::mount::mount(device, folder.path(), "ext4", MountFlags::empty(), None)
            .expect("it is mounted");
        Self(folder)
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("file")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        rustix::mount::unmount(self.0.path(), UnmountFlags::empty()).expect("nobody uses it");
    }
}

/// What the kernel has behind a loop device; nothing where that is free.
fn backing(device: &str) -> Option<String> {
    let name = device.strip_prefix("/dev/").expect("a device");
    std::fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).ok()
}

fn make_file_system(device: &str) {
    let output = Command::new("mkfs.ext4").args(["-q", device]).output();
    let output = output.expect("it runs");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_file_system_on_a_volume_is_there_again_and_goes_with_nobody() {
    if let Some(obstacle) = obstacle() {
        eprintln!("skipped: {obstacle}");
        return;
    }
    let mut lab = Lab::new();
    lab.order(0, &["create", "db", "--size", "64M"]);
    let device = lab.order(0, &["attach", "db", "--device"]);
    assert_eq!(
        lab.order(0, &["attach", "db", "--device"]),
        device,
        "it is one device"
    );
    make_file_system(&device);
    let content: Vec<u8> = (0..5_000_000u32).map(|index| (index / 7) as u8).collect();
    {
        let mounted = Mounted::new(&device);
        std::fs::write(mounted.file(), &content).expect("written");
        for order in [["detach", "db"].as_slice(), &["migrate", "db", "--to", "b"]] {
            let refused = lab.try_order(0, order);
            let why = String::from_utf8_lossy(&refused.stderr);
            assert!(
                !refused.status.success() && why.contains("in use as /dev/loop"),
                "{why}"
            );
        }
        assert_eq!(std::fs::read(mounted.file()).expect("read"), content);
    }
    // It moves, and what was written is at the other host.
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(backing(&device), None, "the device has gone");
    let device = lab.order(1, &["attach", "db", "--device"]);
    {
        let mounted = Mounted::new(&device);
        assert_eq!(std::fs::read(mounted.file()).expect("read"), content);
    }
    lab.order(1, &["detach", "db"]);
    assert_eq!(backing(&device), None, "the device has gone");

    // A daemon that is killed leaves nothing, either.
    let device = lab.order(1, &["attach", "db", "--device"]);
    lab.kill(1);
    until("the device of a daemon that was killed goes", || {
        backing(&device).is_none()
    });
    lab.start(1, None);
    let device = lab.order(1, &["attach", "db", "--device"]);
    let mounted = Mounted::new(&device);
    assert_eq!(std::fs::read(mounted.file()).expect("read"), content);
}
