//! Devices that vanish, return under another name, are late, or are replaced by others.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use verbatim_e2e::eventually;

use crate::destination::noise;
use crate::disks::{Ground, Mapped, Medium, whole};
use crate::hosts::{Hosts, LIMIT, VOLUME, expect_eio, expect_same, read_all, succeed, write_all};
use crate::inside::Case;

/// All cases of this file.
pub const ALL: &[Case] = &[
    ("identity::late_and_under_another_name", late),
    ("identity::another_device", another),
    ("identity::a_scsi_disk_goes_and_comes_again", scsi),
];

const SIZE: u64 = 4 << 20;

/// A symbolic link to a device, like udev's in /dev/disk.
struct Link(PathBuf);

impl Link {
    fn to(&self, device: &Path) -> anyhow::Result<()> {
        let _ = std::fs::remove_file(&self.0);
        Ok(std::os::unix::fs::symlink(device, &self.0)?)
    }

    fn word(&self) -> &str {
        self.0.to_str().unwrap_or_default()
    }
}

/// Creates the first host's volume on the device of the link; returns its content.
fn serve(hosts: &Hosts, link: &Link) -> anyhow::Result<Vec<u8>> {
    let size = SIZE.to_string();
    hosts.order(0, &["create", VOLUME, "--size", &size, "--data", link.word()])?;
    hosts.order(0, &["attach", VOLUME])?;
    let data = noise(1, SIZE);
    let mut client = hosts.client(0)?;
    write_all(&mut client, &data)?;
    client.flush()?;
    Ok(data)
}

/// An error unless the copy waits for its data, for the given reason.
fn waits(hosts: &Hosts, reason: &str) -> anyhow::Result<()> {
    let status = hosts.status(0)?;
    let why = status["waits"].as_str().unwrap_or_default();
    ensure!(
        why.contains(reason),
        "it does not wait because of {reason:?}: {status}"
    );
    Ok(())
}

/// A device that is missing when the daemon starts, and appears later under another name and another number.
fn late() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let medium = Medium::new(ground.path("medium"), SIZE)?;
    let between_medium = Medium::new(ground.path("between"), SIZE)?;
    let link = Link(ground.path("by-id"));
    let first = Mapped::with_uuid("first", "FAULTY-late", &whole(&medium)?)?;
    link.to(&first.path)?;
    let mut hosts = Hosts::up()?;
    let data = serve(&hosts, &link)?;
    hosts.leave(0);
    drop(first);
    std::fs::remove_file(&link.0)?;
    hosts.start(0)?;
    waits(&hosts, "are missing")?;
    ensure!(!link.0.exists(), "something was put in its place");
    // Another device takes the old number.
    let _between = Mapped::new("between", &whole(&between_medium)?)?;
    let again = Mapped::with_uuid("again", "FAULTY-late", &whole(&medium)?)?;
    link.to(&again.path)?;
    let mut client = hosts.client(0)?;
    expect_same("the volume", &read_all(&mut client)?, &data)?;
    client.write(0, &[1; 512], true)?;
    ensure!(
        between_medium.bytes()?.iter().all(|&byte| byte == 0),
        "the other device was written to"
    );
    // Dropped before the disks.
    drop(hosts);
    Ok(())
}

/// Another device takes the place of the volume's: it is neither served nor touched, and the right device is
/// served again without a command.
fn another() -> anyhow::Result<()> {
    let ground = Ground::new()?;
    let medium = Medium::new(ground.path("medium"), SIZE)?;
    let others = Medium::new(ground.path("others"), SIZE)?;
    let link = Link(ground.path("by-path"));
    let disk = Mapped::new("right", &whole(&medium)?)?;
    let other = Mapped::new("other", &whole(&others)?)?;
    link.to(&disk.path)?;
    let mut hosts = Hosts::up()?;
    let data = serve(&hosts, &link)?;
    hosts.kill(0);
    link.to(&other.path)?;
    hosts.start(0)?;
    waits(&hosts, "is not what the volume had")?;
    let said = hosts.refused(0, &["migrate", VOLUME, "--to", "b"])?;
    ensure!(!said.is_empty(), "a move is refused without a word");
    ensure!(others.bytes()?.iter().all(|&byte| byte == 0), "it was written to");
    link.to(&disk.path)?;
    let mut client = hosts.client(0)?;
    expect_same("the volume", &read_all(&mut client)?, &data)?;
    client.write(0, &[1; 512], true)?;
    ensure!(others.bytes()?.iter().all(|&byte| byte == 0), "it was written to");
    Ok(())
}

/// The present SCSI disk.
fn disk() -> anyhow::Result<Option<PathBuf>> {
    for entry in std::fs::read_dir("/sys/block")? {
        let entry = entry?;
        let name = entry.file_name().into_string().unwrap_or_default();
        let node = Path::new("/dev").join(&name);
        if name.starts_with("sd") && node.exists() {
            return Ok(Some(node));
        }
    }
    Ok(None)
}

/// A disk is pulled out while it serves, and returns under another name.
fn scsi() -> anyhow::Result<()> {
    let mut hosts = Hosts::up()?;
    succeed(std::process::Command::new("modprobe").args(["scsi_debug", "dev_size_mb=8", "sector_size=512"]))?;
    let link = Link(hosts.path("by-id"));
    let first = eventually("a SCSI disk", LIMIT, disk)?;
    link.to(&first)?;
    let data = serve(&hosts, &link)?;
    let name = first.file_name().context("a name")?.to_owned();
    std::fs::write(Path::new("/sys/block").join(&name).join("device/delete"), "1")?;
    let mut client = hosts.client(0)?;
    // The page cache may take the write.
    let _ = client.write(0, &[9; 4096], false);
    expect_eio("a flush", client.flush())?;
    expect_eio("a write", client.write(0, &[9; 4096], false))?;
    hosts.expect_suspect(0, true)?;
    ensure!(hosts.role(0)? == "serving", "{}", hosts.logs());
    // Older blocks are read from the page cache, or fail; they are never wrong.
    let mut rest = vec![0; 4096];
    if client.read(SIZE / 2, &mut rest).is_ok() {
        expect_same("the rest", &rest, &data[SIZE as usize / 2..][..4096])?;
    }
    let all = eventually("its host", LIMIT, || {
        let mut hosts = std::fs::read_dir("/sys/class/scsi_host")?;
        Ok(hosts.next().transpose()?.map(|host| host.path()))
    })?;
    std::fs::write(all.join("scan"), "- - -")?;
    let again = eventually("the disk has come again", LIMIT, disk)?;
    ensure!(again != first, "it has come by the same name");
    drop(client);
    hosts.kill(0);
    link.to(&again)?;
    hosts.start(0)?;
    let mut client = hosts.client(0)?;
    hosts.expect_suspect(0, true)?;
    expect_eio("a write", client.write(0, &[9; 4096], false))?;
    expect_same("what was flushed", &read_all(&mut client)?[4096..], &data[4096..])?;
    hosts.order(0, &["accept", VOLUME])?;
    hosts.expect_suspect(0, false)?;
    client.write(0, &data[..4096], true)?;
    hosts.migrate(0, 1, &[])?;
    expect_same("the other host's file", &hosts.data(1)?, &data)?;
    drop(hosts);
    succeed(std::process::Command::new("modprobe").args(["--remove", "scsi_debug"])).map(drop)
}
