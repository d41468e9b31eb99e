//! Which descriptors are channels.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use parking_lot::{RwLock, RwLockWriteGuard};
use verbatim_verbs::CmChannel;

/// A channel. A program may close its descriptor without librdmacm, and the number be another's: the channel's own duplicate of it
/// tells, which is the same file wherever the process is.
struct Known {
    channel: Arc<CmChannel>,
    /// The process that made it; a forked child has only the descriptor.
    pid: u32,
}

static CHANNELS: RwLock<Option<HashMap<RawFd, Known>>> = RwLock::new(None);

/// What the descriptor is, as the kernel tells its files apart.
fn file(fd: BorrowedFd<'_>) -> Option<(u64, u64)> {
    let stat = rustix::fs::fstat(fd).ok()?;
    Some((stat.st_dev, stat.st_ino))
}

impl Known {
    /// Whether the descriptor is still the channel's.
    fn is(&self, fd: RawFd) -> bool {
        // SAFETY: fstat looks at the number only; there is no file behind it, or one that it describes.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let own = file(self.channel.own());
        self.pid == std::process::id() && own.is_some() && file(borrowed) == own
    }
}

/// Keeps a channel; gives its descriptor.
pub fn insert(channel: Arc<CmChannel>) -> RawFd {
    let fd = channel.fd().as_raw_fd();
    let known = Known {
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
    known.is(fd).then(|| known.channel.clone())
}

/// Lets go of the channel with that descriptor, which is closed with the last who uses it.
pub fn remove(fd: RawFd) -> Option<Arc<CmChannel>> {
    let mut channels = CHANNELS.write();
    let known = channels.as_mut()?.remove(&fd)?;
    drop(channels);
    if known.is(fd) {
        return Some(known.channel);
    }
    abandon(known);
    None
}

/// All channels, while nobody else may look at them.
type Locked = RwLockWriteGuard<'static, Option<HashMap<RawFd, Known>>>;

thread_local! {
    static IN_FORK: RefCell<Option<Locked>> = const { RefCell::new(None) };
}

/// Nobody changes them while this thread forks: the child may open channels of its own.
pub fn before_fork() {
    let locked = CHANNELS.write();
    // A thread whose thread-locals are gone is about to end, and does not fork.
    drop(IN_FORK.try_with(|slot| slot.replace(Some(locked))));
}

/// In the parent and in the child.
pub fn after_fork() {
    drop(IN_FORK.try_with(RefCell::take));
}

/// Ends a channel whose descriptor is somebody else's now.
fn abandon(known: Known) {
    known.channel.close();
    // Dropping it would close the descriptor.
    std::mem::forget(known.channel);
}
