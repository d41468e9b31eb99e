//! A descriptor that stays open in a program which may close it at any time, and get its number for something else.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};

use rustix::fs::fstat;

/// Numbers below are left to the program: `select(2)` can watch no others than the first 1,024, and many programs expect
/// theirs to be small.
const LOWEST: RawFd = 256;

/// The descriptor of a file, known by the file.
#[derive(Debug)]
pub struct KeptFd {
    number: RawFd,
    file: (u64, u64),
}

fn identity(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let stat = fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

impl KeptFd {
    /// Keeps a duplicate of `fd`.
    pub fn new(fd: &OwnedFd) -> io::Result<Self> {
        let file = identity(fd.as_fd())?;
        let duplicate = |lowest| rustix::io::fcntl_dupfd_cloexec(fd, lowest);
        // The limit on descriptors may be lower.
        let kept = duplicate(LOWEST).or_else(|_| duplicate(3))?;
        Ok(Self {
            number: kept.into_raw_fd(),
            file,
        })
    }

    /// The descriptor, if it still is one of the file.
    fn current(&self) -> io::Result<BorrowedFd<'_>> {
        // SAFETY: another thread of the program may close it between this and its use; the worst that follows is EBADF,
        // or a look at another file, which the comparison of identities finds.
        let fd = unsafe { BorrowedFd::borrow_raw(self.number) };
        if identity(fd)? == self.file {
            return Ok(fd);
        }
        Err(io::Error::other(
            "the program has closed descriptors that it did not open, that of registered memory among them",
        ))
    }

    /// Another descriptor of the same file.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        let duplicate = self.current()?.try_clone_to_owned()?;
        if identity(duplicate.as_fd())? == self.file {
            return Ok(duplicate);
        }
        Err(io::Error::other("the descriptor of registered memory was closed"))
    }

    /// Its number.
    #[cfg(test)]
    pub fn number(&self) -> RawFd {
        self.number
    }

    /// Does what a program may do.
    #[cfg(test)]
    pub fn replace_for_test(&self, other: &std::fs::File) {
        // SAFETY: the number is this value's, which expects that it may be replaced.
        let mut fd = unsafe { OwnedFd::from_raw_fd(self.number) };
        rustix::io::dup2(other, &mut fd).expect("both are open");
        let _ = fd.into_raw_fd();
    }
}

impl Drop for KeptFd {
    fn drop(&mut self) {
        if self.current().is_ok() {
            // SAFETY: it is the file's, and nobody but this value opened one with this number.
            drop(unsafe { OwnedFd::from_raw_fd(self.number) });
        }
    }
}

#[cfg(test)]
pub fn is_open(number: RawFd) -> bool {
    // SAFETY: looked at for the time of the call only.
    identity(unsafe { BorrowedFd::borrow_raw(number) }).is_ok()
}

#[cfg(test)]
pub fn close_for_test(number: RawFd) {
    // SAFETY: the test put it there.
    drop(unsafe { OwnedFd::from_raw_fd(number) });
}
