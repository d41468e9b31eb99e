//! Disks of device-mapper that fail on order, over loop devices over files in memory: a file is the medium, and is read past every cache above it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::ensure;

use crate::hosts::succeed;

/// What device-mapper counts in.
pub const SECTOR: u64 = 512;

/// A folder in memory, for media.
pub struct Ground(tempfile::TempDir);

impl Ground {
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self(tempfile::tempdir_in("/run")?))
    }

    /// A path there.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// A loop device over a file; it goes with it.
pub struct Medium {
    file: PathBuf,
    pub device: String,
}

impl Medium {
    /// Of zeros.
    pub fn new(file: PathBuf, bytes: u64) -> anyhow::Result<Self> {
        File::create(&file)?.set_len(bytes)?;
        Self::of(file)
    }

    /// Over a file that is there.
    pub fn of(file: PathBuf) -> anyhow::Result<Self> {
        let device = succeed(Command::new("losetup").args(["--find", "--show"]).arg(&file))?;
        Ok(Self { file, device })
    }

    /// All that it has.
    pub fn bytes(&self) -> anyhow::Result<Vec<u8>> {
        Ok(std::fs::read(&self.file)?)
    }

    /// Makes it larger.
    pub fn grow(&self, bytes: u64) -> anyhow::Result<()> {
        File::options().write(true).open(&self.file)?.set_len(bytes)?;
        succeed(Command::new("losetup").args(["--set-capacity", &self.device])).map(drop)
    }

    /// In sectors.
    pub fn sectors(&self) -> anyhow::Result<u64> {
        Ok(self.file.metadata()?.len() / SECTOR)
    }
}

impl Drop for Medium {
    fn drop(&mut self) {
        // A device that is in use still goes when it is not.
        let _ = succeed(Command::new("losetup").args(["--detach", &self.device]));
    }
}

/// `dmsetup`, without a udev that would answer it.
pub fn dmsetup(args: &[&str]) -> anyhow::Result<String> {
    succeed(Command::new("dmsetup").env("DM_DISABLE_UDEV", "1").args(args))
}

/// A device of device-mapper; it goes with it.
pub struct Mapped {
    pub name: String,
    pub path: PathBuf,
}

impl Mapped {
    /// With an identity of its own.
    pub fn new(name: &str, table: &str) -> anyhow::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let uuid = format!(
            "FAULTY-{}-{}",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        );
        Self::with_uuid(name, &uuid, table)
    }

    /// With that identity.
    pub fn with_uuid(name: &str, uuid: &str, table: &str) -> anyhow::Result<Self> {
        dmsetup(&["create", name, "--uuid", uuid, "--table", table])?;
        Ok(Self {
            name: name.to_owned(),
            path: Path::new("/dev/mapper").join(name),
        })
    }

    /// Another table, from now on. What is in the page cache stays there.
    pub fn load(&self, table: &str) -> anyhow::Result<()> {
        dmsetup(&["load", &self.name, "--table", table])?;
        self.suspend()?;
        self.resume()
    }

    /// Whoever asks for something waits from now on.
    pub fn suspend(&self) -> anyhow::Result<()> {
        dmsetup(&["suspend", "--nolockfs", &self.name]).map(drop)
    }

    /// Goes on.
    pub fn resume(&self) -> anyhow::Result<()> {
        dmsetup(&["resume", &self.name]).map(drop)
    }

    /// Its path, as a word of a command.
    pub fn word(&self) -> &str {
        self.path.to_str().unwrap_or_default()
    }

    /// All that it has, past the page cache.
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

    /// Has what is clean of it in the page cache dropped.
    pub fn forget(&self) -> anyhow::Result<()> {
        succeed(Command::new("blockdev").args(["--flushbufs", self.word()])).map(drop)
    }

    /// Keeps it open, so that its page cache outlives a daemon that closes it.
    pub fn keep_cache(&self) -> anyhow::Result<File> {
        let file = File::open(&self.path)?;
        file.read_at(&mut [0; 512], 0)?;
        Ok(file)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Where nothing can be read any more it goes all the same.
        let _ = dmsetup(&["resume", &self.name]);
        let _ = dmsetup(&["remove", "--retry", "--force", &self.name]);
    }
}

/// A file system that is mounted; unmounted with it.
pub struct Mounted(pub PathBuf);

impl Mounted {
    /// Of ext4, in a folder that is made.
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

/// A table with all of a medium, as it is.
pub fn whole(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!("0 {} linear {} 0", medium.sectors()?, medium.device))
}

/// Every write and flush fails; reads do not.
pub fn writes_fail(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!(
        "0 {} flakey {} 0 0 3600 1 error_writes",
        medium.sectors()?,
        medium.device
    ))
}

/// Every write and flush is forgotten, and said to be done.
pub fn writes_vanish(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!(
        "0 {} flakey {} 0 0 3600 1 drop_writes",
        medium.sectors()?,
        medium.device
    ))
}

/// Nothing works.
pub fn all_fails(medium: &Medium) -> anyhow::Result<String> {
    Ok(format!("0 {} error", medium.sectors()?))
}

/// Half a MiB in the middle can be neither read nor written.
pub fn has_a_hole(medium: &Medium) -> anyhow::Result<String> {
    let (sectors, device) = (medium.sectors()?, &medium.device);
    let (start, length) = (sectors / 2, 1024);
    let end = start + length;
    Ok(format!(
        "0 {start} linear {device} 0\n{start} {length} error\n{end} {} linear {device} {end}",
        sectors - end
    ))
}
