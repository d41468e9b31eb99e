//! A descriptor on which every command fails as on a device that was unplugged.
//!
//! What a process has of an RNIC that it has left behind is destroyed by the RNIC's own library, which commands the device to
//! destroy it. A device that was unplugged answers each command with `EIO`, and the library goes on; what answers everything so is
//! a terminal that was hung up. Containers mostly have no `/dev/ptmx` that works, so agents give one along
//! ([`Order::MakeAgain`](crate::Order::MakeAgain)).

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// A terminal that was hung up: every ioctl and every write fails with `EIO`. An error if this process can make no terminals.
pub fn hung_up_terminal() -> io::Result<OwnedFd> {
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: a C string.
    let master = owned(unsafe { libc::open(c"/dev/ptmx".as_ptr(), flags) })?;
    let unlock: libc::c_int = 0;
    // SAFETY: reads one number.
    if unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &unlock) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: makes a descriptor. It is hung up when its master is closed, at the end of this.
    owned(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })
}

fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    match fd {
        // SAFETY: just made, and nobody else's.
        0.. => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_can_be_commanded_of_it() {
        let dead = hung_up_terminal().unwrap();
        // `RDMA_VERBS_IOCTL`
        let command: libc::c_ulong = 0xc018_1b01;
        // SAFETY: the descriptor fails before it looks at the structure, which is there all the same.
        let returned = unsafe { libc::ioctl(dead.as_raw_fd(), command, &mut [0u64; 8]) };
        let failed = io::Error::last_os_error().raw_os_error();
        assert_eq!((returned, failed), (-1, Some(libc::EIO)));
        let written = rustix::io::write(&dead, b"command");
        assert_eq!(written.unwrap_err().raw_os_error(), libc::EIO);
    }
}
