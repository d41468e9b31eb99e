//! A volume as a block device of this machine: a file of a FUSE server in this process, and a loop device with direct I/O on it.
//!
//! ```text
//!  ext4 ──► /dev/loopN ──► one file (fuse, mounted nowhere) ──► /dev/fuse ──► front ──► Volume
//!              └─────────────────────┴──────────────────────────────┴──────► keeper: a copy of each descriptor
//! ```
//!
//! The device outlives the daemon: a keeper (`kept`) has its descriptors, and requests wait in the kernel
//! until the next daemon goes on with them ([`Device::go_on`]). The device goes after [`Device::let_go`],
//! when no program has it open any more; or when daemon and keeper are both killed: then its users get
//! errors.
//!
//! - `fuse`: the connection and the mount. `protocol`: the kernel's words. `front`: the server.
//! - `asking`: calls that wait for the front, in a process of their own.
//! - `users`: what is on a device. `sys`: system calls.

mod asking;
mod front;
mod fuse;
mod kept;
pub mod protocol;
mod sys;
mod users;

use std::fs::File;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, ensure};
use rustix::fs::SeekFrom;

use crate::volume::Volume;
use front::Front;
use fuse::Connection;
use kept::{Fds, Keeping};

pub use asking::run_role;
pub use kept::{Found, Label, Left, Places};
pub use sys::be_io_flusher;

/// What a device is to be.
pub struct Wanted<'a> {
    /// The place of its keeper.
    pub places: &'a Places,
    /// Identities of the volume and its data, the holder, and whether the device is read-only.
    pub label: Label,
    /// The kernel's claim that it resends requests is believed.
    pub may_resend: bool,
}

/// A loop device. When dropped, the loop device stays, and waits for another daemon.
pub struct Device {
    label: Label,
    front: Arc<Front>,
    fds: Arc<Fds>,
    keeping: Keeping,
}

impl Device {
    /// Makes a device of the volume.
    pub fn new(volume: &Arc<Volume>, wanted: Wanted<'_>) -> anyhow::Result<Self> {
        let length = volume.length();
        has_sectors(length)?;
        let is_read_only = wanted.label.read_only;
        let by_fuse = "cannot serve a file by FUSE";
        let connection = Connection::new(wanted.may_resend).context(by_fuse)?;
        let front = Front::new(volume, is_read_only)?;
        front
            .start(connection.channels().context(by_fuse)?)
            .context(by_fuse)?;
        let (path, device) = asking::make(connection.mount.as_fd(), is_read_only, length).context(by_fuse)?;
        let label = Label {
            path,
            resends: connection.resends,
            ..wanted.label
        };
        let fds = Arc::new(Fds {
            fuse: connection.fuse,
            clones: connection.clones,
            device: device.into(),
            mount: connection.mount,
        });
        let keeping = Keeping::new(wanted.places, &label, fds.clone(), None)
            .context("nobody would keep the block device if this daemon ended")?;
        tracing::debug!("a volume is {}", label.path.display());
        Ok(Self {
            label,
            front,
            fds,
            keeping,
        })
    }

    /// Serves a device that an earlier daemon has made.
    pub fn go_on(volume: &Arc<Volume>, places: &Places, found: Found) -> anyhow::Result<Self> {
        let Found { keeper, label, fds } = found;
        let connection = Connection {
            fuse: fds.fuse.clone(),
            clones: fds.clones.clone(),
            mount: fds.mount.try_clone()?,
            resends: label.resends,
        };
        let channels = connection.channels()?;
        let keeping = Keeping::new(places, &label, fds.clone(), Some(keeper))?;
        let front = Front::new(volume, label.read_only)?;
        connection
            .ask_again()
            .context("the kernel does not send its requests again")?;
        let device = Self {
            label,
            front,
            fds,
            keeping,
        };
        // The earlier daemon may have ended before it announced a new length.
        let (grown, shown, front) = (device.growing(), device.label.path.clone(), device.front.clone());
        device.front.go_on(channels, move || {
            tracing::info!(
                "{} goes on; {} requests came again",
                shown.display(),
                front.counts().again
            );
            if let Err(error) = grown() {
                tracing::error!("{} does not have its volume's length: {error:#}", shown.display());
            }
        })?;
        Ok(device)
    }

    /// Gives the device the volume's new length. The file system on it is not touched.
    pub fn grow(&self, length: u64) -> anyhow::Result<()> {
        self.front.set_length(length);
        self.growing()()
    }

    /// Announces the front's length to the kernel.
    fn growing(&self) -> impl FnOnce() -> anyhow::Result<()> + Send + use<> {
        let (fds, front, path) = (self.fds.clone(), self.front.clone(), self.label.path.clone());
        move || {
            let device = File::from(fds.device.try_clone()?);
            loop {
                let length = front.length();
                if rustix::fs::seek(&device, SeekFrom::End(0))? == length {
                    return Ok(());
                }
                let grown = asking::grow(fds.mount.as_fd(), &path, length);
                // It may be another one by now.
                if front.length() == length {
                    return grown;
                }
            }
        }
    }

    /// Takes no more requests: further ones are for the next daemon.
    pub fn stop(&self) {
        self.front.stop();
    }

    /// Waits until all taken requests are answered. Returns the number of those that are not at `end`.
    pub fn idle(&self, end: Instant) -> usize {
        let unanswered = self.front.idle(end);
        let counts = self.front.counts();
        tracing::info!(
            "{} waits for the next daemon; this one had {} reads, {} changes and {} flushes, {} of them after another one; {unanswered} have no answer",
            self.path().display(),
            counts.reads,
            counts.changes,
            counts.flushes,
            counts.again,
        );
        unanswered
    }

    /// Removes the device. While a program has it open, it stays until that program closes it.
    pub fn let_go(self) {
        self.keeping.end();
    }

    /// The path of the loop device.
    pub fn path(&self) -> &Path {
        &self.label.path
    }

    /// Whether the device is read-only.
    pub fn is_read_only(&self) -> bool {
        self.label.read_only
    }

    /// A user of the device, in words for the operator: a mounted file system, swap, or a device made of it.
    pub fn user(&self) -> Option<String> {
        user(self.path())
    }
}

/// A user of this device.
pub fn user(device: &Path) -> Option<String> {
    users::of(device)
}

/// An error unless the length is one of a block device.
pub fn has_sectors(length: u64) -> anyhow::Result<()> {
    ensure!(
        length.is_multiple_of(512),
        "a block device has whole sectors of 512 bytes, and the volume has {length} bytes: resize it"
    );
    Ok(())
}
