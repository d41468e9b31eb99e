//! The disk as a block device of this machine, by the kernel's own NBD client (module `nbd`).
//!
//! The kernel has one end of a pair of sockets, the disk the other. On this path the kernel allocates from
//! its own reserves, and this process allocates nothing. The device goes at any end of this process.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::block::PAGE_BYTES;

// `linux/nbd.h`.
const NBD_SET_SOCK: libc::Ioctl = 0xab00;
const NBD_SET_BLKSIZE: libc::Ioctl = 0xab01;
const NBD_DO_IT: libc::Ioctl = 0xab03;
const NBD_CLEAR_SOCK: libc::Ioctl = 0xab04;
const NBD_SET_SIZE_BLOCKS: libc::Ioctl = 0xab07;
const NBD_SET_FLAGS: libc::Ioctl = 0xab0a;

const HAS_FLAGS: libc::c_ulong = 1;
const SEND_TRIM: libc::c_ulong = 32;

/// Limit for the kernel to begin.
const BEGIN: Duration = Duration::from_secs(10);

/// Stack of the device's threads, which need little.
const STACK_BYTES: usize = 64 << 10;

/// A device of this machine.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
}

impl Device {
    /// Makes a device of this many bytes, and the socket for the kernel's requests.
    pub fn new(bytes: u64) -> anyhow::Result<(Self, UnixStream)> {
        let (path, file) = free()?;
        let (theirs, ours) = UnixStream::pair()?;
        let order = |request, argument: libc::c_ulong| {
            ioctl(&file, request, argument).with_context(|| format!("{} cannot be set up", path.display()))
        };
        order(NBD_CLEAR_SOCK, 0)?;
        order(NBD_SET_SOCK, theirs.as_raw_fd() as libc::c_ulong)?;
        order(NBD_SET_BLKSIZE, PAGE_BYTES)?;
        order(NBD_SET_SIZE_BLOCKS, bytes / PAGE_BYTES)?;
        order(NBD_SET_FLAGS, HAS_FLAGS | SEND_TRIM)?;
        let device = Self { path };
        device.begin(file, theirs.into())?;
        Ok((device, ours))
    }

    /// Starts a thread that stays in the kernel as long as the device exists.
    fn begin(&self, file: File, theirs: OwnedFd) -> anyhow::Result<()> {
        let ended = Arc::new(std::sync::OnceLock::new());
        let (ended_by, name) = (ended.clone(), self.name());
        std::thread::Builder::new()
            .name(name.clone())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let result = ioctl(&file, NBD_DO_IT, 0);
                let _ = ioctl(&file, NBD_CLEAR_SOCK, 0);
                drop(theirs);
                if let Err(error) = &result {
                    tracing::info!("{name} has ended: {error}");
                }
                let _ = ended_by.set(result);
            })?;
        // The kernel shows the process that serves a device once it takes requests.
        let pid = Path::new("/sys/block").join(self.name()).join("pid");
        let limit = Instant::now() + BEGIN;
        while !pid.exists() {
            if let Some(Err(error)) = ended.get() {
                bail!("{} does not begin: {error}", self.path.display());
            }
            if Instant::now() > limit {
                bail!("{} does not begin", self.path.display());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn name(&self) -> String {
        let name = self.path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// The path of the device.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Whether this machine swaps on a device, or another user has it exclusively. The thread that serves the
/// device must not ask this: opening a device may read from it.
pub fn is_in_use(path: &Path) -> bool {
    let exclusive = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(path);
    matches!(exclusive, Err(error) if error.raw_os_error() == Some(libc::EBUSY))
}

/// A free device of the kernel.
fn free() -> anyhow::Result<(PathBuf, File)> {
    if !Path::new("/sys/module/nbd").exists() {
        // A failure shows as a missing device.
        let _ = Command::new("modprobe").arg("nbd").output();
    }
    for number in 0.. {
        let shown = PathBuf::from(format!("/sys/block/nbd{number}"));
        if !shown.exists() {
            break;
        }
        if shown.join("pid").exists() {
            continue;
        }
        let path = PathBuf::from(format!("/dev/nbd{number}"));
        if is_in_use(&path) {
            continue;
        }
        // If two processes find the same device free, the kernel refuses one of them.
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        return Ok((path, file));
    }
    bail!("there is no free /dev/nbd*: does this kernel have the module nbd?")
}

fn ioctl(file: &File, request: libc::Ioctl, argument: libc::c_ulong) -> io::Result<()> {
    // SAFETY: these requests take a number, and touch no memory of this process.
    match unsafe { libc::ioctl(file.as_raw_fd(), request, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
