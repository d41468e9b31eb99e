//! Letting go of a device in a process that goes on without it.
//!
//! Its descriptors are placeholders by now, and so is what was mapped of it. The library still has all of its objects, and
//! must forget them without telling anybody. It has a way for that: a device that was unplugged answers every command with
//! `EIO`, and with the variable [`ALLOW_DISASSOCIATED`] the library takes that for success of whatever destroys. What
//! answers everything so is a terminal that was hung up ([`hung_up_terminal`]): the agent's, since containers mostly can make none.
//! It takes the place of the descriptor for commands; then all is destroyed as always, and its memory, descriptors and mappings are
//! given back.
//!
//! Where there are no terminals it is a descriptor on which nothing at all can be done, and what the library keeps for
//! objects that it could not destroy stays, memory and mappings. The placeholder would not do: commands may be written to it.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use verbatim_channel::hung_up_terminal;

use super::device::RdmaCoreDevice;

/// rdma-core's own, since release 19; read when the library is first used.
pub const ALLOW_DISASSOCIATED: &CStr = c"RDMAV_ALLOW_DISASSOC_DESTROY";

impl RdmaCoreDevice {
    /// All of its objects go with the last reference. `dead`: a terminal that was hung up, if the caller has one.
    pub fn cut_off(self: Arc<Self>, dead: Option<BorrowedFd<'_>>) {
        let own = match dead {
            Some(_) => None,
            None => hung_up_terminal().or_else(|_| bare_name()).ok(),
        };
        if let Some(dead) = dead.or(own.as_ref().map(AsFd::as_fd)) {
            // SAFETY: the context is open as long as the device is; the library closes that number with it.
            unsafe {
                let commands = (*self.opened.context()).cmd_fd;
                libc::dup3(dead.as_raw_fd(), commands, libc::O_CLOEXEC);
            }
        }
    }
}

/// A descriptor on which every ioctl and every write fails with `EBADF`.
fn bare_name() -> io::Result<OwnedFd> {
    // SAFETY: a C string.
    let fd = unsafe { libc::open(c"/".as_ptr(), libc::O_PATH | libc::O_CLOEXEC) };
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
    fn nothing_can_be_commanded_of_a_bare_name() {
        let dead = bare_name().unwrap();
        // `RDMA_VERBS_IOCTL`
        let command: libc::c_ulong = 0xc018_1b01;
        // SAFETY: the descriptor fails before it looks at the structure, which is there all the same.
        let returned = unsafe { libc::ioctl(dead.as_raw_fd(), command, &mut [0u64; 8]) };
        let failed = io::Error::last_os_error().raw_os_error();
        assert_eq!((returned, failed), (-1, Some(libc::EBADF)));
        let written = rustix::io::write(&dead, b"command");
        assert_eq!(written.unwrap_err().raw_os_error(), libc::EBADF);
    }
}
