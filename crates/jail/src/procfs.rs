//! A root directory that has processes in it and nothing else: for a process that opens no other path.
//!
//! Landlock cannot give that to a process that reaches the memory of others by `/proc/PID/mem`: whoever is in a landlock domain may not trace a process
//! outside of it (`security/landlock/task.c`), whatever rights it has.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
};
use rustix::process::{chroot, fchdir};

/// Whether this process's root is a procfs.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// The path of something in `/proc`, wherever this process has that.
pub fn path(inside: &str) -> String {
    match ENTERED.load(Ordering::Relaxed) {
        true => format!("/{inside}"),
        false => format!("/proc/{inside}"),
    }
}

/// The path of something of the calling thread, in `/proc` likewise.
pub fn path_of_this_thread(inside: &str) -> String {
    match ENTERED.load(Ordering::Relaxed) {
        // A link is not followed there, and `thread-self` is one.
        true => {
            let (process, thread) = (std::process::id(), rustix::thread::gettid());
            format!("/{process}/task/{}/{inside}", thread.as_raw_nonzero())
        }
        // `/proc` may be another PID namespace's, with other numbers.
        false => format!("/proc/thread-self/{inside}"),
    }
}

/// Makes a procfs this process's root: one with processes only (`subset=pid`, Linux 5.8), which is mounted nowhere. It needs `CAP_SYS_ADMIN` and
/// `CAP_SYS_CHROOT`. From here on `/proc` is where [`path`] says.
///
/// No link of it is followed (Linux 5.14): `/PID/root`, `/PID/cwd` and `/PID/fd` would lead out again. `/self` and
/// `/thread-self` are links, too.
///
/// Directories that are open would lead out again: the caller must not keep any, or must not be able to open paths by them.
pub fn enter() -> io::Result<()> {
    let context = fsopen("proc", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&context, "subset", "pid")?;
    fsconfig_create(&context)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC
        | MountAttrFlags::MOUNT_ATTR_NOSYMFOLLOW;
    let root = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    fchdir(&root)?;
    // Where a directory is entered whose mount is detached, the kernel may say that it is not there.
    rustix::fs::statat(&root, "self", rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
    chroot(".")?;
    ENTERED.store(true, Ordering::Relaxed);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    match rustix::fs::open(path_of_this_thread("stat"), flags, Mode::empty()) {
        Ok(_) => Ok(()),
        Err(Errno::NOENT) => Err(io::Error::other("this process is not in its own procfs")),
        Err(errno) => Err(errno.into()),
    }
}
