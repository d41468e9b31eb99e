//! Ending in good order, and enough file descriptors.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use rustix::process::{Resource, Rlimit};

use crate::error::NicError;

/// A descriptor that becomes readable when the process shall end (signalfd(2)). Call it before any thread is made,
/// since only threads that are made later inherit the signal mask.
pub fn termination() -> Result<OwnedFd, NicError> {
    // SAFETY: the set is initialised by sigemptyset before use; the descriptor is new and ours.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTERM);
        libc::sigaddset(&mut set, libc::SIGINT);
        let error = libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut());
        if error != 0 {
            return Err(NicError::os(
                "pthread_sigmask",
                io::Error::from_raw_os_error(error),
            ));
        }
        match libc::signalfd(-1, &set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
            fd if fd >= 0 => Ok(OwnedFd::from_raw_fd(fd)),
            _ => Err(NicError::os("signalfd", io::Error::last_os_error())),
        }
    }
}

/// A context takes four descriptors; the usual soft limit of 1,024 is for `select`.
pub fn raise_descriptor_limit() {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    // Going on with the lower limit is right too: the RNIC then refuses connections sooner.
    let _ = rustix::process::setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}
