//! TCP connections that a lost CRIU has left in repair mode.
//!
//! While CRIU writes a connection down it is in repair mode (`TCP_REPAIR`; Linux, `net/ipv4/tcp.c`): a program's `recv` gets EPERM,
//! or shows what is still to be sent, and what it sends waits. CRIU ends that when it lets go of the tasks (`criu/sk-tcp.c`,
//! `cpt_unlock_tcp_connections`); a CRIU that was killed has not, and the kernel leaves it so for ever.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::cgroup::Cgroup;

/// Ends it for every connection of a cgroup's tasks; how many there were. To be called when CRIU is gone, and before the tasks run:
/// those that are frozen see nothing of it. Needs `CAP_SYS_PTRACE` and `CAP_NET_ADMIN`.
///
/// All are tried; the error is the first.
pub(crate) fn end(cgroup: &Cgroup) -> io::Result<usize> {
    let (mut ended, mut first_error) = (0, None);
    let mut seen = HashSet::new();
    for pid in cgroup.processes()? {
        match end_of_process(pid, &mut seen) {
            Ok(of_it) => ended += of_it,
            Err(error) if has_ended(&error) => {}
            Err(error) => {
                first_error.get_or_insert(error);
            }
        }
    }
    first_error.map_or(Ok(ended), Err)
}

fn end_of_process(pid: i32, seen: &mut HashSet<String>) -> io::Result<usize> {
    let number = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let pidfd = pidfd_open(number, PidfdFlags::empty())?;
    let mut ended = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let target = match std::fs::read_link(entry.path()) {
            Err(error) if has_ended(&error) => continue,
            target => target?,
        };
        // `socket:[INODE]`: several descriptors may be one.
        let name = target.to_string_lossy().into_owned();
        if !name.starts_with("socket:") || !seen.insert(name) {
            continue;
        }
        let number = entry.file_name().to_string_lossy().parse::<RawFd>();
        let number = number.map_err(|_| io::ErrorKind::InvalidData)?;
        let socket = match pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty()) {
            // Closed meanwhile.
            Err(rustix::io::Errno::BADF) => continue,
            socket => socket?,
        };
        if is_in_repair(socket.as_fd())? {
            end_of_socket(socket.as_fd())?;
            ended += 1;
        }
    }
    Ok(ended)
}

fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// `linux/tcp.h`: repair mode is left, and the peer is asked for its window.
const REPAIR_OFF: libc::c_int = 0;

fn end_of_socket(socket: BorrowedFd<'_>) -> io::Result<()> {
    set(socket, libc::IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_OFF)?;
    // Repair mode has taken the place of SO_REUSEADDR, and only CRIU knew what that was. With it a server that is started again can
    // bind its port while this connection lasts; without it, it could not.
    set(socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)
}

/// Whether it is a TCP socket in repair mode.
fn is_in_repair(socket: BorrowedFd<'_>) -> io::Result<bool> {
    let mut value: libc::c_int = 0;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and the kernel writes at most `length` bytes, an int, to `value`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result == 0 {
        return Ok(value != 0);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // Sockets of other families have no such option.
        Some(libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::EINVAL) => Ok(false),
        _ => Err(error),
    }
}

fn set(
    socket: BorrowedFd<'_>,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the kernel reads an int from `value`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_tcp_sockets_in_repair_mode_are() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (unix, _other) = UnixStream::pair().unwrap();
        for socket in [listener.as_fd(), stream.as_fd(), unix.as_fd()] {
            assert!(!is_in_repair(socket).unwrap());
        }
        const REPAIR_ON: libc::c_int = 1;
        match set(stream.as_fd(), libc::IPPROTO_TCP, libc::TCP_REPAIR, REPAIR_ON) {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                return eprintln!("skipped: it needs CAP_NET_ADMIN");
            }
            result => result.unwrap(),
        }
        assert!(is_in_repair(stream.as_fd()).unwrap());
        end_of_socket(stream.as_fd()).unwrap();
        assert!(!is_in_repair(stream.as_fd()).unwrap());
    }
}
