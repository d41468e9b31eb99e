//! Descriptors that tokio watches.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use tokio::io::unix::AsyncFd;

/// Something with a descriptor, in the form that tokio takes.
#[derive(Debug)]
pub(crate) struct Raw<T>(pub T);

impl<T: AsFd> AsRawFd for Raw<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

impl<T: AsFd> AsFd for Raw<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Watches `inner`, which should be non-blocking. Needs a tokio runtime.
pub(crate) fn watch<T: AsFd>(inner: T) -> io::Result<AsyncFd<Raw<T>>> {
    // SAFETY: what the types of this crate lend through `AsFd` is a descriptor that they own: it stays open and the
    // same until they are dropped, and `AsyncFd` deregisters it before it drops `inner`.
    Ok(unsafe { AsyncFd::register(Raw(inner)) }?)
}
