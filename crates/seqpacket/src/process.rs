//! A process that is known by more than its number, which another had before it and another gets after it.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// `SO_PEERPIDFD` of the kernel's `asm-generic/socket.h`, since Linux 6.5.
const SO_PEERPIDFD: libc::c_int = 77;

/// The kernel's word on who sent a message, in the receiver's own namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// Process id; 0 if the sender is not visible in the receiver's PID namespace.
    pub pid: i32,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// A process, held by a descriptor (pidfd_open(2)).
#[derive(Debug)]
pub struct Process {
    pid: i32,
    /// Unset if it had ended already, or cannot be seen.
    pidfd: Option<OwnedFd>,
}

impl Process {
    /// The one that has this number now.
    pub fn open(credentials: Credentials) -> Self {
        let pid = credentials.pid;
        // Number 0 stands for a process in a PID namespace that this one cannot see.
        let known = Pid::from_raw(pid).filter(|_| pid > 0);
        let pidfd = known.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Self { pid, pidfd }
    }

    /// The one that connected `socket`, whoever has its number now.
    pub(crate) fn of_peer(socket: BorrowedFd<'_>, credentials: Credentials) -> Self {
        match peer_pidfd(socket) {
            // An older kernel.
            Err(Errno::NOPROTOOPT) => Self::open(credentials),
            pidfd => Self {
                pid: credentials.pid,
                pidfd: pidfd.ok(),
            },
        }
    }

    /// Its number, if it has not ended: as long as that is so, no other process has it.
    pub fn pid(&self) -> Option<i32> {
        let pidfd = self.pidfd.as_ref()?;
        let mut ends = [PollFd::new(pidfd, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // It is readable once the process has ended.
        let runs = matches!(rustix::event::poll(&mut ends, Some(&now)), Ok(0));
        runs.then_some(self.pid)
    }

    /// Its number, whether or not it has ended.
    pub fn number(&self) -> i32 {
        self.pid
    }
}

#[allow(unsafe_code, reason = "rustix does not have this option")]
fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    let mut pidfd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `pidfd`, which outlives the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut pidfd).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
    }
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(pidfd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Listener, Socket};
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_has_its_number_until_it_ends() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        let process = Process::open(Credentials { pid, uid: 0, gid: 0 });
        assert_eq!(process.pid(), Some(pid));
        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!((process.pid(), process.number()), (None, pid));
        let unseen = Credentials {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        assert_eq!(Process::open(unseen).pid(), None);
    }

    #[test]
    fn who_connected_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = Listener::bind(&path).unwrap();
        let _client = Socket::connect(&path).unwrap();
        let process = listener.accept().unwrap().peer_process().unwrap();
        assert_eq!(process.pid(), Some(std::process::id() as i32));
    }
}
