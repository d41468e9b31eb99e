//! Connections whose end nobody is told, as when a host loses its power.

use std::os::fd::{AsFd, AsRawFd};

/// When that socket is closed, its kernel forgets the connection and sends nothing (`TCP_REPAIR`). False where that is not allowed.
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
