//! What is done with the userfaultfd of a task (ioctl_userfaultfd(2)).

use std::os::fd::{AsRawFd, BorrowedFd};

// <linux/userfaultfd.h>
const UFFDIO_WAKE: libc::c_ulong = 0x8010_aa02;
const UFFDIO_COPY: libc::c_ulong = 0xc028_aa03;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;

/// What came of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// So many bytes are there now, and who waited for them goes on.
    Done(u64),
    /// The first page was there already.
    Exists,
    /// An event is to be read first, or the task has not gone on yet since it was.
    EventFirst,
    /// No mapping that this descriptor watches has all of the range.
    NotThere,
    /// The task has no memory any more.
    Gone,
    /// The system has no memory for the page.
    NoMemory,
    /// Anything else, an errno.
    Failed(i32),
}

#[repr(C)]
struct Copy {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    copy: i64,
}

#[repr(C)]
struct ZeroPage {
    start: u64,
    len: u64,
    mode: u64,
    zeropage: i64,
}

fn failed() -> Outcome {
    match std::io::Error::last_os_error()
        .raw_os_error()
        .unwrap_or(libc::EIO)
    {
        libc::EEXIST => Outcome::Exists,
        libc::EAGAIN | libc::EINTR => Outcome::EventFirst,
        libc::ENOENT => Outcome::NotThere,
        libc::ESRCH | libc::ENOSPC => Outcome::Gone,
        libc::ENOMEM => Outcome::NoMemory,
        errno => Outcome::Failed(errno),
    }
}

/// Puts the bytes at `source` of this process to `address` of the task. If `source` cannot be read that is `Failed(EFAULT)`.
pub fn copy(uffd: BorrowedFd<'_>, address: u64, source: usize, bytes: u64) -> Outcome {
    let mut copy = Copy {
        dst: address,
        src: source as u64,
        len: bytes,
        mode: 0,
        copy: 0,
    };
    // SAFETY: the kernel reads and writes `copy`, and only reads at `source`.
    let result = unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_COPY as _, &raw mut copy) };
    match (result, copy.copy) {
        (0, _) => Outcome::Done(bytes),
        (_, 1..) => Outcome::Done(copy.copy as u64),
        _ => failed(),
    }
}

/// Puts a page of zeros there.
pub fn zero(uffd: BorrowedFd<'_>, address: u64, bytes: u64) -> Outcome {
    let mut zero = ZeroPage {
        start: address,
        len: bytes,
        mode: 0,
        zeropage: 0,
    };
    // SAFETY: the kernel reads and writes `zero`.
    match unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_ZEROPAGE as _, &raw mut zero) } {
        0 => Outcome::Done(bytes),
        _ => failed(),
    }
}

/// Threads that wait for pages of the range try again.
pub fn wake(uffd: BorrowedFd<'_>, address: u64, bytes: u64) -> bool {
    let mut range = [address, bytes];
    // SAFETY: the kernel reads two words.
    unsafe { libc::ioctl(uffd.as_raw_fd(), UFFDIO_WAKE as _, range.as_mut_ptr()) == 0 }
}

/// Threads that wait for any page try again: what an earlier worker has read of their faults is lost.
pub fn wake_all(uffd: BorrowedFd<'_>) {
    let page = rustix::param::page_size() as u64;
    let first = 1 << 16;
    // How far a task's addresses go depends on the machine and on the task; the kernel refuses what goes further.
    let ends = [
        1 << 56,
        1 << 52,
        1 << 48,
        1 << 47,
        1 << 42,
        1 << 39,
        1 << 38,
        1 << 32,
        0xffff_e000,
    ];
    ends.iter()
        .flat_map(|end: &u64| [*end, end - page])
        .any(|end| wake(uffd, first, end - first));
}
