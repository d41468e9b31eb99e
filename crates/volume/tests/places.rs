//! The copy at the destination goes to the chosen place: a block device, or a file other than the daemon's.

mod support;

use std::path::{Path, PathBuf};
use std::process::Command;

use support::tenant::{BLOCK, Tenant};
use support::{Lab, find, until};

/// In bytes; the last chunk is shorter than the others.
const SIZE: u64 = (12 << 20) + BLOCK as u64;

/// Content of a used disk.
const RUBBISH: u8 = 0xa5;

/// A block device over a file, removed on drop.
struct Disk {
    file: PathBuf,
    device: String,
}

impl Disk {
    /// `None`, with the reason, if no device is available.
    fn new(file: PathBuf, bytes: u64) -> Option<Self> {
        let programs = ["losetup", "blockdev", "mkfs.ext4", "mount"];
        let is_there =
            Path::new("/dev/loop-control").exists() && programs.iter().all(|name| find(name).is_some());
        if !is_there || !rustix::process::geteuid().is_root() {
            eprintln!("skipped: not root, no loop devices, or one of {programs:?} is missing");
            return None;
        }
        std::fs::write(&file, vec![RUBBISH; bytes as usize]).expect("written");
        let device = run(Command::new("losetup").args(["--find", "--show"]).arg(&file));
        Some(Self { file, device })
    }

    fn bytes(&self) -> Vec<u8> {
        // Writes to the device may not have reached the file.
        run(Command::new("blockdev").args(["--flushbufs", &self.device]));
        std::fs::read(&self.file).expect("it is there")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        run(Command::new("losetup").args(["--detach", &self.device]));
    }
}

