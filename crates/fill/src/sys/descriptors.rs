//! Descriptors at numbers of our choice.
//!
//! Guardian and worker have one table of descriptors. What must outlive a worker has a number that says what it is; the kernel
//! gives low numbers, and whatever is left there by a worker that died is closed by the next.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::net::sockopt;

/// The descriptor with this number, for a call or two: the table is changed by this thread alone.
pub fn at(number: i32) -> BorrowedFd<'static> {
    assert!(number >= 0, "no descriptor has a negative number");
    // SAFETY: it is not -1. If it is not open, calls fail with EBADF; what it stands for is said by the number.
    unsafe { BorrowedFd::borrow_raw(number) }
}

/// Whether there is a descriptor of this number.
pub fn is_open(number: i32) -> bool {
    rustix::io::fcntl_getfd(at(number)).is_ok()
}

/// Gives the descriptor `from` the number `to`, in the place of what has it. `from` stays open, too.
pub fn copy_to(from: i32, to: i32) -> io::Result<()> {
    // SAFETY: plain numbers; `to` is in the range that this module's users keep for themselves.
    match unsafe { libc::dup3(from, to, libc::O_CLOEXEC) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Moves a descriptor to the number `to`.
pub fn place(from: OwnedFd, to: i32) -> io::Result<()> {
    copy_to(std::os::fd::AsRawFd::as_raw_fd(&from), to)
}

/// Closes it, if it is open.
pub fn close(number: i32) {
    // SAFETY: the number is one that no owner in this process has: those that tables and messages name.
    let _ = unsafe { libc::close(number) };
}

/// Closes all from `first` to `last`.
pub fn close_range(first: i32, last: i32) {
    if first > last {
        return;
    }
    // SAFETY: called at the start of a worker only, which owns no descriptor yet.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// The connection of a stream socket below `last`: CRIU's is the only one.
pub fn find_stream(last: i32) -> Option<i32> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    let numbers = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    numbers
        .filter(|number| (3..last).contains(number))
        .find(|number| {
            let socket = at(*number);
            sockopt::socket_type(socket) == Ok(rustix::net::SocketType::STREAM)
                && sockopt::socket_acceptconn(socket) == Ok(false)
        })
}
