//! Waiting for an event as read(2) on the kernel's own channel would.
//!
//! A read that a signal interrupts goes on when the handler was set with `SA_RESTART`, and ends with `EINTR` otherwise. A poll
//! always ends, and does not say which handler has run. So who wakes without an event looks at the handlers that the
//! program has: only where one is set without the flag may the wait be over. A program with both kinds is told of either.
//!
//! It is ppoll(2), which goes on after a freeze and after a dump, where epoll_wait(2) and poll(2) end with `EINTR`.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// What a fault of the thread itself raises, not somebody who interrupts it.
const FAULTS: [libc::c_int; 6] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
];

/// `EINTR` after a signal whose handler was set without `SA_RESTART`.
pub fn until_readable(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let mut polled = libc::pollfd {
        fd: fd.as_raw_fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    loop {
        // SAFETY: one entry; without a limit, and with the thread's own signal mask.
        if unsafe { libc::ppoll(&mut polled, 1, std::ptr::null(), std::ptr::null()) } >= 0 {
            return Ok(());
        }
        match std::io::Error::last_os_error().raw_os_error() {
            Some(libc::EINTR) if !a_handler_ends_waits() => {}
            errno => return Err(Errno::from_raw_os_error(errno.unwrap_or(libc::EINTR))),
        }
    }
}

/// Whether a handler of the program was set without `SA_RESTART`.
#[cold]
fn a_handler_ends_waits() -> bool {
    let signals = (1..=libc::SIGRTMAX()).filter(|signal| !FAULTS.contains(signal));
    signals.into_iter().any(|signal| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: asks only; the structure is the C library's. It refuses signals that are its own.
        let action = unsafe {
            if libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) != 0 {
                return false;
            }
            action.assume_init()
        };
        let handled = !matches!(action.sa_sigaction, libc::SIG_DFL | libc::SIG_IGN);
        handled && action.sa_flags & libc::SA_RESTART == 0
    })
}
