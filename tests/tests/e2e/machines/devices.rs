//! Virtual machines whose disks are block devices of their hosts: a disk is the same one at both, or the virtual machine stays where it is.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use rustix::fs::{CWD, FileType, Mode, mknodat};
use verbatim_e2e::{ROLLED_BACK, TestLab};

use super::{Disk, Guest, HOSTS, NAME, blockers};
use crate::Test;

/// The name of the disk.
pub(crate) const NODE: &str = "/dev/verbatim-disk";

/// All of them.
pub fn tests() -> Vec<Test> {
    vec![Test::new("machines::block_devices", HOSTS, block_devices)]
}

/// A loop device over a file. It goes when this is dropped.
pub(crate) struct Loop {
    path: PathBuf,
    _file: Disk,
}

impl Loop {
    pub(crate) fn new() -> anyhow::Result<Self> {
        let file = Disk::new()?;
        let made = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file.path())
            .output()
            .context("losetup is not there")?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let path = PathBuf::from(String::from_utf8(made.stdout)?.trim());
        Ok(Self { path, _file: file })
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let gone = Command::new("losetup").arg("--detach").arg(&self.path).status();
        if !gone.is_ok_and(|status| status.success()) {
            eprintln!("{} is left behind", self.path.display());
        }
    }
}

/// Its node, by that name, in a host's own `/dev`, as the one of a LUN is.
pub(crate) fn put_in(lab: &TestLab, host: &str, disk: &Loop) -> anyhow::Result<()> {
    let number = std::fs::metadata(&disk.path)?.rdev();
    let node = lab.path(host, NODE)?;
    let mode = Mode::RUSR | Mode::WUSR;
    mknodat(CWD, &node, FileType::BlockDevice, mode, number)
        .with_context(|| format!("cannot make {}", node.display()))
}

fn block_devices(lab: &TestLab) -> anyhow::Result<()> {
    let (disk, another) = (Loop::new()?, Loop::new()?);
    for host in HOSTS {
        put_in(lab, host, &disk)?;
    }
    let drive = format!("file={NODE},format=raw,if=none,id=disk,cache=none,aio=threads");
    let device = "virtio-blk-pci,drive=disk,disable-modern=on";
    let guest = Guest::start(lab, &["-drive", &drive, "-device", device])?;
    for to in ["dst", "src"] {
        guest.instance.migrate(to)?.must_be_committed()?;
        guest.counts_on()?;
    }
    let node = lab.path("dst", NODE)?;
    std::fs::remove_file(&node)?;
    put_in(lab, "dst", &another)?;
    let refused = |why: &str| -> anyhow::Result<()> {
        let said = blockers(lab)?;
        ensure!(said.contains(why), "{said}");
        let migration = guest.instance.migrate("dst")?;
        ensure!(migration.outcome == ROLLED_BACK, "{migration:?}");
        guest.counts_on()
    };
    // A loop device is known by nothing but its number in this kernel.
    refused("nothing by which two hosts could tell")?;
    std::fs::remove_file(&node)?;
    std::fs::write(&node, "")?;
    refused("there is no block device")?;
    lab.ask(&["stop", NAME])?;
    Ok(())
}
