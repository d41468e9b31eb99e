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

/// The largest request. The kernel splits larger ones.
pub const MAX_BYTES: u32 = 1 << 20;

/// Upper bound of the bytes before the data of a request.
pub const MAX_HEADER: usize = 4096;

/// Threads that take requests of one volume.
const THREADS: usize = 2;

/// Limit for the kernel's INIT request; the kernel sends it before the mount exists.
const BEGIN: Duration = Duration::from_secs(10);

/// A connection, and the mount with the file.
pub struct Connection {
    /// The descriptor for answers to the kernel. The keeper has it too, so the connection outlives this
    /// process.
    pub fuse: Arc<OwnedFd>,
    /// Clones of this descriptor, which the keeper has too: one for each thread but the first, on kernels
    /// that resend requests.
    pub clones: Vec<Arc<OwnedFd>>,
    /// A path to the file (`O_PATH`), which is mounted nowhere. By this path the kernel asks for the file's
    /// length.
    pub mount: OwnedFd,
    /// Whether the kernel resends requests that a process has read and not answered.
    pub resends: bool,
}

impl Connection {
    /// Makes a connection. `may_resend`: the kernel's claim that it resends requests is believed.
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

    /// The descriptors from which threads take requests, one for each thread.
    ///
    /// A cloned descriptor owns the requests that were read from it, and the kernel fails them
    /// (`ECONNABORTED`) when the clone is closed. With a kernel that resends requests, threads therefore read
    /// from descriptors that the keeper has too. With other kernels they read from clones of this process
    /// alone: otherwise requests that were read and not answered would wait forever.
    pub fn channels(&self) -> io::Result<Vec<Arc<OwnedFd>>> {
        if !self.resends {
            let clones = (0..THREADS).map(|_| sys::clone_fuse(&self.fuse).map(Arc::new));
            return clones.collect();
        }
        // The keeper of an earlier release has no clones: then the threads share its one descriptor.
        let kept = std::iter::once(&self.fuse).chain(&self.clones);
        Ok(kept.cycle().take(THREADS).cloned().collect())
    }

    /// Makes the kernel resend the requests that an earlier process has read and not answered, before any
    /// other is read.
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

/// The file system with this one file, in no namespace. It exists as long as it or the file is open.
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

/// Reads the kernel's INIT request, and answers with the wanted features: once in the life of a connection.
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
