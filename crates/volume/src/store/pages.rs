//! The page cache of a block device, kept for the next daemon.
//!
//! Linux drops the pages of a block device with its last descriptor, and with them the trace of a flush that has
//! failed. So a keeper has a second descriptor of the device, opened for itself and not exclusively. It outlives a
//! daemon that is killed, and shows two things to the next one:
//!
//! - The pages are still there, and can be compared with the disk.
//! - The kernel reports an error of writing back to each open file that was open then, once. What it has reported to
//!   the dead daemon, the kept descriptor has not heard yet. So also pages that have left the page cache are known of.
//!
//! ```text
//!  RUN/volumes/NAME.pages   the keeper's socket; each set is one descriptor, and the last set counts
//! ```

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use rustix::fs::SeekFrom;
use verbatim_keeper::{Keeper, Kept, OWN_PROGRAM};

use super::trust::PAGES;

/// Limit for a keeper to carry out an order: it is idle, unless another process has it.
const ANSWER: Duration = Duration::from_secs(10);

/// The keeper of a device's pages. There may be none at the socket.
#[derive(Debug, Clone)]
pub struct Pages {
    socket: PathBuf,
}

impl Pages {
    /// The one with this socket.
    pub fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// The descriptor of this very device that an earlier daemon has left; `None` if there is none.
    pub fn left(&self, device: &File) -> anyhow::Result<Option<File>> {
        match self.find()? {
            Some((_, kept)) => of(kept, device),
            None => Ok(None),
        }
    }

    /// Has the pages kept, unless they are already.
    pub fn keep(&self, device: &File) -> anyhow::Result<()> {
        match self.left(device)? {
            Some(_) => Ok(()),
            None => self.keep_anew(device),
        }
    }

    /// Has the pages kept by a new descriptor. Errors so far are dealt with: it reports later ones only.
    pub fn keep_anew(&self, device: &File) -> anyhow::Result<()> {
        // Not by its name, which another device may have by now.
        let path = format!("/proc/self/fd/{}", device.as_raw_fd());
        let mut options = OpenOptions::new();
        let second = options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let is_its = |kept: &Option<Kept>| kept.as_ref().is_some_and(|(label, _)| *label == label_of(device));
        let found = match self.find()? {
            Some((keeper, kept)) if is_its(&kept) => Some(keeper),
            // It has another device.
            Some((keeper, _)) => {
                keeper.end();
                None
            }
            None => None,
        };
        let keeper = match found {
            Some(keeper) => keeper,
            None => Keeper::start(Path::new(OWN_PROGRAM), &self.socket)?,
        };
        let kept = keeper.keep(label_of(device), &[second.as_fd()]);
        if kept.is_err() {
            keeper.end();
        }
        kept
    }

    /// Whether there is a keeper, as far as one can say.
    pub fn is_any(&self) -> bool {
        !matches!(Keeper::look_within(&self.socket, ANSWER), Ok(None))
    }

    /// Ends the keeper, if there is one: the pages go with the daemon's descriptor.
    pub fn end(&self) {
        if !self.socket.exists() {
            return;
        }
        match Keeper::look_within(&self.socket, ANSWER) {
            Ok(Some(keeper)) => keeper.end(),
            Ok(None) => drop(std::fs::remove_file(&self.socket)),
            Err(error) => tracing::warn!("a keeper has a device still: {error:#}"),
        }
    }

    /// The keeper, and what it has.
    fn find(&self) -> anyhow::Result<Option<(Keeper, Option<Kept>)>> {
        let Some(keeper) = Keeper::look_within(&self.socket, ANSWER)? else {
            return Ok(None);
        };
        let kept = keeper.take()?.pop();
        Ok(Some((keeper, kept)))
    }
}

/// Ends all keepers of pages. No daemon runs.
pub fn end_all(runtime_dir: &Path) {
    let folder = std::fs::read_dir(runtime_dir.join("volumes"));
    let paths = folder.into_iter().flatten().flatten().map(|entry| entry.path());
    for path in paths.filter(|path| path.extension().is_some_and(|kind| kind == PAGES)) {
        Pages::at(path).end();
    }
}

/// The kept descriptor, if it is of this device.
fn of(kept: Option<Kept>, device: &File) -> anyhow::Result<Option<File>> {
    let Some((label, mut fds)) = kept else {
        return Ok(None);
    };
    let own = fds.pop().context("a keeper has no descriptor")?;
    let length = |file: &File| rustix::fs::seek(file, SeekFrom::End(0));
    let file = File::from(own);
    // A disk that was pulled out has no length any more. Another one may have its number.
    let is_it = label == label_of(device)
        && file.metadata()?.rdev() == device.metadata()?.rdev()
        && matches!((length(&file), length(device)), (Ok(kept), Ok(now)) if kept == now && now > 0);
    Ok(is_it.then_some(file))
}

/// The device's number, and the kernel's count of devices (Linux 5.15 and later), which gives no number twice until
/// the machine is started again.
fn label_of(device: &File) -> Vec<u8> {
    let number = device.metadata().map_or(0, |metadata| metadata.rdev());
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let folder = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition has its disk's.
    let count = ["diskseq", "../diskseq"].iter().find_map(|name| {
        let folder = folder.canonicalize().ok()?;
        std::fs::read_to_string(folder.join(name)).ok()
    });
    format!("{major}:{minor} {}", count.unwrap_or_default().trim()).into_bytes()
}

/// Flushes by a kept descriptor: an error is one that an earlier daemon may have heard alone.
pub fn flush_by(left: &File) -> io::Result<()> {
    left.sync_data().map_err(|error| {
        io::Error::other(format!(
            "the disk did not take something that was written, and nobody has noted it: {error}"
        ))
    })
}
