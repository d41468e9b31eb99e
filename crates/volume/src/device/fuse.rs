//! A FUSE connection with a file system of one file: its root is the file.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, StatxFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use super::protocol::{self, Offer, Op};
use super::sys;

/// The largest request. What the kernel has is cut into such.
pub const MAX_BYTES: u32 = 1 << 20;

/// What is before the data of a request, rounded up.
pub const MAX_HEADER: usize = 4096;

/// Threads that take requests of one volume.
const THREADS: usize = 2;

/// So long the kernel may take to say what it can do: it does before the mount is there.
const BEGIN: Duration = Duration::from_secs(10);

/// A connection, and the mount with the file.
pub struct Connection {
    /// By this one the kernel is answered. It is the keeper's, too, so the connection outlives this process.
    pub fuse: Arc<OwnedFd>,
    /// Others of the same connection, which are the keeper's, too: for each thread but the first, on kernels that send again.
    pub clones: Vec<Arc<OwnedFd>>,
    /// A path to the file (`O_PATH`), which is mounted nowhere. By it the kernel asks how long the file is.
    pub mount: OwnedFd,
    /// Whether the kernel sends again what a process has read and not answered.
    pub resends: bool,
}

impl Connection {
    /// Makes one. `may_resend`: the kernel is believed if it says that it sends again.
    pub fn new(may_resend: bool) -> io::Result<Self> {
        let fuse = sys::open_fuse()?;
        let mount = mount(&fuse)?;
        let offer = begin(&fuse)?;
        let resends = may_resend && offer.resends();
        let count = if resends { THREADS - 1 } else { 0 };
        let clones = (0..count).map(|_| sys::clone_fuse(&fuse).map(Arc::new));
        Ok(Self {
            clones: clones.collect::<io::Result<_>>()?,
            fuse: Arc::new(fuse),
            mount,
            resends,
        })
    }

    /// What a thread each takes requests from.
    ///
    /// A descriptor that is cloned has what was read from it for its own, and the kernel fails that (`ECONNABORTED`) when it is closed. So a kernel that sends
    /// again is read from by descriptors that the keeper has, too; and one that cannot by clones, which nobody else has: what was read from them
    /// would wait for ever otherwise.
    pub fn channels(&self) -> io::Result<Vec<Arc<OwnedFd>>> {
        if !self.resends {
            let clones = (0..THREADS).map(|_| sys::clone_fuse(&self.fuse).map(Arc::new));
            return clones.collect();
        }
        // The keeper of an earlier release has no clones: then threads share the one that it has.
        let kept = std::iter::once(&self.fuse).chain(&self.clones);
        Ok(kept.cycle().take(THREADS).cloned().collect())
    }

    /// Has the kernel send again what an earlier process has read and not answered, before anything else is read.
    pub fn ask_again(&self) -> io::Result<()> {
        if self.resends {
            rustix::io::write(&self.fuse, &protocol::resend())?;
        }
        Ok(())
    }
}

/// Has the kernel ask how long the file is; the answer. Only for a process that does not answer it.
pub fn length(mount: BorrowedFd<'_>) -> io::Result<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
    Ok(rustix::fs::statx(mount, c"", flags, StatxFlags::SIZE)?.stx_size)
}

/// The file system with that one file, in no namespace. It is there as long as it or the file is open.
fn mount(fuse: &OwnedFd) -> io::Result<OwnedFd> {
    let system = rustix::mount::fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let fuse = fuse.as_raw_fd().to_string();
    for (key, value) in [
        ("source", "verbatim-volume"),
        ("fd", fuse.as_str()),
        ("rootmode", "100600"),
        ("user_id", "0"),
        ("group_id", "0"),
    ] {
        rustix::mount::fsconfig_set_string(system.as_fd(), key, value)?;
    }
    rustix::mount::fsconfig_create(system.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOSUID;
    Ok(rustix::mount::fsmount(
        system.as_fd(),
        FsMountFlags::FSMOUNT_CLOEXEC,
        attributes,
    )?)
}

/// Hears what the kernel can do, and says what is wanted of that: once in the life of a connection.
fn begin(fuse: &OwnedFd) -> io::Result<Offer> {
    let limit = Timespec::try_from(BEGIN).expect("it is short");
    if poll(&mut [PollFd::new(fuse, PollFlags::IN)], Some(&limit))? == 0 {
        return Err(io::ErrorKind::TimedOut.into());
    }
    let mut bytes = vec![0; MAX_BYTES as usize + MAX_HEADER];
    let length = rustix::io::read(fuse, &mut bytes)?;
    let request = protocol::parse(&bytes[..length]);
    let Some((unique, offer)) = request.and_then(|request| match request.op {
        Op::Init(offer) if offer.is_known() => Some((request.unique, offer)),
        _ => None,
    }) else {
        return Err(io::Error::other("the kernel begins with something else"));
    };
    super::front::answer(fuse, unique, Ok(&offer.answer(MAX_BYTES)));
    Ok(offer)
}
