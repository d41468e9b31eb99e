//! A disk as a file system: ext4 on a loop device with direct I/O on a file of a FUSE server, as a container has a volume.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use verbatim_volume::control::Order;

use crate::disk::ended;
use crate::disk::servers::{Ours, Server, until_there};

/// The volume's name, and the instance that has it.
pub const VOLUME: &str = "rocksdb";
const HOLDER: &str = "bench";

/// What is mounted, as long as it lives.
pub enum Mounted<'a> {
    Ours(#[expect(dead_code, reason = "it is there to be dropped")] Volume<'a>),
    Foreign(#[expect(dead_code, reason = "it is there to be dropped")] Foreign),
}

/// A file system that is unmounted with it.
struct Mount(PathBuf);

impl Mount {
    /// As `verbatim run --volume` mounts it.
    fn new(device: &Path, folder: &Path) -> anyhow::Result<Self> {
        std::fs::create_dir_all(folder)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount(device, folder, "ext4", flags, None)
            .with_context(|| format!("cannot mount {}", device.display()))?;
        Ok(Self(folder.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.0, UnmountFlags::NOFOLLOW) {
            eprintln!("{} stays mounted: {error}", self.0.display());
        }
    }
}

/// Makes the file system. What the image has where it is free stays there: a copy of zeros would cost less.
pub fn make(device: &Path) -> anyhow::Result<()> {
    ended(
        Command::new("mkfs.ext4")
            .args(["-q", "-E", "nodiscard"])
            .arg(device),
    )
    .map(drop)
}

/// A volume of the first host's, lent and mounted.
pub struct Volume<'a> {
    // In the order in which they go.
    mount: Option<Mount>,
    ours: &'a Ours,
}

impl<'a> Volume<'a> {
    /// With a new file system if that is wanted.
    pub fn mount(
        ours: &'a Ours,
        image: &Path,
        size: u64,
        folder: &Path,
        is_new: bool,
    ) -> anyhow::Result<Self> {
        let device = ours.lent(VOLUME, HOLDER, size, image)?;
        if is_new {
            make(&device)?;
        }
        let mount = Some(Mount::new(&device, folder)?);
        Ok(Self { mount, ours })
    }
}

impl Drop for Volume<'_> {
    fn drop(&mut self) {
        drop(self.mount.take());
        let order = Order::Detach {
            name: VOLUME.to_owned(),
            holder: Some(HOLDER.to_owned()),
        };
        let given_back = self.ours.order("a", &order).map(drop);
        if let Err(error) = given_back.and_then(|()| self.ours.forget(VOLUME)) {
            eprintln!("the volume {VOLUME} stays: {error:#}");
        }
    }
}

/// A loop device that goes with it.
struct Loop(PathBuf);

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(error) = ended(Command::new("losetup").arg("--detach").arg(&self.0)) {
            eprintln!("{} stays: {error:#}", self.0.display());
        }
    }
}

/// libnbd's `nbdfuse`: a file of its FUSE server is what somebody serves by NBD.
struct Fuse {
    folder: PathBuf,
    _server: Server,
}

impl Drop for Fuse {
    fn drop(&mut self) {
        if let Err(error) = unmount(&self.folder, UnmountFlags::NOFOLLOW) {
            eprintln!("{} stays mounted: {error}", self.folder.display());
        }
    }
}

/// Somebody else's disk, the same way. QEMU has a FUSE server as well; that of QEMU 7.2 mixes up writes that come at a time, and ext4 finds its
/// journal spoilt when it is mounted.
pub struct Foreign {
    // In the order in which they go.
    _mount: Mount,
    _loop: Loop,
    _fuse: Fuse,
}

impl Foreign {
    /// What is served at that address; what belongs to it lies in `folder`.
    pub fn mount(uri: &str, folder: &Path, at: &Path) -> anyhow::Result<Self> {
        let files = folder.join("nbdfuse");
        std::fs::create_dir_all(&files)?;
        let mut command = Command::new("nbdfuse");
        command.arg(&files).arg(uri);
        let server = Server::start(&mut command, &folder.join("nbdfuse.log"))?;
        let file = files.join("nbd");
        until_there(&file)?;
        let fuse = Fuse {
            folder: files,
            _server: server,
        };
        let mut command = Command::new("losetup");
        command.args(["--find", "--show", "--direct-io=on"]).arg(&file);
        let device = Loop(ended(&mut command)?.trim().into());
        Ok(Self {
            _mount: Mount::new(&device.0, at)?,
            _loop: device,
            _fuse: fuse,
        })
    }
}
