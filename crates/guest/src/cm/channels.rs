//! Which descriptors are channels.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use parking_lot::RwLock;
use verbatim_verbs::CmChannel;

/// A channel, and the file that its descriptor was: a program may close that without librdmacm, and its number be another's.
struct Known {
    channel: Arc<CmChannel>,
    file: (u64, u64),
    /// The process that made it; a forked child has only the descriptor.
    pid: u32,
}

static CHANNELS: RwLock<Option<HashMap<RawFd, Known>>> = RwLock::new(None);

/// What the descriptor is, as the kernel tells its files apart.
fn file(fd: RawFd) -> Option<(u64, u64)> {
    // SAFETY: fstat looks at the number only; there is no file behind it, or one that it describes.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let stat = rustix::fs::fstat(borrowed).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

/// Keeps a channel; gives its descriptor.
pub fn insert(channel: Arc<CmChannel>) -> RawFd {
    let fd = channel.fd().as_raw_fd();
    let known = Known {
        file: file(fd).unwrap_or_default(),
        channel,
        pid: std::process::id(),
    };
    // One that the program has closed by itself, and whose number this one has got, is dropped once nothing is locked. Its
    // descriptor is this one's now, and must not be closed.
    let stale = CHANNELS.write().get_or_insert_default().insert(fd, known);
    stale.into_iter().for_each(abandon);
    fd
}

/// The channel with that descriptor.
pub fn find(fd: RawFd) -> Option<Arc<CmChannel>> {
    let channels = CHANNELS.read();
    let known = channels.as_ref()?.get(&fd)?;
    let is_it = known.pid == std::process::id() && file(fd) == Some(known.file);
    is_it.then(|| known.channel.clone())
}

/// Lets go of the channel with that descriptor, which is closed with the last who uses it.
pub fn remove(fd: RawFd) -> Option<Arc<CmChannel>> {
    let mut channels = CHANNELS.write();
    let known = channels.as_mut()?.remove(&fd)?;
    drop(channels);
    if known.pid == std::process::id() && file(fd) == Some(known.file) {
        return Some(known.channel);
    }
    abandon(known);
    None
}

/// Ends a channel whose descriptor is somebody else's now.
fn abandon(known: Known) {
    known.channel.close();
    // Dropping it would close the descriptor.
    std::mem::forget(known.channel);
}
