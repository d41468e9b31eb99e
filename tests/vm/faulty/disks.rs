//! Disks of device-mapper that fail on demand, over loop devices over files in memory: a file is the medium,
//! and is read past every cache above it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::ensure;

use crate::hosts::succeed;

/// Bytes in a sector of device-mapper.
pub const SECTOR: u64 = 512;

/// A folder in memory, for media.
pub struct Ground(tempfile::TempDir);

impl Ground {
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self(tempfile::tempdir_in("/run")?))
    }

    /// A path in this folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// A loop device over a file. The device is detached on drop.
pub struct Medium {
    file: PathBuf,
    pub device: String,
}

impl Medium {
    /// A medium of zeros.
    pub fn new(file: PathBuf, bytes: u64) -> anyhow::Result<Self> {
        File::create(&file)?.set_len(bytes)?;
        Self::of(file)
    }

    /// A medium over an existing file.
    pub fn of(file: PathBuf) -> anyhow::Result<Self> {
        let device = succeed(Command::new("losetup").args(["--find", "--show"]).arg(&file))?;
        Ok(Self { file, device })
    }

    /// Content of the whole medium.
    pub fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        Ok(std::fs::read(&self.file)?)
    }

    /// Grows the medium.
    pub fn grow(&self, bytes: u64) -> anyhow::Result<()> {
        File::options().write(true).open(&self.file)?.set_len(bytes)?;
        succeed(Command::new("losetup").args(["--set-capacity", &self.device])).map(drop)
    }

    /// Size in sectors.
    pub fn sectors(&self) -> anyhow::Result<u64> {
        Ok(self.file.metadata()?.len() / SECTOR)
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        // A device in use is detached when its last user closes it.
        let _ = succeed(Command::new("losetup").args(["--detach", &self.device]));
    }
}

/// Runs `dmsetup`, without udev, which would have to answer it.
pub fn dmsetup(args: &[&str]) -> anyhow::Result<String> {
    succeed(Command::new("dmsetup").env("DM_DISABLE_UDEV", "1").args(args))
}

/// A device of device-mapper. The device is removed on drop.
pub struct Mapped {
    pub name: String,
    pub path: PathBuf,
}

impl Mapped {
    /// A device with a unique UUID.
    pub fn new(name: &str, table: &str) -> anyhow::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let uuid = format!(
            "FAULTY-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        Self::with_uuid(name, &uuid, table)
    }

    /// A device with a given UUID.
    pub fn with_uuid(name: &str, uuid: &str, table: &str) -> anyhow::Result<Self> {
        dmsetup(&["create", name, "--uuid", uuid, "--table", table])?;
        Ok(Self {
            name: name.to_owned(),
            path: Path::new("/dev/mapper").join(name),
        })
    }

    /// Replaces the table. The page cache stays as it is.
    pub fn load(&self, table: &str) -> anyhow::Result<()> {
        dmsetup(&["load", &self.name, "--table", table])?;
        self.suspend()?;
        self.resume()
    }

    /// The table that the device has after it was resumed.
    pub fn prepare(&self, table: &str) -> anyhow::Result<()> {
        dmsetup(&["load", &self.name, "--table", table]).map(drop)
    }

    /// Suspends the device: all requests wait from now on.
    pub fn suspend(&self) -> anyhow::Result<()> {
        dmsetup(&["suspend", "--nolockfs", &self.name]).map(drop)
    }

    /// Resumes the device.
    pub fn resume(&self) -> anyhow::Result<()> {
        dmsetup(&["resume", &self.name]).map(drop)
    }

    /// Suspends the device until the result is dropped.
    pub fn hold(&self) -> anyhow::Result<Held<'_>> {
        self.suspend()?;
        Ok(Held(self))
    }

    /// The device's path as a word of a command.
    pub fn word(&self) -> &str {
        self.path.to_str().unwrap_or_default()
    }

    /// Content of the whole device, read past the page cache.
    pub fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        let from = format!("if={}", self.word());
        let output = Command::new("dd")
            .args([&from, "bs=1M", "iflag=direct", "status=none"])
            .output()?;
        ensure!(
            output.status.success(),
            "dd: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(output.stdout)
    }

    /// Drops the device's clean pages from the page cache.
    pub fn forget(&self) -> anyhow::Result<()> {
        succeed(Command::new("blockdev").args(["--flushbufs", self.word()])).map(drop)
    }

    /// Keeps the device open, so that its page cache outlives a daemon that closes the device.
    pub fn keep_cache(&self) -> anyhow::Result<File> {
        let file = File::open(&self.path)?;
        file.read_at(&mut [0; 512], 0)?;
        Ok(file)
    }
}

/// A suspended device, which is resumed on drop.
pub struct Held<'a>(&'a Mapped);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let _ = self.0.resume();
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // A device that cannot be read any more is removed all the same.
        let _ = dmsetup(&["resume", &self.name]);
        let _ = dmsetup(&["remove", "--retry", "--force", &self.name]);
    }
}

/// A mounted file system. It is unmounted on drop.
pub struct Mounted(pub PathBuf);

impl Mounted {
    /// Mounts an ext4 file system in a new folder.
    pub fn new(device: &str, at: PathBuf) -> anyhow::Result<Self> {
        std::fs::create_dir_all(&at)?;
        succeed(Command::new("mount").args(["-t", "ext4", device]).arg(&at))?;
        Ok(Self(at))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = succeed(Command::new("umount").arg(&self.0));
    }
}

/// Table of a whole medium without faults.
pub fn whole(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!("0 {} linear {} 0", medium.sectors()?, medium.device))
}

/// Table in which every write and flush fails; reads succeed.
pub fn writes_fail(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!(
        "0 {} flakey {} 0 0 3600 1 error_writes",
        medium.sectors()?,
        medium.device
    ))
}

/// Table in which every write and flush is dropped, and reported as done.
pub fn writes_vanish(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!(
        "0 {} flakey {} 0 0 3600 1 drop_writes",
        medium.sectors()?,
        medium.device
    ))
}

/// Table in which every request fails.
pub fn all_fails(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!("0 {} error", medium.sectors()?))
}

/// Table in which half a MiB in the middle can be neither read nor written.
pub fn has_a_hole(medium: &Medium) -> anyhow::Result<String> {
    let (sectors, device) = (medium.sectors()?, &medium.device);
    let (start, length) = (sectors / 2, 1024);
    let end = start + length;
    Ok(format!(
        "0 {start} linear {device} 0\n{start} {length} error\n{end} {} linear {device} {end}",
        sectors - end
    ))
}