fn run(command: &mut Command) -> String {
    let output = command.output().expect("it runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8(output.stdout).expect("text").trim().to_owned()
}

/// Runs a command that must be refused; returns its error.
fn refused(lab: &Lab, host: usize, args: &[&str]) -> String {
    let output = lab.try_order(host, args);
    assert!(!output.status.success(), "{args:?} is not refused");
    String::from_utf8(output.stderr).expect("text")
}

fn tenant(lab: &Lab, seed: u64) -> Tenant {
    let sockets = [lab.socket(0, "db"), lab.socket(1, "db")];
    let tenant = Tenant::start(sockets, SIZE / BLOCK as u64, 3, seed);
    until("the tenant works", || tenant.done() > 200);
    tenant
}

#[test]
fn a_volume_moves_to_a_block_device_and_back() {
    let mut lab = Lab::new();
    let Some(disk) = Disk::new(lab.path(1, "disk"), SIZE + (1 << 20)) else {
        return;
    };
    lab.volume("db", &SIZE.to_string());
    lab.order(1, &["place", "db", "--data", &disk.device]);
    let said = refused(&lab, 1, &["place", "log", "--data", &disk.device]);
    assert!(said.contains("the place of the volume db"), "{said}");
    let said = refused(
        &lab,
        1,
        &["create", "log", "--size", "1M", "--data", &disk.device],
    );
    assert!(said.contains("the place of the volume db"), "{said}");
    let said = refused(&lab, 1, &["create", "db", "--size", "1M"]);
    assert!(said.contains("expected from another host"), "{said}");

    // The next daemon knows the place, too.
    lab.kill(1);
    lab.start(1, None);
    let status = lab.status(1, "db").expect("it is listed");
    assert_eq!(
        (&status["role"], &status["data"]),
        (&"placed".into(), &disk.device.as_str().into())
    );

    let running = tenant(&lab, 1);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    let before = running.done();
    until("the tenant goes on there", || running.done() > before + 200);
    let log = running.stop();
    lab.order(1, &["detach", "db"]);
    let (data, rest) = (disk.bytes(), vec![RUBBISH; 1 << 20]);
    log.check(&data[..SIZE as usize]);
    assert!(data[SIZE as usize..] == rest, "it wrote behind the volume");

    // There and back again, without a change.
    lab.order(1, &["migrate", "db", "--to", "a"]);
    for (from, to) in [(0, "b"), (1, "a")] {
        let moved = lab.order(from, &["migrate", "db", "--to", to, "--json"]);
        let moved: serde_json::Value = serde_json::from_str(&moved).expect("JSON");
        let sent = moved["sent_bytes"].as_u64().expect("a number");
        assert!(sent < 1 << 20, "{moved}");
    }
    log.check(&lab.data(0, "db"));
    let said = refused(&lab, 1, &["place", "db", "--data", &disk.device]);
    assert!(said.contains("there is a copy of db here"), "{said}");

    // The volume grows as far as both disks reach.
    let size = (SIZE + (1 << 20)).to_string();
    lab.order(0, &["resize", "db", "--size", &size]);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    let data = disk.bytes();
    log.check(&data[..SIZE as usize]);
    assert!(
        data[SIZE as usize..].iter().all(|&byte| byte == 0),
        "what is new is zeros"
    );
    let said = refused(&lab, 1, &["resize", "db", "--size", "1G"]);
    assert!(said.contains("the device has"), "{said}");
    assert_eq!(
        lab.status(1, "db").expect("listed")["length_bytes"],
        SIZE + (1 << 20)
    );

    // A volume without its device is neither served nor taken for an expected one.
    lab.kill(1);
    let settings = lab.path(1, "state/db/settings.json");
    let text = std::fs::read_to_string(&settings).expect("it is there");
    std::fs::write(&settings, text.replace(&disk.device, "/nowhere/db")).expect("written");
    lab.start(1, None);
    let status = lab.status(1, "db").expect("it is listed");
    assert_eq!(
        (&status["role"], &status["uri"]),
        (&"serving".into(), &serde_json::Value::Null)
    );
    assert!(
        status["waits"]
            .as_str()
            .is_some_and(|why| why.contains("/nowhere/db")),
        "{status}"
    );
    refused(&lab, 1, &["delete", "db"]);
    lab.kill(1);
    std::fs::write(&settings, text).expect("written");
    lab.start(1, None);
    assert_eq!(lab.role(1, "db"), "serving");

    lab.order(1, &["delete", "db"]);
    assert!(disk.bytes() == data, "a device that is given back stays as it is");
}

#[test]
fn what_cannot_take_the_copy_is_refused_and_the_source_serves() {
    let lab = Lab::new();
    let Some(small) = Disk::new(lab.path(1, "small"), 4 << 20) else {
        return;
    };
    lab.volume("db", &SIZE.to_string());
    let folder = lab.path(1, "");
    let nowhere = lab.path(1, "nowhere/db");
    for (place, why) in [
        (
            folder.to_str().expect("text"),
            "neither a file nor a block device",
        ),
        (nowhere.to_str().expect("text"), "there is no folder"),
    ] {
        let said = refused(&lab, 1, &["place", "db", "--data", place]);
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(lab.role(1, "db"), "none");

    lab.order(1, &["place", "db", "--data", &small.device]);
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    assert!(said.contains("gives it another place"), "{said}");
    assert_eq!(
        (lab.role(0, "db"), lab.role(1, "db")),
        ("serving".into(), "placed".into())
    );
    assert!(
        small.bytes().iter().all(|&byte| byte == RUBBISH),
        "it was written to"
    );

    // The kernel has the device, for a file system.
    let mounted = tempfile::tempdir().expect("a folder");
    let bytes = SIZE as usize;
    let Some(disk) = Disk::new(lab.path(1, "disk"), bytes as u64) else {
        return;
    };
    lab.order(1, &["place", "db", "--data", &disk.device]);
    run(Command::new("mkfs.ext4").args(["-q", "-F", &disk.device]));
    run(Command::new("mount").arg(&disk.device).arg(mounted.path()));
    let said = refused(&lab, 0, &["migrate", "db", "--to", "b"]);
    let placed = refused(&lab, 1, &["place", "log", "--data", &disk.device]);
    run(Command::new("umount").arg(mounted.path()));
    assert!(said.contains("is it mounted"), "{said}");
    assert!(placed.contains("the place of the volume db"), "{placed}");
    lab.order(0, &["migrate", "db", "--to", "b"]);
    assert_eq!(lab.role(1, "db"), "serving");
}

#[test]
fn a_place_is_taken_back_and_may_be_a_file() {
    let lab = Lab::new();
    lab.volume("db", &SIZE.to_string());
    let file = lab.path(1, "elsewhere");
    let place = file.to_str().expect("text");
    lab.order(1, &["place", "db", "--data", place]);
    lab.order(1, &["delete", "db"]);
    assert_eq!(lab.role(1, "db"), "none");
    lab.order(1, &["place", "db", "--data", place]);
    let running = tenant(&lab, 2);
    lab.order(0, &["migrate", "db", "--to", "b"]);
    running.stop().check(&std::fs::read(&file).expect("it is there"));
    assert!(!lab.path(1, "state/db/data").exists(), "it is in two places");
}
