//! Questions to a socket that no library asks.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Hides the end of a connection, as when a host loses its power: when this socket is closed, its kernel forgets the connection and
/// sends nothing (`TCP_REPAIR`). False where that is not allowed.
pub fn forget(socket: &impl AsFd) -> bool {
    let on: libc::c_int = 1;
    // SAFETY: the option is an int, which outlives the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const on).cast(),
            size_of_val(&on) as libc::socklen_t,
        )
    };
    set == 0
}

/// Whether the other end of this Unix socket has read all that was sent (`SIOCOUTQ` of unix(7)).
pub fn is_all_read(socket: &impl AsFd) -> io::Result<bool> {
    let mut unread: libc::c_int = 0;
    // SAFETY: the descriptor is open for the call, which writes one int to a place that outlives it.
    match unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) } {
        0 => Ok(unread == 0),
        _ => Err(io::Error::last_os_error()),
    }
}
